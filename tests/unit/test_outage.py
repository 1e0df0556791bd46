"""An outage is logged once when it begins and once when it ends."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from orchestrator.telemetry import Outage, first_line
from orchestrator.transport.connection import FULL, REFUSED, _RefusalErrors


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def outage(clock: Clock) -> Outage:
    return Outage(logging.getLogger("test"), "Redis", "reports wait", settled=2.0, monotonic=clock)


def pass_time(outage: Outage, clock: Clock, seconds: int, *, works: bool) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        outage.worked() if works else outage.failed("gone")


def test_an_outage_is_logged_at_its_start_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    redis = outage(clock)
    with caplog.at_level(logging.INFO, "test"):
        redis.worked()
        for _ in range(100):
            redis.failed("gone")
            clock.now += 1.0
            redis.worked()
        assert redis.is_ongoing, "what works for a moment between two failures is not over"
        clock.now += 2.0
        redis.worked()
        redis.worked()
    assert not redis.is_ongoing
    assert [record.message for record in caplog.records] == [
        "service.unavailable: Redis cannot be used; reports wait: gone",
        "service.available: Redis can be used again, after 100.0 s, with 99 short recoveries",
    ]


def test_each_of_two_outages_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    redis = outage(clock)
    with caplog.at_level(logging.INFO, "test"):
        for seconds in (20, 10):
            pass_time(redis, clock, seconds, works=False)
            pass_time(redis, clock, 5, works=True)
    assert [record.message for record in caplog.records] == [
        "service.unavailable: Redis cannot be used; reports wait: gone",
        "service.available: Redis can be used again, after 20.0 s",
        "service.unavailable: Redis cannot be used; reports wait: gone",
        "service.available: Redis can be used again, after 10.0 s",
    ]


def test_frequent_short_outages_are_logged_rarely(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    redis = outage(clock)
    with caplog.at_level(logging.INFO, "test"):
        for _ in range(600):
            pass_time(redis, clock, 1, works=False)
            pass_time(redis, clock, 5, works=True)
        assert len(caplog.records) <= 5, "of six hundred"
        pass_time(redis, clock, 70, works=True)
        assert "can be used again, after" in caplog.records[-1].message
        caplog.clear()
        pass_time(redis, clock, 3, works=False)
        pass_time(redis, clock, 4, works=True)
    assert len(caplog.records) == 2, "after a calm minute all is as it was"


def test_the_duration_counts_from_the_start_of_the_outage(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    redis = outage(clock)
    redis.failed("it has not answered for 3.0 s", age=3.0)
    pass_time(redis, clock, 5, works=True)
    assert caplog.records[-1].message == "service.available: Redis can be used again, after 4.0 s"


def test_an_error_is_logged_in_one_line_without_its_command() -> None:
    quoted = OutOfMemoryError("Command # 1 (XADD events * d \x01\n\x02) of pipeline caused error: not allowed")
    assert first_line(quoted) == "not allowed"
    assert first_line(OSError("first\nsecond")) == "first"
    assert first_line(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize(
    ("said", "is_refusal"),
    [
        ("MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk.", True),
        ("MISCONF Errors writing to the AOF file: No space left on device", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("Error running script (call to f_0): @user_script:4: -OOM command not allowed when used memory", True),
        ("Error running script (call to f_0): @user_script:4: -READONLY You can't write against a replica", True),
        ("NOGROUP No such key", False),
        ("wrong number of arguments for 'xadd' command", False),
    ],
)
def test_writes_rejected_by_redis_raise_their_own_error_class(said: str, is_refusal: bool) -> None:
    class Answering:
        _sock = None
        _parser = SimpleNamespace(_reader=SimpleNamespace(gets=lambda: ResponseError(said)))

        def read_response(self, **_: bool) -> None:
            raise ResponseError(said)

    class Connection(_RefusalErrors, Answering):
        pass

    for options in ({}, {"push_request": False}):  # with our short way to read a reply, and with the driver's
        with pytest.raises(ResponseError) as caught:
            Connection().read_response(**options)
        assert isinstance(caught.value, REFUSED) is is_refusal
        assert isinstance(caught.value, FULL) is ("OOM" in said)
