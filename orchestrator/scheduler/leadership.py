"""Acquire leadership in Postgres, and open the transactions that the term allows."""

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
"""Leases without a useful tick after which another scheduler may depose the leader."""


TICK_LIMIT = 0.8
"""The share of the lease that a statement, or an idle transaction, may take before Postgres ends it."""


class TermOver(Exception):
    """Another scheduler leads now."""


@dataclass
class Writing:
    """A write transaction of the leader."""

    connection: Connection
    now: datetime
    pending_work: PendingWorkProbe | None
    """The pending work at the start of the transaction, if requested."""
    cursor: Cursor | None = None
    """The position up to which this transaction applies events; recorded with the commit."""


class Leadership:
    """One process's claim to lead one shard: its term, and the transactions that the term allows."""

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
        """Why this leader cannot work. `status` shows it, and other schedulers may take over."""

    @property
    def idle_limit(self) -> float:
        """Seconds without a useful tick after which another scheduler may depose the leader."""
        return _IDLE_LEASES * self._lease

    def acquire(self, *, depose: bool = False, abandoned: datetime | None = None) -> bool:
        """Try to become the leader. With `depose`, replace even a live leader that has not been useful for a while.

        `abandoned` is the end of a lease that looks valid but has not been renewed.
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
        """Return the position up to which events have been applied."""
        with self.reading() as connection:
            return leases.read_cursor(connection, self._shard)

    def identity(self) -> str:
        """Return the identity of this database since its creation or last restore; empty if it has none."""
        return leases.identity(self._connect())

    def has_claimed(self, task: bytes, attempt: int) -> bool:
        """Return whether a task has reached an attempt number."""
        with self.reading() as connection:
            return leases.has_claimed(connection, task, attempt)

    def raise_fence(self, writing: Writing, by: int) -> None:
        """Number the attempts of this and all later terms from far above the current ones."""
        leases.raise_fence(writing.connection, self._shard, self.term, by)

    @contextmanager
    def writing(
        self, monotonic: float, *, with_pending_work: bool = False, may_begin_later: bool = False
    ) -> Iterator[Writing]:
        """Open the only kind of transaction that changes state. It holds the lease until it ends.

        `with_pending_work` also reads the work that waits for the leader, without an extra round trip.
        `may_begin_later` delays BEGIN to the first statement; `now` is extrapolated from Postgres's last answer.
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
        """Succeed tasks, record the cursor and commit, all in one round trip, in a transaction that has not begun.

        If more must follow from the ends of these tasks, change nothing; the transaction can still begin.
        """
        return leases.succeed_and_commit(connection, rows, now, self._shard, cursor)

    def commit_with_next(self, connection: Connection, cursor: Cursor) -> None:
        """Let the next statement begin the transaction, send all gathered statements and the cursor, and commit."""
        leases.commit_with_next(connection, self._shard, cursor)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a read-only transaction."""
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
        """Seconds since the open transaction began, or the one that has just failed."""
        return 0.0 if self._opened_at is None else time.monotonic() - self._opened_at

    def release(self) -> None:
        """Release the lease, so that a standby takes over at once."""
        leases.release(self._connect(), self._shard, self.term)

    def disconnect(self) -> None:
        """Drop the connection, whatever its state. The next use opens another."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None

    def _connect(self) -> Connection:
        """Return the connection. SQLAlchemy sees a single transaction; BEGIN and COMMIT are sent by hand."""
        if self._connection is not None and self._connection.invalidated:
            self.disconnect()
        if self._connection is None:
            # BEGIN and COMMIT are sent by hand, together with other statements: the driver would send them alone.
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            # A leader that is suspended in a transaction must lose its locks before its lease expires. Its statements
            # probe indexes for batches whose size the planner cannot know: docs/hot-tables.md.
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
    if not connection.invalidated:
        roll_back(connection)
