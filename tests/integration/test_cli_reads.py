"""Every command that reads, for every kind of task, run and schedule, as text and JSON, also old rows."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli import main
from orchestrator.domain.states import RunState, TaskState
from orchestrator.store import database
from tests.integration.filled import STEPS, fill, fill_oddly, fill_with_code, rows
from tests.integration.serving import both_ways  # noqa: F401
from tests.integration.stage import System
from tests.unit.test_cli_help import READS

pytestmark = pytest.mark.long_for("http")

LISTS = [
    ("tasks", "list"),
    ("runs", "list"),
    ("workflows", "list"),
    ("schedules", "list"),
    ("schedules", "backfills"),
    ("queues",),
    ("workers",),
    ("status",),
    ("top",),
    ("quarantine", "list"),
    ("db", "check"),
]
TASKS = "SELECT {} FROM orchestrator.tasks UNION ALL SELECT {} FROM orchestrator.ended_tasks"
ENDED = "SELECT DISTINCT ON (name, status, step, run_id IS NULL) id FROM orchestrator.ended_tasks"
OPEN = "SELECT DISTINCT ON (name, status, step, run_id IS NULL, hold, blockers) id FROM orchestrator.tasks"
RUNS = "SELECT DISTINCT ON (name, status, reason, parent_step, stuck IS NULL, parked, key) id FROM orchestrator.runs"
"""One row of each kind."""
VERSIONS = Path(database.__file__).parents[2] / "migrations" / "versions"


@pytest.fixture
def reading(system: System, in_empty_folder: Path) -> System:
    Path("steps.yaml").write_text(STEPS, encoding="utf-8")
    return system


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def read(*words: str) -> None:
    """Check a command that reads, as text and JSON."""
    may_say_no = words[1:2] in (("watch",), ("diff",))
    shown = invoke(*words)
    if words[0] in ("db", "top") and "ORCHESTRATOR_API_URL" in os.environ:
        assert "Error: This needs direct access to Postgres and Redis" in shown.stderr
        return
    assert shown.exit_code == 0 or (may_say_no and shown.exit_code == 1), (words, shown.output, shown.exception)
    assert shown.output.strip()
    found = invoke(*words, "--json")
    assert found.exit_code == shown.exit_code, (words, found.output, found.exception)
    json.loads(found.stdout)


def everything(system: System) -> Iterator[tuple[str, ...]]:
    """Yield every command that reads, for every object it could show."""
    yield from LISTS
    yield "workflows", "validate", "steps.yaml"
    yield "workflows", "diff", "steps.yaml"
    for state in TaskState:
        yield "tasks", "list", "--status", str(state), "--limit", "2"
    for task in rows(system, f"({OPEN}) UNION ALL ({ENDED})"):
        yield "tasks", "show", task
    for task in rows(system, ENDED):
        yield "tasks", "watch", task
    for task in rows(system, f"{OPEN} WHERE name = 'slow'"):
        yield "tasks", "logs", task
    for run in rows(system, RUNS):
        yield "runs", "show", run
        yield "tasks", "list", "--run", run
    for run in rows(system, f"{RUNS} WHERE ended_at IS NOT NULL"):
        yield "runs", "watch", run
        yield "runs", "logs", run
    for run in rows(system, f"{RUNS} WHERE code"):
        yield "runs", "history", run
    for key in rows(system, "SELECT workflow || '/' || name AS id FROM orchestrator.schedules"):
        yield "schedules", "show", key
        yield "schedules", "next", key
    for name in rows(system, "SELECT DISTINCT name AS id FROM orchestrator.workflows"):
        yield "workflows", "show", name
    for message in json.loads(invoke("quarantine", "list", "--json").stdout)["messages"]:
        yield "quarantine", "show", message["id"]


def test_read_commands_work_on_an_empty_system(reading: System) -> None:
    for words in (*LISTS, ("workflows", "diff", "steps.yaml")):
        read(*words)


def test_read_commands_show_every_kind_of_object(reading: System) -> None:
    fill(reading)
    fill_with_code(reading)
    fill_oddly(reading)
    assert set(rows(reading, TASKS.format("status AS id", "status"))) == set(TaskState)
    assert set(rows(reading, "SELECT status AS id FROM orchestrator.runs")) == set(RunState)
    walked = list(everything(reading))
    for words in walked:
        read(*words)
    assert {words[0] for words in walked} | {" ".join(words[:2]) for words in walked} >= READS


UNBORN = {
    5: ["DELETE FROM orchestrator.runs WHERE code", "DELETE FROM orchestrator.tasks WHERE name IN ('code', 'kid')"],
    4: ["DELETE FROM orchestrator.schedules", "DELETE FROM orchestrator.backfills"],
    2: ["DELETE FROM orchestrator.runs WHERE workflow IS NOT NULL", "DELETE FROM orchestrator.workflows"],
}
"""Deletes objects newer than a revision."""


def added() -> Iterator[tuple[int, str, str]]:
    """Yield the columns that revisions have added to existing tables: revision, table and column."""
    for file in sorted(VERSIONS.glob("r0*.py")):
        for table, columns in re.findall(r"ALTER TABLE orchestrator\.(\w+)([^;\"]*)", file.read_text(encoding="utf-8")):
            for column in re.findall(r"ADD COLUMN (\w+)", columns):
                yield int(file.name[1:5]), table, column


@pytest.mark.timeout(600)  # hundreds of commands, for which a busy machine takes more than three minutes
@pytest.mark.parametrize(
    "release", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)]
)
def test_read_commands_show_rows_of_older_releases(reading: System, release: int) -> None:
    fill(reading)
    fill_with_code(reading)
    fill_oddly(reading)
    assert list(added())
    for statement in (statement for born, gone in UNBORN.items() if born > release for statement in gone):
        reading.sql(statement)
    for revision, table, column in added():
        if revision > release:
            reading.sql(f"UPDATE orchestrator.{table} SET {column} = DEFAULT")
    for words in everything(reading):
        read(*words)


def test_unreadable_definitions_of_another_release_are_named(reading: System) -> None:
    fill(reading)
    for table, column in (("workflows", "name"), ("schedules", "workflow")):
        strange = f"""UPDATE orchestrator.{table} SET definition = definition || '{{"days": 1}}'"""
        reading.sql(f"{strange} WHERE {column} = 'steps'")
        refused = invoke(table, "list")
        assert refused.exit_code == 1
        assert "Error: This release cannot read the stored data: " in refused.stderr
        assert "steps" in refused.stderr
        assert "days" in refused.stderr


def test_history_rejects_a_run_without_a_history(reading: System) -> None:
    many = reading.app.start_many(reading.job, [1])
    refused = invoke("runs", "history", many.id)
    assert refused.exit_code == 1
    assert "only those have a history" in refused.stderr
    assert f"orchestrator runs show {many.id}" in refused.stderr


def test_mistaking_task_ids_for_run_ids_is_explained_both_ways(reading: System) -> None:
    task, run = reading.job.enqueue(1).id, reading.app.start_many(reading.job, [1], name="many").id
    for words in (
        ("runs", "show", task),
        ("runs", "history", task),
        ("runs", "cancel", task),
        ("runs", "show", task[:20]),
    ):
        refused = invoke(*words)
        assert refused.exit_code == 1
        said = f"{words[2]}{'' if words[2] == task else '…'} is not a run but a task: job. To see it: "
        assert refused.stderr == f"Error: {said}orchestrator tasks show {task}\n"
    for words in (("tasks", "show", run), ("tasks", "retry", run), ("tasks", "logs", run)):
        refused = invoke(*words)
        assert (
            refused.stderr == f"Error: {run} is not a task but a run: many. To see it: orchestrator runs show {run}\n"
        )


def test_status_names_the_process_that_locks_a_table(reading: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c lock_timeout=200")
    with reading.engine.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE orchestrator.tasks IN ACCESS EXCLUSIVE MODE")
        holder = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        refused = invoke("status")
    assert refused.exit_code == 1
    assert f"process {holder} (" in refused.stderr
    assert f"End it: SELECT pg_terminate_backend({holder})" in refused.stderr
