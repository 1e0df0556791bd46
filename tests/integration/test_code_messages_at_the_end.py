"""Signals and updates that arrive while the code returns: the end waits until the code has seen them."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import WorkflowContext, WorkflowHandle
from orchestrator.domain.code import ends
from orchestrator.domain.code.history import ActivationApplied
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.testing import replay
from tests.integration.code_stage import act, kinds, rest
from tests.integration.stage import System, Worker


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker("w1", knows=("job", "drain"))


@pytest.fixture
def calls() -> list[int]:
    return []


@pytest.fixture
def drain(system: System, calls: list[int]) -> CodeWorkflow[..., Any]:
    """Sums up what it is sent until it is told to end, in the way that its argument says."""

    @system.app.workflow(name="drain")
    async def drain(ctx: WorkflowContext, how: str = "return") -> int:
        got: list[int] = []
        done: list[bool] = []

        @ctx.signal
        def add(number: int) -> None:
            got.append(number)

        @ctx.signal
        def end() -> None:
            done.append(True)

        @ctx.update
        def put(number: int) -> int:
            got.append(number)
            return sum(got)

        if how == "queue":
            notes = ctx.signals("note", type=int)
            got.append(await notes.get())
            while len(notes):
                got.append(notes.get_nowait())
        elif how == "task":
            await system.job.schedule(1)
        else:
            await ctx.wait_condition(lambda: bool(done))
        await ctx.run("sum", lambda: calls.append(sum(got)))
        if how == "fail":
            raise ValueError(f"sum {sum(got)}")
        if how == "continue" and len(got) < 4:
            ctx.continue_as_new("return")
        return sum(got)

    return drain


def report_late(system: System, worker: Worker, engine: Engine, *messages: Any) -> None:
    """Let the code take its turn, and send messages before the leader hears of it."""
    system.pass_seconds()
    (turn,) = [task for task in worker.take() if task.is_turn_task]
    report = act(engine, turn)
    for send in messages:
        send()
    system.tick()
    worker.report(report)
    system.pass_seconds()


def begin(system: System, worker: Worker, engine: Engine, drain: CodeWorkflow[..., Any], how: str) -> Any:
    handle = drain.start(how)
    rest(system, worker, engine)
    return handle


def marks(handle: WorkflowHandle[Any]) -> list[int]:
    events = (event.what for event in handle.history().events)
    return [what.ended for what in events if isinstance(what, ActivationApplied) and what.ended]


def test_a_signal_is_not_lost_by_a_return(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any], calls: list[int]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 3), lambda: handle.signal("add", 4))
    assert handle.status() == "running"
    rest(system, worker, engine_)
    assert handle.result(0) == 7
    assert calls == [0, 7], "what the refused turn ran is run again, with what is true now"
    assert kinds(system, handle).count("operation_recorded") == 1
    assert len(marks(handle)) == 1
    replay(drain, handle.history(), exactly=True, strict=True, in_order=True)


def test_neither_is_one_that_was_accepted_and_is_not_in_the_history_yet(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    system.pass_seconds()
    (turn,) = worker.take()
    worker.report(act(engine_, turn))
    handle.signal("add", 3)  # the tick takes reports first
    rest(system, worker, engine_)
    assert handle.result(0) == 3


def test_neither_by_an_error(system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]) -> None:
    handle = begin(system, worker, engine_, drain, "fail")
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 3))
    rest(system, worker, engine_)
    with pytest.raises(Exception, match="sum 3"):
        handle.result(0)


def test_signals_without_a_handler_are_there_in_order(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "queue")
    handle.signal("note", 1)
    report_late(system, worker, engine_, lambda: handle.signal("note", 2), lambda: handle.signal("add", 30))
    rest(system, worker, engine_)
    assert handle.result(0) == 33


def test_handlers_run_before_the_result_that_ends_the_run(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = drain.start("task")
    system.pass_seconds()
    worker.report(*(act(engine_, one) for one in worker.take()))
    system.pass_seconds()
    (task,) = worker.take()
    worker.succeed(task)
    report_late(system, worker, engine_, lambda: handle.signal("add", 5))
    rest(system, worker, engine_)
    assert handle.result(0) == 5
    replay(drain, handle.history(), exactly=True, strict=True)


def test_an_update_is_answered_by_the_code_that_runs_again(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    sent: list[Any] = []
    report_late(system, worker, engine_, lambda: sent.append(handle.start_update("put", 5)))
    rest(system, worker, engine_)
    assert (sent[0].result(0), handle.result(0)) == (5, 5)


def test_a_cancel_does_not_put_off_an_end_that_came_before_it(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 5), handle.cancel)
    rest(system, worker, engine_)
    assert (handle.result(0), marks(handle)) == (0, [])


def test_a_run_that_continues_passes_signals_on(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "continue")
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 5), lambda: handle.signal("end"))
    rest(system, worker, engine_)
    assert handle.result(0) == 5


def test_a_flood_of_signals_does_not_keep_a_run_open(
    system: System,
    worker: Worker,
    engine_: Engine,
    drain: CodeWorkflow[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ends, "MOST_REFUSALS", 3)
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    for _ in range(3):
        report_late(system, worker, engine_, lambda: handle.signal("add", 1))
        assert handle.status() == "running"
    report_late(system, worker, engine_, lambda: handle.signal("add", 1))
    assert handle.result(0) == 3
    assert caplog.text.count("run.signal_late") == 1
    assert len(marks(handle)) == 3
    replay(drain, handle.history(), exactly=True, strict=True)
