"""Connections to Postgres outlive the tests that close them: one is kept for whoever opens the same again.

A new process of Postgres first reads its catalogues, which takes longer than most tests do. What a session has set or
made is discarded between two users. This is done in `tests/integration`; tests of sessions themselves carry the mark
`own_connections` there.
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

_MOST = 12
"""Kept at a time; Postgres has a hundred."""


class KeptConnections:
    """The connections that a process of tests does not use at the moment."""

    def __init__(self, prefix: str) -> None:
        """Keep those to databases whose names begin so."""
        self.is_on = False
        self._prefix = prefix
        self._lock = threading.Lock()
        self._idle: list[tuple[str, connection]] = []
        self._keys: WeakKeyDictionary[connection, str] = WeakKeyDictionary()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep and hand out connections while the block lasts."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def install(self) -> None:
        """Have the dialect connect and close this way, whoever uses it."""
        dialect: Any = PGDialect_psycopg2
        connect, close = dialect.connect, dialect.do_close

        def connect_or_take(self_: Any, *arguments: Any, **options: Any) -> Any:
            environment = [(name, value) for name, value in os.environ.items() if name.startswith("PG")]
            key = repr((arguments, sorted(options.items()), environment))
            found = self._take(key) or connect(self_, *arguments, **options)
            self._keys[found] = key
            return found

        dialect.connect = connect_or_take
        dialect.do_close = lambda self_, one: self._keep(one) or close(self_, one)

    def close(self) -> None:
        """Close all that are kept."""
        with self._lock:
            while self._idle:
                self._idle.pop()[1].close()

    def _take(self, key: str) -> connection | None:
        while self.is_on:
            with self._lock:
                number = next((number for number, (other, _) in enumerate(self._idle) if other == key), None)
                if number is None:
                    return None
                _, one = self._idle.pop(number)
            if not select.select([one], [], [], 0)[0]:
                return one
            one.close()  # somebody has ended it meanwhile: nothing else is said to one that is idle
        return None

    def _keep(self, one: connection) -> bool:
        """Say whether it is kept: only one that is idle, to one of our databases. Its locks and the like are gone."""
        key = self._keys.pop(one, None)
        if not self.is_on or key is None or one.closed or len(self._idle) >= _MOST:
            return False
        if one.isexecuting() or one.info.transaction_status != TRANSACTION_STATUS_IDLE:
            return False
        if not one.info.dbname.startswith(self._prefix):
            return False
        try:
            one.autocommit = True
            with one.cursor() as cursor:
                cursor.execute("DISCARD ALL")
            one.autocommit = False
            one.isolation_level = None
        except Error:
            return False
        one.notifies.clear()
        one.notices.clear()
        with self._lock:
            self._idle.append((key, one))
        return True


KEPT = KeptConnections("test_")
KEPT.install()


def find_the_version_of_redis_once() -> None:
    """Else the driver reads it from the files of its package for every connection."""
    redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)
