"""Exceptions and helpers that end the code of a run early: it continues in a new run, leaves memory, or is stopped.

Closing coroutines and asynchronous generators that will never be resumed is not enough. One that awaits again in its
`finally` block would break off with an error in the middle, and one that is merely dropped would run its `finally`
blocks whenever it is garbage-collected, inside other code. An exception is therefore thrown in repeatedly until nothing
waits any more.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any

from orchestrator.errors import DeterminismViolation, NotDeterministic

logger = logging.getLogger("orchestrator.workflow")
_MAX_THROWS = 100
_unstoppable_coroutines: list[Any] = []
"""Coroutines that cannot be ended. They are kept forever, so that they are never garbage-collected."""


class ContinueAsNew(BaseException):
    """Ends the run, to continue in a new one. Not an Exception, so that no `except Exception` catches it."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the workflow continues as a new run")
        self.payload = payload


class Evicted(BaseException):
    """Ends the code of a run that leaves memory. Commands that the code still gives raise it, too."""


class EndTurn(BaseException):
    """Ends a turn that exceeds the time limit."""

    def __init__(self) -> None:
        super().__init__("it ran for too long without waiting for anything")


UNSTOPPABLE = (Evicted, EndTurn, GeneratorExit, DeterminismViolation, NotDeterministic)
"""Exceptions that end the code without compensations or answers: the run continues elsewhere, or is stuck."""


def end_coroutines(
    coroutines: Iterable[Coroutine[Any, Any, Any]], generators: Iterable[AsyncGenerator[Any, Any]]
) -> None:
    """End all coroutines and generators, however often their `finally` blocks wait."""
    for coroutine in coroutines:
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            coroutine.close()
        else:
            _throw_into(coroutine)
    for generator in generators:
        closing: Any = generator.athrow(Evicted())
        try:
            closing.send(None)
        except BaseException:  # noqa: BLE001  # it has ended
            continue
        _throw_into(closing)


def _throw_into(waiting: Coroutine[Any, Any, Any]) -> None:
    for _ in range(_MAX_THROWS):
        try:
            waiting.throw(Evicted())
        except BaseException:  # noqa: BLE001  # it has ended, no matter how
            return
    logger.warning("workflow.not_evicted coroutine=%r: it catches BaseException in a loop and waits again", waiting)
    _unstoppable_coroutines.append(waiting)


def continuation(error: BaseException) -> ContinueAsNew | None:
    """Return the ContinueAsNew in an error, even in an exception group that contains nothing else; otherwise None."""
    if isinstance(error, ContinueAsNew):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    continuations = [continuation(nested) for nested in error.exceptions]
    return None if None in continuations else continuations[0]


class Compensations:
    """The undo steps of a workflow, run in reverse order if the workflow fails or is cancelled."""

    def __init__(self, report: Callable[[str, BaseException | None], None]) -> None:
        self._steps: list[tuple[str, Callable[..., Any]]] = []
        self._report = report

    def add(self, name: str, undo: Callable[[], Any]) -> None:
        """Add an undo step."""
        self._steps.append((name, undo))

    async def run(self) -> None:
        """Run all undo steps. A failing step is logged, and the rest is still run."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()  # lets timeouts in the undo steps work
        while self._steps:
            name, undo = self._steps.pop()
            try:
                value = undo()
                if inspect.isawaitable(value):
                    await value
            except UNSTOPPABLE:
                raise
            except BaseException as error:  # noqa: BLE001  # the run fails with the original error
                self._report(f"compensation {name!r} failed", error)
