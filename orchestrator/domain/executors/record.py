"""The record of an execution, stored with its task for the next worker that watches it.

The leader chooses the name in the transaction that claims the first attempt of a try. So all attempts of that try use
the same name, even one whose worker was cut off and does not know that another worker has taken over. The worker adds
the external id before the attempt counts as started.
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
"""The text `execution` in MessagePack. Details that hold a record start with it."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one execution."""

    name: str
    attempt: int
    """The attempt that started the execution."""
    failures: int
    """The task's failures before. After another failure, this execution is over."""
    since: float
    """The time of its first dispatch, in Unix seconds by the clock of Postgres."""
    external_id: str = ""
    """The executor's own id. Empty until the execution is known to be started."""
    host: str = ""
    """The only machine whose workers can watch it. Empty for any."""
    elapsed: float = 0.0
    """Seconds since `since`. The leader sends them with each attempt, so that no two clocks are compared."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def execution_name(task: bytes, attempt: int) -> str:
    """Return the name of the execution that an attempt starts, unique for each try of each task."""
    return f"task-{to_text(task)}-{attempt}"


def task_of(execution: str) -> bytes | None:
    """Return the task's id in an execution's name, or None if `execution_name` did not create the name."""
    match = _NAME.fullmatch(execution)
    return UUID(match[1]).bytes if match else None


def encode_record(record: Record) -> bytes:
    """Encode a record for storage."""
    return b"\x92" + _TAG + _encoder.encode(record)


def decode_record(details: bytes | None) -> Record | None:
    """Return the record in a task's details, or None if they hold none."""
    if details is None or not is_record(details):
        return None
    try:
        return _decoder.decode(details[1 + len(_TAG) :])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def is_record(details: bytes) -> bool:
    """Return whether details hold a record. Records contain no user data, and are never sealed."""
    return details.startswith(b"\x92" + _TAG)


def next_record(task: bytes, attempt: int, failures: int, details: bytes | None, now: float) -> tuple[Record, bool]:
    """Return the record for an attempt, and whether it is new and must be stored."""
    previous = decode_record(details)
    if previous is None or previous.failures != failures:
        return Record(name=execution_name(task, attempt), attempt=attempt, failures=failures, since=now), True
    if not previous.external_id:  # not known to be started: its time has not begun
        return msgspec.structs.replace(previous, since=now, elapsed=0.0), False
    return msgspec.structs.replace(previous, elapsed=max(0.0, now - previous.since)), False


# -- executor calls, and what a worker must have for them

_ANNOUNCED = "@executor:"


class ExecutorCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """The executor of a task, and its options."""

    name: str
    options: dict[str, Any] = {}
    """The `ExecutorOptions`, as plain data."""
    wants: str = ""
    """The requirement for a worker, if more than the executor itself: `process /usr/bin/convert`."""
    ends: Record | None = None
    """The execution of a cancelled task, which this call only has to end."""

    @property
    def requirement(self) -> str:
        """The requirement as workers announce it, beside the names of their tasks. They may announce a matching
        pattern."""
        return announced(self.wants or self.name)


def announced(wants: str) -> str:
    """Return a requirement as workers announce it. `*` stands for any text without a slash."""
    return _ANNOUNCED + wants


def is_announced(name: str) -> bool:
    """Return whether an announced name is an executor, not a task."""
    return name.startswith(_ANNOUNCED)


def is_program(name: str) -> bool:
    """Return whether an announced name is a program of the machine, or a pattern for programs."""
    return name.startswith(f"{_ANNOUNCED}process ")


def displayed_requirement(means: str) -> str:
    """Return an announced requirement for display."""
    return means.removeprefix(_ANNOUNCED)


def meets_requirement(announcements: Iterable[str], means: str) -> bool:
    """Return whether one of a worker's announcements meets the requirement of a task."""
    return any(name == means or ("*" in name and is_announced(name) and _fits(means, name)) for name in announcements)


def matches_program(program: str, pattern: str) -> bool:
    """Return whether a program matches a pattern. `*` stands for any text without a slash; alone, for any program."""
    parts, named = program.split("/"), pattern.split("/")
    return pattern == "*" or (len(parts) == len(named) and all(map(fnmatchcase, parts, named)))


def _fits(means: str, pattern: str) -> bool:
    (executor, _, program), (known, _, programs) = (
        displayed_requirement(means).partition(" "),
        displayed_requirement(pattern).partition(" "),
    )
    return fnmatchcase(executor, known) and matches_program(program, programs)
