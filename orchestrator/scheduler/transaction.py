"""One transaction of the leader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Connection

from orchestrator.scheduler.budget import TickBudget
from orchestrator.scheduler.spans import LeaderSpans
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.sealing import Vault
from orchestrator.store.driver import limit_statements
from orchestrator.store.tasks.enqueue import Creation
from orchestrator.store.tasks.transitions import Moved, Success

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
    """Nothing but a claim is to be committed: it commits by itself, and what follows is another transaction."""
    succeed_and_commit: Callable[[Sequence[Success]], list[Moved]] | None = None
    """Ends tasks and the transaction in one round trip, or does nothing; None if more is to be committed."""
    foreseen: Mapping[bytes, Moved] | None = None
    """Tasks that have succeeded as they have ended then; None if Postgres is to be asked."""
    commit_with_next: Callable[[], None] | None = None
    """Has the statement commit that creates tasks as claimed; None if it does not."""
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
