"""Names that are enqueued as tasks: names of workflows are rejected, and unknown names get a warning."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sdk.tasks.by_name import call_by_name
from tests.integration.api_client import ApiClient
from tests.integration.stage import System

DAG = "name: nightly\ntasks: {load: {task: known}}"
OWN = "name: known\ntasks: {only: {task: known}}"
FLOW = {"start": "a", "nodes": {"a": {"kind": "approval", "params": {"approval_key": "$shared.ok"}}}}


@pytest.fixture
def client(system: System) -> ApiClient:
    system.app.task(name="known")(lambda: None)
    system.app.workflows.apply(loads(DAG))
    system.app.workflows.apply(loads(OWN))
    system.app.flows.publish("graph", FLOW)
    system.worker(knows=("known", "signup", "signup@1"))
    system.settle()
    return ApiClient(system.settings)


def enqueue(client: ApiClient, name: str, **more: Any) -> Any:
    return client.post("/api/v1/tasks", json={"name": name, **more})


@pytest.mark.parametrize(
    ("name", "path"), [("nightly", "workflows/nightly"), ("graph", "flows/graph"), ("signup", "workflows/signup")]
)
def test_enqueueing_a_workflow_as_a_task_is_rejected(client: ApiClient, system: System, name: str, path: str) -> None:
    answers = [enqueue(client, name), client.post("/api/v1/tasks/bulk", json={"tasks": [{"name": name}]})]
    assert [one.status_code for one in answers] == [422, 422]
    assert all(f"POST /api/v1/{path}/runs" in one.json()["detail"] for one in answers)
    assert system.count("tasks") == 0


def test_client_calls_reject_workflows_whatever_the_payload_size(client: ApiClient, system: System) -> None:
    """Large requests are handled elsewhere than small ones."""
    for size in (1, 70_000):
        task = call_by_name(system.settings, "nightly", ["x" * size], {}, options={}, queue="default")
        for name, body in (("enqueue", {"task": task}), ("enqueue_many", {"tasks": [task]})):
            answer = client.post(f"/api/v1/client/tasks/{name}", msgspec.to_builtins(body))
            assert (answer.status_code, "not a task" in answer.json()["detail"]) == (422, True)
    assert system.count("tasks") == 0


def test_an_unknown_task_name_is_stored_with_a_warning(client: ApiClient) -> None:
    known, unknown = enqueue(client, "known"), enqueue(client, "t.a")
    assert (known.status_code, known.json().keys()) == (201, {"id"})
    assert unknown.status_code == 201
    assert "No live worker has registered a task 't.a'" in unknown.json()["warning"]
    many = client.post("/api/v1/tasks/bulk", json={"tasks": [{"name": "known"}, {"name": "t.a"}, {"name": "t.a"}]})
    assert len(many.json()["ids"]) == 3
    assert [("t.a" in one) for one in many.json()["warnings"]] == [True]


def test_outdated_worker_data_causes_no_name_warnings(client: ApiClient, system: System) -> None:
    system.sql("UPDATE orchestrator.workers SET seen_at = now() - interval '1 minute' RETURNING id")
    answer = enqueue(client, "known")
    assert (answer.status_code, answer.json().keys()) == (201, {"id"})
    assert enqueue(client, "nightly").status_code == 422


def test_a_task_expires_at_a_time_or_after_seconds(client: ApiClient, system: System) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    ids = [enqueue(client, "known", expires=one).json()["id"] for one in (3_600, at.isoformat())]
    ends = [system.row(id)["expires_at"] for id in ids]
    assert all(abs(end - at) < timedelta(minutes=5) for end in ends)
    assert enqueue(client, "known", expires="2026-01-31T09:30:00").status_code == 422


def test_the_enqueue_command_rejects_workflows_and_warns_about_unknown_names(
    client: ApiClient, system: System, in_empty_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del client, in_empty_folder
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", system.settings.redis_url)
    told = {
        name: CliRunner().invoke(main, ["enqueue", name]) for name in ("nightly", "graph", "signup", "t.a", "known")
    }
    assert {name: found.exit_code for name, found in told.items()} == {
        **dict.fromkeys(("nightly", "graph", "signup"), 1),
        **dict.fromkeys(("t.a", "known"), 0),
    }
    assert "orchestrator runs start nightly" in told["nightly"].output
    assert "No live worker has registered a task 't.a'" in told["t.a"].output
    assert "Warning" not in told["known"].output
