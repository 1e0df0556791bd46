"""However wide a tree of runs grows, a tick makes and cancels so many of its runs, and other trees go on beside it."""

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
    """Let ticks have no time at all."""
    monkeypatch.setattr("orchestrator.scheduler.budget.SHARE", 0.0)


def start(system: System, name: str, **params: Any) -> RunHandle[Any]:
    """Start a run that is the first of a tree of its own: those of one millisecond count as one."""
    began = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == began:
        pass
    return system.app.workflows[name].start(**params)


def number(system: System, where: str, **values: Any) -> int:
    return int(system.sql(f"SELECT count(*) AS count FROM orchestrator.runs WHERE {where}", **values)[0]["count"])


def children(system: System, run: RunHandle[Any]) -> int:
    return number(system, "parent_run = CAST(:id AS uuid)", id=run.id)


@pytest.mark.parametrize(("has_time", "most"), [(True, MOST), (False, NEXT)])
def test_a_tree_grows_by_so_many_runs_in_a_tick(
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
def test_every_tree_gets_children_whatever_those_before_it_take(
    system: System, monkeypatch: pytest.MonkeyPatch, has_time: bool
) -> None:
    """More trees than there is room for, and the last of them needs one child alone."""
    if not has_time:
        hurry(monkeypatch)
    apply(system, LEAF, FAN, SINGLE)
    trees = [start(system, "fan") for _ in range(15)]
    last = start(system, "single")
    for _ in range(4):  # the first finds out how large the definitions are
        before = [children(system, tree) for tree in trees]
        system.tick()
        assert sum(children(system, tree) for tree in trees) < sum(before) + 2 * MOST + NEXT + len(trees)
    assert children(system, last) == 1
    assert all(children(system, tree) > many for tree, many in zip(trees, before, strict=True))


def test_a_tree_whose_children_cannot_be_created_is_found(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was rolled back with it has taken no room from those among which it is looked for."""
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


def test_a_tree_is_cancelled_some_at_once(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(system, LEAF, FAN)
    run = start(system, "fan", width=40)
    system.tick_until(lambda: number(system, "status = 'running'") == 41)
    hurry(monkeypatch)
    run.cancel()
    marked: list[int] = []
    for _ in range(200):
        before = number(system, "cancelling")
        system.tick()
        marked.append(number(system, "cancelling") - before)
        if number(system, "ended_at IS NULL") == 0:
            break
    assert number(system, "status = 'cancelled'") == 41
    assert max(marked) == 5 + 1, "and the first of them, when it was asked"
