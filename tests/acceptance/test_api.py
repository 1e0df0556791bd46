"""The HTTP API, served by a real process beside a scheduler and a worker."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator import Orchestrator, Unavailable
from orchestrator.transport.keys import Keys
from tests.acceptance import pages
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import HERE, Stack
from tests.forking import FORKING
from tests.waiting import eventually

ID = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"
"""An id of no task or run."""
DAG = {
    "name": "api_nightly",
    "params": {"start": {"default": 1}},
    "tasks": {
        "first": {"task": "project.add", "input": {"a": "${params.start}", "b": 1}},
        "second": {"task": "project.add", "depends_on": ["first"], "input": {"a": "${first}", "b": 1}},
    },
}


@pytest.fixture(scope="module")
def served(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.worker(processes=1)
        yield stack, stack.api()


@pytest.fixture
def http(served: tuple[Stack, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[1], timeout=30) as client:
        yield client


def ended(http: httpx.Client, path: str, what: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = http.get(path).raise_for_status().json()
        return found if found[what]["status"] in ("success", "failed", "cancelled") else None

    return eventually(look, f"{path} has ended")


def test_a_task_is_enqueued_and_shown_with_its_result(http: httpx.Client) -> None:
    answer = http.post("/api/v1/tasks", json={"name": "project.add", "args": [2], "kwargs": {"b": 3}})
    assert answer.status_code == 201
    task = ended(http, f"/api/v1/tasks/{answer.json()['id']}", "task")
    assert (task["task"]["status"], task["result"], task["args"], task["kwargs"]) == ("success", 5, [2], {"b": 3})


def test_many_tasks_are_enqueued_together_and_listed_page_by_page(http: httpx.Client) -> None:
    calls = [{"name": "project.add", "args": [number, 1], "queue": "paged"} for number in range(25)]
    ids = http.post("/api/v1/tasks/bulk", json={"tasks": calls}).json()["ids"]
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = http.get("/api/v1/tasks", params={"queue": "paged", "limit": 10, **cursor}).json()
        found += [task["id"] for task in page["items"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert sorted(found) == sorted(ids)


def test_a_workflow_runs_over_routes_without_the_api_prefix(http: httpx.Client) -> None:
    applied = http.post("/workflows", json=DAG)
    digest = applied.json()["hash"]
    assert applied.json() == {"name": "api_nightly", "version": 1, "new": True, "hash": digest}
    assert applied.headers["ETag"] == f'"{digest}"'
    assert http.post("/workflows", json=DAG).json()["new"] is False
    assert "api_nightly" in [one["name"] for one in http.get("/workflows").json()["workflows"]]
    assert http.get("/workflows/api_nightly").json()["definition"]["name"] == "api_nightly"
    run = http.post("/workflows/api_nightly/runs", json={"params": {"start": 5}}).json()["id"]
    shown = ended(http, f"/runs/{run}", "run")
    assert shown["run"]["status"] == "success"
    assert [step["state"] for step in shown["steps"]] == ["success", "success"]
    assert http.get(f"/api/v1/runs/{run}/outputs").json() == {"outputs": {"first": 6, "second": 7}}
    in_order = http.get(f"/runs/{run}/tasks").json()["items"]
    assert in_order == sorted(in_order, key=lambda task: task["created_at"])
    page = http.get(f"/runs/{run}/tasks", params={"limit": 1}).json()
    rest = http.get(f"/runs/{run}/tasks", params={"cursor": page["next"]}).json()
    assert [*page["items"], *rest["items"]] == in_order
    assert len(in_order) == 2
    assert run in [one["id"] for one in http.get("/runs", params={"workflow": "api_nightly"}).json()["items"]]
    assert http.get(f"/runs/{run}/tasks/first/logs", params={"index": 0, "attempt": 1}).json()["lines"] == []
    assert http.get(f"/runs/{run}/tasks/frist/logs").json()["detail"].endswith("Did you mean 'first'?")
    assert http.post(f"/runs/{run}/cancel").status_code == 409
    assert http.post(f"/runs/{run}/retry").status_code == 409
    assert http.delete("/workflows/api_nightly").json() == {"done": "deleted"}
    assert http.get("/workflows/api_nightly").status_code == 404


def test_queues_are_paused_limited_and_purged(http: httpx.Client) -> None:
    assert http.post("/api/v1/queues/slow/pause?new=true").json() == {"done": "paused"}
    assert http.put("/api/v1/queues/slow/limits", json={"concurrency": 2, "rate": "10/s"}).status_code == 200
    task = http.post("/api/v1/tasks", json={"name": "project.noop", "queue": "slow"}).json()["id"]
    queue = next(one for one in http.get("/api/v1/queues").json()["queues"] if one["queue"] == "slow")
    assert (queue["paused"], queue["concurrency"], queue["ready"]) == (True, 2, 1)
    assert http.post("/api/v1/queues/slow/purge").status_code == 202
    assert ended(http, f"/api/v1/tasks/{task}", "task")["task"]["status"] == "cancelled"
    assert http.post("/api/v1/queues/slow/resume").json() == {"done": "resumed"}


def test_failed_tasks_are_counted_and_retried_in_bulk(http: httpx.Client) -> None:
    task = http.post("/api/v1/tasks", json={"name": "project.broken", "args": ["gone for good"]}).json()["id"]
    assert ended(http, f"/api/v1/tasks/{task}", "task")["error"]["kind"] == "LookupError"
    looked = http.post("/api/v1/tasks/retry", json={"error": "gone for good", "dry_run": True}).json()
    assert (looked["tasks"], looked["asked"], looked["groups"][0]["kind"]) == (1, False, "LookupError")
    assert http.post("/api/v1/tasks/retry", json={"error": "gone for good"}).json()["asked"] is True
    attempts = eventually(
        lambda: len(http.get(f"/api/v1/tasks/{task}").json()["attempts"]) > 1, "it was tried once more"
    )
    assert attempts
    assert http.post("/api/v1/tasks/retry", json={}).status_code == 422


def test_invalid_requests_get_problem_details(http: httpx.Client) -> None:
    def problem(method: str, path: str, status: int, **options: Any) -> dict[str, Any]:
        answer = http.request(method, path, **options)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        found: dict[str, Any] = answer.json()
        assert found["status"] == status
        return found

    unknown = problem("POST", "/api/v1/tasks", 422, json={"name": "a", "pirority": 1})
    assert unknown["errors"][0]["pointer"] == "#/pirority"
    assert problem("GET", "/api/v1/tasks?limit=0", 422)["errors"][0]["pointer"] == "?limit"
    assert problem("GET", "/api/v1/tasks?status=lost", 422)["errors"][0]["pointer"].startswith("?status")
    assert "priority" in problem("POST", "/api/v1/tasks", 422, json={"name": "a", "priority": 1000})["detail"]
    assert problem("POST", "/api/v1/tasks", 400, content=b"{", headers={"content-type": "application/json"})["title"]
    problem("GET", "/api/v1/tasks/7", 404)
    problem("GET", f"/api/v1/tasks/{ID}", 404)
    problem("DELETE", "/api/v1/tasks", 405)
    problem("GET", "/api/v1/tasks?name=%00", 422)
    problem("POST", "/api/v1/tasks/retry", 422, json={"error": "\0"})
    problem("GET", f"/runs/{ID}/tasks/a/logs?index={2**70}", 422)
    problem("GET", "/workflows/%00", 422)
    problem("GET", "/nowhere", 404)


def test_search_finds_ids_names_tags_and_errors(http: httpx.Client) -> None:
    task = http.post("/api/v1/tasks", json={"name": "project.broken", "args": ["rare words"]}).json()["id"]
    ended(http, f"/api/v1/tasks/{task}", "task")
    http.post("/workflows", json={"name": "api_found", "tasks": {"one": {"task": "project.noop"}}}).raise_for_status()
    run = http.post("/workflows/api_found/runs", json={"tags": ["customer 7"]}).json()["id"]

    def search(text: str) -> dict[str, list[str]]:
        found = http.get("/api/v1/search", params={"text": text}).raise_for_status().json()
        return {kind: [one["id"] for one in several] for kind, several in found.items() if several}

    assert search(task) == {"tasks_by_id": [task]}
    assert run in search(run[:13])["runs_by_id"]
    assert task in search("project.broken")["tasks"]
    assert search("api_found") == {"runs": [run]}
    assert search("customer 7") == {"runs": [run]}
    assert search("RARE WORDS") == {"failures": [task]}
    assert search("nothing is called so") == {}
    assert http.get("/api/v1/search").status_code == 422


def test_quarantined_messages_are_listed_and_deleted(http: httpx.Client, served: tuple[Stack, str]) -> None:
    stack, _ = served
    stack.redis.xadd(Keys().quarantine, {"entry": "events/1-0", "body": b"\xff\x00", "size": 2, "error": "no sense"})
    listed = http.get("/api/v1/quarantine").json()["messages"]
    assert (listed[0]["source"], listed[0]["error"], listed[0]["body"]) == ("events/1-0", "no sense", "/wA=")
    assert http.get(f"/api/v1/quarantine/{listed[0]['id']}").json() == listed[0]
    assert http.get("/api/v1/quarantine/1-0").status_code == 404
    assert http.get("/api/v1/quarantine/what").status_code == 404
    assert http.get("/api/v1/quarantine/1-0%0A").status_code == 404
    assert http.delete("/api/v1/quarantine").json() == {"messages": len(listed)}
    assert http.get("/api/v1/quarantine").json() == {"messages": []}


def test_the_openapi_document_health_and_status_routes_answer(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert len(document["paths"]) > 50
    assert "Enqueue a task" in http.get("/docs").text
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}
    assert http.get("/api/v1/status").json()["leader"]
    assert http.get("/api/v1/workers").json()["workers"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_api_stops_gracefully_on_sigterm_and_sigint(served: tuple[Stack, str], number: signal.Signals) -> None:
    stack, _ = served
    address = stack.api()
    process = stack.processes[-1]
    assert httpx.get(f"{address}/healthz").status_code == 200
    process.signal(number)
    assert process.wait() == 0


def test_the_program_of_the_guide_prints_the_shown_output(served: tuple[Stack, str], tmp_path: Path) -> None:
    stack, address = served
    guide = pages.REPOSITORY / "docs" / "http-api.md"
    program = pages.files_in(guide)["use.py"].replace("app.resize", "project.resized")
    (tmp_path / "use.py").write_text(program)
    environment = stack.environment | {"ORCHESTRATOR_API_URL": address}
    done = FORKING.run("use.py", environment=environment, folder=tmp_path)
    shown = next(command.expected_output for command in pages.commands(guide) if command.line == "python use.py")
    assert done.stdout.splitlines() == shown, done.stderr


def test_the_program_of_the_guide_needs_only_the_api_elsewhere(served: tuple[Stack, str], tmp_path: Path) -> None:
    stack, address = served
    guide = pages.REPOSITORY / "docs" / "http-api.md"
    program = pages.files_in(guide)["elsewhere.py"].replace(
        "from tasks import resize", "from project import resized as resize"
    )
    (tmp_path / "elsewhere.py").write_text(program)
    stores = ("ORCHESTRATOR_DATABASE_URL", "ORCHESTRATOR_REDIS_URL")
    environment = {name: value for name, value in stack.environment.items() if name not in stores}
    done = subprocess.run(
        [sys.executable, "elsewhere.py"],
        cwd=tmp_path,
        env=environment | {"ORCHESTRATOR_API_URL": address, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = next(command.expected_output for command in pages.commands(guide) if command.line == "python elsewhere.py")
    assert done.stdout.splitlines() == shown, done.stderr


def test_a_client_waiting_for_a_result_survives_an_api_restart(served: tuple[Stack, str]) -> None:
    stack, _ = served
    port = int(stack.api().rpartition(":")[2])
    settings = replace(stack.settings, database_url="", redis_url="", api_url=f"http://127.0.0.1:{port}")
    with Orchestrator(settings) as app, ThreadPoolExecutor(1) as pool:
        add = app.task(name="project.add")(lambda a, b: a + b)
        first = add.options(delay=2).enqueue(1, 2)
        result = pool.submit(first.result, 60)
        stack.processes[-1].kill()
        with pytest.raises(Unavailable, match="cannot be reached"):
            add.enqueue(1, 3)
        stack.api(port)
        assert result.result() == 3
        assert add.enqueue(1, 3).result(60) == 4
