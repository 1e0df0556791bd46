"""Signals and updates that arrive while the code returns: the run ends only after the code has seen them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from orchestrator import WorkflowContext, WorkflowHandle, WrongState
from orchestrator.domain.code import ends
from orchestrator.domain.code import replay as replaying
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.history import ActivationApplied, SignalReceived
from orchestrator.scheduler.code import batches
from orchestrator.scheduler.requests import Requests
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.values.payload import encode_value
from orchestrator.store.code import histories
from orchestrator.store.code.turns import append_last
from orchestrator.store.sql import Statement
from orchestrator.testing import replay
from tests.integration.code_stage import act, kinds, rest
from tests.integration.stage import System, Worker
from tests.waiting import eventually


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker("w1", knows=("job", "drain"))


@pytest.fixture
def calls() -> list[int]:
    return []


@pytest.fixture
def drain(system: System, calls: list[int]) -> CodeWorkflow[..., Any]:
    """Sums up numbers until the signal `end`, and ends as its argument says."""

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
        if how == "twice" and len(got) == 1:
            await ctx.wait_condition(lambda: len(got) > 1)
        if how not in ("queue", "twice"):
            await ctx.run("sum", lambda: calls.append(sum(got)))
        if how == "fail":
            raise ValueError(f"sum {sum(got)}")
        if how == "continue" and len(got) < 4:
            ctx.continue_as_new("return")
        return sum(got)

    return drain


def report_late(system: System, worker: Worker, engine: Engine, *messages: Any) -> None:
    """Let the code take its turn, and send messages before its report."""
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


def test_a_signal_during_the_last_turn_is_not_lost(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any], calls: list[int]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 3), lambda: handle.signal("add", 4))
    assert handle.status() == "running"
    rest(system, worker, engine_)
    assert handle.result(0) == 7
    assert calls == [0], "what the refused turn ran does not run again"
    assert kinds(system, handle).count("operation_recorded") == 1
    assert len(marks(handle)) == 1
    replay(drain, handle.history(), exactly=True, strict=True, in_order=True)


@pytest.mark.parametrize("awaited", ["directly", "in a gather", "never"])
def test_a_refused_end_repeats_no_side_effect(
    system: System, worker: Worker, engine_: Engine, calls: list[int], awaited: str
) -> None:
    @system.app.workflow(name="drain")
    async def payer(ctx: WorkflowContext) -> list[int]:
        got: list[int] = []
        ctx.signal("add")(got.append)
        await ctx.signals("go").get()
        system.job.schedule(1)
        first = ctx.run("pay", lambda: calls.append(1))
        if awaited == "directly":
            await first
        elif awaited == "in a gather":
            await asyncio.gather(first)
        assert first.result() is None
        ctx.set("paid", len(got))
        if len(got) == 1:
            await ctx.run("thank", lambda: calls.append(2))
        return got

    handle = payer.start()
    rest(system, worker, engine_)
    handle.signal("go")
    for number in range(4):
        report_late(system, worker, engine_, lambda number=number: handle.signal("add", number))
    rest(system, worker, engine_)
    assert handle.result(0) == ([] if awaited == "never" else [0, 1, 2, 3])
    assert calls == ([1] if awaited == "never" else [1, 2]), "the rest sees the message that came meanwhile"
    found = kinds(system, handle)
    assert [found.count(kind) for kind in ("task_scheduled", "operation_recorded", "state_set")] == [1, len(calls), 1]
    replay(payer, handle.history(), exactly=True, strict=True, in_order=True)


def test_a_cancel_after_a_refused_end_keeps_its_side_effects(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any], calls: list[int]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 3))
    report_late(system, worker, engine_, handle.cancel)
    rest(system, worker, engine_)
    assert (handle.result(0), calls) == (3, [0])


def test_an_accepted_signal_not_yet_in_the_history_is_not_lost(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    system.pass_seconds()
    (turn,) = worker.take()
    worker.report(act(engine_, turn))
    handle.signal("add", 3)  # the tick applies reports first
    rest(system, worker, engine_)
    assert handle.result(0) == 3


def test_a_signal_during_a_failing_turn_is_not_lost(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "fail")
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 3))
    rest(system, worker, engine_)
    with pytest.raises(Exception, match="sum 3"):
        handle.result(0)


def test_signals_without_a_handler_are_delivered_in_order(
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


def test_an_update_during_the_last_turn_is_answered(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    sent: list[Any] = []
    report_late(system, worker, engine_, lambda: sent.append(handle.start_update("put", 5)))
    rest(system, worker, engine_)
    assert (sent[0].result(0), handle.result(0)) == (5, 5)


def test_a_later_cancel_does_not_delay_the_end_of_a_run(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 5), handle.cancel)
    rest(system, worker, engine_)
    assert (handle.result(0), marks(handle)) == (0, [])


def test_a_run_that_continues_passes_signals_to_its_successor(
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
    monkeypatch.setattr(ends, "MAX_REFUSALS", 3)
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


def test_an_old_worker_ends_a_run_despite_late_signals(
    system: System,
    worker: Worker,
    engine_: Engine,
    drain: CodeWorkflow[..., Any],
    caplog: pytest.LogCaptureFixture,
    old_worker: None,
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 3))
    assert (handle.result(0), marks(handle)) == (0, [])
    assert caplog.text.count("run.signal_late") == 1


@pytest.fixture
def old_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine behave as in the previous release."""
    make_old(monkeypatch)


def make_old(monkeypatch: pytest.MonkeyPatch) -> None:
    activate = Engine.activate
    monkeypatch.setattr(replaying, "stages", lambda _: {})

    def without_fields(*given: Any) -> Activated:
        return msgspec.structs.replace(activate(*given), refusals=-1, holds=False)

    monkeypatch.setattr(Engine, "activate", without_fields)


@pytest.mark.parametrize("more", [False, True])
def test_an_old_worker_cannot_end_a_run_whose_end_was_refused(
    system: System,
    worker: Worker,
    engine_: Engine,
    drain: CodeWorkflow[..., Any],
    more: bool,
) -> None:
    """It would end the run where its end was refused, even if the code has gone on."""
    how = "twice" if more else "return"
    handle = begin(system, worker, engine_, drain, how)
    handle.signal("end")
    report_late(system, worker, engine_, lambda: handle.signal("add", 3))
    if more:
        rest(system, worker, engine_)
        assert handle.status() == "running", "it waits for a second number"
        handle.signal("unknown")
    engine_.close()
    with pytest.MonkeyPatch.context() as old:
        make_old(old)
        system.sql("UPDATE orchestrator.runs SET cached = 0 WHERE id = CAST(:id AS uuid)", id=handle.id)
        rest(system, worker, engine_)  # comes to rest: the run is not sent to that worker repeatedly
    assert handle.status() == "stuck"
    assert "previous release" in system.sql("SELECT stuck FROM orchestrator.runs")[0]["stuck"]["message"]
    engine_.close()
    handle.retry()
    rest(system, worker, engine_)
    if more:
        handle.signal("add", 4)
        rest(system, worker, engine_)
    assert handle.result(0) == (7 if more else 3)
    replay(drain, handle.history(), exactly=True, strict=True)


FLOOD = 20_000


@pytest.mark.parametrize("refusals", [100, 0])
def test_ending_a_run_after_a_flood_of_messages_reads_few_rows(
    system: System,
    worker: Worker,
    engine_: Engine,
    drain: CodeWorkflow[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusals: int,
) -> None:
    """Neither the refused end nor the final end, without these messages, reads all of them."""
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    system.pass_seconds()
    (turn,) = worker.take()
    report = act(engine_, turn)
    system.sql(
        "INSERT INTO orchestrator.histories (run_id, number, at, kind, data) "
        "SELECT id, last_event + n, now(), 'signal_received', :data "
        f"FROM orchestrator.runs CROSS JOIN generate_series(1, {FLOOD}) AS n WHERE id = CAST(:id AS uuid)",
        id=handle.id,
        data=histories.encoded(SignalReceived("add", encode_value(1, "", 100))),
    )
    system.sql(f"UPDATE orchestrator.runs SET last_event = last_event + {FLOOD}")
    system.sql(
        "INSERT INTO orchestrator.inbox (kind, target, body) SELECT 'signal', CAST(:id AS uuid), '{}' "
        f"FROM generate_series(1, {FLOOD})",
        id=handle.id,
    )
    read: list[tuple[str, int]] = []
    fetch = Statement.__call__

    def counting(statement: Statement[Any], *given: Any, **values: Any) -> list[Any]:
        found = fetch(statement, *given, **values)
        read.append((statement.name, len(found or ())))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Requests, "apply", lambda *_: None)
        patched.setattr(Statement, "__call__", counting)
        patched.setattr(ends, "MAX_REFUSALS", refusals)
        worker.report(report)
        system.tick()
    assert (handle.status(), len(marks(handle))) == (("running", 1) if refusals else ("success", 0))
    assert sum(rows for name, rows in read if name != "turns.page") < 5_000, read
    assert max(rows for _, rows in read) <= 5_000, "a replay is sent in pages"
    assert len(read) < 100
    assert caplog.text.count("run.signal_late") == (0 if refusals else 1)


def _waits_for_a_row(system: System) -> bool:
    return bool(
        system.sql("SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
    )


@pytest.mark.parametrize("message", ["signal", "update"])
def test_a_message_sent_while_the_end_is_stored_is_rejected(
    system: System,
    worker: Worker,
    engine_: Engine,
    drain: CodeWorkflow[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    message: str,
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    sent: list[Future[Any]] = []
    send = {"signal": lambda: handle.signal("add", 3), "update": lambda: handle.update("put", 3)}[message]

    def append_and_send(*given: Any) -> Any:
        found = append_last(*given)
        sent.append(threads.submit(send))
        eventually(lambda: sent[0].done() or _waits_for_a_row(system), "the sender waits")
        return found

    with ThreadPoolExecutor() as threads, monkeypatch.context() as patched:
        patched.setattr(batches, "append_last", append_and_send)
        report_late(system, worker, engine_)
        with pytest.raises(WrongState, match="it is in state 'success'"):
            sent[0].result(10)
    assert handle.result(0) == 0
    assert not system.sql("SELECT FROM orchestrator.inbox")


def test_an_end_waits_for_a_message_that_is_being_stored(
    system: System, worker: Worker, engine_: Engine, drain: CodeWorkflow[..., Any]
) -> None:
    handle = begin(system, worker, engine_, drain, "return")
    handle.signal("end")
    body = {"name": "add", "value": encode_value(3, "a number", 100)}

    def commit() -> None:
        eventually(lambda: _waits_for_a_row(system), "the leader waits")
        sender.commit()

    with ThreadPoolExecutor() as threads, system.engine.connect() as sender:
        sender.execute(text("SELECT FROM orchestrator.runs FOR KEY SHARE"))
        sender.execute(
            text(
                "INSERT INTO orchestrator.inbox (kind, target, body) SELECT 'signal', id, :body FROM orchestrator.runs"
            ),
            {"body": msgspec.json.encode(body).decode()},
        )
        committed = threads.submit(commit)
        report_late(system, worker, engine_)
        committed.result(10)
    assert handle.status() == "running"
    rest(system, worker, engine_)
    assert handle.result(0) == 3
