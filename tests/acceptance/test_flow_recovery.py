"""Scheduler and worker are killed in the middle of every kind of node, and every run reaches its result."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import project
import pytest

from tests.acceptance.stack import Stack
from tests.waiting import eventually


@pytest.fixture
def settings() -> dict[str, float]:
    return {"worker_ttl": 3.0, "lease": 2.0}


WORK: dict[str, Any] = {"exec_type": "local_func", "func": project.logged_when.name, "post": {"output_key": "done"}}
INNER = {"start": "n", "nodes": {"n": {**WORK, "params": {"number": 1}}}}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "executor": ({**WORK, "params": {"number": 1}}, 1),
    "parallel": (
        {
            **WORK,
            "parallel_mode": "concurrent",
            "parallel_execs": [{"params": {"number": 1}}, {"params": {"number": 2}}],
        },
        [1, 2],
    ),
    "foreach": ({**WORK, "prep": {"input_key": "$params.items"}}, [1, 2]),
    "subflow": ({"subflow": INNER, "post": {"output_key": "done"}}, {"done": 1}),
    "timer": ({"params": {"delay_ms": 2_500}, "prep": {"input_key": "$params.val"}, "post": WORK["post"]}, 3),
    "wait_event": ({"params": {"signal_key": "$shared.flag", "timeout_ms": 600_000}, "post": WORK["post"]}, "here"),
    "approval": ({"params": {"approval_key": "$shared.ok", "timeout_ms": 600_000}, "post": WORK["post"]}, "approved"),
}
"""By kind: a node, and its expected result."""
TAKES = {"foreach": ("path", "go", "items"), "timer": ("val",), "wait_event": (), "approval": ()}
"""By kind: the parameters of its flow, if not those of the function that most nodes call."""
LOOP: dict[str, Any] = {
    "start": "node",
    "max_steps": 1_000_000,
    "nodes": {
        "node": {"kind": "choice", "choice_cases": [{"action": "on", "expr": {"ne": ["$shared.stop", True]}}]},
        "pause": {"kind": "timer", "params": {"delay_ms": 10}},
    },
    "edges": [{"from": "node", "action": "on", "to": "pause"}, {"from": "pause", "to": "node"}],
}
"""A choice waits for nothing, so this flow loops until the signal `stop`."""
_MIDDLE = """
SELECT (SELECT count(*) FROM orchestrator.tasks WHERE status = 'running') >= 5
   AND (SELECT count(*) FROM orchestrator.timers) >= 3
   AND (SELECT count(*) FROM orchestrator.node_runs WHERE kind = 'choice') > 5
"""
_GAPS = """
SELECT count(*) FROM (
       SELECT run_id FROM orchestrator.node_runs JOIN orchestrator.runs ON id = run_id GROUP BY run_id
       HAVING min(number) <> 1 OR max(number) <> count(*)) AS wrong
"""
_OPEN = """
SELECT (SELECT count(*) FROM orchestrator.tasks) + (SELECT count(*) FROM orchestrator.timers)
     + (SELECT count(*) FROM orchestrator.inbox) + (SELECT coalesce(sum(open), 0) FROM orchestrator.runs)
"""


@pytest.mark.parametrize("victims", ["both", "scheduler", "worker"])
@pytest.mark.long_for("scheduler", "worker")
def test_runs_survive_kills_in_the_middle_of_every_kind_of_node(stack: Stack, tmp_path: Path, victims: str) -> None:
    log, go, flows = tmp_path / "log", tmp_path / "go", project.app.flows
    scheduler, worker = stack.scheduler(), stack.worker()
    runs = {}
    for kind, (node, _) in KINDS.items():
        after = {"kind": "choice", "default_action": "end"}
        graph = {"start": "node", "nodes": {"node": {"kind": kind, **node}, "after": after}}
        flows.publish(kind, {**graph, "edges": [{"from": "node", "action": "default", "to": "after"}]})
        given = {"path": str(log), "go": str(go), "val": 3, "items": [{"number": 1}, {"number": 2}]}
        runs[kind] = flows[kind].start(**{name: given[name] for name in TAKES.get(kind, ("path", "go"))})
    flows.publish("choice", LOOP)
    loop = flows["choice"].start()
    eventually(lambda: stack.scalar(_MIDDLE), "every run is in the middle of its node")
    if victims != "worker":
        scheduler.kill()
    if victims != "scheduler":
        worker.kill()
    runs["wait_event"].signal("flag", "here")
    runs["approval"].approve()
    loop.signal("stop")
    go.touch()
    if victims != "worker":
        stack.scheduler()
    if victims != "scheduler":
        stack.worker()
    for kind, run in runs.items():
        assert run.result(timeout=60)["done"] == KINDS[kind][1], kind
        found = project.app._client.backend.flows.node_runs(UUID(run.id).bytes)
        visits = Counter(visit.node for visit in found if visit.branch is None and visit.status == "success")
        assert visits == {"node": 1, "after": 1} | ({"node/n": 1} if kind == "subflow" else {}), kind
    assert loop.result(timeout=60) == {"stop": True}
    assert stack.scalar(_GAPS) == 0
    assert stack.scalar(_OPEN) == 0
    assert {*log.read_text().split()} == {"1", "2"}
