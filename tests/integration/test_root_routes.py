"""The routes at the root, as clients of other schedulers call them: workflows with their tasks, and flows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from orchestrator.errors import InvalidWorkflow
from tests.integration.flow_stage import Stage
from tests.integration.serving import serving
from tests.integration.stage import System
from tests.integration.test_flows import executor

NIGHTLY = """
name: nightly
tasks:
  fetch: {task: job, foreach: "${[1, 2]}"}
  load: {task: job, depends_on: [fetch], retries: 0}
  report: {task: job, depends_on: [load]}
"""
WAIT = {"start": "wait", "nodes": {"wait": {"kind": "wait_event", "params": {"signal_key": "go"}}}}


@pytest.fixture
def stage(system: System) -> Stage:
    return Stage(system)


@pytest.fixture
def http(stage: Stage) -> Iterator[httpx.Client]:
    with serving(stage.system.settings) as address, httpx.Client(base_url=address, timeout=30) as client:
        yield client


def test_yaml_workflows_and_the_tasks_of_their_runs_have_routes(stage: Stage, http: httpx.Client) -> None:
    applied = http.post("/workflows", content=NIGHTLY, headers={"Content-Type": "application/yaml; charset=utf-8"})
    assert applied.status_code == 200, applied.text
    assert (applied.json()["name"], applied.json()["new"]) == ("nightly", True)
    wrong = http.post("/workflows", content="name: [", headers={"Content-Type": "text/yaml"})
    assert wrong.status_code == 422
    run = http.post("/workflows/nightly/runs", json={}).json()["id"]
    stage.system.pass_seconds(2)
    stage.worker.succeed(*stage.worker.take())
    stage.system.pass_seconds(2)
    stage.worker.fail(*stage.worker.take())
    stage.system.pass_seconds(2)
    first = http.get(f"/runs/{run}/tasks", params={"limit": 2}).json()
    assert [(one["step"], one["index"], one["attempt"]) for one in first["items"]] == [("fetch", 0, 1), ("fetch", 1, 1)]
    rest = http.get(f"/runs/{run}/tasks", params={"cursor": first["next"]}).json()
    assert rest["next"] is None
    load, report = rest["items"]
    assert (load["step"], load["status"], load["name"]) == ("load", "failed", "job")
    assert (report["step"], report["status"], report["id"], report["attempt"]) == ("report", "skipped", None, 0)
    for one in [*first["items"], load]:
        query = {"index": one["index"], "attempt": one["attempt"]}
        assert http.get(f"/runs/{run}/tasks/{one['step']}/logs", params=query).json()["lines"] == []
    missing = http.get(f"/runs/{run}/tasks/report/logs")
    assert missing.status_code == 404
    assert f"step 'report' has no task: it is skipped ({report['reason']})." in missing.json()["detail"]


def test_the_tasks_of_a_flow_name_their_node_and_index(stage: Stage, http: httpx.Client) -> None:
    node = {"kind": "foreach", "exec_type": "local_func", "service": "route", "prep": {"input_key": "$params.list"}}
    stage.system.app.flows.publish("each", {"start": "each", "nodes": {"each": node}})
    run = stage.system.app.flows["each"].start(list=[1, 2])
    assert stage.run(run) == "success"
    found = http.get(f"/runs/{run.id}/tasks").json()["items"]
    assert [(one["step"], one["index"]) for one in found] == [("each", 0), ("each", 1)]
    assert http.get(f"/runs/{run.id}/tasks/each/logs", params={"index": 1}).status_code == 200


def test_both_cancel_routes_give_the_same_answer(stage: Stage, http: httpx.Client) -> None:
    flows = stage.system.app.flows
    flows.publish("wait", WAIT)

    def doors(run: str) -> tuple[bool, bool]:
        answers = http.post(f"/runs/{run}/cancel"), http.post("/tasks/cancel", params={"id": run})
        assert {one.status_code for one in answers} <= {200, 202, 409}
        return answers[0].is_success, answers[1].is_success

    done, open_ = flows["wait"].start(), flows["wait"].start()
    stage.run(done, 2)
    done.signal("go")
    assert stage.run(done) == "success"
    assert doors(done.id) == (False, False)
    assert doors(open_.id) == (True, True)
    assert stage.run(open_, 4) == "cancelled"
    assert doors(open_.id) == (True, True)


def test_a_flow_starts_with_a_given_shared_state(stage: Stage, http: httpx.Client) -> None:
    flows = stage.system.app.flows
    nodes: dict[str, Any] = {"ask": {"kind": "approval"}, **WAIT["nodes"]}  # type: ignore[dict-item]
    flows.publish("begun", {**WAIT, "nodes": nodes, "edges": [{"from": "wait", "to": "ask"}]})
    run = flows["begun"].options(shared={"order": {"id": 7}}).start()
    assert run.shared() == {"order": {"id": 7}}
    stage.run(run, 2)
    run.signal("order.paid", True)
    run.signal("go", 1)
    stage.run(run, 2)
    assert (run.cursor(), run.shared()) == ("ask", {"order": {"id": 7, "paid": True}, "go": 1})
    again = run.rerun()
    assert again.shared() == {"order": {"id": 7}}
    for body in ({"shared": {"x": 1}}, {"SharedJSON": '{"x": 1}'}):
        task = http.post("/tasks", json={"flow_id": "begun", **body}).json()["id"]
        assert http.get("/tasks/get", params={"id": task}).json()["shared"] == {"x": 1}
    started = http.post("/api/v1/flows/begun/runs", json={"shared": {"x": 2}}).json()["id"]
    assert http.get(f"/api/v1/runs/{started}/flow").json()["shared"] == {"x": 2}
    with pytest.raises(InvalidWorkflow, match="decides approval 'ask' at 'ask': use `approve` for that"):
        flows["begun"].options(shared={"ask": "approved"}).start()


def test_each_publish_route_applies_its_own_default_edge_rule(stage: Stage, http: httpx.Client) -> None:
    """A failed node follows its default edge only in flows published on the route of the system that defines it so."""
    shop = {
        "start": "charge",
        "nodes": {"charge": executor("bad"), "ship": executor("route")},
        "edges": [{"from": "charge", "to": "ship"}],
    }
    theirs = http.post("/flows/version", json={"flow_id": "theirs", "definition": shop})
    ours = http.post("/api/v1/flows/ours", json={"definition": shop})
    assert (theirs.status_code, ours.status_code) == (200, 200), theirs.text + ours.text
    flows = stage.system.app.flows
    assert [stage.run(flows[name].start()) for name in ("theirs", "ours")] == ["success", "failed"]
    told = http.post("/api/v1/flows/validate", json={"definition": shop}).json()
    assert any("charge" in warning for warning in told["warnings"]), told


def test_a_signal_beyond_the_storage_of_a_waiting_run_is_rejected(stage: Stage, http: httpx.Client) -> None:
    flows = stage.system.app.flows
    flows.publish("waits", WAIT)
    run = flows["waits"].start()
    stage.run(run, times=3)
    answers = [http.post(f"/api/v1/runs/{run.id}/flow/signals/k{n}", json={"value": "x" * 900_000}) for n in range(4)]
    assert answers[0].is_success
    assert answers[-1].status_code == 413, answers[-1].text
    run.signal("go", True)
    assert stage.run(run) == "success"
