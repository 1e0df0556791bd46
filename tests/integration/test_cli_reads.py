"""Every command that reads, over every kind of task, run and schedule, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import UUID

import pytest
from click.testing import CliRunner, Result

from orchestrator import WorkflowContext
from orchestrator.cli import main
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.definitions import loads
from tests.integration.code_stage import act
from tests.integration.stage import System

STEPS = """
name: steps
params: {many: {type: list, default: [1, 2, 3]}, day: {type: date, default: today}}
on_failure: [{task: job}]
on_success: [{task: job}]
schedule: {cron: "0 3 * * *"}
tasks:
  first: {task: job}
  each: {task: job, depends_on: [first], foreach: params.many}
  child: {workflow: small, depends_on: [first]}
  never: {task: job, depends_on: [first], when: "${false}"}
  last: {task: job, depends_on: [each, child]}
"""
OPEN_STEPS = "SELECT id FROM orchestrator.tasks WHERE run_id = '{}'"
SMALL = "name: small\ntasks: {only: {task: job}}"


@pytest.fixture
def reading(system: System, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> System:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", system.settings.redis_url)
    return system


def fill(system: System) -> None:
    """Make tasks, runs and schedules of every kind, in every state."""
    worker = system.worker(knows=("job",), slots=50)
    system.app.workflows.apply(loads(SMALL))
    system.app.workflows.apply(loads(STEPS))
    system.app.schedule(every="1h")(system.app.task(name="hourly")(lambda: None))
    system.app.schedules.apply()
    failing, finishing = system.app.workflows["steps"].start(), system.app.workflows["steps"].start()
    system.app.workflows["steps"].start().cancel()
    system.app.start_many(system.job, [1, 2])
    system.job.enqueue(1).cancel()
    system.job.options(delay=3600).enqueue(1)
    assert invoke("schedules", "trigger", "hourly").exit_code == 0
    for number in range(6):
        system.look()
        tasks = worker.take()
        if number == 0:
            steps = {task.id for task in tasks} & {
                UUID(step).bytes for step in rows(system, OPEN_STEPS.format(failing.id))
            }
            worker.fail(*(task for task in tasks if task.id in steps), retryable=False)
            tasks = [task for task in tasks if task.id not in steps]
        worker.succeed(*tasks)
    assert finishing.progress().status == "success"
    system.job.options(unique_key="a").enqueue(2)
    system.dispatch(2)
    system.app.workflows["steps"].start()


def fill_with_code(system: System) -> None:
    """Make a run of code that has ended, and one that waits."""

    @system.app.workflow(name="code")
    async def code(ctx: WorkflowContext, number: int) -> int:
        if number:
            await ctx.promise("answer", type=int)
        return await system.job.schedule(number)

    system.worker("coder", knows=("job", "code", "code@1"))
    engine = Engine(system.app.code_workflows.find, 1_000_000)
    ended, waiting = code.start(0), code.start(1)
    try:
        for _ in range(6):
            system.look()
            for member in system.workers:
                for task in member.take():
                    if task.is_activation:
                        member.report(act(engine, task))
                    else:
                        member.succeed(task)
    finally:
        engine.close()
    assert (ended.status(), waiting.status()) == ("success", "running")


def rows(system: System, statement: str) -> Iterator[str]:
    return (str(row["id"]) for row in system.sql(statement))


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), catch_exceptions=False)


def read(*words: str) -> None:
    """Run a command that reads, as text and as JSON."""
    text = CliRunner().invoke(main, list(words))
    assert text.exit_code == 0, (words, text.output, text.exception)
    assert text.output.strip()
    found = CliRunner().invoke(main, [*words, "--json"])
    assert found.exit_code == 0, (words, found.output, found.exception)
    for line in found.stdout.splitlines() if words[1:2] == ("logs",) else [found.stdout]:
        json.loads(line)


LISTS = [
    ("tasks", "list"),
    ("runs", "list"),
    ("workflows", "list"),
    ("schedules", "list"),
    ("schedules", "backfills"),
    ("queues",),
    ("workers",),
    ("status",),
    ("quarantine", "list"),
]


def test_of_nothing(reading: System) -> None:
    for words in LISTS:
        read(*words)


def test_of_everything(reading: System) -> None:
    fill(reading)
    fill_with_code(reading)
    for words in LISTS:
        read(*words)
    for task in rows(reading, "SELECT id FROM orchestrator.tasks UNION ALL SELECT id FROM orchestrator.ended_tasks"):
        read("tasks", "show", task)
    for run in rows(reading, "SELECT id FROM orchestrator.runs"):
        read("runs", "show", run)
    for run in rows(reading, "SELECT id FROM orchestrator.runs WHERE code"):
        read("runs", "history", run)
    for key in rows(reading, "SELECT workflow || '/' || name AS id FROM orchestrator.schedules"):
        read("schedules", "show", key)
        read("schedules", "next", key)
    for name in rows(reading, "SELECT DISTINCT name AS id FROM orchestrator.workflows"):
        read("workflows", "show", name)
