"""Secrets in arguments and results: programs and workers get them, and all views and logs redact them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from orchestrator import Orchestrator, TaskFailed
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack
from tests.waiting import eventually

SECRET, CARD, TOKEN = "correct-horse-battery", "4111111111111111", "tok-9f8e7d6c5b"
APP = """
import logging

from orchestrator import Orchestrator, TaskContext

app = Orchestrator()


@app.task(redact=("token",))
def login(ctx: TaskContext, user: str, token: str, password: str = "", card: dict | None = None) -> dict:
    print(f"printed {token} and {password}")
    logging.getLogger("shop").warning("logged %s and %s", token, password)
    ctx.log(f"said {token} and {password}")
    if user == "mallory":
        error = ValueError(f"{token} and {password} are refused")
        error.password, error.user = password, user
        raise error
    return {"user": user, "password": password, "card": card, "length": len(token + password)}


@app.workflow
async def signup(ctx, user: str, password: str) -> dict:
    return {"user": user, "password": password}
"""
DAG = {
    "name": "onboarding",
    "params": {"password": {"type": "string"}},
    "tasks": {
        "enter": {
            "task": "project.login",
            "input": {"user": "eve", "token": TOKEN[::-1], "password": "${params.password}"},
        }
    },
}

GRAPH = {
    "start": "enter",
    "nodes": {
        "enter": {
            "exec_type": "local_func",
            "func": "project.login",
            "params": {"user": "eve"},
            "prep": {"input_map": {"password": "$params.password", "token": "$params.token"}},
            "post": {"output_key": "entered"},
        }
    },
}


@pytest.fixture(scope="module")
def stack(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("redaction")
    (folder / "project.py").write_text(APP)
    with fresh_stack(database_url, redis_url, folder, redact="password, card.*") as stack:
        stack.scheduler()
        stack.worker(folder=folder)
        yield stack


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.api(), timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def ids(stack: Stack, http: httpx.Client) -> dict[str, str]:
    """Ids of a succeeded and a failed task, and of runs of a DAG, of code and of a flow."""
    namespace: dict[str, Any] = {"__name__": "project"}
    exec(compile(APP, "project.py", "exec"), namespace)
    application = Orchestrator(stack.settings)
    login = application.task(redact=("token",), name="project.login")(namespace["login"].function)
    done = login.enqueue("alice", TOKEN, password=SECRET, card={"number": CARD, "holder": CARD[::-1]})
    result = done.result(timeout=60)
    assert result == {
        "user": "alice",
        "password": SECRET,
        "card": {"number": CARD, "holder": CARD[::-1]},
        "length": len(TOKEN + SECRET),
    }
    failed = login.enqueue("mallory", TOKEN, SECRET)
    with pytest.raises(TaskFailed, match="••• and ••• are refused"):
        failed.result(timeout=60)
    assert http.post("/workflows", json=DAG).status_code == 200
    run = http.post("/workflows/onboarding/runs", json={"params": {"password": SECRET}}).json()["id"]
    signup = application.workflow(name="project.signup")(namespace["signup"].function)
    code = signup.start("bob", password=SECRET)
    assert code.result(timeout=60)["password"] == SECRET
    application.flows.publish("graph", GRAPH)
    graph = application.flows["graph"].start(password=SECRET, token=TOKEN[::-1])
    assert graph.result(timeout=60)["entered"]["password"] == SECRET
    eventually(lambda: http.get(f"/runs/{run}").json()["run"]["status"] == "success", "the run has ended")
    application.close()
    return {"done": done.id, "failed": failed.id, "run": run, "code": code.id, "graph": graph.id}


def assert_redacted(text: str, where: str) -> None:
    for secret in (SECRET, CARD, CARD[::-1], TOKEN):
        assert secret not in text, f"{where}: {text}"


def given(path: str) -> dict[str, str]:
    return {"text": "refused"} if path.endswith("/search") else {}


@pytest.mark.parametrize(
    "words",
    [
        "tasks list",
        "tasks show {done}",
        "tasks show {done} --json",
        "tasks show {failed}",
        "tasks show {failed} --json",
        "tasks logs {done}",
        "tasks logs {failed} --json",
        "tasks retry --error refused --dry-run",
        "runs list --json",
        "runs show {run}",
        "runs show {run} --json",
        "runs show {code}",
        "runs show {code} --json",
        "runs history {code}",
        "runs history {code} --full",
        "runs history {code} --json",
        "runs watch {run}",
        "runs watch {code}",
        "search refused --json",
        "status --json",
        "queues --json",
        "workers --json",
        "audit --json",
        "quarantine list",
        "flows show {graph}",
        "flows show {graph} --json",
        "flows runs --json",
        "flows watch {graph}",
    ],
)
def test_every_command_redacts_secrets(stack: Stack, ids: dict[str, str], words: str) -> None:
    done = stack.command(*words.format(**ids).split())
    assert done.exit_code == 0, done.stderr
    assert_redacted(done.stdout + done.stderr, words)
    if " show " in words:
        assert "•••" in done.stdout


def test_views_over_http_are_redacted_and_programs_get_results(stack: Stack, ids: dict[str, str]) -> None:
    with contextlib.closing(Orchestrator(replace(stack.settings, api_url=stack.api(), redact=""))) as application:
        backend = application._client.backend.flows
        graph = UUID(ids["graph"])
        told = str((backend.show(graph.bytes), backend.runs(), backend.node_runs(graph.bytes)))
        assert_redacted(told, "the client")
        assert TOKEN[::-1] not in told, "which the task itself says is secret"
        assert application.flows.run(graph).shared()["entered"]["password"] == SECRET


def test_a_call_by_name_may_declare_its_secrets(http: httpx.Client) -> None:
    call = {"name": "project.login", "args": ["carol", TOKEN], "kwargs": {"password": SECRET}, "redact": ["@1"]}
    task = http.post("/api/v1/tasks", json=call).json()["id"]
    answer = eventually(
        lambda: (found := http.get(f"/api/v1/tasks/{task}")).json()["task"]["status"] == "success" and found.text,
        "it has ended",
    )
    assert_redacted(answer, "the task")


@pytest.mark.parametrize("given", [{"args": ["dave", TOKEN]}, {"kwargs": {"user": "dave", "token": TOKEN}}])
def test_a_call_by_name_redacts_secrets_declared_by_its_function(http: httpx.Client, given: dict[str, Any]) -> None:
    def post() -> Any:
        answer = http.post("/api/v1/tasks", json={"name": "project.login", **given}).json()
        return "warning" not in answer and answer["id"]

    task = eventually(post, "its worker is known")
    answer = eventually(
        lambda: (found := http.get(f"/api/v1/tasks/{task}")).json()["task"]["status"] == "success" and found.text,
        "it has ended",
    )
    assert_redacted(answer, "the task")


def test_logs_contain_no_secrets(stack: Stack, ids: dict[str, str]) -> None:
    del ids
    logs = sorted(Path(stack.folder).glob("*.log"))
    for log in logs:
        assert_redacted(log.read_text(), log.name)
    for line in ("printed ••• and •••", "logged ••• and •••", "said ••• and •••"):
        eventually(lambda: line in "".join(log.read_text() for log in logs), line)  # noqa: B023


def test_the_stored_error_contains_no_secrets(stack: Stack, ids: dict[str, str]) -> None:
    [(error,)] = stack.sql("SELECT error::text FROM orchestrator.ended_tasks WHERE id = :id", id=ids["failed"])
    assert_redacted(error, "the stored error")
    assert "mallory" in error
