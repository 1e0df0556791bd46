"""The context of a task in a thread, on the event loop and in a process of its own: progress, logs, cancellation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner

from orchestrator import NotFound, Task, TaskCancelled, TaskProgress, Workflow
from orchestrator.cli import main
from tests import forking
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import HERE, Stack, using
from tests.waiting import eventually

import inside  # isort: skip  # a top-level module, as the workers see it


@pytest.fixture(scope="module")
def running(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack, using(inside.app, stack):
        stack.scheduler()
        stack.worker("--app", "inside:app", "--database")
        yield stack


@pytest.fixture
def command(running: Stack, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", running.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", running.settings.redis_url)
    return CliRunner()


@pytest.mark.parametrize(
    ("task", "text"),
    [(inside.talks, "in a thread"), (inside.talks_async, "on the loop"), (inside.talks_isolated, "in a process")],
)
def test_progress_and_logs_of_a_running_task_are_visible(
    running: Stack, command: CliRunner, tmp_path: Path, task: Task[[str], float], text: str
) -> None:
    go = tmp_path / "go"
    handle = task.enqueue(str(go))

    def expected_progress() -> TaskProgress | None:
        found = handle.progress()
        return found if found is not None and found.fraction == 0.4 else None

    progress = eventually(expected_progress, "the progress")
    assert (progress.text, progress.attempt) == (text, 1)
    assert 0 <= progress.age < 60

    def lines() -> list[dict[str, object]]:
        done = command.invoke(main, ["tasks", "logs", handle.id, "--json"])
        assert done.exit_code == 0, done.output
        found: list[dict[str, object]] = json.loads(done.stdout)["lines"]
        return found if len(found) == 2 else []

    said = eventually(lines, "the log")
    assert [(line["level"], line["text"], line["attempt"]) for line in said] == [
        ("info", "reading", 1),
        ("warning", "a line is missing", 1),
    ]
    eventually(lambda: handle.status() == "running", "running")
    shown = command.invoke(main, ["tasks", "show", handle.id])
    assert f"40 % {text}" in shown.stdout
    assert json.loads(command.invoke(main, ["tasks", "show", handle.id, "--json"]).stdout)["progress"]["text"] == text

    watching = forking.begin(
        *("tasks", "watch", handle.id), environment=running.environment, folder=HERE, stdout=subprocess.PIPE
    )
    assert watching.stdout is not None
    with watching, watching.stdout as output:
        assert output.readline().strip() == f"running 40 % {text}"
        go.touch()
        assert output.readline().strip() == "success"
        assert watching.wait(60) == 0
    assert 0 < handle.result(60) <= 60
    followed = command.invoke(main, ["tasks", "logs", handle.id, "--follow"])
    assert followed.exit_code == 0
    assert [line.split(maxsplit=1)[1] for line in followed.stdout.splitlines()] == [
        "info     reading",
        "warning  a line is missing",
    ]


@pytest.mark.parametrize("task", [inside.counts, inside.counts_async, inside.counts_isolated])
def test_the_next_attempt_resumes_from_heartbeat_details(running: Stack, task: Task[[], list[object]]) -> None:
    handle = task.enqueue()
    assert handle.result(60) == [[number, 1 + number // 3] for number in range(9)]


def test_heartbeat_details_survive_a_killed_worker(running: Stack, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    handle = inside.is_killed_once.enqueue(str(path), str(tmp_path / "go"))
    details = "SELECT details FROM orchestrator.tasks WHERE details IS NOT NULL"
    eventually(lambda: running.sql(details), "details in Postgres")
    os.kill(int(path.read_text()), signal.SIGKILL)
    assert handle.result(60) == "the first attempt was here"


def test_a_task_can_poll_for_cancellation(running: Stack, tmp_path: Path) -> None:
    path = tmp_path / "log"
    handle = inside.is_cancelled.enqueue(str(path))
    eventually(path.exists, "it runs")
    handle.cancel()
    with pytest.raises(TaskCancelled):
        handle.result(60)
    eventually(lambda: path.read_text().split() == ["started", "stopped"], "it stops")


def test_a_thread_started_by_a_task_can_enqueue(running: Stack) -> None:
    (child,) = inside.has_a_thread.enqueue().result(60)
    assert inside.app.handle(child).result(60) == 1


# -- starting runs


@pytest.fixture(scope="module")
def steps(running: Stack) -> None:
    flow = Workflow("inside.steps", params={"number": int})
    flow.task("only", inside.nothing, input={"number": "${params.number}"})
    inside.app.workflows.apply(flow)


@pytest.mark.parametrize("task", [inside.starts, inside.starts_async, inside.starts_isolated], ids=lambda one: one.name)
def test_a_task_starts_runs(running: Stack, steps: None, task: Task[[str], dict[str, Any]]) -> None:
    found = task.enqueue(task.name).result(60)
    assert found["returned"] == found["code"]
    assert found["same steps"] == found["steps"]
    assert inside.app.workflow_run(found["code"]).result(60) == 3
    assert inside.app.workflow_run(found["free"]).result(60) == 5
    assert inside.app.workflow_run(found["signalled"]).result(60) == 7
    assert inside.app.run(found["steps"]).outputs(60) == {"only": 7}
    assert inside.app.run(found["many"]).results(60) == [0, 1, 2]
    missing, wrong, taken = found["refused"]
    assert missing.startswith("NotFound: There is no workflow 'inside.nowhere'")
    assert wrong.startswith("InvalidWorkflow: ")
    assert taken.startswith("Duplicate: Workflow 'inside.adds_up' has run")


def test_a_task_starts_a_flow(running: Stack) -> None:
    node = {"exec_type": "local_func", "func": "inside.nothing", "post": {"output_key": "given"}}
    prep = {"input_map": {"number": "$params.number"}}
    version = inside.app.flows.publish("inside.flow", {"start": "a", "nodes": {"a": {**node, "prep": prep}}})
    first, again, refused = inside.starts_flow.enqueue("from-a-task").result(60)
    assert first == again
    assert "inside.no-flow" in refused
    run = inside.app.flows.run(first)
    assert run.result(60) == {"given": 7}
    view = inside.app._client.backend.flows.show(UUID(first).bytes)
    assert (view.flow, view.version, view.params) == ("inside.flow", version, {"number": 7})


def test_a_transaction_starts_runs_if_it_commits(running: Stack, steps: None) -> None:
    code, run = inside.starts_in_transaction.enqueue("x").result(60)

    def is_there() -> bool:
        try:
            return bool(inside.app.run(run).progress()) and bool(inside.app.workflow_run(code).status())
        except NotFound:
            return False

    eventually(is_there)  # the scheduler starts them a moment later
    assert inside.app.run(run).wait_ended(60) == "success"
    assert inside.app.workflow_run(code).result(60) == 1
