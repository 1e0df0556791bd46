"""Become the leader, and stay it only while Postgres agrees."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine

from orchestrator.store import leases
from orchestrator.store.leases import Cursor


class TermOver(Exception):
    """Another scheduler leads now."""


class Leadership:
    """One process's claim to lead one shard: a term, and the transactions that the term allows."""

    def __init__(self, engine: Engine, *, lease: float, shard: int = 0, clock_offset: timedelta = timedelta()) -> None:
        self._engine = engine
        self._lease = lease
        self._shard = shard
        self._clock_offset = clock_offset
        self._owner = str(uuid.uuid4())
        self._renew_at = 0.0
        self._connection: Connection | None = None
        self.term = 0

    def acquire(self) -> bool:
        """Try to become leader."""
        connection = self._connect()
        with connection.begin():
            address = f"{socket.gethostname()}:{os.getpid()}"
            term = leases.acquire(connection, self._shard, self._owner, self._lease, address)
        if term is None:
            return False
        self.term = term
        self._renew_at = 0.0
        return True

    def wait(self, awake: threading.Event) -> None:
        """Wait as standby until the present lease could have expired, or somebody has a reason to look earlier."""
        connection = self._connect()
        with connection.begin():
            remaining = leases.remaining(connection, self._shard)
        awake.wait(min(max(remaining, 0.05), self._lease / 3))
        awake.clear()

    def cursor(self) -> Cursor | None:
        """Return how far events have been applied."""
        with self.reading() as connection:
            return leases.read_cursor(connection, self._shard)

    def save_cursor(self, connection: Connection, cursor: Cursor) -> None:
        """Record how far events have been applied, in the transaction that applied them."""
        leases.save_cursor(connection, self._shard, cursor)

    @contextmanager
    def writing(self, monotonic: float) -> Iterator[tuple[Connection, datetime]]:
        """Open the one kind of transaction in which anything is changed; it holds the lease until it ends."""
        connection = self._connect()
        with connection.begin():
            renew = monotonic >= self._renew_at
            now = leases.hold(connection, self._shard, self.term, self._lease if renew else None)
            if now is None:
                raise TermOver
            yield connection, now + self._clock_offset
        if renew:
            self._renew_at = monotonic + self._lease / 3

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction that only reads."""
        connection = self._connect()
        with connection.begin():
            yield connection

    def release(self) -> None:
        """Give the lease up, so that a standby takes over at once."""
        with self._connect().begin():
            leases.release(self._connect(), self._shard, self.term)

    def disconnect(self) -> None:
        """Drop the connection, whatever state it is in; the next use opens another."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None

    def _connect(self) -> Connection:
        if self._connection is None:
            connection = self._engine.connect()
            # A leader that is stopped in mid-transaction must lose its locks before its lease runs out. And its
            # statements probe indexes for batches whose size the planner cannot know: docs/hot-tables.md.
            limit = int(self._lease * 800)
            connection.exec_driver_sql(
                f"SET lock_timeout = {limit}; SET statement_timeout = {limit}; "
                f"SET idle_in_transaction_session_timeout = {limit}; SET jit = off; "
                "SET plan_cache_mode = force_generic_plan; "
                "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off"
            )
            connection.commit()
            self._connection = connection
        return self._connection
