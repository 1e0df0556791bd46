"""Postgres connections that outlive their test: a closed connection is kept and reused for the same address.

A new Postgres process first reads its catalogs, which takes longer than most tests. Session state is discarded between
two uses. Only `tests/integration` reuses connections; tests of sessions themselves carry the mark `own_connections`.
"""

from __future__ import annotations

import functools
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import redis.utils
from psycopg2 import Error
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, connection
from sqlalchemy.dialects.postgresql.psycopg2 import PGDialect_psycopg2

_MAX_IDLE = 12
"""Idle connections, at most; Postgres allows 100 connections."""


class KeptConnections:
    """The idle connections of a test process."""

    def __init__(self, prefix: str) -> None:
        """Keep connections to databases whose names begin with `prefix`."""
        self.is_on = False
        self._prefix = prefix
        self._lock = threading.Lock()
        self._idle: list[tuple[str, connection]] = []
        self._keys: WeakKeyDictionary[connection, str] = WeakKeyDictionary()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep and reuse connections within the block."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def install(self) -> None:
        """Make SQLAlchemy's psycopg2 dialect connect and close through this pool."""
        dialect: Any = PGDialect_psycopg2
        connect, close = dialect.connect, dialect.do_close

        def connect_or_reuse(self_: Any, *arguments: Any, **options: Any) -> Any:
            environment = [(name, value) for name, value in os.environ.items() if name.startswith("PG")]
            key = repr((arguments, sorted(options.items()), environment))
            connected = self._take(key) or connect(self_, *arguments, **options)
            self._keys[connected] = key
            return connected

        dialect.connect = connect_or_reuse
        dialect.do_close = lambda self_, idle: self._keep(idle) or close(self_, idle)

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop()[1].close()

    def _take(self, key: str) -> connection | None:
        while self.is_on:
            with self._lock:
                number = next((number for number, (other, _) in enumerate(self._idle) if other == key), None)
                if number is None:
                    return None
                _, idle = self._idle.pop(number)
            if not select.select([idle], [], [], 0)[0]:
                return idle
            idle.close()  # readable while idle: the server has ended the connection
        return None

    def _keep(self, idle: connection) -> bool:
        """Keep an idle connection to a test database, without its session state. Return whether it is kept."""
        key = self._keys.pop(idle, None)
        if not self.is_on or key is None or idle.closed or len(self._idle) >= _MAX_IDLE:
            return False
        if idle.isexecuting() or idle.info.transaction_status != TRANSACTION_STATUS_IDLE:
            return False
        if not idle.info.dbname.startswith(self._prefix):
            return False
        try:
            idle.autocommit = True
            with idle.cursor() as cursor:
                cursor.execute("DISCARD ALL")
            idle.autocommit = False
            idle.isolation_level = None
        except Error:
            return False
        idle.notifies.clear()
        idle.notices.clear()
        with self._lock:
            self._idle.append((key, idle))
        return True


KEPT = KeptConnections("test_")
KEPT.install()


def cache_redis_version() -> None:
    """Cache the version of redis-py, which it reads from package files for every connection."""
    redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)
