"""Connections that SQLAlchemy did not open: psycopg2, psycopg 3, asyncpg and Django.

`other_driver` wraps such a connection. A `Statement` runs on the wrapper as on a SQLAlchemy connection, in the owner's
open transaction. No driver is imported here: a caller with a connection has loaded the driver. Asynchronous drivers
need greenlet, as in SQLAlchemy: the caller runs in `greenlet_spawn`, which awaits each statement.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from sqlalchemy.util import await_only, greenlet_spawn

from orchestrator.store.driver import StatementResult
from orchestrator.store.namespaces import in_namespace

PARAMETER = re.compile(r"%\((\w+)\)s((?:::[a-z]+(?: precision)?(?:\[\])?)?)")
"""A parameter of a statement: name and cast."""


class HasCursor(Protocol):
    """A connection of psycopg2, psycopg 3, asyncpg or Django."""

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """Return a cursor."""


class DriverConnection:
    """A connection with cursors: psycopg2, psycopg 3 and Django."""

    is_async = False

    def __init__(self, connection: Any, namespace: str, **plain: Any) -> None:
        """`plain` has the options of a cursor whose rows are tuples, whatever the connection's owner has set."""
        self._connection = connection
        self._namespace = namespace
        self._plain = plain

    def run(self, sql: str, values: Mapping[str, Any]) -> StatementResult:
        """Run a statement, in the open transaction if there is one."""
        with self._connection.cursor(**self._plain) as cursor:
            cursor.execute(in_namespace(sql, self._namespace), values)
            rows = cursor.fetchall() if cursor.description else ()
            return StatementResult(rows, cursor.description or (), cursor.rowcount)


class _AsyncPsycopg(DriverConnection):
    is_async = True

    def run(self, sql: str, values: Mapping[str, Any]) -> StatementResult:
        return await_only(self._run(in_namespace(sql, self._namespace), values))

    async def _run(self, sql: str, values: Mapping[str, Any]) -> StatementResult:
        async with self._connection.cursor(**self._plain) as cursor:
            await cursor.execute(sql, values)
            rows = await cursor.fetchall() if cursor.description else ()
            return StatementResult(rows, cursor.description or (), cursor.rowcount)


class _Asyncpg(DriverConnection):
    is_async = True

    def run(self, sql: str, values: Mapping[str, Any]) -> StatementResult:
        numbered, names = _numbered(in_namespace(sql, self._namespace))
        rows = await_only(self._connection.fetch(numbered, *(values[name] for name in names)))
        return StatementResult(rows, [(name,) for name in rows[0].keys()] if rows else ())  # noqa: SIM118  # no mapping


@lru_cache(maxsize=1024)
def _numbered(sql: str) -> tuple[str, list[str]]:
    """Return a statement with `$1`, `$2`, … and their names. JSON is sent as text, whatever codec the owner has set."""
    names = list(dict.fromkeys(name for name, _ in PARAMETER.findall(sql)))

    def write(found: re.Match[str]) -> str:
        return f"${names.index(found[1]) + 1}{'::text' * (found[2] == '::jsonb')}{found[2]}"

    return PARAMETER.sub(write, sql), names


def run_sync_of(connection: Any) -> Callable[..., Awaitable[Any]] | None:
    """Return `run_sync` of an asynchronous connection, or an equivalent; None for a synchronous one."""
    if hasattr(connection, "run_sync"):
        return connection.run_sync  # type: ignore[no-any-return]
    wrapped = other_driver(connection, "")
    if wrapped is None or not wrapped.is_async:
        return None
    return lambda work, *args, **keywords: greenlet_spawn(work, connection, *args, **keywords)


def other_driver(connection: object, namespace: str) -> DriverConnection | None:
    """Wrap a connection of another library; None if the library is not supported."""
    if hasattr(connection, "in_atomic_block"):  # Django's connection, or its proxy for a thread's connection
        return DriverConnection(connection, namespace) if getattr(connection, "vendor", "") == "postgresql" else None
    libraries = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(connection).__mro__}
    if ("psycopg2", "connection") in libraries:
        from psycopg2.extensions import cursor

        return DriverConnection(connection, namespace, cursor_factory=cursor)
    if ("psycopg", "BaseConnection") in libraries:
        from psycopg.rows import tuple_row

        kind = _AsyncPsycopg if ("psycopg", "AsyncConnection") in libraries else DriverConnection
        return kind(connection, namespace, row_factory=tuple_row)
    if libraries & {("asyncpg", "Connection"), ("asyncpg", "PoolConnectionProxy")}:
        return _Asyncpg(connection, namespace)
    return None
