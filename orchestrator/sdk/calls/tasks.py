"""Calls about tasks: enqueue, query, wait, cancel and retry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.plain import anchored
from orchestrator.domain.tasks.task import Id, NewTask
from orchestrator.sdk.calls.checked import Distinct
from orchestrator.sdk.calls.declaring import Body, Kind, Rest, call
from orchestrator.sdk.tasks.logs import LogPage, TaskProgress
from orchestrator.sdk.waiting.steps import Steps, Stream
from orchestrator.store.tasks.redrive import FailedFilter, Group
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

Entry = Annotated[str, Meta(pattern=anchored("([0-9]{1,19}-[0-9]{1,19})?"))]
Number = Annotated[int, Meta(ge=0, le=2**31)]
Moment = Annotated[float, Meta(ge=0, le=1)]


class PayloadPart(msgspec.Struct, frozen=True):
    """A part of a value in the payload store."""

    data: bytes
    parts: int
    """The number of parts of the value."""


class TaskCalls(Protocol):
    """Calls about tasks."""

    @call(
        Scope.ENQUEUE, about={Kind.NEW_TASKS: "task"}, within={"within": Kind.QUEUE}, repeatable=True, body=Body.VALUES
    )
    def enqueue(self, task: NewTask, *, repeated: bool = False) -> Id:
        """Create one task. Return its id, or the id of the task that holds its unique key."""

    @call(
        Scope.ENQUEUE,
        about={Kind.NEW_TASKS: "tasks"},
        within={"within": Kind.QUEUE},
        repeatable=True,
        assume_repeated=True,
        expensive=True,
        body=Body.VALUES,
    )
    def enqueue_many(self, tasks: Annotated[Iterable[NewTask], Distinct], *, repeated: bool = False) -> list[Id]:
        """Create many tasks in one transaction. Return their ids, or the ids of the tasks that hold their keys."""

    @call(
        Scope.OPERATE, about={Kind.TASK: "task"}, repeatable=True, rest=Rest("POST /tasks/{id}/cancel", "cancel", 202)
    )
    def cancel(self, task: Id) -> None:
        """Cancel a task in any state. A running task is interrupted.

        A cancelled task stays as it is.
        """

    @call(Scope.OPERATE, about={Kind.TASK: "task"}, rest=Rest("POST /tasks/{id}/retry", "retry", 202))
    def retry(self, task: Id) -> None:
        """Retry a failed or skipped task, with all its retries.

        The call fails if another task holds its unique key now.
        """

    @call(
        Scope.OPERATE,
        about={Kind.QUEUE: "wanted.queue"},
        within={"within": Kind.QUEUE},
        repeatable=True,
        expensive=True,
    )
    def retry_failed(self, wanted: FailedFilter) -> int:
        """Retry the failed tasks that match, and return how many match now."""

    @call(within={"within": Kind.QUEUE}, expensive=True)
    def preview_retry(self, wanted: FailedFilter) -> list[Group]:
        """Return the failed tasks that match, grouped by name and error."""

    @call(about={Kind.TASK: "task"})
    def status(self, task: Id) -> str:
        """Return the state of a task."""

    @call(about={Kind.TASK: "task"})
    def progress(self, task: Id) -> TaskProgress | None:
        """Return the progress that a task last reported."""

    @call(about={Kind.TASK: "task"})
    def log(self, task: Id, after: Entry = "", wait: Moment = 0.0, attempt: Number | None = None) -> LogPage:
        """Return a page of the log of a task or attempt after a cursor. Wait up to `wait` seconds for new lines."""

    @call(about={Kind.TASK_OR_RUN: "target"})
    def obstacles(self, target: Id) -> list[str]:
        """Describe the obstacles that keep a task or a run from continuing."""

    @call(about={Kind.TASK: "task"})
    def overdue(self, task: Id) -> str:
        """Describe why a task has not ended in time."""

    @call(Scope.ENQUEUE, about={Kind.TASK: "task"}, repeatable=True, expensive=True, for_programs=True)
    def payload_part(self, task: Id, reference: bytes = b"", number: Number = 0) -> PayloadPart:
        """Return a part of a task's payload in the payload store: of its result, or of the value in a reference."""


class TaskWork(TaskCalls, Protocol):
    """All calls about tasks, including waits."""

    @property
    def retries(self) -> int:
        """How many retries of ended tasks and runs this program has requested. A retry invalidates cached ends."""

    async def aenqueue(self, task: NewTask) -> bytes:
        """Create one task on an event loop."""

    def enqueue_in(self, given: object, task: NewTask) -> bytes:
        """Create one task in the caller's transaction."""

    def wait(self, task: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        """Wait until a task has ended, and return its end; None on timeout."""

    def wait_each(self, tasks: Sequence[bytes], limit: TimeLimit) -> Stream[Ended]:
        """Yield the ends of tasks as they happen, past ends first. Stop on timeout."""
