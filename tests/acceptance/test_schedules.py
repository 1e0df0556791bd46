"""Schedules through real processes: a backfill of a year, a cancelled backfill, schedules of tasks from the code."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import project
import pytest

from orchestrator.sdk.dag.definitions import loads
from tests import forking
from tests.acceptance.stack import Stack
from tests.waiting import eventually


@pytest.fixture
def settings() -> dict[str, float]:
    return {"lease": 1.5}


def apply(text: str) -> None:
    project.app.workflows.apply(loads(text), elsewhere=["nobody.knows"])


def orchestrator(stack: Stack, *words: str, folder: Path) -> str:
    done = forking.run(*words, environment=stack.environment, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def count_runs(stack: Stack) -> int:
    return int(str(stack.scalar("SELECT count(*) FROM orchestrator.runs")))


@pytest.mark.long
def test_a_backfill_of_a_year_respects_its_concurrency(stack: Stack) -> None:
    stack.scheduler()
    stack.worker("--allow", "steps.py")
    apply(
        "name: daily\nparams: {day: {type: date, default: today}}\n"
        "schedule: {cron: 30 2 * * *, timezone: Europe/Berlin}\n"
        'tasks: {tell: {task: "steps.py:echo", input: {day: "${params.day}"}}}'
    )
    words = (
        "schedules",
        "backfill",
        "daily",
        "--from",
        "2025-01-01",
        "--to",
        "2026-01-01",
        "--concurrency",
        "4",
        "--watch",
    )
    lines = stack.output_of(*words).splitlines()
    assert lines[-1] == "daily/default 365/365"
    assert len(lines) > 2, "progress was shown on the way"
    rows = stack.sql("SELECT params ->> 'day', status FROM orchestrator.runs ORDER BY fire_time")
    first = datetime(2025, 1, 1, tzinfo=UTC)
    assert rows == [(f"{first + timedelta(days=day):%Y-%m-%d}", "success") for day in range(365)]
    most = """
        SELECT max((SELECT count(*) FROM orchestrator.runs other
                     WHERE other.started_at <= run.started_at AND other.ended_at > run.started_at))
          FROM orchestrator.runs run"""
    assert int(str(stack.scalar(most))) <= 4
    assert stack.output_of(*words).splitlines()[-1] == "daily/default 365/365 365 already run"
    assert count_runs(stack) == 365, "what has had its run gets no other"
    again = project.app.schedules["daily"].backfill("2025-03-01", "2025-03-04", again=True)
    view = again.wait_ended(60)
    assert (view.started, view.done, view.failed, count_runs(stack)) == (3, 3, 0, 368)


def test_a_backfill_can_be_cancelled(stack: Stack) -> None:
    stack.scheduler()
    apply("name: daily\nschedule: {cron: 30 2 * * *}\ntasks: {tell: {task: nobody.knows}}")
    backfill = project.app.schedules["daily"].backfill("2020-01-01", "2026-01-01", concurrency=2)
    eventually(lambda: backfill.progress().open >= 200, "the first runs stand in line")
    assert backfill.progress().passed < backfill.progress().total
    backfill.cancel()
    view = backfill.wait_ended(60)
    assert (view.error, view.open) == ("cancelled", 0)
    assert view.failed == view.started


PROJECT = """
from datetime import datetime
from orchestrator import Orchestrator, Retry

app = Orchestrator()


@app.schedule(every="1s", params={"due": "${run.fire_time}"}, overlap="allow")
@app.schedule(cron="0 3 * * *", timezone="Europe/Berlin", name="nightly-note", params={"due": "never"})
@app.task(retries=Retry(max=2, base=0.5), isolation="process", concurrency=3)
def note(due: str) -> str:
    return due
"""


def test_a_schedule_declared_on_a_task_starts_runs(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(PROJECT)
    stack.scheduler()
    said = orchestrator(stack, "schedules", "apply", "--app", "notes:app", folder=tmp_path)
    assert "notes.note: next fire" in said
    assert "nightly-note: next fire" in said
    assert "03:00:00 CE" in said
    stack.worker("--app", "notes:app", folder=tmp_path)
    eventually(
        lambda: stack.scalar("SELECT count(*) FROM orchestrator.runs WHERE status = 'success'"), "a run succeeds"
    )
    options = stack.sql(
        "SELECT options -> 'retry' ->> 'base', options ->> 'isolation', lane FROM orchestrator.ended_tasks LIMIT 1"
    )
    assert options == [("0.5", "process", "notes.note|")]
    assert orchestrator(stack, "schedules", "apply", "--app", "notes:app", folder=tmp_path)
    assert stack.scalar("SELECT max(version) FROM orchestrator.workflows") == 1
