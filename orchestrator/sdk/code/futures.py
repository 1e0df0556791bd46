"""Futures of a workflow's code: timers, and results of tasks, promises and child runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.commands import Command
from orchestrator.errors import PayloadError, PromiseRejected, RunFailed, TaskCancelled, TaskFailed
from orchestrator.sdk.code.commander import Commander, Settled
from orchestrator.sdk.code.loop import OrderedFuture
from orchestrator.sdk.values.payload import decode_value

T = TypeVar("T")


class SleepFuture(OrderedFuture[None]):
    """The future of a timer. Cancelling it cancels the timer."""

    def __init__(self, commander: Commander, seconds: float, name: str) -> None:
        super().__init__(loop=commander.loop)
        self._commander = commander
        self._timer = commander.loop.call_later(seconds, self._wake, name=name)

    def cancel(self, msg: Any | None = None) -> bool:
        self._commander.check_unseen("cancelling a timer")
        self._timer.cancel()
        return super().cancel(msg)

    def _wake(self) -> None:
        if not self.done():
            self.set_result(None)


class HeldFuture(OrderedFuture[T]):
    """A side effect whose outcome the code can read, but gets only after it has been shown messages."""

    def __init__(self, commander: Commander, ordinal: int, outcome: asyncio.Future[T]) -> None:
        super().__init__(loop=commander.loop)
        self._outcome = outcome
        commander.held[ordinal] = self._settle

    def result(self) -> T:
        return super().result() if self.done() else self._outcome.result()

    def exception(self) -> BaseException | None:
        return super().exception() if self.done() else self._outcome.exception()

    def _settle(self) -> None:
        error = self._outcome.exception()
        if self.done():
            return
        if error is None:
            self.set_result(self._outcome.result())
        else:
            self.set_exception(error)


class DurableFuture(OrderedFuture[T]):
    """The result of a task, promise or child workflow. Cancelling the future cancels the task, promise or child."""

    def __init__(
        self,
        commander: Commander,
        identifier: bytes,
        label: str,
        restore: Callable[[Any], T],
        cancel: Command | None,
    ) -> None:
        super().__init__(loop=commander.loop)
        self._commander = commander
        self._label = label
        self._restore = restore
        self._cancel = cancel
        self.id = identifier
        self.waits_for_end = False
        """A cancelled future ends only when its child has ended, too."""
        self._cancelling = False
        self._timer: asyncio.TimerHandle | None = None
        commander.expect(self)

    def __repr__(self) -> str:
        return f"<{self._label}>"

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, promise or child, and this future."""
        self._commander.check_unseen(f"cancelling {self!r}")
        if self.done():
            return False
        if self._cancel is not None and not self._cancelling:
            self._commander.cancel_command(self._cancel, self.id)
        self._cancelling = True
        self._stop_timer()
        if self.waits_for_end:
            return True
        self._commander.forget(self.id)
        return super().cancel(msg)

    def expire_after(self, seconds: float) -> None:
        """Cancel the task, promise or child after this time, and raise TimeoutError."""
        if not self.done():
            self._timer = self._commander.loop.call_later(seconds, self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        if not self.done():
            if self._cancel is not None:
                self._commander.cancel_command(self._cancel, self.id)
            self._commander.forget(self.id)
            self._fail(TimeoutError(f"{self._label} had no answer within {seconds:g} s."))

    def settle(self, outcome: Settled) -> None:
        self._stop_timer()
        if self._cancelling:
            super().cancel()
            return
        match outcome:
            case history.TaskCompleted(result=data) | history.ChildCompleted(result=data):
                self._fulfill(data)
            case history.PromiseResolved(value=data):
                self._fulfill(data)
            case history.TaskFailed(error=error):
                message = f"{self._label} failed: {error.kind}: {error.message}"
                attributes = error.attributes
                self._fail(TaskFailed(message, kind=error.kind, traceback=error.traceback, data=attributes))
            case history.ChildFailed(error=error):
                message = f"{self._label} failed: {error.kind}: {error.message}"
                self._fail(RunFailed(message, kind=error.kind, data=error.attributes))
            case history.PromiseRejected(error=error):
                self._fail(PromiseRejected(f"{self._label} was rejected: {error.message}"))
            case history.TaskCancelled():
                self._fail(TaskCancelled(f"{self._label} was cancelled."))
            case history.ChildCancelled():
                self._fail(RunFailed(f"{self._label} was cancelled."))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fulfill(self, data: bytes) -> None:
        try:
            value = self._restore(decode_value(data))
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            self._fail(PayloadError(f"{self._label} returned a value that does not match its type: {error}."))
        else:
            self.set_result(value)

    def _fail(self, error: Exception) -> None:
        self.set_exception(error)
        self._log_traceback = False  # the error is in the history even if the code ignores it
