"""Graphs of very many steps are drawn as groups, without cycles, whatever their shape."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from orchestrator.api.dashboard.graph import MAX_DRAWN, fold, planned_step, rows_of, worst
from orchestrator.api.dashboard.layout import draw
from orchestrator.store.insights import StepView


def step(name: str, *depends_on: str, state: str = "success") -> StepView:
    return planned_step(name=name, kind="task", calls="t", depends_on=depends_on, state=state)


def wide(number: int) -> list[StepView]:
    """Return two layers of similar steps between a first and a last step."""
    loads = [step(f"load_{one}", "begin") for one in range(number)]
    checks = [step(f"check-{one}", f"load_{one}", state="failed" if one == 7 else "success") for one in range(number)]
    return [step("begin"), *loads, *checks, step("end", *(one.name for one in checks), state="waiting")]


def test_small_graphs_are_drawn_without_groups() -> None:
    steps = wide(70)
    assert fold(steps, frozenset()).steps == steps


def test_similar_steps_of_a_layer_form_one_group() -> None:
    found = fold(wide(1_000), frozenset({"load_3"}))
    assert [(one.name, one.state, one.total, one.failed) for one in found.steps] == [
        ("begin", "success", None, 0),
        ("load (1000)", "success", 1000, 0),
        ("check (1000)", "failed", 1000, 1),
        ("end", "waiting", None, 0),
    ]
    assert found.steps[2].depends_on == ("load (1000)",)
    assert (found.groups, found.critical) == ({"load (1000)", "check (1000)"}, set()), (
        "one of them is critical, not all"
    )


def test_a_group_shows_how_many_steps_were_skipped() -> None:
    steps = wide(1_000)
    steps[3:8] = [step(one.name, *one.depends_on, state="skipped") for one in steps[3:8]]
    loads, checks = fold(steps, frozenset()).steps[1:3]
    assert (loads.state, loads.reason) == ("skipped", "5 skipped, 995 success")
    assert (checks.state, checks.reason) == ("failed", "1 failed, 999 success")
    assert (loads.ended, checks.ended) == (995, 1000), "the bar is not green for what was skipped"


def test_groups_of_one_name_show_their_range_and_their_last_end() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    steps = [
        replace(step(f"part_{one}", *([f"part_{one - 100}"] if one >= 100 else [])), started_at=at, ended_at=at)
        for one in range(300)
    ]
    steps[150] = replace(steps[150], state="skipped", started_at=None, ended_at=None)
    found = fold(steps, frozenset()).steps
    assert [one.name for one in found] == ["part_0…99 (100)", "part_100…199 (100)", "part_200…299 (100)"]
    graph = draw(found, frozenset())
    assert [one.label for one in graph.nodes] == ["part_0…99", "part_100…199", "part_200…299"]
    assert draw([step("a_rather_long_name_17")], frozenset()).nodes[0].label == "a_rather…g_name_17"
    assert found[1].ended_at == at, "a step that was skipped has no end of its own"


def test_an_open_group_lists_its_failed_steps_first() -> None:
    found = fold(wide(1_000), frozenset(), ["check (1000)"])
    names = [one.name for one in found.steps]
    assert names[2] == "check-7"
    assert len(names) == 3 + MAX_DRAWN + 1
    assert "check (1000)" in found.groups, "the rest"


def test_a_grid_row_has_the_worst_state_of_similar_steps() -> None:
    names = [f"load_{number}" for number in range(100)]
    assert rows_of(names[:3], 60) == {name: [name] for name in names[:3]}
    assert rows_of(names, 60) == {"load (100)": names}
    found = rows_of(names, 60, failed={"load_7"})
    assert found == {"load_7": ["load_7"], "load (100)": names}, "a failed one stands by itself, too"
    assert rows_of(names, 60, opened=["load (100)"]) == {name: [name] for name in names}
    many = [f"{letter}{other}" for letter in "abcdefghij" for other in "abcdefghij"]
    found = rows_of(many, 60)
    assert len(found) == 61
    assert found["others (40)"] == many[60:], "none is left out"
    assert [worst(one) for one in ([], ["success", "failed"], ["waiting", "success"], ["skipped"])] == [
        "",
        "failed",
        "open",
        "skipped",
    ]


@pytest.mark.parametrize("seed", range(5))
def test_any_graph_is_drawn_with_few_nodes(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"{chance.choice('abcdefgh') * chance.randint(1, 9)}{place}" for place in range(2_000)]
    before = [
        (),
        *([names[place - 1]] if seed == 4 else names[max(0, place - 90) : place] for place in range(1, 2_000)),
    ]
    steps = [step(name, *chance.sample(some, min(len(some), 3))) for name, some in zip(names, before, strict=True)]
    for opened in ((), tuple(fold(steps, frozenset()).groups)[:1]):
        found = fold(steps, frozenset(), opened)
        drawn = draw(found.steps, found.critical, found.frames)  # a cycle would never end
        assert len(drawn.nodes) <= 2 * MAX_DRAWN + 1
