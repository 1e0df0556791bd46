"""How many slots a queue needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.durations import SECONDS
from orchestrator.domain.fleet.window import mean_time, wanted_slots


@pytest.mark.parametrize(
    ("ready", "busy", "oldest", "rate", "run_time", "wanted"),
    [
        (0, 0, None, 0.0, None, 0),
        (1_000, 0, 60.0, 0.0, None, 1),
        (1_000, 20, 60.0, 0.0, None, 21),
        (0, 3, None, 0.0, None, 3),
        (0, 8, None, 100.0, 0.08, 10),
        (0, 0, None, 0.5, 0.01, 1),
        (1_000, 10, 0.0, 100.0, 0.08, 18),
        (1_000, 10, 9.0, 100.0, 0.08, 42),
        (1_000, 10, 900.0, 100.0, 0.08, 42),
        (10_000, 0, 900.0, 0.0, 0.001, 4),
        (2, 2, 1.0, 0.1, 60.0, 21),
    ],
    ids=[
        "nothing to do",
        "no run time is known: one slot finds it out",
        "and one more where all are busy for long",
        "running tasks are not stopped",
        "what arrives, with a reserve",
        "little is one",
        "a young backlog has ten seconds",
        "one whose oldest task waits long has less",
        "but not none: the fleet does not explode",
        "many short tasks want few",
        "few long ones want many",
    ],
)
def test_wanted_slots_follow_backlog_rate_and_run_time(
    ready: int, busy: int, oldest: float | None, rate: float, run_time: float | None, wanted: int
) -> None:
    assert wanted_slots(ready=ready, busy=busy, oldest=oldest, rate=rate, run_time=run_time) == wanted


@given(
    ready=st.integers(0, 10_000),
    busy=st.integers(0, 1_000),
    oldest=st.floats(0, 1e6),
    rate=st.floats(0, 1e4),
    run_time=st.none() | st.floats(0.001, 3_600),
)
def test_wanted_slots_cover_busy_slots_and_grow_with_demand(
    ready: int, busy: int, oldest: float, rate: float, run_time: float | None
) -> None:
    wanted = wanted_slots(ready=ready, busy=busy, oldest=oldest, rate=rate, run_time=run_time)
    assert wanted >= busy
    assert wanted_slots(ready=ready + 100, busy=busy, oldest=oldest, rate=rate + 1, run_time=run_time) >= wanted


def test_the_mean_run_time_uses_the_middle_of_each_bucket() -> None:
    assert mean_time([]) is None
    assert mean_time([0] * 24) is None
    counts = [0] * (len(SECONDS) + 1)
    counts[SECONDS.index(1)] = 3  # between 0.5 and 1 s
    assert mean_time(counts) == 0.75
    counts[-1] = 1
    assert mean_time(counts) == pytest.approx((3 * 0.75 + 5_400) / 4)
