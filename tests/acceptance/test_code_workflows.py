"""Workflows as code on real processes."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import project
import pytest

from orchestrator import OrchestratorError, RunFailed, WrongState
from orchestrator.sdk.code.engine import replay
from orchestrator.sdk.code.handle import WorkflowHandle
from orchestrator.sdk.code.recording import Recording
from tests import forking
from tests.acceptance.stack import HERE, Stack
from tests.acceptance.ways import both_ways  # noqa: F401
from tests.waiting import eventually

pytestmark = pytest.mark.long_for("http")  # test_enqueue_to_result.py covers HTTP in each build


def test_a_workflow_runs_from_start_to_result(running: Stack) -> None:
    handle = project.both.start(1, 2)
    assert handle.result(60) == [2, 3]
    assert handle.status() == "success"


def test_a_hundred_steps_run_in_sequence(running: Stack) -> None:
    assert project.steps.start(3).result(60) == 3
    assert project.steps.start(100).result(60) == 100, "at less than 0.6 s a step, which it takes nowhere"


@pytest.mark.long
def test_a_thousand_workflows_run_ten_steps_each(running: Stack) -> None:
    handles = [project.steps.start(10) for _ in range(1_000)]
    assert [handle.result(120) for handle in handles] == [10] * 1_000
    tasks = running.sql("SELECT run_id, count(*) FROM orchestrator.ended_tasks WHERE run_id <> id GROUP BY run_id")
    counts = {str(run): count for run, count in tasks}
    assert all(counts[handle.id] == 10 for handle in handles)
    assert running.scalar("SELECT count(*) FROM orchestrator.tasks") == 0


# -- messages to runs


def test_cancels_updates_and_timeouts_reach_runs_that_keep_continuing(running: Stack) -> None:
    """Each call arrives at any moment of a turn."""
    cancelled = [project.restless.start() for _ in range(10)]
    asked = [project.restless.start() for _ in range(10)]
    late = [project.restless.options(timeout=0.5 + 0.1 * number).start() for number in range(10)]
    parents = [project.leaves.start(0.5 + 0.1 * number) for number in range(10)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda handle: handle.update("count", timeout=60), asked))
        list(pool.map(lambda handle: handle.cancel(), [*cancelled, *asked]))
    assert all(isinstance(answer, int) for answer in answers)
    for handle in [*cancelled, *asked]:
        with pytest.raises(RunFailed, match="was cancelled"):
            handle.result(60)
    for handle in late:
        with pytest.raises(RunFailed, match="RunTimedOut"):
            handle.result(60)
    for parent in parents:
        parent.result(60)
    eventually(
        lambda: (
            running.scalar(
                "SELECT count(*) FROM orchestrator.runs WHERE workflow = 'project.restless' AND ended_at IS NULL"
            )
            == 0
        ),
        "all have ended",
    )


def test_a_promise_is_resolved_only_once(running: Stack) -> None:
    handle = project.approval.start(600.0)
    eventually(lambda: _promises(running, handle), "the promise is open")
    assert handle.query("describe") == "waits for 600 s"
    handle.resolve("approval", "yes")
    assert handle.result(60) == "yes"
    with pytest.raises(WrongState, match="is in state 'success'"):
        handle.resolve("approval", "no")


def test_a_run_answers_signals_queries_and_updates(running: Stack) -> None:
    handle = project.basket.start()
    handle.signal("add", "a pear")
    handle.signal("add", "a fig")
    assert eventually(lambda: len(handle.query("items")) == 2 and handle.query("items"), "both are there") == [
        "a pear",
        "a fig",
    ]
    assert handle.update("rename", 1, "a date") == "a fig"
    with pytest.raises(OrchestratorError, match="IndexError"):
        handle.update("rename", 7, "nothing")
    with pytest.raises(OrchestratorError, match="answers no query 'item'"):
        handle.query("item")
    handle.signal("add", "pay")
    assert handle.result(60) == ["a pear", "a date"]
    with pytest.raises(WrongState, match="Cannot signal run"):
        handle.signal("add", "a plum")


def test_a_cancelled_run_cleans_up_and_cancels_its_children(running: Stack, tmp_path: Path) -> None:
    path = tmp_path / "log"
    handle = project.tidy.start(str(path))
    children = "SELECT id FROM orchestrator.runs WHERE parent_run = CAST(:id AS uuid)"
    child = eventually(lambda: running.sql(children, id=handle.id), "the child is there")[0][0]
    handle.cancel()
    with pytest.raises(RunFailed, match="was cancelled"):
        handle.result(60)
    assert path.read_text() == "7\n"
    eventually(lambda: _state(running, child) == "cancelled", "the child is cancelled, too")
    eventually(lambda: not _open_tasks(running, handle), "nothing is open")
    (counters,) = running.sql("SELECT total, open FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=handle.id)
    assert counters == (3, 0)


# -- from the command line


def test_a_run_is_controlled_from_the_command_line(running: Stack) -> None:
    run = _with_app(running, "runs", "start", "project.basket").strip()
    running.output_of("runs", "signal", run, "add", "a pear")
    assert eventually(lambda: "pear" in running.output_of("runs", "query", run, "items"), "it is there")
    assert "a pear" in running.output_of("runs", "update", run, "rename", "0", "a date")
    assert "code matches" in _with_app(running, "workflows", "replay-check", "--since", "1h")
    history = running.output_of("runs", "history", run)
    assert "signal received" in history
    recording = Recording.from_json(running.output_of("runs", "history", run, "--json"))
    replay(project.basket, recording)
    shown = running.output_of("runs", "show", run)
    assert "project.basket, version 1" in shown
    assert re.search(r"at +project.py, line \d+, in basket: async for", shown)
    running.output_of("runs", "terminate", run)
    eventually(lambda: _state(running, run) == "cancelled", "it has ended")


def test_a_run_is_reset_from_the_command_line(running: Stack) -> None:
    old = project.steps.start(3)
    assert old.result(60) == 3
    refused = running.command("runs", "reset", old.id, "--to", "2")
    assert refused.exit_code == 1
    assert "Reset it to event 1 or 3." in refused.stderr
    shown = running.output_of("runs", "reset", old.id, "--to", "4", "--dry-run")
    assert [line.split(maxsplit=3)[:3] for line in shown.splitlines()[1:]] == [
        *(["1", "task", "project.add"], ["2", "task", "project.add"])
    ]
    before = running.scalar("SELECT count(*) FROM orchestrator.runs")
    aborted = running.command("runs", "reset", old.id, "--to", "4", input="n\n")
    assert (aborted.exit_code, running.scalar("SELECT count(*) FROM orchestrator.runs")) == (1, before)
    new = project.app.workflow_run(
        running.command("runs", "reset", old.id, "--to", "4", input="y\n").stdout.split()[-1]
    )
    assert new.result(60) == 3
    told = json.loads(running.output_of("runs", "reset", old.id, "--to", "4", "--yes", "--json", "--reason", "again"))
    assert (told["reset_from"], told["to"], told["preview"][0]["fate"]) == (old.id, 4, "is kept")
    assert project.app.workflow_run(told["run"]).result(60) == 3
    assert "reason=again" in running.output_of("runs", "history", told["run"])
    tasks = "SELECT count(*) FROM orchestrator.ended_tasks WHERE run_id <> id AND run_id = CAST(:id AS uuid)"
    assert [running.scalar(tasks, id=run) for run in (old.id, new.id, told["run"])] == [3, 2, 2]


def test_waiters_of_a_reset_run_get_the_new_runs_result(running: Stack) -> None:
    old = project.approval.start(600.0)
    eventually(lambda: _promises(running, old), "the promise is open")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(old.result, 60)
        new = old.reset(to=1, reason="from the beginning")
        eventually(lambda: _promises(running, new), "the new promise is open")
        old.resolve("approval", "yes")
        assert waiting.result() == new.result(60) == "yes"
    assert (_state(running, old.id), old.status()) == ("cancelled", "success")
    assert f"continues as  {new.id}" in running.output_of("runs", "show", old.id)


def _with_app(stack: Stack, *words: str) -> str:
    done = forking.run(*words, "--app", "project:app", environment=stack.environment, folder=HERE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _promises(stack: Stack, handle: WorkflowHandle[Any]) -> object:
    return stack.scalar("SELECT count(*) FROM orchestrator.promises WHERE run_id = CAST(:id AS uuid)", id=handle.id)


def _open_tasks(stack: Stack, handle: WorkflowHandle[Any]) -> object:
    return stack.scalar("SELECT count(*) FROM orchestrator.tasks WHERE run_id = CAST(:id AS uuid)", id=handle.id)


def _state(stack: Stack, run: object) -> object:
    return stack.scalar("SELECT status FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=str(run))
