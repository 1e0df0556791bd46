"""What is stored of an execution with its task, for its next watcher.

The leader chooses the name when it first claims a try of the task, in the transaction that claims it. So all attempts
of that try use the same name, also one whose worker was cut off and does not know that another has it by now. The
worker adds the external id before the attempt counts as started.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any
from uuid import UUID

import msgspec

from orchestrator.domain.ids import to_text

_NAME = re.compile(r"task-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-[0-9]+")
_TAG = b"\xa9execution"
"""The text `execution` in MessagePack, with which the details of such a task begin."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One execution, as the row of its task has it."""

    name: str
    attempt: int
    """The first attempt that it was given to."""
    failures: int
    """How often the task had failed before: after another failure, this execution is over."""
    since: float
    """When it was first given to a worker, in seconds since 1970 by the clock of Postgres."""
    external_id: str = ""
    """The executor's own id; empty until it is known to be started."""
    host: str = ""
    """The machine whose workers alone can watch it, if so."""
    elapsed: float = 0.0
    """Seconds since then, sent by the leader with each attempt, so that no two clocks are compared."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def execution_name(task: bytes, attempt: int) -> str:
    """Return the name of the execution that an attempt begins: unlike that of any other try of any task."""
    return f"task-{to_text(task)}-{attempt}"


def task_of(execution: str) -> bytes | None:
    """Return the task that an execution is of, by its name; None if it is not one that `execution_name` gives."""
    found = _NAME.fullmatch(execution)
    return UUID(found[1]).bytes if found else None


def encode_record(record: Record) -> bytes:
    """Return a record as it is kept."""
    return b"\x92" + _TAG + _encoder.encode(record)


def decode_record(details: bytes | None) -> Record | None:
    """Return what is kept of an execution; None if nothing is, or it is something else."""
    if details is None or not is_record(details):
        return None
    try:
        return _decoder.decode(details[1 + len(_TAG) :])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def is_record(details: bytes) -> bool:
    """Say whether details are about an execution. They hold no user data, and are never sealed."""
    return details.startswith(b"\x92" + _TAG)


def next_record(task: bytes, attempt: int, failures: int, details: bytes | None, now: float) -> tuple[Record, bool]:
    """Return the record that goes with an attempt, and whether it is new and is to be kept."""
    known = decode_record(details)
    if known is None or known.failures != failures:
        return Record(name=execution_name(task, attempt), attempt=attempt, failures=failures, since=now), True
    if not known.external_id:  # as far as known, its time has not begun
        return msgspec.structs.replace(known, since=now, elapsed=0.0), False
    return msgspec.structs.replace(known, elapsed=max(0.0, now - known.since)), False


# -- the call of a task that is done outside the worker's own Python, and what a worker must have for it

_ANNOUNCED = "@executor:"


class ExecutorCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which executor does a task, and how."""

    name: str
    options: dict[str, Any] = {}
    """Its `ExecutorOptions`, as plain data."""
    wants: str = ""
    """The requirement of a worker, where that is more than the executor itself: `process /usr/bin/convert`."""
    ends: Record | None = None
    """The execution of another task, which was cancelled: there is nothing to do but to end it."""

    @property
    def means(self) -> str:
        """The name that a worker that can do it announces, beside the names of its tasks, or a pattern that fits
        this."""
        return announced(self.wants or self.name)


def announced(wants: str) -> str:
    """Return how a worker says that it has an executor; `*` in it stands for any text without a slash."""
    return _ANNOUNCED + wants


def is_announced(name: str) -> bool:
    """Say whether what a worker knows is an executor, and no task."""
    return name.startswith(_ANNOUNCED)


def is_program(name: str) -> bool:
    """Say whether what a worker knows is a program of its machine, or a pattern for some."""
    return name.startswith(f"{_ANNOUNCED}process ")


def wanted(means: str) -> str:
    """Return what is announced, in the words of people."""
    return means.removeprefix(_ANNOUNCED)


def has_means(known: Iterable[str], means: str) -> bool:
    """Say whether one of the things that a worker announces is what a task needs."""
    return any(name == means or ("*" in name and is_announced(name) and _fits(means, name)) for name in known)


def is_one_of(program: str, pattern: str) -> bool:
    """Say whether a program is what a pattern means: `*` stands for any text without a slash; alone, for everything."""
    parts, named = program.split("/"), pattern.split("/")
    return pattern == "*" or (len(parts) == len(named) and all(map(fnmatchcase, parts, named)))


def _fits(means: str, pattern: str) -> bool:
    (executor, _, thing), (known, _, things) = wanted(means).partition(" "), wanted(pattern).partition(" ")
    return fnmatchcase(executor, known) and is_one_of(thing, things)
