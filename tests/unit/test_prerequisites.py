"""What a starting process waits for, and which errors end it at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from ssl import SSLCertVerificationError

import psycopg2
import pytest
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ResponseError,
    TimeoutError,
)
from sqlalchemy import exc

from orchestrator.errors import ConfigurationError, SchemaError
from orchestrator.prerequisites import Prerequisite, Prerequisites
from orchestrator.store import postgres_errors
from orchestrator.transport import connection as transport

LOG = logging.getLogger("test")


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Restore the signal handlers of pytest."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def failing(name: str, times: int, error: Exception) -> Prerequisite:
    """Return a prerequisite that fails this many times."""
    looks = iter(range(times))

    def check() -> None:
        if next(looks, None) is not None:
            raise error

    return Prerequisite(name, check, lambda error: str(error) if isinstance(error, OSError) else None)


def test_startup_waits_for_all_services_and_logs_each_once(caplog: pytest.LogCaptureFixture) -> None:
    needed = [
        failing("Postgres", 3, OSError("gone")),
        failing("Redis", 2, OSError("away")),
        failing("It", 0, OSError()),
    ]
    with caplog.at_level(logging.INFO, "test"):
        assert Prerequisites(LOG, needed).wait()
    said = [record.message.partition(",")[0] for record in caplog.records]
    assert said == [
        "service.unavailable: Postgres cannot be used; waiting for it: gone",
        "service.unavailable: Redis cannot be used; waiting for it: away",
        "service.available: Redis can be used again",
        "service.available: Postgres can be used again",
    ]


def test_an_error_that_waiting_cannot_fix_is_raised_at_once() -> None:
    needed = [failing("Postgres", 10**9, OSError("gone")), failing("Redis", 1, ValueError("wrong"))]
    with pytest.raises(ValueError, match="wrong"):
        Prerequisites(LOG, needed).wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait(number: signal.Signals) -> None:
    prerequisites = Prerequisites(LOG, [failing("Redis", 10**9, OSError("gone"))])
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    assert not prerequisites.wait()
    assert prerequisites.is_stopped


def connection_error(words: str) -> exc.OperationalError:
    """Return the error of a connection that could not be opened; the driver sets no code."""
    failure = psycopg2.OperationalError(f'connection to server at "db" (10.0.0.7), port 5432 failed: {words}\n')
    return exc.OperationalError(None, None, failure)


@pytest.mark.parametrize(
    ("passing", "error", "is_outage"),
    [
        (postgres_errors.outage_of, connection_error("Connection refused"), True),
        (postgres_errors.outage_of, connection_error("No such file or directory"), True),
        (postgres_errors.outage_of, connection_error('could not translate host name "db" to address'), True),
        (postgres_errors.outage_of, connection_error("FATAL:  the database system is starting up"), True),
        (postgres_errors.outage_of, connection_error("FATAL:  sorry, too many clients already"), True),
        (postgres_errors.outage_of, connection_error('FATAL:  password authentication failed for user "me"'), False),
        (postgres_errors.outage_of, connection_error("fe_sendauth: no password supplied"), False),
        (postgres_errors.outage_of, connection_error('FATAL:  role "me" does not exist'), False),
        (postgres_errors.outage_of, connection_error('FATAL:  database "shop" does not exist'), False),
        (postgres_errors.outage_of, connection_error('FATAL:  no pg_hba.conf entry for host "10.0.0.9"'), False),
        (postgres_errors.outage_of, SchemaError("old"), False),
        (transport._outage_of, ConnectionError("Error 111 connecting to redis:6379. Connection refused."), True),
        (transport._outage_of, TimeoutError("Timeout connecting to server"), True),
        (transport._outage_of, BusyLoadingError("Redis is loading the dataset in memory"), True),
        (transport._outage_of, OutOfMemoryError("used memory > maxmemory"), True),
        (transport._outage_of, AuthenticationError("invalid username-password pair"), False),
        (transport._outage_of, NoPermissionError("this user has no permissions to run the 'info' command"), False),
        (transport._outage_of, ResponseError("DB index is out of range"), False),
        (transport._outage_of, InvalidResponse("Protocol Error: b'HTTP/1.1 400 Bad Request'"), False),
        (
            transport._outage_of,
            ConnectionError(SSLCertVerificationError("[SSL: CERTIFICATE_VERIFY_FAILED] no")),
            False,
        ),
        (transport._outage_of, ConfigurationError("evicts"), False),
    ],
)
def test_outages_are_waited_for_and_configuration_errors_are_not(
    passing: Callable[[Exception], str | None], error: Exception, is_outage: bool
) -> None:
    assert (passing(error) is not None) is is_outage
