"""Timelines of the steps of a run: what each step waited for, and the ticks of the axis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from orchestrator.api.dashboard.gantt import Gantt, gantt_of_steps, timeline
from orchestrator.api.dashboard.graph import critical_path, ends_of, fold, planned_step
from orchestrator.store.insights import AttemptView, RunView, TaskView

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def test_a_step_waits_for_its_dependencies_and_then_in_its_queue() -> None:
    known: dict[str, Any] = {"kind": "task", "calls": "t", "state": "success"}
    steps = [
        planned_step(name="a", depends_on=(), started_at=at(10), ended_at=at(40), **known),
        planned_step(name="b", depends_on=("a",), started_at=at(60), ended_at=at(100), **known),
    ]
    run = SimpleNamespace(id=UUID(int=1), started_at=at(0), created_at=at(0), ended_at=at(100))
    first, second = gantt_of_steps(cast(RunView, run), steps, frozenset(), at(100)).rows
    assert (first.ready, first.x, first.width) == (0, 10, 30)
    assert (second.ready, second.x, second.width) == (40, 60, 40)
    assert second.link == f"/ui/runs/{run.id}?step=b"


def test_a_step_waits_for_a_limit_and_then_in_its_queue() -> None:
    known: dict[str, Any] = {"kind": "task", "calls": "t", "state": "success", "depends_on": ()}
    steps = [planned_step(name=name, started_at=at(60), ended_at=at(100), **known) for name in "ab"]
    run = SimpleNamespace(id=UUID(int=1), started_at=at(0), created_at=at(0), ended_at=at(100))
    limited, free = gantt_of_steps(cast(RunView, run), steps, frozenset(), at(100), {"a": at(50)}).rows
    assert (limited.ready, limited.limited, limited.x) == (0, 50, 60)
    assert (free.ready, free.limited, free.x) == (0, None, 60)


def test_a_step_below_skipped_steps_waits_for_their_dependencies() -> None:
    steps = [
        planned_step(
            name="d", kind="task", calls="t", state="success", depends_on=("c",), started_at=at(90), ended_at=at(95)
        ),
        planned_step(name="c", kind="task", calls="t", state="skipped", depends_on=("b",)),
        planned_step(name="b", kind="task", calls="t", state="skipped", depends_on=("a",)),
        planned_step(
            name="a", kind="task", calls="t", state="failed", depends_on=(), started_at=at(10), ended_at=at(80)
        ),
    ]
    run = SimpleNamespace(id=UUID(int=1), started_at=at(0), created_at=at(0), ended_at=at(100))
    ends = ends_of(steps)
    assert ends == {"a": at(80), "b": at(80), "c": at(80), "d": at(95)}
    last = gantt_of_steps(cast(RunView, run), steps, frozenset(), at(100), ends=ends).rows[-1]
    assert (last.name, last.ready) == ("d", 80)
    assert critical_path(steps) == {"a", "d"}


def test_earlier_attempts_of_a_step_do_not_count_as_queue_time() -> None:
    known: dict[str, Any] = {"kind": "task", "calls": "t", "state": "failed", "depends_on": ()}
    steps = [planned_step(name=name, started_at=at(60), ended_at=at(100), **known) for name in "ab"]
    run = SimpleNamespace(id=UUID(int=1), started_at=at(0), created_at=at(0), ended_at=at(100))
    tried = {"a": at(20)}
    gantt = gantt_of_steps(cast(RunView, run), steps, frozenset(), at(100), {"a": at(50)}, tried=tried)
    again, once = gantt.rows
    assert (again.limited, again.tried, again.x, gantt.is_retried) == (20, 20, 60, True)
    assert (once.limited, once.tried, once.x) == (None, None, 60)


def test_a_step_in_its_queue_is_drawn_while_the_run_is_open() -> None:
    known: dict[str, Any] = {"kind": "task", "calls": "t"}
    steps = [
        planned_step(name="a", depends_on=(), started_at=at(10), ended_at=at(40), state="success", **known),
        planned_step(name="b", depends_on=("a",), state="open", **known),
        planned_step(name="c", depends_on=("b",), state="waiting", **known),
    ]
    run = SimpleNamespace(id=UUID(int=1), started_at=at(0), created_at=at(0), ended_at=None)
    _, waits = gantt_of_steps(cast(RunView, run), steps, frozenset(), at(100)).rows
    assert (waits.name, waits.ready, waits.x, waits.width, waits.seconds, waits.link) == ("b", 40, 100, 0, 60, "")
    run.ended_at = at(100)
    assert len(gantt_of_steps(cast(RunView, run), steps, frozenset(), at(100)).rows) == 1


@pytest.mark.parametrize("seconds", [0.0004, 0.7, 14.4, 95, 5_000, 90_000, 2_000_000])
def test_the_axis_has_three_to_six_ticks(seconds: float) -> None:
    ticks = Gantt([], at(0), at(seconds), 0).ticks
    assert ticks[0] == 0
    assert ticks[-1] <= seconds
    assert len(ticks) <= 6
    assert len(ticks) >= 3 or seconds < 0.001


def test_a_group_of_steps_is_timed_by_its_first_step() -> None:
    known: dict[str, Any] = {
        "calls": "t",
        "state": "success",
        "depends_on": (),
        "started_at": at(10),
        "ended_at": at(90),
    }
    steps = [planned_step(name="s (30)", kind="group", **known), planned_step(name="a", kind="task", **known)]
    run = SimpleNamespace(id=UUID(int=1), started_at=at(0), created_at=at(0), ended_at=at(100))
    first = {"s (30)": planned_step(name="s1", kind="task", **known | {"depends_on": ("above",)})}
    rows = gantt_of_steps(cast(RunView, run), steps, frozenset(), at(100), {"s1": at(7)}, first, {"above": at(4)}).rows
    group, alone = rows
    assert (group.is_group, alone.is_group) == (True, False)
    assert (group.ready, group.limited, group.x) == (4, 7, 10), "it waited like the step that began first"
    assert (alone.ready, alone.limited) == (0, None)


def test_a_group_knows_the_step_that_began_first() -> None:
    times: dict[str, Any] = {"kind": "task", "calls": "t", "depends_on": ()}
    steps = [planned_step(name=f"load_{number}", started_at=at(500 - number), **times) for number in range(300)]
    folded = fold(steps, frozenset())
    ((name, first),) = folded.firsts.items()
    assert (name in folded.groups, first.name) == (True, "load_299")


def test_the_pause_before_a_retry_does_not_count_as_queue_time() -> None:
    task = SimpleNamespace(created_at=at(0), ended_at=at(100), status="success")
    attempts = [
        SimpleNamespace(attempt=1, outcome="failed", started_at=at(10), ended_at=at(20)),
        SimpleNamespace(attempt=2, outcome="success", started_at=at(90), ended_at=at(100)),
    ]
    line = timeline(cast(TaskView, task), cast(list[AttemptView], attempts), at(100))
    assert (line.waited, line.between, line.ran) == (10, 70, 20)
    assert [one.kind for one in line.stretches] == ["wait", "failed", "between", "success"]
