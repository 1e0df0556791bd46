"""Direct use of psycopg2: for what SQLAlchemy cannot do, such as COPY, or does slower than Postgres does.

Errors are raised as SQLAlchemy errors, and a broken connection does not return to the pool.
"""

from __future__ import annotations

import contextlib
import hashlib
import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from psycopg2 import BINARY, extensions
from psycopg2.errors import DuplicatePreparedStatement, InvalidSqlStatementName
from sqlalchemy import Connection, Dialect, Engine, exc

from orchestrator.store.deadlines import deadlines_of
from orchestrator.store.dialing import hide_rows
from orchestrator.store.namespaces import in_namespace, namespace_of
from orchestrator.store.postgres_errors import as_outage

_CHANNEL = "orchestrator_channel"
_MAX_KEPT_ROWS = 100
"""A cursor that holds more rows than this is replaced, because a cursor keeps its rows until the next statement."""
_statements = 0


def statements_sent() -> int:
    """Return the number of statements that `send` has sent in this process."""
    return _statements


class StatementResult(NamedTuple):
    rows: Sequence[Any] = ()
    columns: Sequence[Any] = ()
    """The driver's description of each column; the name comes first."""
    changed: int = -1
    """The number of changed rows."""


def _id(value: Any, _: object) -> bytes | None:
    return None if value is None else bytes.fromhex(value.replace("-", ""))


def _bytes(value: Any, cursor: Any) -> bytes | None:
    if value is None:
        return None
    is_hex = value.startswith("\\x")  # otherwise `bytea_output` is `escape`
    return bytes.fromhex(value[2:]) if is_hex else bytes(BINARY(value, cursor))


_TYPES = {2950: extensions.new_type((2950,), "UUID", _id), 17: extensions.new_type((17,), "BYTES", _bytes)}
"""How the driver decodes UUIDs and byte strings, by the type's OID."""


class Deferred:
    """A deferred statement, sent with the next one on its connection. Parameters are encoded only then."""

    __slots__ = ("parameters", "sql")

    def __init__(self, sql: str, parameters: Callable[[], dict[str, Any] | None] = lambda: None) -> None:
        self.sql = sql
        self.parameters = parameters


class Channel:
    """A driver connection and its cursor, kept for the connection's lifetime because creating cursors is slow."""

    __slots__ = (
        "_begins",
        "_connection",
        "_cursor",
        "_deadlines",
        "_deferred",
        "_guard",
        "_is_last",
        "has_committed",
        "prepared",
    )

    def __init__(self, connection: Connection) -> None:
        pooled: Any = connection.connection
        self._connection = pooled.dbapi_connection
        self._cursor = pooled.cursor()
        self._cursor.string_types = _TYPES
        self._deadlines = deadlines_of(connection)
        self.prepared: set[str] | None = None
        """Names of the statements prepared on this connection; None if it does not prepare statements."""
        self._deferred: list[Deferred] = []
        """Deferred statements, in order."""
        self._begins: dict[tuple[object, ...], bytes] = {}
        """The encoded guard, by SQL and parameters: one leader begins all transactions of its term alike."""
        self._guard: bytes | None = None
        """The first statement of the transaction that the next statement begins, if it begins one."""
        self._is_last = False
        """Whether the next statement also commits its transaction."""
        self.has_committed = False
        """Whether a statement has committed its transaction. The next statement, if any, begins another one."""

    def begin_later(self, sql: str, parameters: dict[str, Any]) -> None:
        """Begin a transaction with SQL and the next statement, in one round trip."""
        key = (sql, *parameters.values())
        if (guard := self._begins.get(key)) is None:
            self._begins = {key: (guard := self._cursor.mogrify(sql, parameters))}
        self._guard = guard
        self._is_last = self.has_committed = False

    def commit_with_next(self, *, others: bool = False) -> bool:
        """Let the next statement begin and commit its transaction in one message. Return whether it does.

        It does not if deferred statements belong to the transaction, unless `others` allows that. Postgres runs a
        message of several statements as one transaction. Statements after this message begin another transaction with
        the same guard.
        """
        self._is_last = self._guard is not None and (others or not self._deferred)
        return self._is_last

    def is_over(self, *, is_complete: bool) -> bool:
        """Return whether the transaction is committed, or had no statements and `is_complete`, so none will follow.

        A transaction that was about to begin is then dropped.
        """
        if self._guard is None or self._deferred or not (self.has_committed or is_complete):
            return False
        self._guard = None
        return True

    def defer(self, statement: Deferred) -> None:
        """Run a statement before the next one and in the same round trip; its result is not read."""
        self._deferred.append(statement)

    def take_back(self, statement: Deferred) -> bool:
        """Remove a deferred statement. Return whether the statement had not been sent yet."""
        if statement not in self._deferred:
            return False
        self._deferred.remove(statement)
        return True

    def flush(self, connection: Connection) -> None:
        """Run the deferred statements."""
        self._is_last = False
        if self._deferred:
            last = self._deferred.pop()
            self.send(connection, last.sql, last.parameters())
        elif self._guard is not None:
            guard, self._guard = self._guard, None
            self.send(connection, f"BEGIN;{guard.decode()}")

    def forget(self) -> None:
        """Drop the deferred statements: their transaction has ended."""
        self._deferred.clear()
        self._guard = None

    def send(self, connection: Connection, sql: str, parameters: dict[str, Any] | None = None) -> StatementResult:
        """Run SQL on `connection`, the connection of this channel, after the deferred statements."""
        global _statements
        _statements += 1
        if not connection.in_transaction():
            connection.begin()  # SQLAlchemy would have done the same
        cursor, deadlines = self._cursor, self._deadlines
        query: str | bytes = sql
        guard, is_last = self._guard, self._is_last and self._guard is not None
        if guard is not None or self._deferred:
            begin = () if guard is None else (guard,) if is_last else (b"BEGIN", guard)
            before = [cursor.mogrify(later.sql, later.parameters()) for later in self._deferred]
            query, parameters = b";".join((*begin, *before, cursor.mogrify(sql, parameters))), None
            self._deferred.clear()
            self._guard, self._is_last = guard if is_last else None, False
        watched = 0 if deadlines is None else deadlines.begin(self._connection)
        try:
            cursor.execute(query, parameters)
            self.has_committed |= is_last
            columns = cursor.description
            return StatementResult(cursor.fetchall() if columns else (), columns, cursor.rowcount)
        except connection.dialect.loaded_dbapi.Error as error:
            missed = deadlines.missed(sql) if deadlines is not None and not deadlines.end(watched) else None
            raise translate_error(
                error, connection, connection.dialect, self._connection, sql, missed=missed
            ) from error
        finally:
            if deadlines is not None:
                deadlines.end(watched)


def channel(connection: Connection) -> Channel:
    """Return the channel of a connection. The channel is dropped with the driver's connection."""
    kept = connection.info
    found: Channel | None = kept.get(_CHANNEL)
    if found is None:
        try:
            found = kept[_CHANNEL] = Channel(connection)
        except connection.dialect.loaded_dbapi.Error as error:  # the connection was closed meanwhile
            raise translate_error(
                error, connection, connection.dialect, connection.connection.dbapi_connection, ""
            ) from error
    return found


def keep_prepared(connection: Connection) -> None:
    """Prepare this connection's statements in Postgres. The connection must be one session for its lifetime."""
    sender = channel(connection)
    if sender.prepared is None:  # otherwise the connection comes from the pool and has prepared statements
        sender.prepared = set()


def flush(connection: Connection) -> None:
    """Run the deferred statements of a connection, before something that does not use the channel."""
    found: Channel | None = connection.info.get(_CHANNEL)
    if found is not None:
        found.flush(connection)


def limit_statements(connection: Connection, seconds: float) -> None:
    """Set a timeout for each of the next statements of the open transaction."""
    channel(connection).defer(Deferred(f"SET LOCAL statement_timeout = {int(1_000 * seconds)}"))


@contextmanager
def savepoint(connection: Connection) -> Iterator[None]:
    """Run the block under a savepoint."""
    flush(connection)
    with connection.begin_nested():
        yield
        flush(connection)


def roll_back(connection: Connection) -> None:
    """Roll back a transaction that was begun with SQL, and drop its deferred statements."""
    sender = channel(connection)
    sender.forget()
    sender.send(connection, "ROLLBACK")


def send(connection: Connection, sql: str, parameters: dict[str, Any] | None = None) -> StatementResult:
    """Run SQL on a connection. The SQL must name no table: the namespace is not replaced."""
    return channel(connection).send(connection, sql, parameters)


class Preparation(NamedTuple):
    """The SQL that prepares a statement, and the SQL that executes it; `{}` stands for the statement's name."""

    prepare: str
    execute: str


_USES = "orchestrator_uses"
_USES_BEFORE_PREPARE = 5
"""A statement is prepared after this many uses on one connection."""


class _PooledConnection:
    """A pooled connection and its cursor, kept for the next statement because getting either is slow."""

    __slots__ = ("_poll", "_uses", "connection", "cursor", "deadlines", "namespace")

    def __init__(self, engine: Engine) -> None:
        self.connection: Any = engine.raw_connection()
        self.cursor = self.connection.cursor()
        self.deadlines = deadlines_of(engine)
        self.namespace = namespace_of(engine)
        self._uses: dict[str, int | str] = self.connection.info.setdefault(_USES, {})
        """By statement: the number of uses or, once the statement is prepared, the SQL that executes it."""
        self._poll = select.poll()
        self._poll.register(self.connection.fileno(), select.POLLIN)

    @property
    def is_closed(self) -> bool:
        """Return whether Postgres has closed the idle connection: only the end of the connection makes it readable."""
        return bool(self._poll.poll(0))

    def run(self, sql: str, parameters: dict[str, Any], preparation: Preparation) -> None:
        """Run a statement; prepare it if it is frequent."""
        uses = self._uses.get(sql, 0)
        if isinstance(uses, int):
            self._uses[sql] = uses + 1
            if uses == _USES_BEFORE_PREPARE and self._is_session():
                uses = self._uses[sql] = self._prepare(sql, preparation)
        try:
            self.cursor.execute(uses if isinstance(uses, str) else sql, parameters)
        except InvalidSqlStatementName:  # the pooler has switched sessions; nothing was done
            self._uses[sql] = _USES_BEFORE_PREPARE + 1
            self.cursor.execute(sql, parameters)

    def _prepare(self, sql: str, preparation: Preparation) -> str:
        """Prepare a statement; return the SQL that executes it. Its name is a hash: others may use the session."""
        name = f"orchestrator {hashlib.sha256(sql.encode()).hexdigest()[:16]}"
        with contextlib.suppress(DuplicatePreparedStatement):
            self.cursor.execute(in_namespace(preparation.prepare, self.namespace).replace("{}", name, 1))
        return preparation.execute.replace("{}", name, 1)

    def _is_session(self) -> bool:
        """Return whether the connection is one Postgres session; behind a pooler the backend ids differ."""
        driver = self.connection.dbapi_connection
        if not isinstance(driver, extensions.connection):
            return False
        self.cursor.execute("SELECT pg_backend_pid()")
        return self.cursor.fetchall() == [(driver.info.backend_pid,)]


_NONE_KEPT: deque[Any] = deque(maxlen=0)
"""The kept connections of an engine without any."""


def _take_connection(engine: Engine, kept: deque[Any]) -> _PooledConnection:
    """Return a kept connection of an engine, or else a new one."""
    with contextlib.suppress(IndexError):  # no kept connection remains
        while kept:
            pooled: _PooledConnection = kept.pop()
            if not pooled.is_closed:
                return pooled
            pooled.connection.invalidate()
    return _PooledConnection(engine)


def execute(
    engine: Engine, sql: str, parameters: dict[str, Any], preparation: Preparation | None = None
) -> StatementResult:
    """Run one statement on an engine in autocommit mode, in one round trip.

    With a `preparation` a frequent statement is prepared, unless a pooler is in between.
    """
    kept: deque[Any] = getattr(engine.pool, "kept", _NONE_KEPT)
    try:
        pooled = _take_connection(engine, kept)
    except engine.dialect.loaded_dbapi.Error as error:
        raise translate_error(error, None, engine.dialect, None, sql, parameters) from error
    connection, cursor, deadlines = pooled.connection, pooled.cursor, pooled.deadlines
    watched = 0 if deadlines is None else deadlines.begin(connection.dbapi_connection)
    try:
        text = in_namespace(sql, pooled.namespace)
        if preparation is None:
            cursor.execute(text, parameters)
        else:
            pooled.run(text, parameters, preparation)
        columns = cursor.description
        if not columns:
            return StatementResult(changed=cursor.rowcount)
        rows = cursor.fetchall()
        if len(rows) > _MAX_KEPT_ROWS:
            pooled.cursor = connection.cursor()  # the old cursor keeps its rows in memory
        return StatementResult(rows, columns)
    except engine.dialect.loaded_dbapi.Error as error:
        missed = deadlines.missed(sql) if deadlines is not None and not deadlines.end(watched) else None
        raise translate_error(
            error, connection, engine.dialect, connection.dbapi_connection, sql, parameters, missed
        ) from error
    except BaseException as error:
        connection.invalidate(error)  # interrupted, so the connection's state is unknown
        raise
    finally:
        if deadlines is not None:
            deadlines.end(watched)
        if connection.is_valid and len(kept) < (kept.maxlen or 0):
            kept.append(pooled)
        else:
            connection.close()


def translate_error(
    error: Any, pooled: Any, dialect: Dialect, driver: Any, sql: str, parameters: Any = None, missed: Any = None
) -> exc.DBAPIError:
    """Return a driver error as a SQLAlchemy error; an outage becomes an `OperationalError`, whatever the driver raised.

    A broken connection is invalidated, so it does not return to the pool. A `missed` deadline replaces the error.
    """
    is_broken = dialect.is_disconnect(error, driver, None)
    result: exc.DBAPIError = exc.DBAPIError.instance(
        sql,
        parameters,
        error,
        dialect.loaded_dbapi.Error,
        hide_parameters=True,
        connection_invalidated=is_broken,
        dialect=dialect,
    )
    hide_rows(result)
    result = missed or as_outage(result, is_broken=is_broken) or result
    if pooled is not None and result.connection_invalidated:
        pooled.invalidate(error)
    return result
