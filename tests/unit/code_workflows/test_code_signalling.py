"""Signals from a workflow to other runs are commands; other client calls inside a workflow are rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from orchestrator import DeterminismViolation, NotDeterministic, Orchestrator, WorkflowContext
from orchestrator.domain.code import history
from orchestrator.sdk.values.payload import decode_value
from orchestrator.testing import Recording, TestedRun, WorkflowTest, replay
from tests.unit.code_workflows.playing import played, started

app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")
SOMEBODY = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"


@app.task(name="work")
def work(number: int) -> int: ...


@app.workflow(name="reports")
async def reports(ctx: WorkflowContext, to: str, count: int) -> None:
    handle = app.workflow_run(to)
    for number in range(count):
        handle.signal("progress", {"done": number})
        await ctx.sleep(1)
    handle.signal("progress", None)


@app.workflow(name="listens")
async def listens(ctx: WorkflowContext, count: int) -> list[Any]:
    child = reports.schedule(str(ctx.info.run_id), count)
    heard = []
    async for signal in ctx.signals("progress"):
        if signal is None:
            break
        heard.append(signal)
    await child
    return heard


def test_a_run_signals_another_run() -> None:
    assert played(listens, 3) == [{"done": 0}, {"done": 1}, {"done": 2}]


def sent(recording: Recording) -> list[history.SignalSent]:
    return [event.what for event in recording.events if isinstance(event.what, history.SignalSent)]


def test_replay_compares_the_signals_that_a_run_sent() -> None:
    async def play(run: TestedRun[Any], _: WorkflowTest) -> Recording:
        await run.result()
        return run.history

    recording = started(reports, play, SOMEBODY, 1)
    assert [(one.ordinal, str(UUID(bytes=one.run)), one.name) for one in sent(recording)] == [
        (1, SOMEBODY, "progress"),
        (2, SOMEBODY, "progress"),
    ]
    other = Orchestrator()

    def changed(name: str, value: Any) -> Any:
        @other.workflow(name="reports", version=len(str(value)) + len(name))
        async def code(ctx: WorkflowContext, to: str, count: int) -> None:
            app.workflow_run(to).signal(name, value)
            await ctx.sleep(1)
            app.workflow_run(to).signal("progress")

        return code

    replay(changed("progress", {"done": 0}), Recording.from_json(recording.to_json()))
    with pytest.raises(DeterminismViolation, match="Signal name mismatch at signal 1"):
        replay(changed("progres", {"done": 0}), recording)
    with pytest.raises(DeterminismViolation, match="Arguments mismatch at signal 1 progress"):
        replay(changed("progress", {"done": 77}), recording)


def test_a_run_that_signals_itself_replays_after_a_reset() -> None:
    own = Orchestrator()

    @own.workflow(name="talks_to_itself")
    async def talks_to_itself(ctx: WorkflowContext) -> Any:
        own.workflow_run(ctx.info.run_id).signal("note", 1)
        first = await ctx.signals("note").get()
        await ctx.sleep(1)
        return first

    async def play(run: TestedRun[Any], test: WorkflowTest) -> Any:
        again = await run.reset(to=4)
        assert decode_value(again.history.events[3].what.value) == 1  # type: ignore[union-attr]
        return [await run.result(), await again.result(), len(sent(again.history))]

    assert started(talks_to_itself, play) == [1, 1, 1]


FORBIDDEN: dict[str, Callable[[], Any]] = {
    "terminate": lambda: app.workflow_run(SOMEBODY).terminate(),
    "resolve": lambda: app.workflow_run(SOMEBODY).resolve("approval"),
    "reject": lambda: app.workflow_run(SOMEBODY).reject("approval", "no"),
    "query": lambda: app.workflow_run(SOMEBODY).query("size"),
    "update": lambda: app.workflow_run(SOMEBODY).update("add"),
    "reset": lambda: app.workflow_run(SOMEBODY).reset(to=1),
    "retry": lambda: app.workflow_run(SOMEBODY).retry(),
    "status": lambda: app.workflow_run(SOMEBODY).status(),
    "history": lambda: app.workflow_run(SOMEBODY).history(),
    "result": lambda: app.workflow_run(SOMEBODY).result(),
    "start_many": lambda: app.start_many(work, [1, 2]),
    "enqueue_many": lambda: app.enqueue_many(work, [(1,)]),
    "queue": lambda: app.queue("default").pause(),
    "event": lambda: app.post_event("something"),
    "workflows": lambda: list(app.workflows),
    "schedules": lambda: list(app.schedules),
    "retry_failed": lambda: app.retry_failed(),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_other_client_calls_inside_a_workflow_are_rejected(name: str) -> None:
    own = Orchestrator()

    @own.workflow(name="meddles")
    async def meddles(ctx: WorkflowContext) -> None:
        FORBIDDEN[name]()

    async def play(run: TestedRun[Any], _: WorkflowTest) -> None:
        with pytest.raises(NotDeterministic, match="every replay"):
            await run.result()

    started(meddles, play)
