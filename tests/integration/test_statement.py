"""Statements that go to the driver by the shortest way, and the transactions that are begun and ended with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, exc

from orchestrator.scheduler.leadership import Leadership, TermOver
from orchestrator.store import database
from orchestrator.store.driver import send
from orchestrator.store.leases import Cursor
from orchestrator.store.statement import Statement

ADD = Statement("INSERT INTO numbers VALUES (%(number)s::int) RETURNING number")
COUNT = "SELECT count(*) FROM numbers"


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TEMPORARY TABLE numbers (number int PRIMARY KEY)")
        connection.commit()
        yield connection
        connection.invalidate()  # and with it the table


def kill(engine: Engine, victim: Connection) -> None:
    """Have Postgres end the session of a connection."""
    pid = victim.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
    with engine.connect() as other:
        other.exec_driver_sql("SELECT pg_terminate_backend(%(pid)s, 10000)", {"pid": pid})


def test_rows_come_back_and_what_was_not_committed_is_gone(connection: Connection) -> None:
    assert ADD(connection, {"number": 1}) == [(1,)]
    connection.commit()
    assert ADD(connection, {"number": 2}) == [(2,)]
    connection.rollback()
    assert send(connection, COUNT) == [(1,)]
    assert send(connection, "DELETE FROM numbers") == []


def test_errors_are_those_of_sqlalchemy(connection: Connection) -> None:
    ADD(connection, {"number": 1})
    with pytest.raises(exc.IntegrityError, match="duplicate key") as caught:
        ADD(connection, {"number": 1})
    assert not database.is_outage(caught.value)
    connection.rollback()
    send(connection, "SET statement_timeout = 50")
    with pytest.raises(exc.OperationalError, match="statement timeout") as caught_late:
        send(connection, "SELECT pg_sleep(60)")
    assert database.is_outage(caught_late.value)
    assert not connection.invalidated


def test_a_connection_that_broke_is_an_outage_and_is_not_used_again(engine: Engine, connection: Connection) -> None:
    ADD(connection, {"number": 1})
    kill(engine, connection)
    with pytest.raises(exc.OperationalError) as caught:
        ADD(connection, {"number": 2})
    assert database.is_outage(caught.value)
    assert caught.value.connection_invalidated
    assert connection.invalidated
    connection.rollback()
    assert send(connection, "SELECT 1") == [(1,)], "a new session takes its place"


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
        return int(send(connection, COUNT)[0][0])


def test_a_transaction_commits_with_its_cursor(leadership: Leadership) -> None:
    with leadership.writing(0.0) as writing:
        ADD(writing.connection, {"number": 1})
        writing.cursor = Cursor("1-1", "5-0", "server")
    assert count(leadership) == 1
    assert leadership.cursor() == Cursor("1-1", "5-0", "server")


def test_a_transaction_that_fails_leaves_nothing_and_the_next_one_works(leadership: Leadership) -> None:
    before = leadership.cursor()
    with pytest.raises(exc.IntegrityError), leadership.writing(0.0) as writing:
        ADD(writing.connection, {"number": 1})
        writing.cursor = Cursor("1-1", "6-0", "server")
        ADD(writing.connection, {"number": 1})
    assert count(leadership) == 0
    assert leadership.cursor() == before
    with leadership.writing(0.0) as writing:
        ADD(writing.connection, {"number": 1})
    assert count(leadership) == 1


def test_a_commit_that_is_refused_leaves_nothing(leadership: Leadership) -> None:
    with leadership.writing(0.0) as writing:
        deferred = "CREATE TEMPORARY TABLE checked (number int REFERENCES numbers DEFERRABLE INITIALLY DEFERRED)"
        send(writing.connection, deferred)
    before = leadership.cursor()
    with pytest.raises(exc.IntegrityError), leadership.writing(0.0) as writing:
        ADD(writing.connection, {"number": 1})
        send(writing.connection, "INSERT INTO checked VALUES (7)")  # which the commit finds out
        writing.cursor = Cursor("1-1", "7-0", "server")
    assert count(leadership) == 0
    assert leadership.cursor() == before


def test_what_waits_is_looked_at_only_when_it_is_asked_for(leadership: Leadership) -> None:
    with leadership.writing(0.0) as writing:
        assert writing.agenda is None
    with leadership.writing(0.0, look=True) as writing:
        assert writing.agenda is not None
        assert not writing.agenda.is_busy


@pytest.mark.parametrize("renews", [False, True])
def test_whoever_is_deposed_changes_nothing(engine: Engine, leadership: Leadership, renews: bool) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE orchestrator.leases SET term = term + 1")
    reached = False
    with pytest.raises(TermOver), leadership.writing(1e9 if renews else 0.0):
        reached = True
    assert not reached


def test_after_the_session_is_killed_a_new_one_leads_on(engine: Engine, leadership: Leadership) -> None:
    with pytest.raises(exc.OperationalError), leadership.writing(0.0) as writing:
        kill(engine, writing.connection)
    leadership.disconnect()
    with leadership.writing(0.0) as writing:
        assert send(writing.connection, "SELECT 1") == [(1,)]
