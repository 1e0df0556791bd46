"""Straight to the driver: what SQLAlchemy cannot do, such as COPY, or would take longer over than Postgres does.

Errors come out as SQLAlchemy would raise them, and a connection that broke does not go back into the pool.
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

from orchestrator.store.database import as_outage
from orchestrator.store.deadlines import deadlines_of
from orchestrator.store.dialing import hide_rows
from orchestrator.store.namespaces import in_namespace, namespace_of

_CHANNEL = "orchestrator_channel"
_FEW_ROWS = 100
"""Rows that a cursor may go on holding until its next statement."""
_statements = 0


def statements_sent() -> int:
    """Return how many times this process has sent something by `send`, as leaders do."""
    return _statements


class StatementResult(NamedTuple):
    rows: Sequence[Any] = ()
    columns: Sequence[Any] = ()
    """The driver's description of each column, its name first."""
    changed: int = -1
    """How many rows it has changed."""


def _id(value: Any, _: object) -> bytes | None:
    return None if value is None else bytes.fromhex(value.replace("-", ""))


def _bytes(value: Any, cursor: Any) -> bytes | None:
    if value is None:
        return None
    is_hex = value.startswith("\\x")  # and not as `bytea_output = 'escape'` has it
    return bytes.fromhex(value[2:]) if is_hex else bytes(BINARY(value, cursor))


_TYPES = {2950: extensions.new_type((2950,), "UUID", _id), 17: extensions.new_type((17,), "BYTES", _bytes)}
"""How the driver is to read ids and byte strings, by the number that Postgres has for the type."""


class Later:
    """A statement that waits for the next one on its connection. Its parameters are encoded when it is sent."""

    __slots__ = ("parameters", "sql")

    def __init__(self, sql: str, parameters: Callable[[], dict[str, Any] | None] = lambda: None) -> None:
        self.sql = sql
        self.parameters = parameters


class Channel:
    """A connection of the driver with its cursor, kept as long as it lives: to find and make them takes a while."""

    __slots__ = (
        "_begins",
        "_connection",
        "_cursor",
        "_deadlines",
        "_guard",
        "_is_last",
        "_waiting",
        "has_committed",
        "prepared",
    )

    def __init__(self, connection: Connection) -> None:
        lent: Any = connection.connection
        self._connection = lent.dbapi_connection
        self._cursor = lent.cursor()
        self._cursor.string_types = _TYPES
        self._deadlines = deadlines_of(connection)
        self.prepared: set[str] | None = None
        """The names of statements that it knows; None if none is prepared there."""
        self._waiting: list[Later] = []
        """Statements to send with the next one, in order."""
        self._begins: dict[tuple[object, ...], bytes] = {}
        """How transactions begin, as it is sent: a leader begins all of its term alike."""
        self._guard: bytes | None = None
        """The first statement of a transaction that begins with the next one; None if none is to begin."""
        self._is_last = False
        """The next statement also ends that transaction."""
        self.has_committed = False
        """One has ended that way; the next statement, if any, begins another."""

    def begin_later(self, sql: str, parameters: dict[str, Any]) -> None:
        """Have a transaction begin with SQL and the next statement, in one round trip."""
        key = (sql, *parameters.values())
        if (known := self._begins.get(key)) is None:
            self._begins = {key: (known := self._cursor.mogrify(sql, parameters))}
        self._guard = known
        self._is_last = self.has_committed = False

    def commit_with_next(self, *, others: bool = False) -> bool:
        """Have the next statement end the transaction that it begins, in one message; say whether it does.

        It does not if `others` belong to it, unless told so. Postgres runs a message of several statements as one
        transaction. Statements that follow begin another, with the same guard.
        """
        self._is_last = self._guard is not None and (others or not self._waiting)
        return self._is_last

    def is_over(self, *, is_complete: bool) -> bool:
        """Say whether the transaction has ended with its last statement, or has had none and `is_complete`.

        What was to begin is then forgotten.
        """
        if self._guard is None or self._waiting or not (self.has_committed or is_complete):
            return False
        self._guard = None
        return True

    def later(self, statement: Later) -> None:
        """Have a statement run with the next one, before it and in the same round trip; its answer is not read."""
        self._waiting.append(statement)

    def take_back(self, statement: Later) -> bool:
        """Do not run a statement that was to run later; say whether it has not been sent yet."""
        if statement not in self._waiting:
            return False
        self._waiting.remove(statement)
        return True

    def flush(self, connection: Connection) -> None:
        """Run what waits."""
        self._is_last = False
        if self._waiting:
            last = self._waiting.pop()
            self.send(connection, last.sql, last.parameters())
        elif self._guard is not None:
            guard, self._guard = self._guard, None
            self.send(connection, f"BEGIN;{guard.decode()}")

    def forget(self) -> None:
        """Run nothing of what waits: its transaction is over."""
        self._waiting.clear()
        self._guard = None

    def send(self, connection: Connection, sql: str, parameters: dict[str, Any] | None = None) -> StatementResult:
        """Run SQL on the connection that it is of."""
        global _statements
        _statements += 1
        if not connection.in_transaction():
            connection.begin()  # as SQLAlchemy would have done by itself
        cursor, deadlines = self._cursor, self._deadlines
        query: str | bytes = sql
        guard, is_last = self._guard, self._is_last and self._guard is not None
        if guard is not None or self._waiting:
            begin = () if guard is None else (guard,) if is_last else (b"BEGIN", guard)
            before = [cursor.mogrify(later.sql, later.parameters()) for later in self._waiting]
            query, parameters = b";".join((*begin, *before, cursor.mogrify(sql, parameters))), None
            self._waiting.clear()
            self._guard, self._is_last = guard if is_last else None, False
        watched = 0 if deadlines is None else deadlines.begin(self._connection)
        try:
            cursor.execute(query, parameters)
            self.has_committed |= is_last
            columns = cursor.description
            return StatementResult(cursor.fetchall() if columns else (), columns, cursor.rowcount)
        except connection.dialect.loaded_dbapi.Error as error:
            missed = deadlines.missed(sql) if deadlines is not None and not deadlines.end(watched) else None
            raise as_known(error, connection, connection.dialect, self._connection, sql, missed=missed) from error
        finally:
            if deadlines is not None:
                deadlines.end(watched)


def channel(connection: Connection) -> Channel:
    """Return the channel of a connection; it is forgotten with the driver's connection."""
    kept = connection.info
    found: Channel | None = kept.get(_CHANNEL)
    if found is None:
        try:
            found = kept[_CHANNEL] = Channel(connection)
        except connection.dialect.loaded_dbapi.Error as error:  # it was closed meanwhile
            raise as_known(error, connection, connection.dialect, connection.connection.dbapi_connection, "") from error
    return found


def keep_prepared(connection: Connection) -> None:
    """Have Postgres plan statements once: on a connection that is one session as long as it lives."""
    line = channel(connection)
    if line.prepared is None:  # else it comes from the pool, and knows some
        line.prepared = set()


def flush(connection: Connection) -> None:
    """Run what was to be sent with the next statement of a connection, for what comes next goes another way."""
    found: Channel | None = connection.info.get(_CHANNEL)
    if found is not None:
        found.flush(connection)


def limit_statements(connection: Connection, seconds: float) -> None:
    """Let each of the next statements of the transaction that is open take so long."""
    channel(connection).later(Later(f"SET LOCAL statement_timeout = {int(1_000 * seconds)}"))


@contextmanager
def savepoint(connection: Connection) -> Iterator[None]:
    """Do something whole or not at all, and nothing else with it."""
    flush(connection)
    with connection.begin_nested():
        yield
        flush(connection)


def roll_back(connection: Connection) -> None:
    """End the transaction that was begun by hand, and with it what was to be sent."""
    line = channel(connection)
    line.forget()
    line.send(connection, "ROLLBACK")


def send(connection: Connection, sql: str, parameters: dict[str, Any] | None = None) -> StatementResult:
    """Run SQL on a connection. It must name no table: nothing is said of namespaces here."""
    return channel(connection).send(connection, sql, parameters)


class Preparation(NamedTuple):
    """A statement to be prepared, and its execution; both have a name in the place of `{}`."""

    prepare: str
    execute: str


_USES = "orchestrator_uses"
_OFTEN = 5
"""Uses of a statement on one connection after which it is prepared."""


class _Line:
    """A connection that is out of the pool, with its cursor: kept for the next statement, for both take long to get."""

    __slots__ = ("_poll", "_uses", "connection", "cursor", "deadlines", "namespace")

    def __init__(self, engine: Engine) -> None:
        self.connection: Any = engine.raw_connection()
        self.cursor = self.connection.cursor()
        self.deadlines = deadlines_of(engine)
        self.namespace = namespace_of(engine)
        self._uses: dict[str, int | str] = self.connection.info.setdefault(_USES, {})
        """By statement, how often it was used, or how it is executed since it was prepared."""
        self._poll = select.poll()
        self._poll.register(self.connection.fileno(), select.POLLIN)

    @property
    def is_closed(self) -> bool:
        """Say whether Postgres has closed it while it lay there: nothing else is on its way to a connection at rest."""
        return bool(self._poll.poll(0))

    def run(self, sql: str, parameters: dict[str, Any], preparation: Preparation) -> None:
        """Run a statement; prepare it if it is used often."""
        uses = self._uses.get(sql, 0)
        if isinstance(uses, int):
            self._uses[sql] = uses + 1
            if uses == _OFTEN and self._is_session():
                uses = self._uses[sql] = self._prepare(sql, preparation)
        try:
            self.cursor.execute(uses if isinstance(uses, str) else sql, parameters)
        except InvalidSqlStatementName:  # the session is another one; nothing was done
            self._uses[sql] = _OFTEN + 1
            self.cursor.execute(sql, parameters)

    def _prepare(self, sql: str, preparation: Preparation) -> str:
        """Prepare a statement, named after its text, as others may use the session; return its execution."""
        name = f"orchestrator {hashlib.sha256(sql.encode()).hexdigest()[:16]}"
        with contextlib.suppress(DuplicatePreparedStatement):
            self.cursor.execute(in_namespace(preparation.prepare, self.namespace).replace("{}", name, 1))
        return preparation.execute.replace("{}", name, 1)

    def _is_session(self) -> bool:
        """Say whether this is one session of Postgres as long as it lives; a pooler shows other process ids."""
        driver = self.connection.dbapi_connection
        if not isinstance(driver, extensions.connection):
            return False
        self.cursor.execute("SELECT pg_backend_pid()")
        return self.cursor.fetchall() == [(driver.info.backend_pid,)]


_NOTHING: deque[Any] = deque(maxlen=0)
"""Kept connections of an engine that has none."""


def _line(engine: Engine, kept: deque[Any]) -> _Line:
    """Return a connection of an engine, one that is kept if there is any."""
    with contextlib.suppress(IndexError):  # none is left
        while kept:
            line: _Line = kept.pop()
            if not line.is_closed:
                return line
            line.connection.invalidate()
    return _Line(engine)


def execute(
    engine: Engine, sql: str, parameters: dict[str, Any], preparation: Preparation | None = None
) -> StatementResult:
    """Run one statement on a connection of an engine in autocommit mode: one round trip.

    With a `preparation` it is prepared, if it is used often and no pooler is in between.
    """
    kept: deque[Any] = getattr(engine.pool, "kept", _NOTHING)
    try:
        line = _line(engine, kept)
    except engine.dialect.loaded_dbapi.Error as error:
        raise as_known(error, None, engine.dialect, None, sql, parameters) from error
    connection, cursor, deadlines = line.connection, line.cursor, line.deadlines
    watched = 0 if deadlines is None else deadlines.begin(connection.dbapi_connection)
    try:
        text = in_namespace(sql, line.namespace)
        if preparation is None:
            cursor.execute(text, parameters)
        else:
            line.run(text, parameters, preparation)
        columns = cursor.description
        if not columns:
            return StatementResult(changed=cursor.rowcount)
        rows = cursor.fetchall()
        if len(rows) > _FEW_ROWS:
            line.cursor = connection.cursor()  # the old one holds them as long as it lives
        return StatementResult(rows, columns)
    except engine.dialect.loaded_dbapi.Error as error:
        missed = deadlines.missed(sql) if deadlines is not None and not deadlines.end(watched) else None
        raise as_known(
            error, connection, engine.dialect, connection.dbapi_connection, sql, parameters, missed
        ) from error
    except BaseException as error:
        connection.invalidate(error)  # interrupted, in an unknown state
        raise
    finally:
        if deadlines is not None:
            deadlines.end(watched)
        if connection.is_valid and len(kept) < (kept.maxlen or 0):
            kept.append(line)
        else:
            connection.close()


def as_known(
    error: Any, lent: Any, dialect: Dialect, driver: Any, sql: str, parameters: Any = None, missed: Any = None
) -> exc.DBAPIError:
    """Return an error of the driver as one of SQLAlchemy; an outage is one, whatever the driver calls it.

    A connection that broke does not go back to where it was lent. A deadline that was `missed` is the error instead.
    """
    is_broken = dialect.is_disconnect(error, driver, None)
    known: exc.DBAPIError = exc.DBAPIError.instance(
        sql,
        parameters,
        error,
        dialect.loaded_dbapi.Error,
        hide_parameters=True,
        connection_invalidated=is_broken,
        dialect=dialect,
    )
    hide_rows(known)
    known = missed or as_outage(known, is_broken=is_broken) or known
    if lent is not None and known.connection_invalidated:
        lent.invalidate(error)
    return known
