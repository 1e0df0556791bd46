"""Become the leader, and stay it only while Postgres agrees."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine

from orchestrator.store import leases
from orchestrator.store.driver import keep_prepared, roll_back, send
from orchestrator.store.leases import Cursor, LeaseView
from orchestrator.store.tasks.transitions import Moved, Success
from orchestrator.store.tasks.waiting import PendingWorkProbe

_IDLE_LEASES = 3.0
"""Leases without a useful tick after which another scheduler may take a leader's place."""


TICK_LIMIT = 0.8
"""Of the lease, how long a statement, or a pause in a transaction, may take before Postgres ends it."""


class TermOver(Exception):
    """Another scheduler leads now."""


@dataclass
class Writing:
    """A transaction of the leader's."""

    connection: Connection
    now: datetime
    pending_work: PendingWorkProbe | None
    """The pending work when it began, if asked for."""
    cursor: Cursor | None = None
    """How far it applies events; recorded as it commits."""


class Leadership:
    """One process's claim to lead one shard: a term, and the transactions that the term allows."""

    def __init__(
        self,
        engine: Engine,
        *,
        lease: float,
        shard: int = 0,
        clock_offset: timedelta = timedelta(),
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._elapsed = elapsed
        self._lease = lease
        self._shard = shard
        self._clock_offset = clock_offset
        self._owner = str(uuid.uuid4())
        self._renew_at = 0.0
        self._clock: tuple[datetime, float] | None = None
        """The time by Postgres when a transaction began, and by `elapsed` just before."""
        self._connection: Connection | None = None
        self._opened_at: float | None = None
        self.term = 0
        self.trouble: str | None = None
        """Why this leader cannot work: `status` shows it, and others may take over."""

    @property
    def idle_limit(self) -> float:
        """Seconds without a useful tick after which another scheduler may take a leader's place."""
        return _IDLE_LEASES * self._lease

    def acquire(self, *, depose: bool = False, abandoned: datetime | None = None) -> bool:
        """Try to become leader; `depose` also one that has not been useful for a while.

        `abandoned` is the end of a lease that has not been renewed, though it seems to last.
        """
        term = leases.acquire(
            self._connect(),
            self._shard,
            self._owner,
            self._lease,
            f"{socket.gethostname()}:{os.getpid()}",
            trouble=self.trouble,
            idle_limit=self.idle_limit if depose else None,
            abandoned=abandoned,
        )
        if term is None:
            return False
        self.term = term
        self._renew_at = 0.0
        return True

    def lease_view(self) -> LeaseView:
        self._opened_at = None  # a standby has no transaction
        return leases.lease_view(self._connect(), self._shard, self._owner)

    def cursor(self) -> Cursor | None:
        """Return how far events have been applied."""
        with self.reading() as connection:
            return leases.read_cursor(connection, self._shard)

    def identity(self) -> str:
        """Return a name for this life of the database; empty where it has none."""
        return leases.identity(self._connect())

    def has_claimed(self, task: bytes, attempt: int) -> bool:
        """Say whether a task has come to an attempt."""
        with self.reading() as connection:
            return leases.has_claimed(connection, task, attempt)

    def raise_fence(self, writing: Writing, by: int) -> None:
        """Have the attempts of this and all later terms numbered from far above."""
        leases.raise_fence(writing.connection, self._shard, self.term, by)

    @contextmanager
    def writing(
        self, monotonic: float, *, with_pending_work: bool = False, may_begin_later: bool = False
    ) -> Iterator[Writing]:
        """Open the one kind of transaction in which anything is changed; it holds the lease until it ends.

        `with_pending_work` also reads what waits for the leader, which costs no round trip of its own. One that
        `may_begin_later` begins with its first statement, and its time is counted on from the last answer of Postgres,
        which is as old as the last renewal at most.
        """
        renew = monotonic >= self._renew_at
        connection = self._connect()
        self._opened_at = time.monotonic()
        try:
            if may_begin_later and self._clock is not None and not (renew or with_pending_work):
                writing = self._begin_later(connection, *self._clock)
            else:
                writing = self._begin(connection, renew, with_pending_work)
            yield writing
            leases.commit(connection, self._shard, writing.cursor)
        except BaseException as error:
            _roll_back(connection)
            if leases.is_term_over(error):
                raise TermOver from error
            raise
        self._opened_at = None
        if renew:
            self._renew_at = monotonic + self._lease / 3

    def _begin(self, connection: Connection, renew: bool, with_pending_work: bool) -> Writing:
        before = self._elapsed()
        begun = leases.begin(
            connection,
            self._shard,
            self.term,
            renew=self._lease if renew else None,
            with_pending_work=with_pending_work,
            trouble=self.trouble,
        )
        if begun is None:
            raise TermOver
        now, pending_work = begun
        self._clock = now, before
        return Writing(connection, now + self._clock_offset, pending_work)

    def _begin_later(self, connection: Connection, known: datetime, at: float) -> Writing:
        leases.begin_later(connection, self._shard, self.term)
        return Writing(connection, known + timedelta(seconds=self._elapsed() - at) + self._clock_offset, None)

    def succeed_and_commit(
        self, connection: Connection, now: datetime, cursor: Cursor, rows: Sequence[Success]
    ) -> list[Moved]:
        """End tasks and the transaction that has not begun yet, with the cursor: one round trip.

        If that is not all that belongs to their ends, nothing is done, and the transaction is still to begin.
        """
        return leases.succeed_and_commit(connection, rows, now, self._shard, cursor)

    def commit_with_next(self, connection: Connection, cursor: Cursor) -> None:
        """Have the next statement commit a transaction that is to begin, with all that waits for it and the cursor."""
        leases.commit_with_next(connection, self._shard, cursor)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction that only reads."""
        connection = self._connect()
        self._opened_at = time.monotonic()
        try:
            send(connection, "BEGIN")
            yield connection
            send(connection, "COMMIT")
        except BaseException:
            _roll_back(connection)
            raise
        self._opened_at = None

    @property
    def took(self) -> float:
        """Seconds since the transaction began that is open, or that has just failed."""
        return 0.0 if self._opened_at is None else time.monotonic() - self._opened_at

    def release(self) -> None:
        """Give the lease up, so that a standby takes over at once."""
        leases.release(self._connect(), self._shard, self.term)

    def disconnect(self) -> None:
        """Drop the connection, whatever state it is in; the next use opens another."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None

    def _connect(self) -> Connection:
        """Return the connection. To SQLAlchemy its life is one transaction; Postgres is told where each one ends."""
        if self._connection is not None and self._connection.invalidated:
            self.disconnect()
        if self._connection is None:
            # BEGIN and COMMIT are sent by hand, with the statements beside them: the driver would send them alone.
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            # A leader that is stopped in mid-transaction must lose its locks before its lease runs out. And its
            # statements probe indexes for batches whose size the planner cannot know: docs/hot-tables.md.
            limit = int(1_000 * TICK_LIMIT * self._lease)
            connection.exec_driver_sql(
                f"SET lock_timeout = {limit}; SET statement_timeout = {limit}; "
                f"SET idle_in_transaction_session_timeout = {limit}; SET jit = off; "
                "SET plan_cache_mode = force_generic_plan; "
                "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off; "
                "SET enable_mergejoin = off; SET enable_memoize = off"
            )
            connection.commit()
            keep_prepared(connection)
            self._connection = connection
        return self._connection


def _roll_back(connection: Connection) -> None:
    """End what was begun by hand and has not come to its end."""
    if not connection.invalidated:
        roll_back(connection)
