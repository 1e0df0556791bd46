"""A leader does less in a tick, and sets runs aside, after ticks that took too long."""

from __future__ import annotations

import pytest

from orchestrator.scheduler.budget import SLICE, Pace, TickBudget

LEASE = 10.0
RUN, OTHER = b"run", b"other"


class Clock:
    """Stands still until the test advances it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(LEASE, clock)


def ended_while_planning(pace: Pace, *runs: bytes, by_postgres: bool = False, took: float = LEASE) -> None:
    budget = pace.budget()
    with pytest.raises(ConnectionError), budget.charging(runs):
        raise ConnectionError
    pace.interrupted(budget, by_postgres=by_postgres, took=took)


def planned(pace: Pace, *runs: bytes) -> TickBudget:
    budget = pace.budget()
    with budget.charging(runs):
        pass
    pace.worked(budget)
    return budget


def test_a_tick_may_take_a_share_of_the_lease(pace: Pace, clock: Clock) -> None:
    budget = pace.budget()
    assert budget.slice == SLICE
    assert not budget.is_spent
    clock.now += 1.0
    assert budget.is_spent


@pytest.mark.parametrize("runs", [(), (RUN,), (RUN, OTHER)])
def test_the_tick_after_a_timed_out_tick_does_the_minimum(pace: Pace, clock: Clock, runs: tuple[bytes, ...]) -> None:
    """However little processor time the tick had, and whichever runs it planned."""
    ended_while_planning(pace, *runs)
    budget = pace.budget()
    assert budget.slice == 1
    clock.now += 0.001
    assert budget.is_spent
    assert budget.refused == set()


def test_a_quickly_failed_tick_does_not_shrink_the_next(pace: Pace) -> None:
    ended_while_planning(pace, RUN, took=0.1)
    assert pace.budget().slice == SLICE


def test_ticks_settle_at_the_work_that_fits_their_time(pace: Pace) -> None:
    """Each step takes a fixed time, and a tick that takes longer than it may is ended."""
    ended: list[int] = []
    sizes: list[int] = []
    for number in range(500):
        budget = pace.budget()
        sizes.append(budget.slice)
        took = budget.slice * 0.03
        if took > 0.8 * LEASE:
            ended.append(number)
            pace.interrupted(budget, by_postgres=False, took=took)
        else:
            pace.worked(budget, took)
    assert ended == [0]
    assert min(sizes[50:]) > 50, "and not much less than that"
    for _ in range(200):
        pace.worked(pace.budget(), 0.01)
    assert pace.budget().slice == SLICE, "and all of it, when others have left the machine"


def test_the_budget_grows_slowly_toward_the_size_that_failed(pace: Pace) -> None:
    ended_while_planning(pace, RUN, OTHER)
    sizes = [planned(pace).slice for _ in range(40)]
    assert sizes == sorted(sizes)
    assert sizes.index(max(size for size in sizes if size <= SLICE // 2)) <= 11
    assert sum(SLICE // 2 <= size < SLICE for size in sizes) >= 10


@pytest.mark.parametrize(("by_postgres", "times"), [(True, 2), (False, 3)])
def test_a_run_that_exceeds_ticks_on_its_own_is_set_aside(pace: Pace, by_postgres: bool, times: int) -> None:
    """Even if other runs are planned in between."""
    for _ in range(times):
        assert pace.budget().refused == set()
        ended_while_planning(pace, RUN, by_postgres=by_postgres)
        planned(pace, OTHER)
    assert pace.budget().refused == {RUN}
    budget = pace.budget()
    budget.resolved.add(RUN)
    pace.worked(budget)
    assert pace.budget().refused == set()
    ended_while_planning(pace, RUN)
    assert pace.budget().refused == set(), "somebody has freed it, and it is tried as often as others"


def test_a_run_planned_in_time_clears_its_earlier_timeouts(pace: Pace) -> None:
    for _ in range(6):
        ended_while_planning(pace, RUN)
        assert planned(pace, RUN, OTHER).suspects == {RUN}
    assert pace.budget().refused == set()


def test_runs_planned_together_are_not_blamed(pace: Pace) -> None:
    for _ in range(6):
        ended_while_planning(pace, RUN, OTHER, by_postgres=True)
    assert pace.budget().refused == set()
