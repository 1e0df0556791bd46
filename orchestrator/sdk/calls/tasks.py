"""Tasks: enqueue, show, wait for, cancel and retry them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.plain import whole
from orchestrator.domain.tasks.task import Id, NewTask
from orchestrator.sdk.calls.checked import Distinct
from orchestrator.sdk.calls.declaring import Body, Kind, Rest, call
from orchestrator.sdk.tasks.logs import LogPage, TaskProgress
from orchestrator.sdk.waiting.steps import Steps, Stream
from orchestrator.store.tasks.redrive import FailedFilter, Group
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

Entry = Annotated[str, Meta(pattern=whole("([0-9]{1,19}-[0-9]{1,19})?"))]
Number = Annotated[int, Meta(ge=0, le=2**31)]
Moment = Annotated[float, Meta(ge=0, le=1)]


class PayloadPart(msgspec.Struct, frozen=True):
    """A part of a value that is stored outside."""

    data: bytes
    parts: int
    """How many there are."""


class TaskCalls(Protocol):
    """Calls about tasks."""

    @call(
        Scope.ENQUEUE, about={Kind.NEW_TASKS: "task"}, within={"within": Kind.QUEUE}, repeatable=True, body=Body.VALUES
    )
    def enqueue(self, task: NewTask, *, repeated: bool = False) -> Id:
        """Create one task; return its id, or that of the task which has its key."""

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
        """Create many tasks, all or none; return their ids, or those of the tasks which have their keys."""

    @call(
        Scope.OPERATE, about={Kind.TASK: "task"}, repeatable=True, rest=Rest("POST /tasks/{id}/cancel", "cancel", 202)
    )
    def cancel(self, task: Id) -> None:
        """Cancel a task, wherever it stands; one that runs is interrupted.

        One that has been cancelled stays so.
        """

    @call(Scope.OPERATE, about={Kind.TASK: "task"}, rest=Rest("POST /tasks/{id}/retry", "retry", 202))
    def retry(self, task: Id) -> None:
        """Open a failed or skipped task again, with all its tries.

        If another task has taken its key meanwhile, it stays as it is.
        """

    @call(
        Scope.OPERATE,
        about={Kind.QUEUE: "wanted.queue"},
        within={"within": Kind.QUEUE},
        repeatable=True,
        expensive=True,
    )
    def retry_failed(self, wanted: FailedFilter) -> int:
        """Open the failed tasks again that match; return how many match now."""

    @call(within={"within": Kind.QUEUE}, expensive=True)
    def preview_retry(self, wanted: FailedFilter) -> list[Group]:
        """Return which failed tasks match, by name and error."""

    @call(about={Kind.TASK: "task"})
    def status(self, task: Id) -> str:
        """Return a task's state."""

    @call(about={Kind.TASK: "task"})
    def progress(self, task: Id) -> TaskProgress | None:
        """Return how far a task says it has come."""

    @call(about={Kind.TASK: "task"})
    def log(self, task: Id, after: Entry = "", wait: Moment = 0.0, attempt: Number | None = None) -> LogPage:
        """Return what a task said after an entry, in one attempt or in all; wait so many seconds for something new."""

    @call(about={Kind.TASK_OR_RUN: "target"})
    def obstacles(self, target: Id) -> list[str]:
        """Return what keeps a task or a run from going on, in words."""

    @call(about={Kind.TASK: "task"})
    def overdue(self, task: Id) -> str:
        """Say why a task has not ended in time."""

    @call(Scope.ENQUEUE, about={Kind.TASK: "task"}, repeatable=True, expensive=True, for_programs=True)
    def payload_part(self, task: Id, reference: bytes = b"", number: Number = 0) -> PayloadPart:
        """Return a part of what a task has left in the payload store: its result, or what a reference names."""


class TaskWork(TaskCalls, Protocol):
    """All that a client can do with tasks."""

    @property
    def retries(self) -> int:
        """How often this program has asked for what ended to be tried again: what it knew of failures may be past."""

    async def aenqueue(self, task: NewTask) -> bytes:
        """Create one task on an event loop."""

    def enqueue_in(self, given: object, task: NewTask) -> bytes:
        """Create one task in the caller's transaction."""

    def wait(self, task: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        """Wait until a task ends; None if it has not by then."""

    def wait_each(self, tasks: Sequence[bytes], limit: TimeLimit) -> Stream[Ended]:
        """Yield tasks as they end, those that have ended already first; stop when the time is up."""
