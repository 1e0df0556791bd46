"""Large flows delay no other work: their total size is bounded, and the leader reads few in a tick, each once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Connection

from orchestrator.domain.flow import checks
from orchestrator.errors import InvalidWorkflow
from orchestrator.scheduler import budget
from orchestrator.scheduler.flow import plans
from orchestrator.sdk.flow import reading
from orchestrator.store.flow import runs
from orchestrator.store.flow.runs import StoredFlow
from tests.integration.stage import System
from tests.waiting import eventually


def nap(nodes: int, **params: Any) -> dict[str, Any]:
    """Return a flow that pauses at each of its nodes."""
    timers = {f"n{number}": {"kind": "timer", "params": {"delay_ms": 10, **params}} for number in range(nodes)}
    edges = [{"from": f"n{number}", "to": f"n{number + 1}"} for number in range(nodes - 1)]
    return {"start": "n0", "nodes": timers, "edges": edges}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the number of reads of each definition."""
    found: Counter[str] = Counter()
    read = runs.read

    def counted(connection: Connection, name: str, version: int) -> StoredFlow | None:
        found[name] += 1
        return read(connection, name, version)

    monkeypatch.setattr(runs, "read", counted)
    return found


def test_exponentially_nested_flows_are_rejected_before_expansion(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = nap(1)
    for _ in range(14):
        both = {key: {"kind": "subflow", "subflow": inline} for key in ("a", "b")}
        inline = {"start": "a", "nodes": both, "edges": [{"from": "a", "to": "b"}]}
    with pytest.raises(InvalidWorkflow, match="more than 10,000 nodes"):
        reading.from_data(inline)
    monkeypatch.setattr(checks, "MAX_NODES", 100)
    flows = system.app.flows
    flows.publish("level0", nap(1))
    with pytest.raises(InvalidWorkflow, match="more than 10,000 nodes, including those of its subflows"):
        for level in range(1, 15):
            both = {key: {"kind": "subflow", "subflow": {"flow": f"level{level - 1}"}} for key in ("a", "b")}
            flows.publish(f"level{level}", {"start": "a", "nodes": both, "edges": [{"from": "a", "to": "b"}]})
    assert level == 6, "which would have 190"
    asked: list[str] = []

    def find(name: str, version: int | None) -> tuple[int, dict[str, Any]]:
        asked.append(f"{name} {version}")
        return 1, nap(1)

    many = {f"n{number}": {"kind": "subflow", "subflow": {"flow": "one"}} for number in range(51)}
    with pytest.raises(InvalidWorkflow, match="more than 10,000 nodes"):
        reading.from_data({"start": "n0", "nodes": many}, find=find)
    assert asked == ["one None"]


def test_a_flow_larger_than_the_cache_stays_cached(
    system: System, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_CACHED_NODES", 30)
    system.lead()
    for name, nodes in (("large", 60), ("small", 25)):  # each has more nodes than there are ticks
        system.app.flows.publish(name, nap(nodes))
    runs = [system.app.flows[name].start() for name in ("large", "small")]

    def has_moved() -> bool:
        system.pass_seconds(after=0.1)
        return max(run.cursor() for run in runs) > "n1"

    reads.clear()
    for _ in range(10):
        system.pass_seconds(after=0.1)
    eventually(has_moved, "a node after the first has begun")  # timers run by the clock of Postgres
    assert [run.status() for run in runs] == ["running", "running"]
    assert reads == {"large": 1, "small": 1}


def test_a_tick_reads_few_definitions_and_defers_the_rest(
    system: System, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_MAX_NODES", 5)
    names = [f"flow{number}" for number in range(8)]
    for number, name in enumerate(names):
        system.app.flows.publish(name, nap(3, number=number))
    runs = [system.app.flows[name].start() for name in names]
    reads.clear()
    most = 0
    for _ in range(40):
        before = reads.total()
        system.pass_seconds(after=0.1)
        most = max(most, reads.total() - before)
        if all(run.status() == "success" for run in runs):
            break
    assert [run.status() for run in runs] == ["success"] * 8
    assert most == 2
    assert reads == dict.fromkeys(names, 1)
    (row,) = system.sql("SELECT count(*) AS runs FROM orchestrator.runs WHERE open <> 0 OR total <> 1 OR success <> 1")
    assert row["runs"] == 0
