"""An outage is told once when it begins and once when it is over."""

from __future__ import annotations

import logging

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from orchestrator.telemetry import Outage, first_line
from orchestrator.transport.connection import FULL, REFUSED, _Recognising


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_line_on_entering_and_one_on_leaving(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = Outage(logging.getLogger("test"), "Redis", "reports wait", settled=5.0, monotonic=clock)
    with caplog.at_level(logging.INFO, "test"):
        outage.worked()
        for _ in range(100):
            outage.failed("gone")
            clock.now += 1.0
            outage.worked()
        assert outage.lasts, "what works for a second between two failures is not over"
        clock.now += 5.0
        outage.worked()
        outage.worked()
    assert not outage.lasts
    assert [record.message for record in caplog.records] == [
        "Redis cannot be used; reports wait: gone",
        "Redis can be used again, after 105.0 s",
    ]


def test_an_error_is_told_in_one_line_and_without_its_command() -> None:
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
def test_a_refused_write_is_known_by_its_class(said: str, is_refusal: bool) -> None:
    class Answering:
        def read_response(self) -> None:
            raise ResponseError(said)

    class Connection(_Recognising, Answering):
        pass

    with pytest.raises(ResponseError) as caught:
        Connection().read_response()
    assert isinstance(caught.value, REFUSED) is is_refusal
    assert isinstance(caught.value, FULL) is ("OOM" in said)
