"""SQL: each statement has a name, is called in one way, and answers with rows that are read by name.

    ENDED = Batch("r", Ending)
    END = Prepared[Moved](f"DELETE /* tasks.end */ FROM orchestrator.tasks t USING {ENDED} WHERE … RETURNING …")

    END(connection, ENDED(endings), now=now)

    @Statement.function("SELECT /* inbox.size */ count(*)::int FROM orchestrator.inbox WHERE kind = %(kind)s")
    def size(connection: Connection, kind: str) -> int: ...

The name is a comment behind the first word, and so `pg_stat_activity` and `pg_stat_statements` show it; what stands
before the first word, Postgres 18 leaves out. A value is sent as the cast behind its parameter says: a list as an array
literal, which is one string whatever its length, and 16 bytes as a uuid.
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
from orchestrator.store.driver import Channel, Later, Preparation, StatementResult, channel, execute, flush
from orchestrator.store.namespaces import in_namespace, namespace_of
from orchestrator.store.other_drivers import PARAMETER, DriverConnection


def _uuids(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else value.hex() for value in values]) + "}"


def _numbers(values: Iterable[float | int | bool | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def _seconds(values: Iterable[float | None]) -> str:
    """Return durations as exact as times of Postgres are: all digits of one would take five times as long."""
    return "{" + ",".join(["NULL" if value is None else f"{value:.6f}" for value in values]) + "}"


def _blobs(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join("NULL" if value is None else f'"\\\\x{value.hex()}"' for value in values) + "}"


def array_of(values: Iterable[str | None]) -> str:
    """Return an array of texts as Postgres reads it."""
    written: dict[str | None, str] = {None: "NULL"}  # many rows of a batch have the same text
    return (
        "{"
        + ",".join([written.get(value) or written.setdefault(value, _quoted(value or "")) for value in values])
        + "}"
    )


def _quoted(word: str) -> str:
    if "\\" in word or '"' in word:
        word = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{word}"'


def _times(values: Iterable[datetime | str | None]) -> str:
    written: dict[datetime | str | None, str] = {None: "NULL"}  # many rows of a batch have the same time
    return "{" + ",".join([written.get(value) or written.setdefault(value, f'"{value}"') for value in values]) + "}"


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
"""By cast, how a value is written."""


F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
Row = Any
"""A row of which each column is an attribute, for statements whose rows are made into nothing else."""
Values = Mapping[str, Any]

_NAME = re.compile(r"\s*\(*\w+ /\* ([\w. ]+) \*/")
_known: dict[str, str] = {}
"""The text of every statement, by its name."""


_NAMED = re.compile(r'EXECUTE "([\w. ]+)"|/\* ([\w. ]+) \*/')
_TABLE = re.compile(r"\borchestrator\.(\w+)")


def statement_of(error: BaseException) -> str:
    """Return the name of the statement with which an error came."""
    found = _NAMED.search(getattr(error, "statement", None) or "")
    return (found[1] or found[2]) if found else "without a name"


def tables_of(name: str) -> set[str]:
    """Return the tables that a statement names."""
    return set(_TABLE.findall(_known.get(name, "")))


_COLUMN = r"unnest\((%\((\w+)\)s::[\w ]+)\[\]\)"
BATCH = re.compile(rf"\(SELECT {_COLUMN}(?:, unnest\(%\(\w+\)s::[\w ]+\[\]\))*\) AS")
"""A batch in the text of a statement."""
_OTHER_WAY = {"<": ">", ">=": "<="}


class Statement(Generic[R]):
    """A statement for anyone, on any connection of SQLAlchemy's, or of another driver in its wrapper.

    Its rows are made into what it is a statement of: a named tuple or a dataclass, whose fields are called as the
    columns are; a `Row`; a plain tuple; None if it returns none; else it has one column, and that is all of a row.
    """

    def __init__(self, sql: str) -> None:
        found = _NAME.match(sql)
        if found is None:
            raise ValueError(f"A statement needs a name, as in `SELECT /* tasks.find */ id …`; found {sql!r:.80}")
        self.name = found[1]
        self.sql = sql.strip()
        if _known.setdefault(self.name, self.sql) != self.sql:
            raise ValueError(f"Two statements are called {self.name!r}; give one of them another name.")
        self._casts = dict(sorted(PARAMETER.findall(sql)))  # of one that stands in several places, the cast it has
        self._encoders = {name: ENCODERS[cast] for name, cast in self._casts.items() if cast in ENCODERS}
        self._make: Callable[..., R] | None = None

    @classmethod
    def function(cls, sql: str) -> Callable[[F], F]:
        """Make a function without a body run a statement, whose values are its arguments.

        The type that it returns says what it does with the rows: a list, set or dictionary has them all, `… | None` is
        the first if there is one, and any other is the only one.
        """

        def declare(function: F) -> F:
            _, *parameters = inspect.signature(function).parameters.values()
            names = [one.name for one in parameters]
            defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
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
                found = run(connection, **(defaults | values if defaults else values))
                return found if made is None else made(found)

            call.statement = statement  # type: ignore[attr-defined]  # for who looks at the plans of all
            return call  # type: ignore[return-value]

        return declare

    def oldest_first(self) -> Statement[R]:
        """Return the statement that lists from the other end, of one that lists the newest ids, or ends, first."""
        sql = re.sub(r" \*/", "_oldest */", self.sql, count=1).replace(" DESC", " ASC")
        sql = re.sub(r"(\bid\)?) (<|>=) ", lambda found: f"{found[1]} {_OTHER_WAY[found[2]]} ", sql)
        made: Statement[R] = self.__orig_class__(sql)  # type: ignore[attr-defined]
        return made

    def __call__(self, connection: Connection, /, *batches: Values, **values: Any) -> list[R]:
        """Run it with the columns of batches and other values; return its rows."""
        result = self._send(connection, self._encoded(batches, values))
        return list(starmap(self._maker(result.columns), result.rows)) if result.rows else []

    def one(self, connection: Connection, /, *batches: Values, **values: Any) -> R:
        """Run it; return its only row."""
        (row,) = self(connection, *batches, **values)
        return row

    def first(self, connection: Connection, /, *batches: Values, **values: Any) -> R | None:
        """Run it; return its first row, if there is one."""
        rows = self(connection, *batches, **values)
        return rows[0] if rows else None

    def count(self, connection: Connection, /, *batches: Values, **values: Any) -> int:
        """Run it; return how many rows it has changed."""
        return self._send(connection, self._encoded(batches, values)).changed

    def alone(self, engine: Engine, /, *batches: Values, **values: Any) -> list[R]:
        """Run it by itself on a connection of an engine in autocommit mode, past SQLAlchemy; return its rows."""
        result = execute(engine, self.sql, self._encoded(batches, values))
        return list(starmap(self._maker(result.columns), result.rows)) if result.rows else []

    def often(self, engine: Engine, values: dict[str, Any]) -> None:
        """Do the same with a statement that is worth preparing, and that returns nothing."""
        execute(engine, self.sql, self._encoded((), values), self.preparation)

    @cached_property
    def preparation(self) -> Preparation:
        """How it is prepared, and executed then."""
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
            if value == ():  # as columns are that no row of a batch uses
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
        """The statement for a driver that writes parameters in another way than psycopg2 and psycopg."""
        marks = {"": ":{}"} | {cast: f"CAST(:{{}} AS {cast[2:]})" for cast in self._casts.values() if cast}
        return text(PARAMETER.sub(lambda found: marks[found[2]].format(found[1]), self.sql))

    def _maker(self, columns: Sequence[Any]) -> Callable[..., R]:
        """Return what makes a row; which that is depends on the columns that the first answer has."""
        if self._make is None:
            (row,) = get_args(self.__orig_class__)  # type: ignore[attr-defined]
            self._make = _maker(self.name, row, [column[0] for column in columns])
        return self._make


def _maker(name: str, row: Any, columns: Sequence[str]) -> Callable[..., Any]:
    """Return what makes the columns of a row into a row."""
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
    """Return the columns that a statement reads for a row: each field by its name, or as an expression says.

    A table may have an alias. Fields behind the `last` one, and others `but` these, are not read.
    """
    known: Sequence[str] = getattr(row, "_fields", None) or [field.name for field in fields(row)]
    names = [name for name in known[: known.index(last) + 1 if last else None] if name not in but]
    if unknown := expressions.keys() - {*names}:
        raise TypeError(f"{row.__name__} has no fields {unknown}.")
    prefix = f"{alias}." if alias else ""
    return ", ".join(f'{expressions[name]} AS "{name}"' if name in expressions else prefix + name for name in names)


class Prepared(Statement[R]):
    """A statement of the leader, on a connection of its own: planned once, and sent by the shortest way.

    The leader sends the same few statements hundreds of times a second, and planning one can take longer than running
    it. Prepared with a generic plan, they also cannot be led astray by statistics that are missing or out of date.

    SQLAlchemy keeps the connection and its errors, but each of its results costs as much as a small statement takes in
    Postgres. So this goes through a cursor of the driver. Ids and other bytes come back as bytes.

    On other connections it is sent in full: a pooler may give each transaction another session.

    Where a batch has one row, as most do on an idle system, that is sent as VALUES: `unnest` costs Postgres some
    microseconds for each column.
    """

    def __init__(self, sql: str) -> None:
        super().__init__(sql)
        self._of_one_row: dict[tuple[str, ...], Prepared[R]] = {}

    def __call__(self, connection: Connection, /, *batches: Values, **values: Any) -> list[R]:
        """Run it with the columns of batches and other values; return its rows."""
        statement, batches = self._for(batches)
        return super(Prepared, statement).__call__(connection, *batches, **values)

    def _for(self, batches: tuple[Values, ...]) -> tuple[Prepared[R], tuple[Values, ...]]:
        """Return the statement for these batches, and them as it takes them."""
        ones = tuple([batch.first for batch in batches if isinstance(batch, Rows) and batch.is_one])
        if not ones:
            return self, batches
        return self._of_one_row.get(ones) or self.of_one_row(ones), tuple(
            {name: column[0] if column else None for name, column in batch.items()}
            if isinstance(batch, Rows) and batch.is_one
            else batch
            for batch in batches
        )

    def of_one_row(self, ones: tuple[str, ...]) -> Prepared[R]:
        """Return the statement for batches of one row each: those with these first columns."""

        def row(found: re.Match[str]) -> str:
            values = re.sub(_COLUMN, r"\1", found[0].removeprefix("(SELECT ").removesuffix(") AS"))
            return f"(VALUES ({values})) AS" if found[2] in ones else found[0]

        sql = BATCH.sub(row, self.sql.replace(f"/* {self.name} */", f"/* {self.name} {' '.join(ones)} */", 1))
        self._of_one_row[ones] = self.__orig_class__(sql)  # type: ignore[attr-defined]
        return self._of_one_row[ones]

    def begin(self, connection: Connection, /, **values: Any) -> list[R]:
        """Begin a transaction with it, in one round trip. The connection must be in autocommit mode."""
        result = self._send(connection, self._encoded((), values), self._begin)
        return list(starmap(self._maker(result.columns), result.rows)) if result.rows else []

    def begin_later(self, connection: Connection, /, **values: Any) -> None:
        """Do the same in the round trip of the next statement. Its result is dropped."""
        line = channel(connection)
        line.begin_later(self._text(connection, line, self._execute), self._encoded((), values))

    def commit(self, connection: Connection, /, **values: Any) -> None:
        """End a transaction with it, in one round trip; if it fails, nothing is committed."""
        self._send(connection, self._encoded((), values), self._commit)

    def later(self, connection: Connection, /, *batches: Values, **values: Any) -> Later:
        """Run it with the next statement on the connection, in one round trip. Its result is dropped.

        If it fails, the next statement does, and the transaction with it. Until then it can be taken back.
        """
        line = channel(connection)
        this, batches = self._for(batches)
        statement = Later(this._text(connection, line, this._execute), lambda: this._encoded(batches, values) or None)
        line.later(statement)
        return statement

    def _send(self, connection: Connection, values: dict[str, Any], sql: str = "") -> StatementResult:
        line = channel(connection)
        return line.send(connection, self._text(connection, line, sql or self._execute), values or None)

    def _text(self, connection: Connection, line: Channel, sql: str) -> str:
        """Prepare the statement that this SQL executes; return the SQL, which names it or has all of it."""
        known = line.prepared
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
