"""How the code of a run ends before its function returns: it goes on in a new run, leaves memory, or is stopped.

To close coroutines and asynchronous generators that will never be resumed is not enough: one that waits again in its
`finally` block would break off with an error in the middle, and one that is merely dropped would run its `finally`
blocks whenever it is collected, inside somebody else's code. So an exception is thrown in, again and again, until there
is nothing left that waits.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any

from orchestrator.errors import DeterminismViolation, NotDeterministic

logger = logging.getLogger("orchestrator.workflow")
_MOST_TRIES = 100
_stubborn: list[Any] = []
"""Coroutines that cannot be ended are kept for ever, so that they are never collected."""


class ContinueAsNew(BaseException):
    """Ends the run, to go on in a new one. Not an Exception, so that no `except Exception` stops it."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the workflow continues as a new run")
        self.payload = payload


class Evicted(BaseException):
    """Ends the code of a workflow that leaves memory. Also raised by whatever that code still commands."""


class EndTurn(BaseException):
    """Ends code that does not come back."""

    def __init__(self) -> None:
        super().__init__("it ran for too long without waiting for anything")


UNSTOPPABLE = (Evicted, EndTurn, GeneratorExit, DeterminismViolation, NotDeterministic)
"""Exceptions that end the code at once, with nothing undone or answered: the run goes on elsewhere, or is stuck."""


def end_coroutines(
    coroutines: Iterable[Coroutine[Any, Any, Any]], generators: Iterable[AsyncGenerator[Any, Any]]
) -> None:
    """End all of these, however often their `finally` blocks wait for something."""
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
    for _ in range(_MOST_TRIES):
        try:
            waiting.throw(Evicted())
        except BaseException:  # noqa: BLE001  # it has ended; how concerns nobody any more
            return
    logger.warning("workflow.not_evicted coroutine=%r: it catches BaseException in a loop and waits again", waiting)
    _stubborn.append(waiting)


def continuation(error: BaseException) -> ContinueAsNew | None:
    """Return how a run goes on whose code has raised this: also where a group of tasks has, and nothing else in it."""
    if isinstance(error, ContinueAsNew):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    continuations = [continuation(one) for one in error.exceptions]
    return None if None in continuations else continuations[0]


class Compensations:
    """The undo calls of a workflow, should it fail or be cancelled; the last one first."""

    def __init__(self, report: Callable[[str, BaseException | None], None]) -> None:
        self._steps: list[tuple[str, Callable[..., Any]]] = []
        self._report = report

    def add(self, name: str, undo: Callable[[], Any]) -> None:
        """Remember how to undo a step."""
        self._steps.append((name, undo))

    async def run(self) -> None:
        """Undo everything. One that fails is reported, and does not keep the others from being tried."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()  # so that timeouts of the undo steps work
        while self._steps:
            name, undo = self._steps.pop()
            try:
                value = undo()
                if inspect.isawaitable(value):
                    await value
            except UNSTOPPABLE:
                raise
            except BaseException as error:  # noqa: BLE001  # the run fails with the workflow's own error
                self._report(f"compensation {name!r} failed", error)
