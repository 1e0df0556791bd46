"""Connecting with a deadline: callers wait no longer than they can, and abandoned attempts are reused or closed."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg2 import OperationalError
from sqlalchemy import Dialect, create_engine

from orchestrator.store.database import engine_for
from orchestrator.store.dialing import Dialing
from orchestrator.time_limits import LEAST, TimeLimit
from tests.waiting import eventually


class FakeConnection:
    is_open = True

    def close(self) -> None:
        self.is_open = False


class Server:
    """Accepts connections, and answers each when a test releases it."""

    def __init__(self) -> None:
        self.answers = threading.Semaphore(0)
        self.lines: list[FakeConnection] = []
        self.calls = 0

    def dial(self) -> Any:
        self.calls += 1
        assert self.answers.acquire(timeout=60)
        self.lines.append(FakeConnection())
        return self.lines[-1]


@pytest.fixture
def dialect() -> Dialect:
    dialect = create_engine("postgresql+psycopg2://nobody@/nowhere").dialect
    assert isinstance(dialect, Dialect)
    return dialect


def hurry() -> TimeLimit:
    """Return a time limit that is almost used up."""
    return TimeLimit(0, since=time.monotonic() - LEAST + 0.01)


def patience() -> TimeLimit:
    return TimeLimit(60)


def give_up(dialing: Dialing, dialect: Dialect, server: Server) -> None:
    with hurry(), pytest.raises(OperationalError, match="no answer within the timeout of the call"):
        dialing.connect(dialect, server.dial)


def test_a_caller_without_a_deadline_leaves_connecting_to_the_driver(dialect: Dialect) -> None:
    server = Server()
    assert Dialing().connect(dialect, server.dial) is None
    assert server.calls == 0


def test_an_abandoned_attempt_is_taken_over(dialect: Dialect) -> None:
    dialing, server = Dialing(), Server()
    for _ in range(3):
        give_up(dialing, dialect, server)
    server.answers.release()
    with patience():
        assert dialing.connect(dialect, server.dial) is server.lines[0]
    assert server.calls == 1


def test_one_late_connection_is_kept_and_the_others_are_closed(dialect: Dialect) -> None:
    dialing, server = Dialing(), Server()
    with ThreadPoolExecutor(3) as callers:
        list(callers.map(lambda _: give_up(dialing, dialect, server), range(3)))
    server.answers.release(3)  # or fewer, if some callers have taken over attempts
    eventually(lambda: [attempt.done() for attempt in dialing._abandoned] == [True], "one is kept")
    eventually(lambda: sum(line.is_open for line in server.lines) == 1, "the others are closed")
    kept = dialing.connect(dialect, server.dial)
    assert kept is not None
    assert kept.is_open
    assert dialing.connect(dialect, server.dial) is None


def test_a_failure_is_reported_only_to_a_waiting_caller(dialect: Dialect) -> None:
    dialing, fails = Dialing(), threading.Event()

    def dial() -> Any:
        assert fails.wait(60)
        raise OperationalError("nobody is there")

    with hurry(), pytest.raises(OperationalError, match="no answer"):
        dialing.connect(dialect, dial)
    fails.set()
    with patience(), pytest.raises(OperationalError, match="nobody is there"):
        dialing.connect(dialect, dial)
    assert dialing.connect(dialect, dial) is None


def test_an_unclaimed_connection_is_closed_in_the_end(dialect: Dialect) -> None:
    dialing, server = Dialing(), Server()
    give_up(dialing, dialect, server)
    dialing.close()
    server.answers.release()
    eventually(lambda: server.lines and not server.lines[0].is_open, "it is closed when it comes")


def test_the_connection_pool_logs_under_the_name_of_sqlalchemy() -> None:
    engine = engine_for("postgresql://nobody@localhost/nothing")
    told = engine.pool.logger
    assert isinstance(told, logging.Logger)
    assert told.name.startswith("sqlalchemy."), "else every process tells of its pool"
    engine.dispose()
