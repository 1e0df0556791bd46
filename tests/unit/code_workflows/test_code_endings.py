"""How a workflow's code ends: compensation, open generators and updates, and what a cancel interrupts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from orchestrator import DeterminismViolation, Orchestrator, OrchestratorError, RunFailed, WorkflowContext, WrongState
from orchestrator.domain.code import history
from orchestrator.domain.code.history import Event
from orchestrator.domain.tasks.task import TaskError
from orchestrator.sdk.code.recording import Recording
from orchestrator.testing import After, TestedRun, WorkflowTest, replay
from tests.unit.code_workflows.playing import played, started

app = Orchestrator()


def event_contents(run: TestedRun[Any]) -> list[Any]:
    """Return the content of each event of a run."""
    return [event.what for event in run.history.events]


@app.task
def undo(step: str) -> None: ...


@app.task
def work(number: int = 0) -> int: ...


# -- compensation


class Own(BaseException):
    """An exception that `except Exception` does not catch."""


def too_large() -> Any:
    return "x" * (app.settings.max_payload + 1)


def no_data() -> Any:
    return object()


def raising(error: BaseException) -> Any:
    def fail() -> Any:
        raise error

    return fail


ENDS = {
    "too large": (too_large, "PayloadError"),
    "no data": (no_data, "PayloadError"),
    "exit": (raising(SystemExit(3)), "SystemExit"),
    "interrupt": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "own": (raising(Own("mine")), "Own"),
}


@app.workflow
async def saga(ctx: WorkflowContext, how: str, late: bool) -> Any:
    for step in ("first", "second"):
        ctx.compensate(undo, step)
    if late:
        await work.schedule()
    return ENDS[how][0]()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", list(ENDS))
def test_a_saga_is_compensated_after_every_kind_of_failure(how: str, late: bool) -> None:
    undone: list[str] = []
    with pytest.raises(RunFailed, match=ENDS[how][1]):
        played(saga, how, late, mocks={undo: undone.append, work: 1})
    assert undone == ["second", "first"]


@app.workflow
async def promises_a_number(ctx: WorkflowContext) -> int:
    ctx.compensate(undo, "first")
    return cast(int, "none")


def test_a_result_of_the_wrong_type_fails_the_run() -> None:
    undone: list[str] = []
    with pytest.raises(RunFailed, match="PayloadError: The result of workflow .* does not match its annotation"):
        played(promises_a_number, mocks={undo: undone.append})
    assert undone == ["first"]


@app.workflow
async def saga_with_bad_steps(ctx: WorkflowContext) -> None:
    def exits() -> None:
        raise SystemExit(1)

    async def cancels() -> None:
        raise asyncio.CancelledError

    def continues() -> None:
        ctx.continue_as_new()

    ctx.compensate(undo, "first")
    for bad in (exits, cancels, continues):
        ctx.compensate(bad)
    raise ValueError("no")


def test_a_failed_compensation_does_not_stop_the_others() -> None:
    undone: list[str] = []
    with pytest.raises(RunFailed, match="ValueError: no"):
        played(saga_with_bad_steps, mocks={undo: undone.append})
    assert undone == ["first"]


# -- cancelling


@app.workflow
async def tidies(ctx: WorkflowContext) -> None:
    try:
        await ctx.sleep(days=1)
    finally:
        await undo.schedule("slowly")
        await undo.schedule("then this")


def test_a_second_cancel_does_not_interrupt_the_clean_up() -> None:
    undone: list[str] = []

    async def cancel_twice(run: TestedRun[None], test: WorkflowTest) -> None:
        await run.cancel()
        await test.skip(1)
        await run.cancel()
        await run.result()

    with pytest.raises(RunFailed, match="was cancelled"):
        started(tidies, cancel_twice, mocks={undo: After(60, undone.append)})
    assert undone == ["slowly", "then this"]


@app.workflow
async def undoes_slowly(ctx: WorkflowContext, fails: bool) -> None:
    for step in ("first", "second"):
        ctx.compensate(undo, step)
    if fails:
        raise ValueError("no")
    await ctx.sleep(days=1)


@pytest.mark.parametrize(("fails", "end"), [(True, "ValueError: no"), (False, "was cancelled")])
def test_a_cancel_does_not_interrupt_compensation(fails: bool, end: str) -> None:
    undone: list[str] = []

    async def cancel(run: TestedRun[None], test: WorkflowTest) -> None:
        if not fails:
            await run.cancel()
        for _ in range(2):
            await test.skip(1)
            await run.cancel()
        with pytest.raises(RunFailed, match=end):
            await run.result()
        assert sum(isinstance(what, history.TaskCompleted) for what in event_contents(run)) == 2, (
            "and none was given up"
        )

    started(undoes_slowly, cancel, fails, mocks={undo: After(60, undone.append)})
    assert undone == ["second", "first"]


@app.workflow
async def takes_it_back(ctx: WorkflowContext) -> int:
    for times in range(2):
        try:
            await ctx.sleep(days=1)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            continue
        return times
    return 2


def test_code_that_ignores_a_cancel_can_be_cancelled_again() -> None:
    async def cancel_twice(run: TestedRun[int], _: WorkflowTest) -> int:
        await run.cancel()
        await run.cancel()
        return await run.result()

    assert started(takes_it_back, cancel_twice) == 2


@app.workflow
async def slow_timeout(ctx: WorkflowContext) -> None:
    try:
        async with asyncio.timeout(10):
            try:
                await ctx.sleep(days=1)
            finally:
                await undo.schedule("slowly")
    except TimeoutError:
        await ctx.sleep(days=1)


def test_a_cancel_during_the_cleanup_after_a_timeout_is_delivered() -> None:
    async def cancel(run: TestedRun[None], test: WorkflowTest) -> None:
        await test.skip(11)
        await run.cancel()
        await run.result()

    with pytest.raises(RunFailed, match="was cancelled"):
        started(slow_timeout, cancel, mocks={undo: After(60)})


# -- continuing


@app.workflow
async def in_a_group(ctx: WorkflowContext, where: str, rounds: int = 0) -> int:
    if rounds:
        return rounds

    async def inner() -> None:
        await work.schedule()
        ctx.continue_as_new(where, rounds + 1)

    async with asyncio.TaskGroup() as group:
        if where == "child":
            group.create_task(inner())
            await ctx.sleep(days=1)
        async with asyncio.TaskGroup():
            await inner()
    return -1


@pytest.mark.parametrize("where", ["child", "body"])
def test_a_task_group_continues_as_new(where: str) -> None:
    assert played(in_a_group, where, mocks={work: 1}) == 1


@app.workflow
async def half_continues(ctx: WorkflowContext) -> None:
    async def fails() -> None:
        try:
            await ctx.sleep(days=1)
        finally:
            raise ValueError("in the clean-up")

    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
        await ctx.sleep(1)
        ctx.continue_as_new()


def test_a_task_group_with_a_failed_task_does_not_continue_as_new() -> None:
    with pytest.raises(RunFailed, match="in the clean-up"):
        played(half_continues)


# -- groups of tasks


@app.workflow
async def groups(ctx: WorkflowContext) -> list[int]:
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[int]] = [group.create_task(work.schedule(number)) for number in range(3)]  # type: ignore[arg-type]
        alone: asyncio.Task[int] = asyncio.create_task(work.schedule(3))  # type: ignore[arg-type]
        group.create_task(ctx.sleep(60))  # type: ignore[arg-type]
    return [task.result() for task in [*tasks, alone]]


def test_a_task_group_accepts_scheduled_tasks() -> None:
    assert played(groups, mocks={work: lambda number: 2 * number}) == [0, 2, 4, 6]


# -- asynchronous generators


@app.workflow
async def abandons(ctx: WorkflowContext, how: str, rounds: int = 0) -> str:
    async def numbers(name: str) -> AsyncIterator[int]:
        try:
            for number in range(10):
                await ctx.sleep(1)
                yield number
        finally:
            await undo.schedule(name)

    async for _ in numbers("first"):
        break
    second = numbers("second")
    await anext(second)
    if how == "raise":
        raise ValueError("no")
    if how == "continue" and not rounds:
        ctx.continue_as_new(how, 1)
    return how


@pytest.mark.parametrize("how", ["return", "raise", "continue"])
def test_abandoned_generators_are_closed_at_the_end(how: str) -> None:
    closed: list[str] = []
    if how == "raise":
        with pytest.raises(RunFailed, match="ValueError: no"):
            played(abandons, how, mocks={undo: closed.append})
    else:
        assert played(abandons, how, mocks={undo: closed.append}) == how
    assert closed == ["first", "second"] * (2 if how == "continue" else 1)


# -- updates


@app.workflow
async def updated(ctx: WorkflowContext, rounds: int = 0) -> int:
    @ctx.update
    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await ctx.sleep(1)

    @ctx.update
    async def exits() -> None:
        raise SystemExit(1)

    @ctx.update
    async def again() -> None:
        ctx.continue_as_new(rounds + 1)

    @ctx.update
    async def slow() -> None:
        await ctx.sleep(days=1)

    @ctx.query
    def sly() -> None:
        ctx.continue_as_new(rounds + 1)

    how = await ctx.signals("end", type=str).get()
    if how == "continue":
        ctx.continue_as_new(rounds + 1)
    if how == "fail":
        raise ValueError("no")
    return rounds


@pytest.mark.parametrize(("name", "error"), [("cancelled", "Cancelled"), ("exits", "SystemExit")])
def test_an_update_is_answered_however_its_handler_ends(name: str, error: str) -> None:
    async def ask(run: TestedRun[int], _: WorkflowTest) -> int:
        with pytest.raises(OrchestratorError, match=error):
            await run.update(name)
        await run.signal("end", "return")
        return await run.result()

    assert started(updated, ask) == 0


@app.workflow
async def late(ctx: WorkflowContext) -> list[str]:
    said: list[str] = []
    end = ctx.signals("end")
    if await ctx.signals("go", type=bool).get():

        @ctx.update(validate=lambda word: check(word))  # defined below
        async def say(word: str) -> int:
            said.append(word)
            return len(said)

        def check(word: str) -> None:
            if word == "rude":
                raise ValueError("no")

    await end.get()
    return said


def test_an_early_update_waits_for_its_handler() -> None:
    async def ask(run: TestedRun[list[str]], test: WorkflowTest) -> list[str]:
        for word in ("one", "rude", "two"):
            with pytest.raises(OrchestratorError, match="the code has no handler of this name so far"):
                await run.update("say", word)
        await run.signal("go", True)
        answers = [what for what in event_contents(run) if isinstance(what, history.UpdateAnswered)]
        assert [answer.error.message if answer.error else answer.result for answer in answers] == [
            "no",
            b"\x01",
            b"\x02",
        ]
        await run.signal("end")
        return await run.result()

    assert started(late, ask) == ["one", "two"]


def test_an_update_without_a_handler_is_answered_when_the_run_ends() -> None:
    async def ask(run: TestedRun[list[str]], test: WorkflowTest) -> list[str]:
        with pytest.raises(OrchestratorError, match="has no answer yet"):
            await run.update("say", "one")
        await run.signal("go", False)
        await run.signal("end")
        result = await run.result()
        (answer,) = [what for what in event_contents(run) if isinstance(what, history.UpdateAnswered)]
        assert answer.error is not None
        assert answer.error.message == "The run ended before update 'say' was completed."
        return result

    assert started(late, ask) == []


def test_an_update_rejected_by_an_older_release_stays_rejected() -> None:
    async def ask(run: TestedRun[list[str]], test: WorkflowTest) -> Recording:
        with pytest.raises(OrchestratorError, match="has no answer yet"):
            await run.update("say", "one")
        await run.signal("go", True)
        await run.signal("end")
        assert await run.result() == ["one"]
        return run.history

    recorded = started(late, ask)
    refused = TaskError("InvalidTask", "The workflow answers no update 'say'. It answers: none.")
    older: list[Event] = []
    for event in recorded.events:  # that release answered in the turn that saw the update
        what = event.what
        if isinstance(what, history.UpdateAnswered):
            continue
        older.append(event)
        if isinstance(what, history.ActivationApplied) and what.through == 3:
            asked = next(e.what for e in recorded.events if isinstance(e.what, history.UpdateRequested))
            older.append(Event(0, event.at, history.UpdateAnswered(asked.id, error=refused)))
        if isinstance(what, history.RunCompleted):
            older[-1] = Event(0, event.at, history.RunCompleted(b"\x90"))
    numbered = [Event(number, event.at, event.what) for number, event in enumerate(older, 1)]
    with pytest.raises(DeterminismViolation):
        replay(late, Recording(recorded.run_id, recorded.events[:-1] + numbered[-1:]), exactly=True)
    replay(late, Recording(recorded.run_id, numbered), exactly=True)


def test_an_update_handler_may_continue_as_new() -> None:
    async def ask(run: TestedRun[int], _: WorkflowTest) -> int:
        assert await run.update("again") is None
        await run.signal("end", "return")
        return await run.result()

    assert started(updated, ask) == 1


def test_a_query_may_not_continue_as_new() -> None:
    async def ask(run: TestedRun[int], _: WorkflowTest) -> int:
        with pytest.raises(OrchestratorError, match="may read the workflow, but may not issue commands"):
            await run.query("sly")
        await run.signal("end", "return")
        return await run.result()

    assert started(updated, ask) == 0


@pytest.mark.parametrize("how", ["return", "fail", "continue"])
def test_an_open_update_fails_when_the_run_ends(how: str) -> None:
    async def ask(run: TestedRun[int], _: WorkflowTest) -> None:
        asked = asyncio.ensure_future(run.update("slow"))
        await asyncio.sleep(0)
        await run.signal("end", how)
        with pytest.raises(WrongState, match="before update 'slow' was completed"):
            await asked

    started(updated, ask)


@app.workflow
async def large(ctx: WorkflowContext, where: str) -> Any:
    return too_large() if where == "workflow" else await work.schedule()


@pytest.mark.parametrize("where", ["workflow", "task"])
def test_a_result_that_is_too_large_is_a_payload_error(where: str) -> None:
    with pytest.raises(RunFailed, match="PayloadError"):
        played(large, where, mocks={work: lambda *_: too_large()})
