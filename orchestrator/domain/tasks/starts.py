"""Requests of running tasks to start runs.

A worker has no database, so it sends the request like a task that a task enqueues: a task named `START` with the id of
the run. The leader does not create that task. It starts the run, and answers with the run's id or an error, as it does
for tasks with unique keys.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from orchestrator.domain.code.history import RunStarted, SignalReceived
from orchestrator.domain.tasks.headers import of_start, with_headers
from orchestrator.domain.tasks.task import NewTask, UniqueKey

START = "orchestrator.start_run"
OnConflict = Literal["reject", "return", "anew"]
"""The behavior if a run already has the chosen id: refuse, return that run, or start a new one if it has ended."""


class StartSteps(msgspec.Struct, frozen=True, array_like=True, tag="steps"):
    """Start a run of the newest version of a DAG or a flow."""

    workflow: str
    params: str = "{}"
    """The parameters, as JSON."""
    key: str | None = None
    tags: tuple[str, ...] = ()
    flow: bool = False
    """The workflow is a flow."""
    version: int | None = None
    """The version of the flow. None for the newest."""
    name: str | None = None
    """The name of the run. None for the name of its workflow."""
    definitions: tuple[str, ...] = ()
    """Definitions of a composition and of its child runs, as JSON. They are stored if not stored yet."""


class StartCode(msgspec.Struct, frozen=True, array_like=True, tag="code"):
    """Start a run of a workflow as code."""

    started: RunStarted
    timeout: float | None = None
    tags: str = "[]"
    """The tags, as JSON."""
    key: str | None = None
    """An id chosen by the caller, as in `run_keys`."""
    on_conflict: str = "reject"
    signal: SignalReceived | None = None
    pinned: bool = False


class StartMany(msgspec.Struct, frozen=True, array_like=True, tag="many"):
    """Start a run of independent tasks."""

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
    """Return a start request encoded as a task. The run gets the span `trace` and the headers of the current call."""
    key = UniqueKey(f"{START} {run.hex()}", "pending")
    options = with_headers(None, of_start.get() or {})
    return NewTask(run, START, "default", _encode(start), options=options, unique=key, trace=trace)


def is_start(task: NewTask) -> bool:
    """Return whether an enqueued task is a request to start a run."""
    return task.name == START


def of_task(task: NewTask) -> Start:
    """Decode the start request in a task."""
    return _decoder.decode(task.payload)
