"""Token buckets: never more than the rate, never less than it allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import Rate
from orchestrator.domain.limits.buckets import Buckets, bucket_size, interval, lateness, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10/s", Rate(10, 1)),
        ("100/m", Rate(100, 60)),
        ("100 / minute", Rate(100, 60)),
        ("5/10s", Rate(5, 10)),
        ("0.5/s", Rate(0.5, 1)),
        ("3/hour", Rate(3, 3600)),
        ("1/2d", Rate(1, 172_800)),
    ],
)
def test_rates_are_parsed(text: str, rate: Rate) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "10", "10/", "/s", "0/s", "10/0s", "-1/s", "ten/s", "10/fortnight", "10/s/s"])
def test_invalid_rates_are_not_parsed(text: str) -> None:
    assert parse_rate(text) is None


def test_a_full_bucket_allows_a_burst_and_then_the_even_rate() -> None:
    rate, buckets, now = Rate(10, 1), Buckets(), 1_000.0
    assert buckets.admits("b", rate, now) == 10
    buckets.spend("b", rate, now, 10)
    assert buckets.admits("b", rate, now) == 0
    assert buckets.next_admission("b", rate, now) == pytest.approx(now + 0.1)
    assert buckets.admits("b", rate, now + 0.1) == 1
    assert buckets.admits("b", rate, now + 0.55) == 5
    assert buckets.admits("b", rate, now + 60) == 10  # tokens are not saved up beyond the bucket


def test_a_burst_of_one_spreads_starts_evenly() -> None:
    rate, buckets = Rate(60, per=60, burst=1), Buckets()
    buckets.spend("b", rate, 0.0)
    assert [buckets.admits("b", rate, now) for now in (0.0, 0.5, 1.0, 5.0)] == [0, 0, 1, 1]


def test_returned_tokens_can_be_spent_again() -> None:
    rate, buckets = Rate(4, 1), Buckets()
    buckets.spend("b", rate, 10.0, 4)
    buckets.spend("b", rate, 10.0, -3)
    assert buckets.admits("b", rate, 10.0) == 3


def test_full_buckets_are_forgotten_once_saved() -> None:
    rate, buckets = Rate(1, 1), Buckets()
    buckets.spend("used", rate, 0.0)
    buckets.forget_full(5.0)
    assert "used" in buckets.due
    buckets.changed.clear()
    buckets.forget_full(0.5)
    assert "used" in buckets.due
    buckets.forget_full(5.0)
    assert not buckets.due


@given(
    count=st.floats(0.1, 1_000),
    per=st.floats(0.1, 1_000),
    burst=st.none() | st.integers(1, 50),
    waits=st.lists(st.floats(0, 10), max_size=50),
)
def test_any_period_allows_at_most_the_rate_and_one_burst(
    count: float, per: float, burst: int | None, waits: list[float]
) -> None:
    """A caller that takes all tokens at every moment gets, in any period, at most the rate and one burst.

    Late tokens may be added to these.
    """
    rate, buckets, now = Rate(count, per, burst), Buckets(), 1_000_000.0
    taken: list[tuple[float, int]] = []
    for wait in waits:
        now += wait * interval(rate)
        allowed = buckets.admits("b", rate, now)
        assert 0 <= allowed <= bucket_size(rate) + lateness(rate) / interval(rate)
        if allowed:
            buckets.spend("b", rate, now, allowed)
        else:
            assert buckets.next_admission("b", rate, now) > now
        taken.append((now, allowed))
    for first, (start, _) in enumerate(taken):
        for last in range(first, len(taken)):
            span = taken[last][0] - start
            most = bucket_size(rate) + (span + lateness(rate)) / interval(rate)
            assert sum(number for _, number in taken[first : last + 1]) <= most + 1e-3


@pytest.mark.parametrize(("a_second", "late"), [(1, 0.04), (10, 0.03), (100, 0.004), (100, 0.03), (1_000, 0.01)])
def test_a_slightly_late_leader_still_reaches_the_rate(a_second: float, late: float) -> None:
    rate, buckets, now, started = Rate(a_second, per=1, burst=1), Buckets(), 1_000.0, 0
    while now < 1_010.0:
        allowed = buckets.admits("b", rate, now)
        if allowed:
            buckets.spend("b", rate, now, allowed)
            started += allowed
        now = max(now, buckets.next_admission("b", rate, now)) + late
    assert started == pytest.approx(10 * a_second, rel=0.05, abs=1)


def test_idle_time_does_not_count_as_lateness() -> None:
    rate, buckets = Rate(10, per=1, burst=1), Buckets()
    buckets.spend("b", rate, 1_000.0)
    assert buckets.admits("b", rate, 1_060.0) == 1
    buckets.spend("b", rate, 1_060.0)
    assert buckets.next_admission("b", rate, 1_060.0) == pytest.approx(1_060.1)


@pytest.mark.parametrize("rate", [Rate(10, 1), Rate(10, 1, burst=1), Rate(1, per=3_600), Rate(3, per=60)])
def test_setting_the_clock_back_costs_at_most_one_interval(rate: Rate) -> None:
    buckets, now = Buckets(), 1_000_000.0
    buckets.spend("b", rate, now, bucket_size(rate))
    now -= 86_400
    assert buckets.next_admission("b", rate, now) <= now + interval(rate) + 1e-6
    now += interval(rate)
    assert buckets.admits("b", rate, now) == 1
