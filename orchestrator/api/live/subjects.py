"""Subjects of streams, and their events. An event is encoded once for all listeners of its subject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from orchestrator.api.context import build_from
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
    """The task, run or queue that a stream is about, or the whole system."""

    kind: Kind
    key: bytes | str = b""
    """The id of a task or run, or the name of a queue."""


SYSTEM = Subject(Kind.SYSTEM)


class TaskMove(msgspec.Struct, frozen=True):
    """A state change of a task."""

    id: UUID
    name: str
    queue: str
    status: str
    attempt: int
    run_id: UUID | None


class TaskMoves(msgspec.Struct, frozen=True):
    """State changes of tasks of one queue or run, in order."""

    tasks: list[TaskMove]


class Progress(msgspec.Struct, frozen=True):
    """Progress as a task reported it."""

    attempt: int
    fraction: float
    text: str


class Line(msgspec.Struct, frozen=True):
    """A log line of a task."""

    at: datetime
    attempt: int
    level: str
    text: str
    source: str
    """`stdout`, `stderr`, the name of a logger, `dropped` where lines are missing, or empty for `ctx.log`."""


class RunLine(Line, frozen=True):
    """A log line of a task of a run."""

    task: str
    step: str
    """The step of the task, or the task's name if it has no step."""


class Activity(msgspec.Struct, frozen=True):
    """Numbers of tasks and runs that entered each state."""

    queues: dict[str, dict[str, int]]
    """Numbers of tasks, by queue and state."""
    runs: dict[str, int]


class WorkerMove(msgspec.Struct, frozen=True):
    """A worker that started, stopped or drains."""

    id: str
    state: str
    """`live`, `draining`, `still` or `gone`."""


class WorkerMoves(msgspec.Struct, frozen=True):
    """Workers that started, stopped or drain."""

    workers: list[WorkerMove]


class Outage(msgspec.Struct, frozen=True):
    """An outage that began or ended."""

    outage: str
    """The reason why no task can run; empty once the outage is over."""


def event(name: str, data: object, id: str = "") -> bytes:
    """Encode an event. Without an id, the client keeps the id of its previous event."""
    head = f"id: {id}\nevent: {name}\ndata: " if id else f"event: {name}\ndata: "
    return head.encode() + describe_json(msgspec.json.encode(data)) + b"\n\n"


def outage_event(outage: str) -> bytes:
    """Encode the event of an outage that began, or ended if the text is empty."""
    return event("outage", Outage(outage))


def move(task: TaskChange) -> TaskMove:
    run = None if task.run is None else UUID(bytes=task.run)
    return TaskMove(UUID(bytes=task.id), task.name, task.queue, task.status, task.attempt, run)


def move_of(task: TaskView) -> TaskMove:
    """Return the current state of a task as a state change."""
    return build_from(TaskMove, task)


def progress(mark: ProgressMark) -> Progress:
    return build_from(Progress, mark)


def line(kind: Kind, entry: LogEntry) -> Line:
    """Return the event of a log line. For the log of a run, it names the task."""
    return build_from(RunLine if kind is Kind.RUN_LOG else Line, entry)


_ORDER = {TaskState.DISPATCHED: 0, TaskState.RUNNING: 1, TaskState.PENDING: 2}


def version(task: TaskChange | TaskView) -> tuple[int, int]:
    """Return a pair that grows with each state change of a task: the attempt, and the order of the state within it.

    A task that waits for its next attempt comes last in its attempt. A snapshot may be newer than the changes that
    follow it; comparing versions keeps listeners from receiving older states.
    """
    return task.attempt, _ORDER.get(TaskState(task.status), 3)


def has_ended(state: State) -> bool:
    if isinstance(state, TaskView):
        return state.status in ENDED_TASK_STATES
    return isinstance(state, RunView) and state.status in ENDED_RUN_STATES


def final(state: State) -> Any:
    return move_of(state) if isinstance(state, TaskView) else state


class Fold:
    """Changes of a queue, a run or the system, collected from several commits into one event."""

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
        """Add runs that began or ended."""
        self._runs.update(run.status for run in runs if run.status)

    def add_workers(self, workers: Iterable[WorkerChange]) -> None:
        self._workers.update((worker.id, worker.state) for worker in workers)

    def events(self, cursor: str) -> bytes:
        events = b""
        if self.tasks:
            events += event("tasks", TaskMoves([move(task) for task in self.tasks]), cursor)
        if self._counts or self._runs:
            counts = {queue: dict(counter) for queue, counter in self._counts.items()}
            events += event("activity", Activity(counts, dict(self._runs)), cursor)
        if self._workers:
            moves = [WorkerMove(worker, state) for worker, state in self._workers.items()]
            events += event("workers", WorkerMoves(moves), cursor)
        return events


def missed(subject: Subject, entries: Sequence[Entry]) -> Fold:
    """Collect the changes in entries that concern a queue, a run or the system."""
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
