"""The run of a workflow, drawn as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from orchestrator.cli.runs.view import changes, draw, gutters, layers, to_lines
from orchestrator.store.insights import ErrorView, RunView, StepView

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
OOPS = ErrorView(kind="ValueError", message="bad\n\x1b[31mfile", traceback="", data={})
RUN = RunView(
    id=UUID("0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"),
    name="nightly",
    status="running",
    cancelling=False,
    total=108,
    open=68,
    success=38,
    failed=2,
    cancelled=0,
    skipped=0,
    created_at=NOW,
    started_at=NOW - timedelta(seconds=12),
    ended_at=None,
    workflow="nightly",
    version=3,
    tags=(),
    key=None,
    reason=None,
    parent_run=None,
    parent_step=None,
)


def step(name: str, state: str = "waiting", *depends_on: str, **options: Any) -> StepView:
    seconds = options.pop("seconds", None)
    has_ended = state in ("success", "failed", "cancelled")
    given = {
        "kind": "task",
        "calls": f"etl.{name}",
        "fan_out": False,
        "total": 1,
        "ended": int(has_ended or state == "skipped"),
        "failed": int(state == "failed"),
        "reason": None,
        "started_at": NOW - timedelta(seconds=seconds) if seconds else None,
        "ended_at": NOW if seconds and has_ended else None,
        "error": None,
    }
    return StepView(name=name, state=state, depends_on=depends_on, **(given | options))  # type: ignore[arg-type]


def fan(name: str, state: str, *depends_on: str, ended: int, total: int | None, **options: Any) -> StepView:
    return step(name, state, *depends_on, fan_out=True, ended=ended, total=total, **options)


NIGHTLY = [
    step("discover", "success", seconds=1.25),
    fan("process", "open", "discover", ended=37, total=100, failed=2, error=OOPS, seconds=8),
    step("check", "waiting", "process"),
    fan("shards", "success", "discover", ended=3, total=3, seconds=2),
    step("audit", "open", "discover"),
    step("report", "waiting", "check", "shards", "audit"),
    step("publish", "waiting", "report", kind="workflow", calls="site"),
    step("rare", "skipped", "report", reason="when: report.total > 1000"),
    fan("each", "waiting", "publish", "rare", "discover", "audit", ended=0, total=None),
]


def text_of(picture: RenderableType, width: int = 200) -> str:
    paper = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    paper.print(picture)
    output = paper.file
    assert isinstance(output, StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def test_a_run_is_drawn_as_forks_and_joins() -> None:
    assert (
        text_of(draw(RUN, NIGHTLY, NOW))
        == """\
● nightly v3  running  40/108 tasks  2 failed  12.0s  0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17

✓ discover                                      1.2s
├─ ● process  ━━━━━━━━────────────────  37/100  8.0s  2 failed, first: ValueError: bad �[31mfile
│  ○ check
├─ ✓ shards   ━━━━━━━━━━━━━━━━━━━━━━━━     3/3  2.0s
╰─ ● audit                                            queued
○ report                                              ← check, shards, audit
├─ ○ publish                                          workflow site
╰─ ⤼ rare                                             when: report.total > 1000
○ each        ────────────────────────     0/?        ← publish, rare, discover, 1 more"""
    )


def test_lines_are_truncated_at_the_width_of_the_terminal() -> None:
    lines = text_of(draw(RUN, NIGHTLY, NOW), width=60).splitlines()
    assert max(map(len, lines)) == 60
    assert len(lines) == len(NIGHTLY) + 2
    assert lines[3].startswith("├─ ● process  ━━━━━━━━────────────────  37/100  8.0s")
    assert lines[3].endswith("…")


def test_a_narrow_terminal_shortens_bars_and_keeps_counts() -> None:
    steps = [fan("process-each-of-them-in-turn", "open", ended=2, total=3, started_at=NOW)]
    for width in (60, 80, 120):
        line = text_of(draw(RUN, steps, NOW, None, width), width).splitlines()[2]
        assert "2/3" in line, line
        assert len(line) <= width


def test_every_state_has_its_symbol() -> None:
    states = ("waiting", "open", "success", "failed", "skipped", "cancelled")
    steps = [step(state, state) for state in states]
    lines = text_of(draw(RUN, steps, NOW)).splitlines()[2:]
    assert [line[3] for line in lines] == ["○", "●", "✓", "✗", "⤼", "⊘"]


def layered(depth: int, width: int, states: Sequence[str]) -> list[StepView]:
    return [
        step(
            f"s{layer}_{place}",
            states[layer] if layer < len(states) else "waiting",
            *(f"s{layer - 1}_{other}" for other in range(width) if layer),
        )
        for layer in range(depth)
        for place in range(width)
    ]


def test_many_steps_are_drawn_by_layer_with_the_first_failures() -> None:
    steps = layered(4, 20, ["success", "open"])
    steps[23] = replace(steps[23], state="failed", ended=1, failed=1, error=OOPS)
    assert text_of(draw(RUN, steps, NOW)).splitlines()[2:] == [
        "✓ layer 1  ━━━━━━━━━━━━━━━━━━━━━━━━  20/20    20 steps",
        "● layer 2  ━───────────────────────   1/20    1 failed  20 steps",
        "○ layer 3  ────────────────────────   0/20    20 steps",
        "○ layer 4  ────────────────────────   0/20    20 steps",
        "✗ s1_3  ValueError: bad �[31mfile",
    ]


def test_skipped_steps_are_counted_in_single_and_folded_layers() -> None:
    steps = layered(50, 4, ["success"] * 50)
    steps[9] = replace(steps[9], state="skipped")
    lines = text_of(draw(replace(RUN, skipped=1), steps, NOW)).splitlines()
    assert "40/108 tasks  2 failed  1 skipped" in lines[0]
    assert lines[2].split()[:3] == ["⤼", "12", "layers"]
    assert lines[2].endswith("48/48    1 skipped")


def test_many_layers_are_folded_around_the_active_layer() -> None:
    lines = text_of(draw(RUN, layered(50, 2, ["success"] * 20 + ["open"]), NOW, height=14)).splitlines()
    assert len(lines) == 2 + 10
    assert [line.partition("  ")[0] for line in lines[2:]] == [
        "✓ 16 layers",
        *(f"✓ layer {place}" for place in range(17, 21)),
        "● layer 21",
        *(f"○ layer {place}" for place in range(22, 25)),
        "○ 26 layers",
    ]


def test_a_low_terminal_also_shows_layers() -> None:
    assert "layer 1" in text_of(draw(RUN, NIGHTLY, NOW, height=10))
    assert "layer 1" not in text_of(draw(RUN, NIGHTLY, NOW, height=24))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("success", "success"), "✓"),
        (("success", "skipped"), "⤼"),
        (("skipped", "skipped"), "⤼"),
        (("failed", "success"), "✗"),
        (("failed", "waiting"), "●"),
        (("cancelled", "success"), "⊘"),
        (("waiting", "waiting"), "○"),
    ],
)
def test_a_layer_shows_its_most_important_state(states: tuple[str, str], expected: str) -> None:
    lines = text_of(draw(RUN, [step(f"s{place}", state) for place, state in enumerate(states * 30)], NOW))
    assert lines.splitlines()[2][0] == expected


def test_without_a_terminal_each_change_is_printed_as_a_line() -> None:
    before = to_lines([step("a", "open", seconds=1), fan("b", "open", ended=1, total=4, seconds=2), step("c")])
    after = to_lines(
        [
            step("a", "success", seconds=2),
            fan("b", "open", ended=3, total=4, failed=1, error=OOPS, seconds=2),
            step("c", "open"),
            step("d", "skipped", reason="when: no"),
            step("e"),
        ]
    )
    assert changes([], before, NOW) == ["a: running", "b: running 1/4"]
    assert changes(before, after, NOW) == [
        "a: success in 2.0s",
        "b: running 3/4 (1 failed, first: ValueError: bad �[31mfile)",
        "c: queued",
        "d: skipped (when: no)",
    ]
    assert changes(after, after, NOW + timedelta(seconds=9)) == []


# -- the layout


def drawn(graph: Mapping[str, Sequence[str]]) -> list[str]:
    return [gutter + name for gutter, name in gutters(graph)]


def test_a_chain_stays_in_its_column() -> None:
    assert drawn({"c": "b", "b": "a", "a": ""}) == ["a", "b", "c"]


def test_fully_connected_layers_are_blocks() -> None:
    assert drawn({"a": "", "b": "", "c": "ab", "d": "ab", "e": "cd"}) == ["╭─ a", "╰─ b", "╭─ c", "╰─ d", "e"]


def test_a_branch_within_a_branch_is_indented() -> None:
    graph = {"a": "", "b": "a", "c": "a", "d": "b", "e": "b", "f": "de", "g": "fc"}
    assert drawn(graph) == ["a", "├─ b", "│  ├─ d", "│  ╰─ e", "│  f", "╰─ c", "g"]


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    names = [f"n{place}" for place in range(draw(st.integers(1, 20)))]
    graph = {
        name: draw(st.lists(st.sampled_from(names[:place]), unique=True, max_size=4)) if place else []
        for place, name in enumerate(names)
    }
    return {name: graph[name] for name in draw(st.permutations(names))}


@given(graphs())
@pytest.mark.slow
def test_every_step_is_drawn_once_and_below_its_dependencies(graph: dict[str, list[str]]) -> None:
    order = [name for _, name in gutters(graph)]
    assert sorted(order) == sorted(graph)
    assert all(order.index(parent) < order.index(name) for name, parents in graph.items() for parent in parents)
    depth = {name: place for place, layer in enumerate(layers(graph)) for name in layer}
    assert all(depth[name] == max((depth[p] + 1 for p in parents), default=0) for name, parents in graph.items())
