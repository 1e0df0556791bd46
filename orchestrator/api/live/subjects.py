"""Subjects of streams, and their events as bytes, made once for all listeners of a subject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from orchestrator.api.context import made_from
from orchestrator.domain.states import ENDED_RUN_STATES, ENDED_TASK_STATES, TaskState
from orchestrator.sdk.tasks.logs import LogEntry
from orchestrator.sealing import describe_json
from orchestrator.store.insights import Overview, QueueCounts, RunView, TaskView
from orchestrator.transport.changes import Entry
from orchestrator.transport.codec import ProgressMark, RunChange, TaskChange, WorkerChange

State = TaskView | RunView | QueueCounts | Overview
"""A snapshot of a subject."""


class Kind(StrEnum):
    """Kinds of subjects of live events."""

    TASK = "task"
    RUN = "run"
    RUN_LOG = "log of run"
    QUEUE = "queue"
    SYSTEM = "system"


class Subject(NamedTuple):
    """One thing to listen to."""

    kind: Kind
    key: bytes | str = b""
    """The id of a task or run, or the name of a queue."""


SYSTEM = Subject(Kind.SYSTEM)


class TaskMove(msgspec.Struct, frozen=True):
    """A task that is in another state now."""

    id: UUID
    name: str
    queue: str
    status: str
    attempt: int
    run_id: UUID | None


class TaskMoves(msgspec.Struct, frozen=True):
    """Tasks of one queue or run that changed their states, in order."""

    tasks: list[TaskMove]


class Progress(msgspec.Struct, frozen=True):
    """How far a task says it has come."""

    attempt: int
    fraction: float
    text: str


class Line(msgspec.Struct, frozen=True):
    """Something that a task said."""

    at: datetime
    attempt: int
    level: str
    text: str
    source: str
    """`stdout`, `stderr`, the name of a logger, or `dropped` where lines are missing; nothing for `ctx.log`."""


class RunLine(Line, frozen=True):
    """Something that a task of a run said."""

    task: str
    """The id of the task."""
    step: str
    """Its step, or its name where it is none."""


class Activity(msgspec.Struct, frozen=True):
    """How many tasks and runs came into which state."""

    queues: dict[str, dict[str, int]]
    """Tasks, by queue and state."""
    runs: dict[str, int]
    """Runs, by state."""


class WorkerMove(msgspec.Struct, frozen=True):
    """A worker that has come, gone, or is about to."""

    id: str
    state: str
    """`live`, `draining`, `still` or `gone`."""


class WorkerMoves(msgspec.Struct, frozen=True):
    """Workers that have come and gone."""

    workers: list[WorkerMove]


class Outage(msgspec.Struct, frozen=True):
    """Nothing moves, or something does again."""

    outage: str
    """Why nothing does; empty when something does again."""


def event(name: str, data: object, id: str = "") -> bytes:
    """Return an event as it is sent; without an id, the last one counts."""
    head = f"id: {id}\nevent: {name}\ndata: " if id else f"event: {name}\ndata: "
    return head.encode() + describe_json(msgspec.json.encode(data)) + b"\n\n"


def outage_event(outage: str) -> bytes:
    """Return the event of an outage that has begun, or is over."""
    return event("outage", Outage(outage))


def move(task: TaskChange) -> TaskMove:
    run = None if task.run is None else UUID(bytes=task.run)
    return TaskMove(UUID(bytes=task.id), task.name, task.queue, task.status, task.attempt, run)


def move_of(task: TaskView) -> TaskMove:
    """Return the state of a task as if it had just come into it."""
    return made_from(TaskMove, task)


def progress(mark: ProgressMark) -> Progress:
    """Return the event of a task's progress."""
    return made_from(Progress, mark)


def line(kind: Kind, said: LogEntry) -> Line:
    """Return the event of a log line; for a run, it names the task."""
    return made_from(RunLine if kind is Kind.RUN_LOG else Line, said)


_ORDER = {TaskState.DISPATCHED: 0, TaskState.RUNNING: 1, TaskState.PENDING: 2}


def age(task: TaskChange | TaskView) -> tuple[int, int]:
    """Return what grows with every move of a task: its attempt, and how far that has come; one that waits comes last.

    A snapshot may be newer than the changes that follow it. By this, no listener gets what is over already.
    """
    return task.attempt, _ORDER.get(TaskState(task.status), 3)


def has_ended(state: State) -> bool:
    if isinstance(state, TaskView):
        return state.status in ENDED_TASK_STATES
    return isinstance(state, RunView) and state.status in ENDED_RUN_STATES


def final(state: State) -> Any:
    return move_of(state) if isinstance(state, TaskView) else state


class Fold:
    """Changes of a queue, a run or the system, gathered from several commits into one event."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.tasks: list[TaskChange] = []
        self._counts: dict[str, Counter[str]] = {}
        self._runs: Counter[str] = Counter()
        self._workers: dict[str, str] = {}

    def add_tasks(self, tasks: Iterable[TaskChange]) -> None:
        if self._kind is not Kind.SYSTEM:
            self.tasks.extend(tasks)
            return
        for task in tasks:
            self._counts.setdefault(task.queue, Counter())[task.status] += 1

    def add_runs(self, runs: Iterable[RunChange]) -> None:
        """Add runs that have begun or ended."""
        self._runs.update(run.status for run in runs if run.status)

    def add_workers(self, workers: Iterable[WorkerChange]) -> None:
        self._workers.update((worker.id, worker.state) for worker in workers)

    def events(self, cursor: str) -> bytes:
        said = b""
        if self.tasks:
            said += event("tasks", TaskMoves([move(task) for task in self.tasks]), cursor)
        if self._counts or self._runs:
            counts = {queue: dict(found) for queue, found in self._counts.items()}
            said += event("activity", Activity(counts, dict(self._runs)), cursor)
        if self._workers:
            moves = [WorkerMove(worker, state) for worker, state in self._workers.items()]
            said += event("workers", WorkerMoves(moves), cursor)
        return said


def missed(subject: Subject, entries: Sequence[Entry]) -> Fold:
    """Return what entries say of a queue, a run or the system."""
    fold = Fold(subject.kind)
    for _, changes in entries:
        fold.add_tasks(task for task in changes.tasks if is_about(subject, task))
        if subject.kind is Kind.SYSTEM:
            fold.add_runs(changes.runs)
            fold.add_workers(changes.workers)
    return fold


def is_about(subject: Subject, task: TaskChange) -> bool:
    if subject.kind is Kind.TASK:
        return task.id == subject.key
    if subject.kind is Kind.RUN:
        return task.run == subject.key
    return subject.kind is Kind.SYSTEM or task.queue == subject.key
