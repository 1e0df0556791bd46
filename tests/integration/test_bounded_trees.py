"""However wide a tree of runs grows, a tick creates and cancels a bounded number of its runs, and other trees
progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator import RunHandle
from orchestrator.scheduler.runs.creation import create_runs
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.runs.creation import NewRun
from tests.integration.stage import System, raw
from tests.integration.test_dag_runs import apply, row

TREE = """
name: tree
params: {n: {default: 0}}
tasks: {down: {workflow: tree, when: "${params.n < 2}", parallel: 6, input: {n: "${params.n + 1}"}}}
"""
RUNS = 1 + 6 + 36
LEAF = "name: leaf\ntasks: {a: {task: job}}"
FAN = 'name: fan\nparams: {width: {default: 100}}\ntasks: {down: {workflow: leaf, parallel: "${params.width}"}}'
SINGLE = "name: single\ntasks: {down: {workflow: leaf}}"
MOST, NEXT = 20, 3


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.scheduler.budget._MAX_CHILDREN", MOST)
    monkeypatch.setattr("orchestrator.scheduler.budget._CHILDREN_OF_FURTHER_TREE", NEXT)
    monkeypatch.setattr("orchestrator.scheduler.runs.cancels._MAX_MARKED", 5)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave ticks no time at all."""
    monkeypatch.setattr("orchestrator.scheduler.budget.SHARE", 0.0)


def start(system: System, name: str, **params: Any) -> RunHandle[Any]:
    """Start a run as the root of its own tree: runs of one millisecond count as one tree."""
    began = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == began:
        pass
    return system.app.workflows[name].start(**params)


def count_runs(system: System, where: str, **values: Any) -> int:
    return int(system.sql(f"SELECT count(*) AS count FROM orchestrator.runs WHERE {where}", **values)[0]["count"])


def children(system: System, run: RunHandle[Any]) -> int:
    return count_runs(system, "parent_run = CAST(:id AS uuid)", id=run.id)


@pytest.mark.parametrize(("has_time", "most"), [(True, MOST), (False, NEXT)])
def test_a_tree_grows_by_a_bounded_number_of_runs_per_tick(
    system: System, monkeypatch: pytest.MonkeyPatch, has_time: bool, most: int
) -> None:
    if not has_time:
        hurry(monkeypatch)
    apply(system, TREE)
    run = start(system, "tree")
    grown: list[int] = []
    for _ in range(200):
        before = system.count("runs")
        system.tick()
        grown.append(system.count("runs") - before)
        if row(system, run)["ended_at"] is not None:
            break
    assert row(system, run)["status"] == "success"
    assert system.count("runs") == RUNS
    assert max(grown) == most


@pytest.mark.parametrize("has_time", [True, False])
def test_every_tree_gets_children_even_behind_many_wide_trees(
    system: System, monkeypatch: pytest.MonkeyPatch, has_time: bool
) -> None:
    """There are more trees than capacity, and the last one needs a single child."""
    if not has_time:
        hurry(monkeypatch)
    apply(system, LEAF, FAN, SINGLE)
    trees = [start(system, "fan") for _ in range(15)]
    last = start(system, "single")
    for _ in range(4):  # the first tick measures the definitions
        before = [children(system, tree) for tree in trees]
        system.tick()
        assert sum(children(system, tree) for tree in trees) < sum(before) + 2 * MOST + NEXT + len(trees)
    assert children(system, last) == 1
    assert all(children(system, tree) > many for tree, many in zip(trees, before, strict=True))


def test_only_the_tree_whose_children_cannot_be_created_becomes_stuck(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rolled-back children take no capacity from the trees that are searched for the culprit."""
    apply(system, LEAF, FAN)
    bad, good = start(system, "fan"), start(system, "fan")

    def refusing(tx: Transaction, new: Sequence[NewRun]) -> set[bytes]:
        if any(run.parent_run == raw(bad) for run in new):
            raise ValueError("no")
        return create_runs(tx, new)

    monkeypatch.setattr("orchestrator.scheduler.dag.creation.create_runs", refusing)
    system.tick(4)
    assert row(system, bad)["stuck"] is not None
    assert children(system, good) > 0
    assert row(system, good)["stuck"] is None


def test_a_tree_is_cancelled_over_several_ticks(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(system, LEAF, FAN)
    run = start(system, "fan", width=40)
    system.tick_until(lambda: count_runs(system, "status = 'running'") == 41)
    hurry(monkeypatch)
    run.cancel()
    marked: list[int] = []
    for _ in range(200):
        before = count_runs(system, "cancelling")
        system.tick()
        marked.append(count_runs(system, "cancelling") - before)
        if count_runs(system, "ended_at IS NULL") == 0:
            break
    assert count_runs(system, "status = 'cancelled'") == 41
    assert max(marked) == 5 + 1, "and the first of them, when it was asked"
