"""How SQL is sent: names, values and rows; prepared statements, and the transactions that they begin and end."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, exc

from orchestrator import store
from orchestrator.scheduler.leadership import Leadership, TermOver
from orchestrator.store import database, postgres_errors, sql
from orchestrator.store.batches import Batch, Blob, Json
from orchestrator.store.driver import channel, flush, keep_prepared, savepoint, send, statements_sent
from orchestrator.store.leases import Cursor
from orchestrator.store.namespaces import borrowed
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tasks import shared
from tests.waiting import eventually

ADD = Prepared[int]("INSERT /* test.add */ INTO numbers VALUES (%(number)s::int) RETURNING number")
COUNT = "SELECT count(*) FROM numbers"


@pytest.fixture(params=["client", "leader"])
def connection(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Connection]:
    with engine.connect() as connection:
        if request.param == "leader":
            keep_prepared(connection)
        connection.exec_driver_sql("CREATE TEMPORARY TABLE numbers (number int PRIMARY KEY)")
        connection.commit()
        yield connection
        connection.invalidate()  # drops the table, too


# -- names


def test_every_product_statement_has_a_unique_name() -> None:
    for module in pkgutil.walk_packages(store.__path__, "orchestrator.store."):
        importlib.import_module(module.name)
    for number in range(len(shared._ALWAYS), len(shared._TYPES) + 1):
        shared._statement(tuple(shared._TYPES)[:number])  # these are created on demand
    ours = {name: text for name, text in sql._sql_by_name.items() if not name.startswith("test.")}
    assert len(ours) > 200
    assert len(set(ours.values())) == len(ours)
    assert all(re.match(rf"\(*\w+ /\* {name} \*/", text) for name, text in ours.items())
    assert max(map(len, ours)) < 63, "what Postgres would cut off"


def test_only_listed_files_execute_sql_directly() -> None:
    """The listed files set up sessions, migrate, check the schema or clean up after tests, without named statements."""
    folder = Path(store.__path__[0])
    past = re.compile(r"connection\.(exec_driver_sql|execute)\(")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if past.search(path.read_text())}
    assert found == {
        *("sql.py", "database.py", "compatibility.py", "retention.py", "tasks/completions.py", "load.py"),
        *("emptying.py", "shards.py"),
    }


def test_statements_without_a_unique_name_are_rejected() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        Statement[int]("SELECT 1")
    with pytest.raises(ValueError, match=r"Two statements are named 'test\.add'"):
        Statement[int]("SELECT /* test.add */ 1")


@pytest.mark.parametrize("kind", [Statement, Prepared])
def test_a_running_statement_shows_its_name_in_pg_stat_activity(
    engine: Engine, connection: Connection, kind: type[Statement[str]]
) -> None:
    seen = kind[str](  # type: ignore[index]
        f"""
SELECT /* test.seen.{kind.__name__} */ query FROM pg_stat_activity WHERE pid = pg_backend_pid()
"""
    )
    assert f"test.seen.{kind.__name__}" in seen.one(connection)[:40]


def test_the_name_of_a_prepared_statement_is_in_its_text(connection: Connection) -> None:
    """`pg_stat_statements` shows this text; from Postgres 18 on, without comments before the first word."""
    keep_prepared(connection)
    ADD(connection, number=1)
    known = connection.exec_driver_sql("SELECT statement FROM pg_prepared_statements WHERE name = 'test.add'")
    assert known.scalar_one().startswith('PREPARE "test.add" AS INSERT /* test.add */ INTO')


def test_a_client_prepares_no_statements(engine: Engine) -> None:
    """A pooler may run the next transaction in another session, which lacks the statement, or has one of the same
    name."""
    with engine.connect() as connection:
        assert Prepared[int]("SELECT /* test.pooled */ 1").one(connection) == 1
        names = connection.exec_driver_sql("SELECT name FROM pg_prepared_statements").scalars().all()
    assert "test.pooled" not in names


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("lent", [False, True])
def test_a_prepared_statement_uses_the_namespace_of_its_connection(
    database_url: str, *, lent: bool, leads: bool
) -> None:
    engine = database.engine_for(database_url, namespace="orchestrator" if lent else "nobodys")
    with engine.connect() as connection, borrowed(connection, "nobodys") if lent else nullcontext():
        if leads:
            keep_prepared(connection)
        with pytest.raises(exc.ProgrammingError, match=r'"nobodys\.tasks" does not exist'):
            Prepared[int](f"SELECT /* test.n{lent:d}{leads:d} */ 1 FROM orchestrator.tasks")(connection)
    engine.dispose()


# -- values and rows


class Thing(NamedTuple):
    id: bytes
    number: int | None
    share: float
    is_so: bool
    word: str | None
    data: Blob | None
    json: Json
    at: datetime | None
    large: Annotated[int, "bigint"] = 0


THINGS = Batch("t", Thing)
_SAME = (
    "SELECT /* test.same.{} */ id, number, share, is_so, word, data, json::text AS json, at, large FROM {} ORDER BY id"
)
NOW = datetime(2026, 11, 15, 12, 30, 15, 123456, UTC)
SOME = [
    Thing(bytes(16), None, 0.1, True, None, None, "{}", None),
    Thing(b"\x01" * 16, -7, 1e300, False, 'a "b" \\ {c}, NULL é', b"\x00\xff", '{"a": "\\"\\\\"}', NOW, 1 << 40),
    Thing(b"\x02" * 16, 0, float("inf"), False, "", b"", "[1, null]", NOW, -1),
    Thing(b"\x03" * 16, 0, 0.0, False, "NULL", b"x", '"NULL"', NOW),
]


def test_a_batch_round_trips_and_its_rows_have_named_fields(connection: Connection) -> None:
    same = Prepared[Thing](_SAME.format("prepared", THINGS))
    assert same(connection, THINGS(SOME)) == SOME
    assert same(connection, THINGS([])) == []


def test_unprepared_statements_accept_batches(connection: Connection) -> None:
    same = Statement[Row](_SAME.format("plain", THINGS))
    first, second, *_ = same(connection, THINGS(iter(SOME)))
    assert first.id == UUID(int=0)
    assert (second.word, bytes(second.data), second.at) == (SOME[1].word, SOME[1].data, NOW)


def test_parameters_are_translated_for_other_drivers() -> None:
    found = Statement[int]("SELECT /* test.portable */ %(id)s::uuid, x::text FROM t WHERE %(id)s = %(name)s")
    assert str(found._portable) == "SELECT /* test.portable */ CAST(:id AS uuid), x::text FROM t WHERE :id = :name"


def test_bytes_are_read_in_every_bytea_output_format(connection: Connection) -> None:
    read = Prepared[bytes]("SELECT /* test.bytes */ data FROM unnest(%(data)s::bytea[]) AS t(data)")
    values = [b"", b"\x00\\'\xff", b"\\x41"]
    assert read(connection, data=values) == values
    connection.exec_driver_sql("SET LOCAL bytea_output = 'escape'")
    assert read(connection, data=values) == values


@dataclass(frozen=True, kw_only=True)
class View:
    b: int
    a: int


def test_rows_have_the_type_declared_by_the_statement(connection: Connection) -> None:
    columns = "1 AS a, 2 AS b"
    assert Statement[View](f"SELECT /* test.view */ {columns}").one(connection) == View(a=1, b=2)
    assert Prepared[Row](f"SELECT /* test.row */ {columns}").one(connection).b == 2
    assert Prepared[tuple[int, int]](f"SELECT /* test.tuple */ {columns}")(connection) == [(1, 2)]
    assert Prepared[int]("SELECT /* test.none */ 1 WHERE false").first(connection) is None
    assert Statement[None]("CREATE /* test.create */ TEMPORARY TABLE words (word text)")(connection) == []
    add = Prepared[None]("INSERT /* test.words */ INTO words SELECT unnest(%(words)s::text[])")
    assert add.count(connection, words=["a", "b"]) == 2


class Pair(NamedTuple):
    a: int
    b: int


def test_columns_in_a_different_order_than_the_fields_are_rejected(connection: Connection) -> None:
    with pytest.raises(TypeError, match=r"'test\.pair' are Pair\('a', 'b'\); found the columns \['b', 'a'\]"):
        Prepared[Pair]("SELECT /* test.pair */ 2 AS b, 1 AS a")(connection)


@Statement.function("SELECT /* test.pairs */ a, a + 1 AS b FROM generate_series(1, %(most)s::int) AS t(a)")
def pairs(connection: Connection, most: int = 2) -> list[Pair]: ...


@Prepared.function("SELECT /* test.by_name */ a::text, a FROM generate_series(1, %(most)s::int) AS t(a)")
def by_name(connection: Connection, *, most: int) -> dict[str, int]: ...


@Prepared.function("SELECT /* test.set */ a / 2 FROM generate_series(1, %(most)s::int) AS t(a)")
def halves(connection: Connection, most: int) -> set[int]: ...


@Prepared.function("SELECT /* test.first_of */ a FROM generate_series(1, %(most)s::int) AS t(a)")
def first(connection: Connection, most: int) -> int | None: ...


@Statement.function("SELECT /* test.only */ a FROM generate_series(1, %(most)s::int) AS t(a)")
def only(connection: Connection, most: int) -> int: ...


@Prepared.function("INSERT /* test.nothing */ INTO numbers VALUES (%(number)s::int) RETURNING number")
def add(connection: Connection, number: int) -> None: ...


def test_a_statement_function_returns_its_annotated_type(connection: Connection) -> None:
    assert pairs(connection) == [Pair(1, 2), Pair(2, 3)]
    assert pairs(connection, 1) == pairs(connection, most=1) == [Pair(1, 2)]
    assert by_name(connection, most=2) == {"1": 1, "2": 2}
    assert halves(connection, 3) == {0, 1}
    assert (first(connection, 3), first(connection, 0)) == (1, None)
    assert only(connection, 1) == 1
    with pytest.raises(ValueError, match="unpack"):
        only(connection, 2)
    assert add(connection, 7) is None


# -- connections


def kill(engine: Engine, victim: Connection) -> None:
    """Let Postgres end the session of a connection."""
    pid = victim.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
    with engine.connect() as other:
        other.exec_driver_sql("SELECT pg_terminate_backend(%(pid)s, 10000)", {"pid": pid})


def test_committed_rows_are_returned_and_rolled_back_rows_are_gone(connection: Connection) -> None:
    assert ADD(connection, number=1) == [1]
    connection.commit()
    assert ADD(connection, number=2) == [2]
    connection.rollback()
    assert send(connection, COUNT).rows == [(1,)]
    assert send(connection, "DELETE FROM numbers").changed == 1


ALL = Prepared[int]("SELECT /* test.all */ number FROM numbers ORDER BY number")
OTHERS = Statement[int]("SELECT /* test.others */ number FROM numbers ORDER BY number")


def test_deferred_statements_are_sent_in_order_with_the_next_statement(connection: Connection) -> None:
    ADD(connection, number=1)
    ALL(connection)  # prepares both statements
    sent = statements_sent()
    ADD.defer(connection, number=3)
    ADD.defer(connection, number=2)
    assert statements_sent() == sent
    assert connection.exec_driver_sql(COUNT).scalar_one() == 1
    assert ALL(connection) == [1, 2, 3]
    assert statements_sent() == sent + 1
    ADD.defer(connection, number=4)
    assert OTHERS(connection) == [1, 2, 3, 4], "what goes another way comes after it, too"
    assert ALL(connection) == [1, 2, 3, 4]


def test_a_failed_deferred_statement_aborts_the_transaction(connection: Connection) -> None:
    ADD(connection, number=1)
    connection.commit()
    ADD.defer(connection, number=2)
    ADD.defer(connection, number=1)
    with pytest.raises(exc.IntegrityError):
        ALL(connection)
    connection.rollback()
    assert ALL(connection) == [1], "nothing is sent again"


def test_a_savepoint_rolls_back_only_its_own_deferred_statements(connection: Connection) -> None:
    ADD.defer(connection, number=1)
    with pytest.raises(ZeroDivisionError), savepoint(connection):
        ADD.defer(connection, number=2)
        flush(connection)
        raise ZeroDivisionError
    with savepoint(connection):
        ADD.defer(connection, number=3)
    assert ALL(connection) == [1, 3]


def test_errors_are_raised_as_sqlalchemy_errors(connection: Connection) -> None:
    ADD(connection, number=1)
    with pytest.raises(exc.IntegrityError, match="duplicate key") as caught:
        ADD(connection, number=1)
    assert not postgres_errors.is_outage(caught.value)
    connection.rollback()
    send(connection, "SET statement_timeout = 50")
    with pytest.raises(exc.OperationalError, match="statement timeout") as caught_late:
        send(connection, "SELECT pg_sleep(60)")
    assert postgres_errors.is_outage(caught_late.value)
    assert not connection.invalidated


def test_a_broken_connection_is_an_outage_and_is_replaced(engine: Engine, connection: Connection) -> None:
    ADD(connection, number=1)
    kill(engine, connection)
    with pytest.raises(exc.OperationalError) as caught:
        ADD(connection, number=2)
    assert postgres_errors.is_outage(caught.value)
    assert caught.value.connection_invalidated
    assert connection.invalidated
    connection.rollback()
    assert send(connection, "SELECT 1").rows == [(1,)], "a new session takes its place"


# -- the leader's transactions


@pytest.fixture
def leadership(engine: Engine) -> Iterator[Leadership]:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE orchestrator.leases SET expires_at = now() - interval '1 second'")
    leadership = Leadership(engine, lease=60.0)
    assert leadership.acquire()
    with leadership.writing(0.0) as writing:
        send(writing.connection, "CREATE TEMPORARY TABLE numbers (number int PRIMARY KEY)")
    yield leadership
    leadership.disconnect()


def count(leadership: Leadership) -> int:
    with leadership.reading() as connection:
        return int(send(connection, COUNT).rows[0][0])


def test_a_transaction_commits_with_its_cursor(leadership: Leadership) -> None:
    with leadership.writing(0.0) as writing:
        ADD(writing.connection, number=1)
        writing.cursor = Cursor("1-1", "5-0", "server")
    assert count(leadership) == 1
    assert leadership.cursor() == Cursor("1-1", "5-0", "server")


def test_a_failed_transaction_changes_nothing_and_the_next_one_succeeds(leadership: Leadership) -> None:
    before = leadership.cursor()
    with pytest.raises(exc.IntegrityError), leadership.writing(0.0) as writing:
        ADD(writing.connection, number=1)
        writing.cursor = Cursor("1-1", "6-0", "server")
        ADD(writing.connection, number=1)
    assert count(leadership) == 0
    assert leadership.cursor() == before
    with leadership.writing(0.0) as writing:
        ADD(writing.connection, number=1)
    assert count(leadership) == 1


def test_deferred_statements_are_committed_with_their_transaction_or_not_sent(leadership: Leadership) -> None:
    with leadership.writing(0.0) as writing:
        ADD.defer(writing.connection, number=1)
    assert count(leadership) == 1
    with pytest.raises(ZeroDivisionError), leadership.writing(0.0) as writing:
        ADD.defer(writing.connection, number=2)
        raise ZeroDivisionError
    assert count(leadership) == 1
    with pytest.raises(exc.IntegrityError), leadership.writing(0.0) as writing:
        ADD.defer(writing.connection, number=3)
        ADD.defer(writing.connection, number=1)
        writing.cursor = Cursor("1-1", "9-0", "server")
    assert count(leadership) == 1


def test_a_rejected_commit_changes_nothing(leadership: Leadership) -> None:
    with leadership.writing(0.0) as writing:
        deferred = "CREATE TEMPORARY TABLE checked (number int REFERENCES numbers DEFERRABLE INITIALLY DEFERRED)"
        send(writing.connection, deferred)
    before = leadership.cursor()
    with pytest.raises(exc.IntegrityError), leadership.writing(0.0) as writing:
        ADD(writing.connection, number=1)
        send(writing.connection, "INSERT INTO checked VALUES (7)")  # the constraint is checked at commit
        writing.cursor = Cursor("1-1", "7-0", "server")
    assert count(leadership) == 0
    assert leadership.cursor() == before


def test_pending_work_is_read_only_on_request(leadership: Leadership) -> None:
    with leadership.writing(0.0) as writing:
        assert writing.pending_work is None
    with leadership.writing(0.0, with_pending_work=True) as writing:
        assert writing.pending_work is not None
        assert not writing.pending_work.is_busy


@pytest.mark.parametrize("renews", [False, True])
def test_a_deposed_leader_changes_nothing(engine: Engine, leadership: Leadership, renews: bool) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE orchestrator.leases SET term = term + 1")
    reached = False
    with pytest.raises(TermOver), leadership.writing(1e9 if renews else 0.0):
        reached = True
    assert not reached


def test_a_transaction_may_begin_with_its_first_statement(leadership: Leadership) -> None:
    times = iter((7.0, 7.25, 7.5))
    leadership._elapsed = lambda: next(times)
    with leadership.writing(0.0, with_pending_work=True) as writing:
        known = writing.now
    ADD._text(writing.connection, channel(writing.connection), "")  # prepares it
    with leadership.writing(0.0, may_begin_later=True) as writing:
        sent = statements_sent()
        ADD(writing.connection, number=1)
        assert statements_sent() == sent + 1
    assert statements_sent() == sent + 2
    assert writing.now == known + timedelta(seconds=0.25)
    assert count(leadership) == 1
    with pytest.raises(ZeroDivisionError), leadership.writing(0.0, may_begin_later=True) as writing:
        ADD(writing.connection, number=2)
        raise ZeroDivisionError
    assert count(leadership) == 1


@pytest.mark.parametrize("adds", [False, True])
def test_a_transaction_begun_late_changes_nothing_after_deposition(
    engine: Engine, leadership: Leadership, adds: bool
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE orchestrator.leases SET term = term + 1")
    before = leadership.cursor()
    with pytest.raises(TermOver), leadership.writing(0.0, may_begin_later=True) as writing:
        if adds:
            ADD(writing.connection, number=1)
        writing.cursor = Cursor("1-1", "8-0", "server")
    assert count(leadership) == 0
    assert leadership.cursor() == before


def test_a_leader_continues_in_a_new_session_after_a_killed_one(engine: Engine, leadership: Leadership) -> None:
    with pytest.raises(exc.OperationalError), leadership.writing(0.0) as writing:
        kill(engine, writing.connection)
    leadership.disconnect()
    with leadership.writing(0.0) as writing:
        assert send(writing.connection, "SELECT 1").rows == [(1,)]


def test_a_connection_that_was_closed_before_its_first_statement_is_an_outage(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.connection.dbapi_connection.close()  # type: ignore[union-attr]
        with pytest.raises(exc.DBAPIError, match="connection already closed") as found:
            Prepared[int]("SELECT /* test.closed */ 1")(connection)
        assert found.value.connection_invalidated
        assert connection.invalidated


# -- single statements


PID = Statement[int]("SELECT /* test.pid */ pg_backend_pid() AS pid")


def _is_open(engine: Engine, pid: int) -> bool:
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,))
        return found.first() is not None


@pytest.mark.own_connections
def test_single_statements_share_one_connection_until_the_pool_is_disposed(engine: Engine, database_url: str) -> None:
    alone = database.engine_for(database_url, autocommit=True)
    (first,) = PID.run_on_engine(alone)
    assert PID.run_on_engine(alone) == [first]
    alone.dispose()
    eventually(lambda: not _is_open(engine, first))
    assert PID.run_on_engine(alone) != [first], "it can be used again"
    alone.dispose()


@pytest.mark.own_connections
def test_a_kept_connection_that_postgres_has_closed_is_replaced(engine: Engine, database_url: str) -> None:
    alone = database.engine_for(database_url, autocommit=True)
    (first,) = PID.run_on_engine(alone)
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT pg_terminate_backend(%s, 10000)", (first,))
    assert PID.run_on_engine(alone) != [first]
    alone.dispose()


@pytest.mark.own_connections
def test_a_kept_connection_leaves_no_transaction_open(engine: Engine, database_url: str) -> None:
    alone = database.engine_for(database_url, autocommit=True)
    with pytest.raises(exc.DBAPIError):
        Statement[int]("SELECT /* test.divide */ 1 / 0 AS nothing").run_on_engine(alone)
    (pid,) = PID.run_on_engine(alone)
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT state FROM pg_stat_activity WHERE pid = %s", (pid,)).scalar_one()
    assert found == "idle"
    alone.dispose()
