"""The leader's cache of flow runs matches Postgres, and holds no more than needed."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection

from orchestrator.scheduler.flow.plans import Flows
from orchestrator.store import leases
from orchestrator.store.flow import runs as store
from orchestrator.store.flow.runs import FlowRun
from tests.integration.flow_stage import Stage
from tests.integration.stage import System, raw

LINE: dict[str, Any] = {
    "start": "a",
    "nodes": {
        "a": {"exec_type": "local_func", "func": "transform", "params": {"mul": 2}, "prep": {"input_key": "$params.n"}},
        "b": {"exec_type": "local_func", "func": "transform", "params": {"mul": 3}, "prep": {"input_key": "n"}},
        "ask": {"kind": "approval"},
        "c": {"exec_type": "local_func", "func": "transform", "params": {"mul": 5}, "prep": {"input_key": "n"}},
    },
    "edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "ask"}, {"from": "ask", "action": "approved", "to": "c"}],
}
for _node in "abc":
    LINE["nodes"][_node]["post"] = {"output_key": "n"}


@pytest.fixture
def stage(system: System) -> Stage:
    stage = Stage(system)
    system.app.flows.publish("line", LINE)
    return stage


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """The run ids of each read."""
    found: list[list[bytes]] = []
    load = store.load

    def counted(connection: Connection, ids: list[bytes], over: list[bytes]) -> list[FlowRun]:
        found.append(list(ids))
        return load(connection, ids, over)

    monkeypatch.setattr(store, "load", counted)
    return found


def kept(stage: Stage) -> Flows:
    return stage.system.scheduler.term.flows


def test_a_run_is_read_only_when_it_begins_and_after_waiting(stage: Stage, loads: list[list[bytes]]) -> None:
    run = stage.system.app.flows["line"].start(n=1)
    stage.system.tick_until(lambda: run.cursor() == "a")
    assert len(kept(stage)._runs) == 1
    stage.run(run, 10)
    assert (run.cursor(), run.shared()["n"]) == ("ask", 6)
    assert loads == [[raw(run)]]
    assert len(kept(stage)._runs) == 0, "it may wait for a year"
    run.approve()
    assert stage.run(run) == "success"
    assert run.result()["n"] == 30
    assert loads == [[raw(run)]] * 2
    assert len(kept(stage)._runs) == 0


def test_after_a_cancel_or_takeover_runs_continue_from_postgres(stage: Stage) -> None:
    system = stage.system
    one, other = (system.app.flows["line"].start(n=n) for n in (1, 2))
    system.tick_until(lambda: one.cursor() == other.cursor() == "a")
    assert len(kept(stage)._runs) == 2
    one.cancel()
    system.pass_seconds(2)
    assert len(kept(stage)._runs) == 1
    stage.work()
    system.pass_seconds(2)
    assert (one.status(), other.cursor()) == ("cancelled", "b")
    system.lead()
    stage.worker.beat()
    system.settle()
    assert len(kept(stage)._runs) == 0
    stage.run(other, 10)
    assert (other.cursor(), other.shared()["n"]) == ("ask", 12)


def test_plans_of_a_failed_tick_are_not_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    system = stage.system
    run = system.app.flows["line"].start(n=1)
    system.tick_until(lambda: run.cursor() == "a")
    assert stage.work() == 1

    def fail(*_: object) -> None:
        assert len(kept(stage)._runs) == 1
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(leases, "commit", fail)
        system.tick()
    assert len(kept(stage)._runs) == 0
    assert run.cursor() == "a"
    stage.run(run, 10)
    assert (run.cursor(), run.shared()["n"]) == ("ask", 6)
    rows = system.sql("SELECT node, status FROM orchestrator.node_runs ORDER BY number")
    assert [(row["node"], row["status"]) for row in rows] == [("a", "success"), ("b", "success")]
    assert len(stage.calls) == 2
