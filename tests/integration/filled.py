"""Fill a system with every kind of task, run and schedule, in every state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from orchestrator import WorkflowContext
from orchestrator.domain.code.activation import Activated, Violation
from orchestrator.domain.tasks.task import Lost
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.dag.definitions import loads
from orchestrator.transport import journal
from orchestrator.transport.codec import LogLine, ProgressMark
from orchestrator.transport.quarantine import Refused
from tests.integration.code_stage import act
from tests.integration.stage import KEYS, System, raw
from tests.said import say

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
SMALL = "name: small\ntasks: {only: {task: job}}"
SINGLE = "name: single\nconcurrency: 1\ntags: [one, two]\ntasks: {only: {task: slow}}"
OPEN_STEPS = "SELECT id FROM orchestrator.tasks WHERE run_id = '{}'"


def rows(system: System, statement: str) -> Iterator[str]:
    return (str(row["id"]) for row in system.sql(statement))


def fill(system: System) -> None:
    """Create tasks, runs and schedules of every kind, in the common states."""
    worker = system.worker(knows=("job",), slots=50)
    for definition in (SMALL, STEPS):
        system.app.workflows.apply(loads(definition))
    system.app.schedule(every="1h")(system.app.task(name="hourly")(lambda: None))
    system.app.schedules.apply()
    failing, finishing = system.app.workflows["steps"].start(), system.app.workflows["steps"].start()
    system.app.workflows["steps"].start().cancel()
    system.app.start_many(system.job, [1, 2])
    system.job.enqueue(1).cancel()
    system.job.options(delay=3600).enqueue(1)
    system.job.options(on_success=system.job).enqueue(1)
    system.app.schedules["hourly"].trigger()
    for number in range(6):
        system.pass_seconds()
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


def fill_oddly(system: System) -> None:
    """Create rare states: retried, lost and unknown tasks; waiting, stuck and cancelling runs; paused schedules."""
    worker = system.worker("odd", knows=("slow",), queue="odd", slots=50)
    slow = system.app.task(name="slow", queue="odd", retries=5)(lambda number=0: number)
    system.app.task(name="nobody", queue="odd")(lambda: None).enqueue()
    system.app.workflows.apply(loads(SINGLE))
    failed, lost, running = slow.enqueue(1), slow.enqueue(2), slow.enqueue(3)
    for _ in range(2):
        system.app.workflows["single"].start()
    system.pass_seconds(2)
    for task in worker.take():
        if task.id == raw(failed):
            worker.fail(task)
        elif task.id == raw(lost):
            worker.report(Lost(task.id, task.attempt, alone=task.alone))
        elif task.id == raw(running):
            worker.start(task)
    system.pass_seconds(2)
    marks = {raw(running): ProgressMark(1, 0.5, "half of it")}
    journal.write(system.redis, KEYS, marks)
    say(system.engine, raw(running), LogLine(1_700_000_000.0, 1, "INFO", "said"))
    system.scheduler._streams.set_aside([Refused("events", b"\xc1", "not understood")])
    unplanned = system.app.workflows["steps"].start()
    system.pass_seconds(2)
    system.sql("UPDATE orchestrator.runs SET state = '\\xc1' WHERE id = CAST(:id AS uuid)", id=unplanned.id)
    system.sql(
        """UPDATE orchestrator.runs SET stuck = '{"event": 0, "kind": "DecodeError", "message": "no", "difference": "",
            "release": "1"}' WHERE id = CAST(:id AS uuid)""",
        id=unplanned.id,
    )
    damaged = slow.enqueue(4)
    system.sql("UPDATE orchestrator.tasks SET payload = '\\xc1' WHERE id = CAST(:id AS uuid)", id=damaged.id)
    system.sql(
        """UPDATE orchestrator.ended_tasks SET payload = '\\xc1', result = '\\xc1'
            WHERE id = (SELECT id FROM orchestrator.ended_tasks WHERE status = 'success' AND run_id IS NULL LIMIT 1)"""
    )
    queue = system.app.queue("odd")
    queue.pause()
    queue.limit(concurrency=3, rate="10/s")
    queue.retain(success=60, failed=0)
    schedules = system.app.schedules
    schedules.set("small", name="paused", every="1h")
    schedules["small/paused"].pause()
    schedules.set("small", name="over", at="2096-01-01T00:00")
    system.sql("UPDATE orchestrator.schedules SET next_fire = NULL, due_at = NULL WHERE name = 'over'")
    odd: dict[str, Any] = {"cron": "15 3 * * 2", "timezone": "Asia/Kolkata", "jitter": "1m", "params": {"many": ["ä"]}}
    schedules.set("steps", name="odd", **odd)
    system.sql("UPDATE orchestrator.schedules SET error = 'no such parameter', last_fire = now() WHERE name = 'odd'")
    system.sql("UPDATE orchestrator.schedules SET origin = 'shop:app', forgotten_at = now() WHERE workflow = 'hourly'")
    schedules["steps/default"].backfill("2026-01-01", "2026-01-10").cancel()
    schedules["steps/default"].backfill("2026-02-01", "2026-02-10")
    system.sql(
        """UPDATE orchestrator.ended_tasks SET status = 'skipped', reason = 'upstream failed', result = NULL
            WHERE id = (SELECT id FROM orchestrator.ended_tasks WHERE run_id IS NULL AND status = 'success' LIMIT 1)"""
    )
    system.sql("UPDATE orchestrator.workers SET state = 'dead' WHERE id = 'odd'")


def fill_with_code(system: System) -> None:
    """Create runs of code workflows in every state."""

    @system.app.workflow(name="kid")
    async def kid(ctx: WorkflowContext) -> None:
        await ctx.signals("go").get()

    @system.app.workflow(name="code")
    async def code(ctx: WorkflowContext, number: int) -> int:
        ctx.set("number", number)
        if number == 1:
            ctx.sleep(hours=1, name="reminder")
            kid.options(name="my kid").schedule()
            await ctx.promise("answer", type=int)
        if number == 2:
            raise ValueError("a long story\nin two lines")
        if number == 3:
            await ctx.sleep(hours=1)
        if number == 5:
            ctx.continue_as_new(0)
        return await system.job.schedule(number)

    system.worker("coder", knows=("job", "code", "code@1", "kid"), slots=50)
    engine = Engine(system.app.code_workflows.find, 1_000_000)
    ended, waiting, failing, cancelled, stuck, _ = (code.starting(id=f"c-{n}").start(n) for n in range(6))
    try:
        for number in range(8):
            system.pass_seconds()
            if number == 2:
                cancelled.cancel()
            for member in system.workers:
                for task in member.take():
                    if not task.is_turn_task:
                        member.succeed(task)
                    elif task.id == raw(stuck):
                        why = Violation(3, "TaskTypeMismatch", "history has 'a', and the code says 'b'", "- a\n+ b")
                        member.report(Activated(task.id, task.attempt, 0.1, stuck=why))
                    else:
                        member.report(act(engine, task))
    finally:
        engine.close()
    states = [handle.status() for handle in (ended, waiting, failing, cancelled, stuck)]
    assert states == ["success", "running", "failed", "cancelled", "stuck"]
    assert len(list(rows(system, "SELECT id FROM orchestrator.runs WHERE reason = 'continued'"))) == 1
    code.starting(id="late").start(0)
