"""The number of worker processes, and which of them are replaced."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.workers.parent.scaling import Autoscaler, Bounds, ChildState, max_processes, plan, scaled
from orchestrator.workers.running.job import CHECK_INTERVAL, Pace

LOADING, WORKING, WORN, DRAINING = ChildState.LOADING, ChildState.WORKING, ChildState.WORN, ChildState.DRAINING


@pytest.mark.parametrize(
    ("states", "wanted", "expected"),
    [
        ([], 2, (2, [])),
        ([LOADING, WORKING], 2, (0, [])),
        ([WORKING], 2, (1, [])),
        ([DRAINING, WORKING], 2, (1, [])),
        ([WORN, WORKING], 2, (1, [])),
        ([WORN, WORKING, LOADING], 2, (0, [])),
        ([WORN, WORKING, WORKING], 2, (0, [0])),
        ([WORN, WORN, LOADING], 2, (0, [])),
        ([WORN, WORN, WORKING], 2, (0, [0])),
        ([DRAINING, WORN, WORKING], 2, (1, [])),
        ([WORKING, WORKING, WORKING], 2, (0, [2])),
        ([DRAINING, DRAINING, WORN, WORKING], 2, (0, [])),
        ([DRAINING, DRAINING, DRAINING, DRAINING, WORKING], 2, (1, [])),
        ([DRAINING] * 5, 2, (1, [])),
        ([DRAINING] * 6, 2, (0, [])),
    ],
    ids=[
        "the first",
        "one is on its way",
        "one has died",
        "one drains",
        "a worn one gets a successor",
        "who is on its way",
        "and ready, so that the worn one goes",
        "one after another",
        "the oldest first",
        "also while its predecessor drains",
        "too many: the youngest goes",
        "draining ones pile up: the worn one works on",
        "a missing one is started all the same",
        "as far as there is room",
        "and where there is none, not even that",
    ],
)
def test_a_plan_starts_and_retires_the_right_processes(
    states: list[ChildState], wanted: int, expected: tuple[int, list[int]]
) -> None:
    assert plan(states, wanted, limit=6) == expected


@pytest.mark.parametrize(("wanted", "most"), [(1, 8), (2, 8), (4, 12)])
def test_the_number_of_processes_has_a_maximum(wanted: int, most: int) -> None:
    assert max_processes(wanted) == most


@given(st.lists(st.sampled_from(ChildState), max_size=20), st.integers(1, 6))
def test_a_plan_keeps_the_wanted_number_of_processes_at_work(states: list[ChildState], wanted: int) -> None:
    start, retire = plan(states, wanted, 3 * wanted)
    able = [place for place, state in enumerate(states) if state in (WORKING, WORN)]
    assert set(retire) <= set(able)
    assert len(able) - len(retire) >= min(wanted, len(able))
    assert start == 0 or len(states) + start <= 3 * wanted
    assert not (start and retire)


BOUNDS = Bounds(1, 8)


@pytest.mark.parametrize(
    ("processes", "load", "work_waits", "calm_for", "expected"),
    [
        (1, 1.0, True, 0.0, 2),
        (4, 3.9, True, 0.0, 6),
        (6, 6.0, True, 0.0, 8),
        (8, 8.0, True, 0.0, 8),
        (2, 2.0, False, 0.0, 2),
        (2, 1.0, True, 0.0, 2),
        (4, 0.0, False, 29.0, 4),
        (4, 0.0, False, 30.0, 3),
        (1, 0.0, False, 99.0, 1),
    ],
    ids=[
        "more",
        "by half",
        "not beyond the most",
        "which are there already",
        "busy, but nothing waits",
        "work waits, but for something else",
        "a lull",
        "calm",
        "not below the fewest",
    ],
)
def test_the_number_of_processes_scales_with_the_load(
    processes: int, load: float, work_waits: bool, calm_for: float, expected: int
) -> None:
    assert scaled(processes, BOUNDS, load, work_waits=work_waits, calm_for=calm_for, scale_down_after=30.0) == expected


def test_the_autoscaler_follows_the_load_over_time() -> None:
    autoscaler = Autoscaler(Bounds(1, 3), scale_down_after=10.0)
    assert autoscaler.could_use_more(1, 1.0)
    assert autoscaler.note(1, 1.0, 0.0, work_waits=True)
    assert autoscaler.wanted == 2
    assert not autoscaler.note(1, 1.0, 1.0, work_waits=True), "the second is on its way"
    assert not autoscaler.could_use_more(1, 1.0)
    assert autoscaler.note(2, 2.0, 2.0, work_waits=True)
    assert not autoscaler.could_use_more(3, 3.0), "there are as many as there may be"
    assert not autoscaler.note(3, 1.0, 5.0)
    assert not autoscaler.note(3, 2.9, 14.0), "a burst begins the calm anew"
    assert not autoscaler.note(3, 1.0, 15.0)
    assert not autoscaler.note(3, 1.0, 24.0)
    assert autoscaler.note(3, 1.0, 25.0)
    assert autoscaler.wanted == 2
    assert not autoscaler.note(2, 0.0, 26.0), "one at a time"
    assert autoscaler.note(2, 0.0, 36.0)
    assert not autoscaler.note(1, 0.0, 99.0)
    assert autoscaler.wanted == 1


def test_a_process_counts_as_full_although_its_tasks_end_together() -> None:
    pace, now = Pace(4, CHECK_INTERVAL), time.monotonic()
    loads = []
    for _ in range(20):
        for _ in range(8):
            pace.measure(now, 4)
            now += CHECK_INTERVAL
        pace.measure(now, 0)
        now += 0.01  # until the next four tasks arrive
        loads.append(pace.load)
    assert min(loads[4:]) > 0.9
    for _ in range(2):
        pace.measure(now, 0)
        now += 1.0
    assert pace.load < 0.2, "a second without tasks"
