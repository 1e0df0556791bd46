"""Ending coroutines and asynchronous generators that will never be resumed.

Closing them is not enough: one that waits again in its `finally` block would break off with an error in the middle, and
one that is merely dropped would run its `finally` blocks whenever it is collected, inside somebody else's code. So an
exception is thrown in, again and again, until there is nothing left that waits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any

from orchestrator.errors import DeterminismViolation, NotDeterministic

logger = logging.getLogger("orchestrator.workflow")
_MOST_TRIES = 100
_stubborn: list[Any] = []
"""What cannot be ended is kept for ever, so that it is never collected."""


class Evicted(BaseException):
    """Ends the code of a workflow that leaves memory. Also raised by whatever that code still commands."""


class EndTurn(BaseException):
    """Ends code that does not come back."""

    def __init__(self) -> None:
        super().__init__("it ran for too long without waiting for anything")


UNSTOPPABLE = (Evicted, EndTurn, GeneratorExit, DeterminismViolation, NotDeterministic)
"""What ends the code at once, with nothing undone and nobody answered: the run goes on elsewhere, or is stuck."""


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
