"""The leader's transaction, and the isolation of work that makes a tick fail."""

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
from orchestrator.store.driver import limit_statements, savepoint
from orchestrator.store.postgres_errors import is_being_restored, is_outage, is_timeout
from orchestrator.store.sql import statement_of
from orchestrator.store.tasks import unique
from orchestrator.store.tasks.enqueue import Creation
from orchestrator.store.tasks.transitions import Moved, Success
from orchestrator.telemetry import get_logger

_HURRIED_SHARE = 0.25
"""The share of the statement timeout that a part gets after another part took too long."""
_MAX_GATHERED = 200
"""Rows sent with the next statement, at most. For more, a round trip of their own hardly matters."""
_MAX_GATHERED_BYTES = 100_000
"""Bytes sent with the next statement, at most: slow writes should not delay the work that shares their statement."""


def _no_caches() -> None: ...


@dataclass
class Transaction:
    """The connection, the time, the budget and the result of one transaction of the leader."""

    connection: Connection
    now: datetime
    budget: TickBudget = field(default_factory=TickBudget)
    is_bisecting: bool = False
    """The previous tick failed: runs are handled one by one to find the failing one."""
    may_gather: bool = False
    """Statements whose answer nobody awaits may be sent with the next statement."""
    is_watched: bool = False
    """Somebody listens to live events."""
    rolled_back: Callable[[], None] = _no_caches
    """Notifies all caches of a rollback to a savepoint."""
    vault: Vault | None = None
    """Encrypts values created by the leader: the inputs of steps and the parameters of runs."""
    statement_limit: float = 0.0
    """Seconds after which Postgres ends a statement; 0 for no limit."""
    spans: LeaderSpans | None = None
    """Creates spans of runs, if spans are exported."""
    may_end_with_claim: bool = False
    """The claim may commit the transaction, with all gathered statements. Further work needs another."""
    succeed_and_commit: Callable[[Sequence[Success]], list[Moved]] | None = None
    """Succeeds tasks and commits in one round trip, or does nothing; None if more must be committed."""
    foreseen: Mapping[bytes, Moved] | None = None
    """The expected ends of tasks that succeeded; None if Postgres must be queried."""
    commit_with_next: Callable[[], None] | None = None
    """Lets the next statement commit the gathered statements and the cursor; None if nothing is gathered."""
    shard: int | None = None
    """The leader's shard, if there are several."""
    created: Creation | None = None
    """Tasks created by the next statement, which may claim them too."""
    result: TickResult = field(default_factory=TickResult)
    """The result of the transaction; under a savepoint, the result of the part that may be rolled back alone."""

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Shorten the statement timeout after a statement took too long, so that several parts fit into a lease."""
        if not (self.budget.parts and self.statement_limit):
            yield
            return
        limit_statements(self.connection, _HURRIED_SHARE * self.statement_limit)
        yield
        limit_statements(self.connection, self.statement_limit)

    def gathers(self, rows: int, size: int = 0) -> bool:
        """Return whether so many rows, of so many bytes, should be sent with the next statement.

        More would leave Postgres without a statement for so long that it may take the leader for a stopped one.
        """
        return self.may_gather and rows <= _MAX_GATHERED and size <= _MAX_GATHERED_BYTES

    @property
    def has_spans(self) -> bool:
        """Return whether the work of a run has spans below the span of the run."""
        return self.spans is not None


# -- find the run, report or request that makes a tick fail, so that the rest does not wait for it
#
# A tick does everything at once. If it fails, the next one *bisects*: runs, reports and requests are handled under
# savepoints, each with a separate result, and halved until the failing one is alone.

log = get_logger("scheduler")
T = TypeVar("T")

_TRIES = 3
"""Attempts at the same work in one tick. Before each retry, open rows of tasks that have ended are removed."""


def affects_everything(error: Exception) -> bool:
    """Return whether an error has no single culprit: Postgres cannot be used, or another scheduler leads."""
    return isinstance(error, TermOver) or is_outage(error) or is_being_restored(error)


def isolate(
    tx: Transaction,
    items: Sequence[T],
    do: Callable[[Transaction, Sequence[T]], object],
    give_up: Callable[[Transaction, T, Exception], None],
) -> None:
    """Process all items at once. In a bisecting tick, find the failing items and pass each to `give_up`."""
    if not items:
        return
    if not tx.is_bisecting:
        do(tx, items)
        return
    error = _error_of(tx, lambda: do(tx, items))
    if error is None:
        return
    if is_timeout(error):  # its part does less next time
        raise error
    if len(items) == 1:
        give_up(tx, items[0], error)
        return
    middle = len(items) // 2
    isolate(tx, items[:middle], do, give_up)
    isolate(tx, items[middle:], do, give_up)


def attempt(tx: Transaction, part: str, do: Callable[[Transaction, int], object], rows: int) -> None:
    """Run one part of a tick with so many rows, or fewer if the part took too long before.

    In a bisecting tick, a failure of one part does not stop the others.
    """
    budget = tx.budget
    row_limit = budget.parts.row_limit(part, rows)
    if tx.is_bisecting and budget.parts.is_paused(part):
        tx.result.failed_parts.append(part)
        return
    before, budget.part = budget.part, part
    if not tx.is_bisecting:
        do(tx, row_limit)
        budget.finish(part, before)
        return
    with tx.hurrying():
        error = _error_of(tx, lambda: do(tx, row_limit))
    budget.finish(part, before)
    if error is None:
        return
    tx.result.failed_parts.append(part)
    budget.parts_done.discard(part)
    if is_timeout(error):
        budget.has_timed_out = True
        budget.parts.timed_out(part, statement_of(error))
        log.warning(
            "scheduler.part_skipped part=%r statement=%s: it took too long; the rest of the tick continues",
            part,
            statement_of(error),
        )
    else:
        log.error("scheduler.part_failed part=%r: the rest of the tick continues", part, exc_info=error)


def _error_of(tx: Transaction, do: Callable[[], object]) -> Exception | None:
    """Run `do` under a savepoint. Merge its result, or return the error after a rollback."""
    for remaining in reversed(range(_TRIES)):
        outer, before = tx.result, tx.budget.spent_on_rows()
        tx.result = TickResult()
        try:
            with savepoint(tx.connection):
                do()
        except Exception as error:
            tx.result = outer
            tx.rolled_back()
            belongs_to_part = is_timeout(error) and tx.budget.blamed_part is not None and not tx.budget.has_timed_out
            if affects_everything(error) and not belongs_to_part:
                raise
            tx.budget.busy_with = []
            tx.budget.undo(before)
            if not remaining or is_timeout(error) or not remove_duplicates(tx, error):
                return error
        else:
            outer.merge(tx.result)
            tx.result = outer
            return None
    raise AssertionError("the last try returns")


_MAX_REMOVED = 1_000
"""Open rows removed at once, at most."""
_MAX_LOGGED = 10
"""Removed tasks named in the log, at most."""


def remove_duplicates(tx: Transaction, error: Exception) -> bool:
    """Remove open rows of tasks that have already ended, if the error names one. Return whether any were removed.

    The stored results remain, and waiting clients get them.
    """
    task = unique.named_in(error)
    if task is None:
        return False
    removed = unique.remove(tx.connection, task, _MAX_REMOVED)
    if not removed:
        return False
    tx.result.note(removed)
    tx.result.outgoing.revoked.extend(duplicate for duplicate in removed if duplicate.before in IN_FLIGHT_STATES)
    log.error(
        "task.duplicates_removed tasks=%d: ended tasks still had open rows, which could not end again. The open rows "
        "are removed, the results stay: %s%s",
        len(removed),
        ", ".join(to_text(duplicate.id) for duplicate in removed[:_MAX_LOGGED]),
        " …" if len(removed) > _MAX_LOGGED else "",
        extra={"task_id": to_text(removed[0].id)},
    )
    return True
