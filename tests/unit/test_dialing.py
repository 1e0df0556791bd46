"""Connecting for those who are in a hurry: they wait no longer than they can, and leave little behind."""

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


class Line:
    is_open = True

    def close(self) -> None:
        self.is_open = False


class Server:
    """Takes calls, and answers each when it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Semaphore(0)
        self.lines: list[Line] = []
        self.calls = 0

    def dial(self) -> Any:
        self.calls += 1
        assert self.answers.acquire(timeout=60)
        self.lines.append(Line())
        return self.lines[-1]


@pytest.fixture
def dialect() -> Dialect:
    dialect = create_engine("postgresql+psycopg2://nobody@/nowhere").dialect
    assert isinstance(dialect, Dialect)
    return dialect


def hurry() -> TimeLimit:
    """Return a limit of which a moment is left."""
    return TimeLimit(0, since=time.monotonic() - LEAST + 0.01)


def patience() -> TimeLimit:
    return TimeLimit(60)


def give_up(dialing: Dialing, dialect: Dialect, server: Server) -> None:
    with hurry(), pytest.raises(OperationalError, match="no answer within the timeout of the call"):
        dialing.connect(dialect, server.dial)


def test_who_has_time_leaves_it_to_the_driver(dialect: Dialect) -> None:
    server = Server()
    assert Dialing().connect(dialect, server.dial) is None
    assert server.calls == 0


def test_an_attempt_that_was_left_behind_is_taken_over(dialect: Dialect) -> None:
    dialing, server = Dialing(), Server()
    for _ in range(3):
        give_up(dialing, dialect, server)
    server.answers.release()
    with patience():
        assert dialing.connect(dialect, server.dial) is server.lines[0]
    assert server.calls == 1


def test_a_connection_that_came_too_late_is_kept_and_no_second_one(dialect: Dialect) -> None:
    dialing, server = Dialing(), Server()
    with ThreadPoolExecutor(3) as callers:
        list(callers.map(lambda _: give_up(dialing, dialect, server), range(3)))
    server.answers.release(3)  # or fewer, if some have taken over from others
    eventually(lambda: [attempt.done() for attempt in dialing._abandoned] == [True], "one is kept")
    eventually(lambda: sum(line.is_open for line in server.lines) == 1, "the others are closed")
    kept = dialing.connect(dialect, server.dial)
    assert kept is not None
    assert kept.is_open
    assert dialing.connect(dialect, server.dial) is None


def test_a_failure_is_told_who_waits_and_nobody_else(dialect: Dialect) -> None:
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


def test_what_nobody_takes_is_closed_in_the_end(dialect: Dialect) -> None:
    dialing, server = Dialing(), Server()
    give_up(dialing, dialect, server)
    dialing.close()
    server.answers.release()
    eventually(lambda: server.lines and not server.lines[0].is_open, "it is closed when it comes")


def test_what_a_pool_has_to_say_is_not_said_in_our_name() -> None:
    engine = engine_for("postgresql://nobody@localhost/nothing")
    told = engine.pool.logger
    assert isinstance(told, logging.Logger)
    assert told.name.startswith("sqlalchemy."), "else every process tells of its pool"
    engine.dispose()
