"""One transaction of the leader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from sqlalchemy import Connection

from orchestrator.domain.ids import to_text
from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.scheduler.budget import TickBudget
from orchestrator.scheduler.leadership import TermOver
from orchestrator.scheduler.spans import LeaderSpans
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.sealing import Vault
from orchestrator.store.database import is_being_restored, is_outage, is_timeout
from orchestrator.store.driver import limit_statements, savepoint
from orchestrator.store.sql import statement_of
from orchestrator.store.tasks import unique
from orchestrator.store.tasks.enqueue import Creation
from orchestrator.store.tasks.transitions import Moved, Success
from orchestrator.telemetry import get_logger

_HURRY = 0.25
"""Of the time that a statement may take, how much one may of a part of a tick after another took too long."""
_GATHERED = 200
"""Rows that are sent with the next statement, at most: for more, a round trip of their own does not matter."""
_GATHERED_BYTES = 100_000
"""Of them, at most: what takes Postgres long is not to be one statement with what others want."""


def _nobody() -> None:
    """Has no caches to notify."""


@dataclass
class Transaction:
    """Where statements go, what time it is, how much may be done, and what has come of it so far."""

    connection: Connection
    now: datetime
    budget: TickBudget = field(default_factory=TickBudget)
    is_bisecting: bool = False
    """The tick before it failed: the work of runs is tried one by one, to find the failing one."""
    may_gather: bool = False
    """Statements without an awaited answer may be sent with the next one."""
    is_watched: bool = False
    """Somebody listens to live events."""
    rolled_back: Callable[[], None] = _nobody
    """Notify all caches of a rollback to a savepoint."""
    vault: Vault | None = None
    """Seals the values that are made here: the inputs of steps, the parameters of runs."""
    statement_limit: float = 0.0
    """Seconds after which Postgres ends a statement; 0 if it does not."""
    spans: LeaderSpans | None = None
    """Makes spans of runs, if they are exported."""
    may_end_with_claim: bool = False
    """Nothing but a claim, and what waits for it, is to be committed: it commits that, and what follows is another
    transaction."""
    succeed_and_commit: Callable[[Sequence[Success]], list[Moved]] | None = None
    """Ends tasks and the transaction in one round trip, or does nothing; None if more is to be committed."""
    foreseen: Mapping[bytes, Moved] | None = None
    """Tasks that have succeeded as they have ended then; None if Postgres is to be asked."""
    commit_with_next: Callable[[], None] | None = None
    """Has the statement commit with which others wait, and the cursor; None if nothing waits so."""
    shard: int | None = None
    """With several shards, that of the leader."""
    created: Creation | None = None
    """Tasks that are created with the next statement, and may be claimed by it."""
    result: TickResult = field(default_factory=TickResult)
    """Its result; under a savepoint, the result of the part that may be rolled back alone."""

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Have Postgres end statements earlier, after one that took too long: several parts fit into a lease then."""
        if not (self.budget.parts and self.statement_limit):
            yield
            return
        limit_statements(self.connection, _HURRY * self.statement_limit)
        yield
        limit_statements(self.connection, self.statement_limit)

    def gathers(self, rows: int, size: int = 0) -> bool:
        """Say whether so many rows, of so many bytes, are to be sent with the next statement.

        Postgres is not left without one for long: while many are made, it may take a leader for one that has stopped.
        """
        return self.may_gather and rows <= _GATHERED and size <= _GATHERED_BYTES

    @property
    def has_spans(self) -> bool:
        """Say whether what comes of a run stands below a span of that."""
        return self.spans is not None


# -- find the run, report or request that makes a tick fail, so that others do not wait for it.
#
# A tick does everything at once. If it fails, the next one *bisects*: the work of runs, reports and requests is done
# under savepoints, each with a tick result of its own, and halved until the failing one is alone.

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
    task = unique.named_in(error)
    if task is None:
        return False
    removed = unique.remove(tx.connection, task, _MOST_REMOVED)
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
