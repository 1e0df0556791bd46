"""The task around the current code, if any, and what it can do."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from io import RawIOBase
from numbers import Real
from typing import IO, TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, cast, get_args
from uuid import UUID, uuid4

from orchestrator.domain.tasks.task import Dispatch, NewTask
from orchestrator.errors import InvalidTask, OrchestratorError, PayloadError
from orchestrator.sdk.values.payload import encode_value

if TYPE_CHECKING:
    from sqlalchemy import Connection

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H")
Handle = TypeVar("Handle", covariant=True)

Level = Literal["debug", "info", "warning", "error"]

TEXT_LIMIT = 1_000
"""Characters of one line of a log, and of the text beside a bar."""
_DETAILS_LIMIT = 10_000
"""Bytes that an attempt may leave for the next."""


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """The attempt that is running. A parameter annotated with this type receives it.

    One that was made by hand, to call a task's function in a test, says nothing to anybody.
    """

    task_id: UUID = field(default_factory=uuid4)
    """The id that its handle has."""
    task_name: str = ""
    """The name under which it is registered."""
    attempt: int = 1
    """The number of this attempt. It grows with each, also where an attempt was lost and cost no try."""
    queue: str = "default"
    """The queue that it came from."""
    run_id: UUID | None = None
    """The run that it belongs to; None if it stands alone."""
    position: int | None = None
    """Place among the tasks of its run."""
    workflow_name: str | None = None
    """The workflow that it is a step of; `task_name` is then the step's name, unless that is a composition."""
    parallel_index: int | None = None
    """Place in its fan-out."""
    parallel_count: int | None = None
    """Size of its fan-out."""
    deadline: datetime | None = None
    """When the attempt times out; None if it may run for ever."""
    details: Any = None
    """What an earlier attempt left with `heartbeat`, as plain data; None if nothing."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Texts that came with it, from its caller, its middleware, or the task or run that it comes of."""
    failures: int = 0
    """How many attempts before this one have failed."""
    is_after_loss: bool = False
    """The process of the attempt before this one died, and this one has a process to itself."""
    _runtime: TaskRuntime | None = field(default=None, repr=False, compare=False)
    """The way out of the worker."""

    # -- saying how it goes

    def progress(self, fraction: float, text: str = "") -> None:
        """Say how far the task has come, from 0 to 1. It may be said as often as you like: few are written down."""
        if not isinstance(fraction, (Real, Decimal)) or not 0 <= fraction <= 1:
            raise InvalidTask(f"Progress of task {self.task_name!r}: expected from 0 to 1, found {fraction!r}.")
        if not isinstance(text, str):
            raise InvalidTask(f"Progress of task {self.task_name!r}: expected a text, found {text!r:.200}.")
        if self._runtime is not None:
            self._runtime.progress(float(fraction), text)

    def log(self, text: str, level: Level = "info") -> None:
        """Write a line to the log of the task."""
        if level not in get_args(Level):
            raise InvalidTask(f"Log level: expected one of {', '.join(get_args(Level))}, found {level!r}.")
        if not isinstance(text, str):
            raise InvalidTask(f"Log of task {self.task_name!r}: expected a text, found {text!r:.200}.")
        if self._runtime is not None:
            self._runtime.log(level, text)

    def heartbeat(self, details: Any) -> None:
        """Leave something for the next attempt, in place of what was left before: it finds it in `details`.

        It is on its way when this returns, and durable within moments. An attempt that fails has left it for certain;
        of one whose worker dies, what had arrived counts.
        """
        data = encode_value(details, f"What task {self.task_name!r} leaves for its next attempt", 100 * _DETAILS_LIMIT)
        if len(data) > _DETAILS_LIMIT:
            raise PayloadError(
                f"What task {self.task_name!r} leaves for its next attempt: {len(data):,} bytes, and at most "
                f"{_DETAILS_LIMIT:,} are allowed. Leave a position or a reference, not the data itself."
            )
        if self._runtime is not None:
            self._runtime.leave(data)

    # -- a large result

    def open_output(self) -> IO[bytes]:
        """Return a file whose bytes become the task's result, if the function returns None.

        With a payload store, about a megabyte of it is in memory, however much is written; without one it may have
        `max_payload` bytes. What an attempt has written that fails is nobody's result.
        """
        return cast("IO[bytes]", self._require_runtime("ctx.open_output()").open_output())

    # -- stopping

    @property
    def cancelled(self) -> bool:
        """Say whether the attempt must stop: cancelled, timed out, or no longer the current one."""
        return self._runtime is not None and self._runtime.interruption() is not None

    def check_cancelled(self) -> None:
        """Raise TaskAborted or TaskTimeout if the attempt must stop."""
        reason = None if self._runtime is None else self._runtime.interruption()
        if reason is not None:
            raise reason

    @property
    def remaining(self) -> float | None:
        """Seconds until the attempt times out; None if it may run for ever."""
        return None if self.deadline is None else (self.deadline - datetime.now(UTC)).total_seconds()

    # -- what follows from it

    def enqueue(self, task: Enqueued[P, H], /, *args: P.args, **kwargs: P.kwargs) -> H:
        """Enqueue a child of this task: the same as `task.enqueue`, also in a thread that the task has started."""
        before = _runtime.set(self._runtime)
        try:
            return task.enqueue(*args, **kwargs)
        finally:
            _runtime.reset(before)

    async def aenqueue(self, task: Enqueued[P, H], /, *args: P.args, **kwargs: P.kwargs) -> H:
        """Do the same as `enqueue` without blocking the event loop."""
        before = _runtime.set(self._runtime)
        try:
            return await task.aenqueue(*args, **kwargs)
        finally:
            _runtime.reset(before)

    def transaction(self) -> AbstractContextManager[Connection]:
        """Open a transaction with which the task completes: what it writes there happens exactly once.

        At the end of the block everything written through the connection, the tasks enqueued there and the success
        of this task commit together, if this attempt still counts; else nothing does, and AttemptOver is raised.
        """
        return self._require_runtime("ctx.transaction()").transaction()

    def complete(self, result: R) -> R:
        """Set the task's result, inside the block of `transaction`; return it."""
        self._require_runtime("ctx.complete()").complete(result)
        return result

    def _require_runtime(self, what: str) -> TaskRuntime:
        if self._runtime is None:
            raise OrchestratorError(f"{what} works only in a task that a worker runs; this context was made by hand.")
        return self._runtime


class Enqueued(Protocol[P, Handle]):
    """A task, as its context needs it: what it is enqueued with, and the handle that it gives."""

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        """Have a worker run it."""

    def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Handle]:
        """Do the same as `enqueue` without blocking the event loop."""


class TaskRuntime(Protocol):
    """The way out of a worker, which has no database: tasks that a task enqueues go through the events stream."""

    @property
    def dispatch(self) -> Dispatch:
        """The attempt, as the worker has received it."""

    def context(self) -> TaskContext:
        """Return what the running task may know of itself."""

    def next_id(self) -> bytes:
        """Return the id of the next task that this attempt enqueues; the same for every repetition of the attempt."""

    def enqueue(self, tasks: Sequence[NewTask]) -> Mapping[bytes, bytes]:
        """Hand tasks to the leader, and return once it has them in Postgres; inside a transaction, write them there.

        For those with a unique key, return the ids of the tasks that have it.
        """

    def enqueue_on_success(self, tasks: Sequence[NewTask]) -> Mapping[bytes, bytes]:
        """Keep tasks until this attempt succeeds; they exist only if it does."""

    def progress(self, fraction: float, text: str) -> None:
        """Show how far the task has come."""

    def log(self, level: Level, text: str) -> None:
        """Show a line."""

    def leave(self, details: bytes) -> None:
        """Leave something for the next attempt."""

    def interruption(self) -> BaseException | None:
        """Return why the attempt must stop, or None while it may go on."""

    def transaction(self) -> AbstractContextManager[Connection]:
        """Open the transaction that completes the task."""

    def complete(self, result: Any) -> None:
        """Set the result that the transaction records."""

    def open_output(self) -> RawIOBase:
        """Return where the task writes its result."""


_runtime: ContextVar[TaskRuntime | None] = ContextVar("orchestrator_runtime", default=None)
in_handler: ContextVar[bool] = ContextVar("orchestrator_in_handler", default=False)
"""Whether a log handler writes, for the records of all: what it prints belongs to no task."""


def current_task() -> TaskContext | None:
    """Return the context of the task around the current code, or None outside of one."""
    runtime = _runtime.get()
    return None if runtime is None else runtime.context()


def current_runtime() -> TaskRuntime | None:
    """Return the way out of the worker, or None outside of a task."""
    return _runtime.get()


def refuse_inside_task(awaited: str) -> None:
    if current_runtime() is not None:
        raise OrchestratorError(
            f"A task cannot wait for {awaited}: it would hold a slot while it waits, and a full fleet would wait for "
            f"itself. Let a workflow schedule both, or let the task enqueue what follows."
        )


def enter_task(runtime: TaskRuntime | None) -> None:
    """Make this the runtime of the task that the current thread or coroutine runs; None when it has ended."""
    _runtime.set(runtime)
