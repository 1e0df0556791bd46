"""The context of the running task: its attributes, and its calls to the worker."""

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
"""Characters in a log line or a progress text, at most."""
_DETAILS_LIMIT = 10_000
"""Bytes of heartbeat details, at most."""


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """The running attempt of a task. A parameter annotated with this type receives it.

    A context created by hand, to call a task's function in a test, discards progress and log lines.
    """

    task_id: UUID = field(default_factory=uuid4)
    """The id of the task."""
    task_name: str = ""
    """The registered name of the task."""
    attempt: int = 1
    """The number of this attempt, from 1. Lost attempts count here, even those that use up no retry."""
    queue: str = "default"
    """The queue of the task."""
    run_id: UUID | None = None
    """The run of the task; None for a task without a run."""
    position: int | None = None
    """The index of the task in its run."""
    workflow_name: str | None = None
    """The workflow of the task, if the task is a step. `task_name` is then the step's name, except in compositions."""
    parallel_index: int | None = None
    """The index of the task in its fan-out."""
    parallel_count: int | None = None
    """The number of tasks in the fan-out."""
    deadline: datetime | None = None
    """When the attempt times out; None without a timeout."""
    details: Any = None
    """The details that an earlier attempt saved with `heartbeat`, as plain data; None if there are none."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Text headers set by the caller, by middleware, or by the task or run that started this task."""
    failures: int = 0
    """How many earlier attempts have failed."""
    is_after_loss: bool = False
    """Whether the process of the previous attempt died. This attempt then has a process of its own."""
    _runtime: TaskRuntime | None = field(default=None, repr=False, compare=False)
    """The connection to the worker; None in a context created by hand."""

    # -- progress, logs and heartbeats

    def progress(self, fraction: float, text: str = "") -> None:
        """Report the progress of the task, from 0 to 1. Call this as often as you like: few reports are stored."""
        if not isinstance(fraction, (Real, Decimal)) or not 0 <= fraction <= 1:
            raise InvalidTask(f"Progress of task {self.task_name!r}: expected from 0 to 1, found {fraction!r}.")
        if not isinstance(text, str):
            raise InvalidTask(f"Progress of task {self.task_name!r}: expected a string, found {text!r:.200}.")
        if self._runtime is not None:
            self._runtime.progress(float(fraction), text)

    def log(self, text: str, level: Level = "info") -> None:
        """Write a line to the log of the task."""
        if level not in get_args(Level):
            raise InvalidTask(f"Log level: expected one of {', '.join(get_args(Level))}, found {level!r}.")
        if not isinstance(text, str):
            raise InvalidTask(f"Log of task {self.task_name!r}: expected a string, found {text!r:.200}.")
        if self._runtime is not None:
            self._runtime.log(level, text)

    def heartbeat(self, details: Any) -> None:
        """Save details for the next attempt, which reads them as `ctx.details`. They replace earlier details.

        The details are sent when this returns, and durable moments later. If the attempt fails, the next attempt
        always gets them; if the worker dies, it gets the last details that arrived.
        """
        data = encode_value(
            details, f"The details that task {self.task_name!r} saves for its next attempt", 100 * _DETAILS_LIMIT
        )
        if len(data) > _DETAILS_LIMIT:
            raise PayloadError(
                f"The details that task {self.task_name!r} saves for its next attempt: {len(data):,} bytes, and "
                f"at most {_DETAILS_LIMIT:,} are allowed. Save a position or a reference, not the data itself."
            )
        if self._runtime is not None:
            self._runtime.save_details(data)

    # -- a large result

    def open_output(self) -> IO[bytes]:
        """Open a file whose bytes become the result of the task, if the function returns None.

        With a payload store, the file may have any size and buffers about a megabyte in memory; without one, it may
        have `max_payload` bytes. The output of a failed attempt is discarded.
        """
        return cast("IO[bytes]", self._require_runtime("ctx.open_output()").open_output())

    # -- stopping

    @property
    def cancelled(self) -> bool:
        """Whether the attempt must stop: it was cancelled, timed out, or is no longer the current attempt."""
        return self._runtime is not None and self._runtime.interruption() is not None

    def check_cancelled(self) -> None:
        """Raise TaskAborted or TaskTimeout if the attempt must stop."""
        reason = None if self._runtime is None else self._runtime.interruption()
        if reason is not None:
            raise reason

    @property
    def remaining(self) -> float | None:
        """Seconds until the attempt times out; None without a timeout."""
        return None if self.deadline is None else (self.deadline - datetime.now(UTC)).total_seconds()

    # -- child tasks and completion

    def enqueue(self, task: Enqueued[P, H], /, *args: P.args, **kwargs: P.kwargs) -> H:
        """Enqueue a child of this task. Unlike `task.enqueue`, this works in threads that the task has started."""
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
        """Open a database transaction that also completes the task, so that its writes happen exactly once.

        At the end of the block, all writes through the connection, all tasks enqueued in the block and the success of
        this task commit together. If the attempt is no longer current, nothing commits and AttemptOver is raised.
        """
        return self._require_runtime("ctx.transaction()").transaction()

    def complete(self, result: R) -> R:
        """Set the result of the task, inside the block of `transaction`, and return the result."""
        self._require_runtime("ctx.complete()").complete(result)
        return result

    def _require_runtime(self, what: str) -> TaskRuntime:
        if self._runtime is None:
            raise OrchestratorError(
                f"{what} works only in a task that a worker runs; this context was created directly."
            )
        return self._runtime


class Enqueued(Protocol[P, Handle]):
    """The methods of a task that its context calls."""

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        """Enqueue a task and return its handle."""

    def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Handle]:
        """Do the same as `enqueue` without blocking the event loop."""


class TaskRuntime(Protocol):
    """The calls of a running task to its worker. Workers have no database: new tasks go through the events stream."""

    @property
    def dispatch(self) -> Dispatch:
        """The attempt, as the worker received it."""

    def context(self) -> TaskContext:
        """Return the context of the running task."""

    def next_id(self) -> bytes:
        """Return the id of the next task that this attempt enqueues. A repeated attempt gets the same ids."""

    def enqueue(self, tasks: Sequence[NewTask]) -> Mapping[bytes, bytes]:
        """Send tasks to the leader and wait until Postgres has them. Inside a transaction, insert them there.

        Return the ids of the tasks that hold the unique keys, by the ids of the new tasks.
        """

    def enqueue_on_success(self, tasks: Sequence[NewTask]) -> Mapping[bytes, bytes]:
        """Buffer tasks until this attempt succeeds. They are created only then."""

    def progress(self, fraction: float, text: str) -> None:
        """Report the progress of the task."""

    def log(self, level: Level, text: str) -> None:
        """Write a line to the log of the task."""

    def save_details(self, details: bytes) -> None:
        """Save details for the next attempt."""

    def interruption(self) -> BaseException | None:
        """Return why the attempt must stop, or None while it may go on."""

    def transaction(self) -> AbstractContextManager[Connection]:
        """Open the transaction that completes the task."""

    def complete(self, result: Any) -> None:
        """Set the result that the transaction records."""

    def open_output(self) -> RawIOBase:
        """Return the file to which the task writes its result."""


_runtime: ContextVar[TaskRuntime | None] = ContextVar("orchestrator_runtime", default=None)
in_handler: ContextVar[bool] = ContextVar("orchestrator_in_handler", default=False)
"""Whether a log handler is writing. Its output belongs to no task, because it handles records of all tasks."""


def current_task() -> TaskContext | None:
    """Return the context of the running task, or None outside of a task."""
    runtime = _runtime.get()
    return None if runtime is None else runtime.context()


def current_runtime() -> TaskRuntime | None:
    """Return the runtime of the running task, or None outside of a task."""
    return _runtime.get()


def refuse_inside_task(awaited: str) -> None:
    if current_runtime() is not None:
        raise OrchestratorError(
            f"A task cannot wait for {awaited}: it would hold a slot while it waits, and a full fleet would wait for "
            f"itself. Let a workflow schedule both, or let the task enqueue what follows."
        )


def enter_task(runtime: TaskRuntime | None) -> None:
    """Set the runtime of the task that runs in the current thread or coroutine; None when the task has ended."""
    _runtime.set(runtime)
