"""Find the one that is at fault, so that nobody else waits for it.

A tick does everything at once. If it fails, the next one is *careful*: whatever belongs to runs, reports or requests is
done under savepoints, and halved until the culprit is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from orchestrator.scheduler.leadership import TermOver
from orchestrator.scheduler.tick import Tick
from orchestrator.store.database import is_outage
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")
T = TypeVar("T")


def is_about_all(error: Exception) -> bool:
    """Say whether an error is nobody's fault in particular: Postgres cannot be used, or somebody else leads."""
    return isinstance(error, TermOver) or is_outage(error)


def isolate(
    tick: Tick, items: Sequence[T], do: Callable[[Sequence[T]], object], give_up: Callable[[T, Exception], None]
) -> None:
    """Do something with all items at once; in a careful tick without those with which it fails."""
    if not items:
        return
    if not tick.is_careful:
        do(items)
        return
    error = _failure(tick, lambda: do(items))
    if error is None:
        return
    if len(items) == 1:
        give_up(items[0], error)
        return
    middle = len(items) // 2
    isolate(tick, items[:middle], do, give_up)
    isolate(tick, items[middle:], do, give_up)


def attempt(tick: Tick, what: str, do: Callable[[], None]) -> None:
    """Do one part of a tick; in a careful tick, go on with the other parts if it fails."""
    if not tick.is_careful:
        do()
        return
    error = _failure(tick, do)
    if error is not None:
        log.error("the scheduler cannot %s; all else goes on", what, exc_info=error)
        tick.failed_parts.append(what)


def _failure(tick: Tick, do: Callable[[], object]) -> Exception | None:
    """Do something whole or not at all; return what is wrong with it."""
    try:
        with tick.trial():
            do()
    except Exception as error:
        if is_about_all(error):
            raise
        tick.budget.busy_with = []
        return error
    return None
