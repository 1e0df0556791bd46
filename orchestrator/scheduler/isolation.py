"""Find the run, report or request that makes a tick fail, so that others do not wait for it.

A tick does everything at once. If it fails, the next one *bisects*: the work of runs, reports and requests is done
under savepoints, each with a tick result of its own, and halved until the failing one is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from orchestrator.domain.ids import to_text
from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.scheduler.leadership import TermOver
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.database import is_being_restored, is_outage, is_timeout
from orchestrator.store.driver import savepoint
from orchestrator.store.sql import statement_of
from orchestrator.store.tasks import duplicates
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")
T = TypeVar("T")

_TRIES = 3
"""How often the same is done in one tick; each time, open tasks that have ended before are removed."""


def is_about_all(error: Exception) -> bool:
    """Say whether an error has no culprit: Postgres cannot be used, or another scheduler leads."""
    return isinstance(error, TermOver) or is_outage(error) or is_being_restored(error)


def isolate(
    tx: Transaction,
    items: Sequence[T],
    do: Callable[[Transaction, Sequence[T]], object],
    give_up: Callable[[Transaction, T, Exception], None],
) -> None:
    """Do something with all items at once; in a bisecting tick without those with which it fails."""
    if not items:
        return
    if not tx.is_bisecting:
        do(tx, items)
        return
    error = _failure(tx, lambda: do(tx, items))
    if error is None:
        return
    if is_timeout(error):  # the part that it belongs to does less next time
        raise error
    if len(items) == 1:
        give_up(tx, items[0], error)
        return
    middle = len(items) // 2
    isolate(tx, items[:middle], do, give_up)
    isolate(tx, items[middle:], do, give_up)


def attempt(tx: Transaction, what: str, do: Callable[[Transaction, int], object], rows: int) -> None:
    """Do one part of a tick with so many rows, or fewer where they took too long before.

    In a bisecting tick, go on with the other parts if it fails.
    """
    budget = tx.budget
    most = budget.parts.most(what, rows)
    if tx.is_bisecting and budget.parts.is_out(what):
        tx.result.failed_parts.append(what)
        return
    before, budget.part = budget.part, what
    if not tx.is_bisecting:
        do(tx, most)
        budget.finish(what, before)
        return
    with tx.hurrying():
        error = _failure(tx, lambda: do(tx, most))
    budget.finish(what, before)
    if error is None:
        return
    tx.result.failed_parts.append(what)
    budget.parts_done.discard(what)
    if is_timeout(error):
        budget.has_timed_out = True
        budget.parts.timed_out(what, statement_of(error))
        log.warning(
            "scheduler.part_skipped part=%r statement=%s: it took too long; the rest of the tick goes on",
            what,
            statement_of(error),
        )
    else:
        log.error("scheduler.part_failed part=%r: the rest of the tick goes on", what, exc_info=error)


def _failure(tx: Transaction, do: Callable[[], object]) -> Exception | None:
    """Do something whole or not at all, and merge its result if it is done; return what is wrong with it."""
    for left in reversed(range(_TRIES)):
        whole, before = tx.result, tx.budget.spent_on_rows()
        tx.result = TickResult()
        try:
            with savepoint(tx.connection):
                do()
        except Exception as error:
            tx.result = whole
            tx.rolled_back()
            belongs_to_part = is_timeout(error) and tx.budget.late_part is not None and not tx.budget.has_timed_out
            if is_about_all(error) and not belongs_to_part:
                raise
            tx.budget.busy_with = []
            tx.budget.undo(before)
            if not left or is_timeout(error) or not remove_duplicates(tx, error):
                return error
        else:
            whole.merge(tx.result)
            tx.result = whole
            return None
    raise AssertionError("the last try returns")


_MOST_REMOVED = 1_000
"""That are removed at once."""
_NAMED_IN_LOG = 10
"""Of those, how many are named in the log."""


def remove_duplicates(tx: Transaction, error: Exception) -> bool:
    """Remove open tasks that have ended, if an error says that there is one; say whether there was.

    Their results stay, and waiting clients get them.
    """
    task = duplicates.named_in(error)
    if task is None:
        return False
    removed = duplicates.remove(tx.connection, task, _MOST_REMOVED)
    if not removed:
        return False
    tx.result.note(removed)
    tx.result.outgoing.revoked.extend(double for double in removed if double.before in IN_FLIGHT_STATES)
    log.error(
        "task.duplicates_removed tasks=%d: tasks that had ended were open as well and could not end again. The open "
        "rows are removed, the results stay: %s%s",
        len(removed),
        ", ".join(to_text(double.id) for double in removed[:_NAMED_IN_LOG]),
        " …" if len(removed) > _NAMED_IN_LOG else "",
        extra={"task_id": to_text(removed[0].id)},
    )
    return True
