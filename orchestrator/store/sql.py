"""Named SQL statements, whose rows are read by column name.

    ENDED = Batch("r", Ending)
    END = Prepared[Moved](f"DELETE /* tasks.end */ FROM orchestrator.tasks t USING {ENDED} WHERE … RETURNING …")

    END(connection, ENDED(endings), now=now)

    @Statement.function("SELECT /* inbox.size */ count(*)::int FROM orchestrator.inbox WHERE kind = %(kind)s")
    def size(connection: Connection, kind: str) -> int: ...

The name is a comment after the first keyword, so `pg_stat_activity` and `pg_stat_statements` show it; Postgres 18 drops
comments before the first keyword. The cast after a parameter selects its encoding: a list becomes one array literal,
whatever its length, and 16 bytes become a uuid.
"""

from __future__ import annotations

import inspect
import re
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cached_property, wraps
from itertools import starmap
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from sqlalchemy import Connection, Engine, TextClause, text

from orchestrator.store.batches import Rows
from orchestrator.store.driver import Channel, Deferred, Preparation, StatementResult, channel, execute, flush
from orchestrator.store.namespaces import in_namespace, namespace_of
from orchestrator.store.other_drivers import PARAMETER, DriverConnection


def _uuids(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else value.hex() for value in values]) + "}"


def _numbers(values: Iterable[float | int | bool | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def _seconds(values: Iterable[float | None]) -> str:
    """Encode durations with six digits, the precision of Postgres: encoding all digits takes five times as long."""
    return "{" + ",".join(["NULL" if value is None else f"{value:.6f}" for value in values]) + "}"


def _blobs(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join("NULL" if value is None else f'"\\\\x{value.hex()}"' for value in values) + "}"


def array_of(values: Iterable[str | None]) -> str:
    """Return strings as a Postgres array literal."""
    encoded: dict[str | None, str] = {None: "NULL"}  # many rows of a batch have the same text
    return (
        "{"
        + ",".join([encoded.get(value) or encoded.setdefault(value, _quoted(value or "")) for value in values])
        + "}"
    )


def _quoted(value: str) -> str:
    if "\\" in value or '"' in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{value}"'


def _times(values: Iterable[datetime | str | None]) -> str:
    encoded: dict[datetime | str | None, str] = {None: "NULL"}  # many rows of a batch have the same time
    return "{" + ",".join([encoded.get(value) or encoded.setdefault(value, f'"{value}"') for value in values]) + "}"


def _uuid(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.hex()


ENCODERS: dict[str, Callable[[Any], str]] = {
    "::uuid": _uuid,
    "::uuid[]": _uuids,
    "::bytea[]": _blobs,
    "::text[]": array_of,
    "::jsonb[]": array_of,
    "::tid[]": array_of,
    "::timestamptz[]": _times,
    "::float[]": _seconds,
    **{f"::{kind}[]": _numbers for kind in ("smallint", "int", "integer", "bigint", "boolean", "double precision")},
}
"""The encoder of a parameter, by its cast."""


F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
Row = Any
"""The row type of statements without a class for their rows: a named tuple with the statement's columns."""
Values = Mapping[str, Any]

_NAME = re.compile(r"\s*\(*\w+ /\* ([\w. ]+) \*/")
_sql_by_name: dict[str, str] = {}
"""The SQL of every statement, by its name."""


_NAMED = re.compile(r'EXECUTE "([\w. ]+)"|/\* ([\w. ]+) \*/')
_TABLE = re.compile(r"\borchestrator\.(\w+)")


def statement_of(error: BaseException) -> str:
    """Return the name of the statement that raised an error."""
    match = _NAMED.search(getattr(error, "statement", None) or "")
    return (match[1] or match[2]) if match else "without a name"


def tables_of(name: str) -> set[str]:
    """Return the tables that a statement uses."""
    return set(_TABLE.findall(_sql_by_name.get(name, "")))


_COLUMN = r"unnest\((%\((\w+)\)s::[\w ]+)\[\]\)"
BATCH = re.compile(rf"\(SELECT {_COLUMN}(?:, unnest\(%\(\w+\)s::[\w ]+\[\]\))*\) AS")
"""Matches a batch in the SQL of a statement."""
_OPPOSITE = {"<": ">", ">=": "<="}


class Statement(Generic[R]):
    """A statement for any SQLAlchemy connection, or for a `DriverConnection`.

    The type argument says what a row becomes: a named tuple or dataclass with the columns as fields, a `Row`, a plain
    tuple, None for a statement without rows, or the bare value of the only column.
    """

    def __init__(self, sql: str) -> None:
        match = _NAME.match(sql)
        if match is None:
            raise ValueError(f"A statement needs a name, as in `SELECT /* tasks.find */ id …`; found {sql!r:.80}")
        self.name = match[1]
        self.sql = sql.strip()
        if _sql_by_name.setdefault(self.name, self.sql) != self.sql:
            raise ValueError(f"Two statements are named {self.name!r}; rename one of them.")
        self._casts = dict(sorted(PARAMETER.findall(sql)))  # the same cast wherever the parameter occurs
        self._encoders = {name: ENCODERS[cast] for name, cast in self._casts.items() if cast in ENCODERS}
        self._make: Callable[..., R] | None = None

    @classmethod
    def function(cls, sql: str) -> Callable[[F], F]:
        """Turn a function without a body into one that runs a statement with the function's arguments as parameters.

        The return type selects the rows: a list, set or dict holds all rows, `… | None` is the first row or None, and
        any other type is the only row.
        """

        def declare(function: F) -> F:
            _, *parameters = inspect.signature(function).parameters.values()
            names = [item.name for item in parameters]
            defaults = {item.name: item.default for item in parameters if item.default is not item.empty}
            returned = get_type_hints(function)["return"]
            args, collect = get_args(returned), get_origin(returned)
            is_first, is_all = type(None) in args, collect in (list, set, frozenset, dict)
            row = tuple[Any, ...] if collect is dict else args[0] if is_first or is_all else returned
            statement = cls[row](sql)  # type: ignore[index]  # a class with a type that is known only now
            run = statement.first if is_first else statement if is_all or row is type(None) else statement.one
            made = collect if is_all and collect is not list else (lambda _: None) if row is type(None) else None

            @wraps(function)
            def call(connection: Connection, /, *args: Any, **values: Any) -> Any:
                values.update(zip(names, args, strict=False))
                result = run(connection, **(defaults | values if defaults else values))
                return result if made is None else made(result)

            call.statement = statement  # type: ignore[attr-defined]  # for who looks at the plans of all
            return call  # type: ignore[return-value]

        return declare

    def oldest_first(self) -> Statement[R]:
        """Return this statement in ascending order: for lists that are sorted by descending id or end time."""
        sql = re.sub(r" \*/", "_oldest */", self.sql, count=1).replace(" DESC", " ASC")
        sql = re.sub(r"(\bid\)?) (<|>=) ", lambda found: f"{found[1]} {_OPPOSITE[found[2]]} ", sql)
        statement: Statement[R] = self.__orig_class__(sql)  # type: ignore[attr-defined]
        return statement

    def __call__(self, connection: Connection, /, *batches: Values, **values: Any) -> list[R]:
        """Run the statement with the columns of batches and other parameters; return its rows."""
        result = self._send(connection, self._encoded(batches, values))
        return list(starmap(self._maker(result.columns), result.rows)) if result.rows else []

    def one(self, connection: Connection, /, *batches: Values, **values: Any) -> R:
        """Run the statement; return its only row."""
        (row,) = self(connection, *batches, **values)
        return row

    def first(self, connection: Connection, /, *batches: Values, **values: Any) -> R | None:
        """Run the statement; return its first row, or None."""
        rows = self(connection, *batches, **values)
        return rows[0] if rows else None

    def count(self, connection: Connection, /, *batches: Values, **values: Any) -> int:
        """Run the statement; return the number of changed rows."""
        return self._send(connection, self._encoded(batches, values)).changed

    def run_on_engine(self, engine: Engine, /, *batches: Values, **values: Any) -> list[R]:
        """Run the statement on an engine in autocommit mode, without SQLAlchemy; return its rows."""
        result = execute(engine, self.sql, self._encoded(batches, values))
        return list(starmap(self._maker(result.columns), result.rows)) if result.rows else []

    def run_prepared(self, engine: Engine, values: dict[str, Any]) -> None:
        """Like `run_on_engine`, for a frequent statement without rows: the statement is prepared after a few uses."""
        execute(engine, self.sql, self._encoded((), values), self.preparation)

    @cached_property
    def preparation(self) -> Preparation:
        """The SQL that prepares the statement, and the SQL that executes the prepared statement."""
        numbers = {name: f"${number}" for number, name in enumerate(self._casts, 1)}
        arguments = ", ".join(f"%({name})s{cast}" for name, cast in self._casts.items())
        return Preparation(
            f'PREPARE "{{}}" AS {PARAMETER.sub(lambda found: numbers[found[1]] + found[2], self.sql)}',
            'EXECUTE "{}"' + (f"({arguments})" if arguments else ""),
        )

    def _encoded(self, batches: Iterable[Values], values: dict[str, Any]) -> dict[str, Any]:
        for batch in batches:
            values |= batch
        for name, encode in self._encoders.items():
            value = values[name]
            if value == ():  # a batch column that is null in all rows
                values[name] = "{}"
            elif value is not None:
                values[name] = encode(value)
        return values

    def _send(self, connection: Connection, values: dict[str, Any]) -> StatementResult:
        if isinstance(connection, DriverConnection):
            return connection.run(self.sql, values)
        flush(connection)
        if connection.dialect.paramstyle == "pyformat":
            result = connection.exec_driver_sql(self.sql, values or None)
        else:
            result = connection.execute(self._portable, values)
        if not result.returns_rows:
            return StatementResult(changed=result.rowcount)
        return StatementResult(result.all(), list(zip(result.keys(), strict=True)))

    @cached_property
    def _portable(self) -> TextClause:
        """The statement for drivers that write parameters differently from psycopg2 and psycopg."""
        marks = {"": ":{}"} | {cast: f"CAST(:{{}} AS {cast[2:]})" for cast in self._casts.values() if cast}
        return text(PARAMETER.sub(lambda found: marks[found[2]].format(found[1]), self.sql))

    def _maker(self, columns: Sequence[Any]) -> Callable[..., R]:
        """Return a function that makes a row from column values; the first result's columns select the function."""
        if self._make is None:
            (row,) = get_args(self.__orig_class__)  # type: ignore[attr-defined]
            self._make = _maker(self.name, row, [column[0] for column in columns])
        return self._make


def _maker(name: str, row: Any, columns: Sequence[str]) -> Callable[..., Any]:
    if row is Row:
        return namedtuple("Row", columns, rename=True)
    if get_origin(row) is tuple:
        return lambda *values: values
    if isinstance(row, type) and is_dataclass(row):
        return lambda *values: row(**dict(zip(columns, values, strict=True)))
    names = getattr(row, "_fields", None)
    if names is None:
        return lambda value: value
    if tuple(columns) != names[: len(columns)]:
        raise TypeError(f"The rows of statement {name!r} are {row.__name__}{names}; found the columns {columns}.")
    return row  # type: ignore[no-any-return]


def columns_of(row: type, alias: str = "", *, last: str = "", but: Collection[str] = (), **expressions: str) -> str:
    """Return the columns to select for a row class: each field by its name, or as an expression.

    `alias` is the alias of the table. Fields after `last`, and the fields in `but`, are left out.
    """
    all_names: Sequence[str] = getattr(row, "_fields", None) or [field.name for field in fields(row)]
    names = [name for name in all_names[: all_names.index(last) + 1 if last else None] if name not in but]
    if unknown := expressions.keys() - {*names}:
        raise TypeError(f"{row.__name__} has no fields {unknown}.")
    prefix = f"{alias}." if alias else ""
    return ", ".join(f'{expressions[name]} AS "{name}"' if name in expressions else prefix + name for name in names)


class Prepared(Statement[R]):
    """A statement of the leader on the leader's own connection: planned once, and sent with little overhead.

    The leader sends the same few statements hundreds of times a second, and planning one can take longer than running
    it. A prepared statement with a generic plan also does not suffer from missing or outdated statistics.

    SQLAlchemy manages the connection and its errors, but each SQLAlchemy result costs as much as Postgres needs for a
    small statement. So `Prepared` uses a cursor of the driver directly. UUIDs and other bytes are returned as `bytes`.

    On connections other than the leader's the SQL is sent in full: a pooler may give each transaction another session.

    A batch of one row, the usual size on an idle system, is sent as VALUES: `unnest` costs Postgres some microseconds
    for each column.
    """

    def __init__(self, sql: str) -> None:
        super().__init__(sql)
        self._of_one_row: dict[tuple[str, ...], Prepared[R]] = {}

    def __call__(self, connection: Connection, /, *batches: Values, **values: Any) -> list[R]:
        statement, batches = self._for(batches)
        return super(Prepared, statement).__call__(connection, *batches, **values)

    def _for(self, batches: tuple[Values, ...]) -> tuple[Prepared[R], tuple[Values, ...]]:
        """Return the statement for these batches and their sizes, and the batches as this statement takes them."""
        single_rows = tuple([batch.first for batch in batches if isinstance(batch, Rows) and batch.is_one])
        if not single_rows:
            return self, batches
        return self._of_one_row.get(single_rows) or self.of_one_row(single_rows), tuple(
            {name: column[0] if column else None for name, column in batch.items()}
            if isinstance(batch, Rows) and batch.is_one
            else batch
            for batch in batches
        )

    def of_one_row(self, single_rows: tuple[str, ...]) -> Prepared[R]:
        """Return the variant for batches of one row; `single_rows` has their first columns."""

        def row(found: re.Match[str]) -> str:
            values = re.sub(_COLUMN, r"\1", found[0].removeprefix("(SELECT ").removesuffix(") AS"))
            return f"(VALUES ({values})) AS" if found[2] in single_rows else found[0]

        sql = BATCH.sub(row, self.sql.replace(f"/* {self.name} */", f"/* {self.name} {' '.join(single_rows)} */", 1))
        self._of_one_row[single_rows] = self.__orig_class__(sql)  # type: ignore[attr-defined]
        return self._of_one_row[single_rows]

    def begin(self, connection: Connection, /, **values: Any) -> list[R]:
        """Begin a transaction with this statement, in one round trip. The connection must be in autocommit mode."""
        result = self._send(connection, self._encoded((), values), self._begin)
        return list(starmap(self._maker(result.columns), result.rows)) if result.rows else []

    def begin_later(self, connection: Connection, /, **values: Any) -> None:
        """Begin a transaction with this statement, in the round trip of the next statement. The result is dropped."""
        sender = channel(connection)
        sender.begin_later(self._text(connection, sender, self._execute), self._encoded((), values))

    def commit(self, connection: Connection, /, **values: Any) -> None:
        """Run the statement and commit, in one round trip; if the statement fails, nothing is committed."""
        self._send(connection, self._encoded((), values), self._commit)

    def defer(self, connection: Connection, /, *batches: Values, **values: Any) -> Deferred:
        """Run the statement together with the next one on the connection, in one round trip. The result is dropped.

        If this statement fails, the next one fails and the transaction too. `Channel.take_back` removes a statement
        that was not sent yet.
        """
        sender = channel(connection)
        variant, batches = self._for(batches)
        statement = Deferred(
            variant._text(connection, sender, variant._execute),
            lambda: variant._encoded(batches, values) or None,
        )
        sender.defer(statement)
        return statement

    def _send(self, connection: Connection, values: dict[str, Any], sql: str = "") -> StatementResult:
        sender = channel(connection)
        return sender.send(connection, self._text(connection, sender, sql or self._execute), values or None)

    def _text(self, connection: Connection, sender: Channel, sql: str) -> str:
        """Prepare the statement of `sql` on a connection for prepared statements; return the SQL to send."""
        known = sender.prepared
        if known is None:
            return sql.replace(self._execute, in_namespace(self.sql, namespace_of(connection)))
        if self.name not in known:
            connection.exec_driver_sql(self._prepare)
            known.add(self.name)
        return sql

    @cached_property
    def _prepare(self) -> str:
        return self.preparation.prepare.replace("{}", self.name, 1)

    @cached_property
    def _execute(self) -> str:
        return self.preparation.execute.replace("{}", self.name, 1)

    @cached_property
    def _begin(self) -> str:
        return f"BEGIN; {self._execute}"

    @cached_property
    def _commit(self) -> str:
        return f"{self._execute}; COMMIT"
