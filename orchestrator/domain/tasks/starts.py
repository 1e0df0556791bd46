"""Runs that a running task starts.

A worker has no database, so the request goes where tasks go that a task enqueues, and in the same shape: a task of the
name `START`, with the id of the run, which the leader never creates. It starts the run instead, and answers which run
that is, or why there is none, as it does for tasks with unique keys.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from orchestrator.domain.code.history import RunStarted, SignalReceived
from orchestrator.domain.tasks.headers import of_start, with_headers
from orchestrator.domain.tasks.task import NewTask, UniqueKey

START = "orchestrator.start_run"
OnConflict = Literal["reject", "return", "anew"]
"""What a start under a chosen id does if a run has it: refuse, return that run, or start anew if that has ended."""


class StartSteps(msgspec.Struct, frozen=True, array_like=True, tag="steps"):
    """Start a run of the newest version of a workflow of steps, or of a flow."""

    workflow: str
    params: str = "{}"
    """JSON."""
    key: str | None = None
    tags: tuple[str, ...] = ()
    flow: bool = False
    """It is a flow."""
    version: int | None = None
    """Of a flow: which one, unless it is the newest."""
    name: str | None = None
    """The name of the run, if it is not that of its workflow."""
    definitions: tuple[str, ...] = ()
    """Of a composition: what it is a run of, and its child runs, as JSON; they are stored unless they are known."""


class StartCode(msgspec.Struct, frozen=True, array_like=True, tag="code"):
    """Start a run of a workflow as code."""

    started: RunStarted
    timeout: float | None = None
    tags: str = "[]"
    """JSON."""
    key: str | None = None
    """An id of people's own, as `run_keys` has it."""
    on_conflict: str = "reject"
    signal: SignalReceived | None = None
    pinned: bool = False


class StartMany(msgspec.Struct, frozen=True, array_like=True, tag="many"):
    """Start a run of tasks."""

    name: str
    tasks: list[NewTask]


class CodeTarget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a schedule starts runs of a workflow as code."""

    version: int
    queue: str
    timeout: float | None = None
    pinned: bool = False


Start = StartSteps | StartCode | StartMany
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Start] = msgspec.msgpack.Decoder(Start)


def as_task(run: bytes, start: Start, trace: str | None = None) -> NewTask:
    """Return the request as it travels; the run will belong to the span `trace`, and have the headers of the call."""
    key = UniqueKey(f"{START} {run.hex()}", "pending")
    options = with_headers(None, of_start.get() or {})
    return NewTask(run, START, "default", _encode(start), options=options, unique=key, trace=trace)


def is_start(task: NewTask) -> bool:
    """Say whether a task that was enqueued stands for a run to be started."""
    return task.name == START


def of_task(task: NewTask) -> Start:
    """Return the request that a task stands for."""
    return _decoder.decode(task.payload)
