"""A signal that starts a run if none is open, and arrives when the open run has ended."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from sqlalchemy import text

from orchestrator import Duplicate, ResultTimeout, WorkflowContext, WorkflowHandle
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import CompleteRun, ContinueRun
from orchestrator.domain.code.history import ActivationApplied, RunStarted, SignalReceived
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import runs as code_runs
from orchestrator.store.runs import creation
from tests.integration.code_stage import activation, rest
from tests.integration.stage import ONE, System, Worker
from tests.waiting import eventually

TWO = b"\x02"


@pytest.fixture
def basket(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="basket")
    async def basket(ctx: WorkflowContext) -> int:
        return int(await ctx.signals("number", type=int).get())

    return basket


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "basket"))


@pytest.fixture
def first(system: System, basket: CodeWorkflow[..., Any], worker: Worker) -> WorkflowHandle[Any]:
    """A run with the id b-1, whose code has its first turn."""
    first = basket.starting(id="b-1").start()
    system.pass_seconds()
    return first


def signalled(basket: CodeWorkflow[..., Any], number: int = 1) -> WorkflowHandle[Any]:
    return basket.starting(id="b-1", signal=("number", number)).start()


def end(worker: Worker, result: bytes, *, through: int | None = None) -> None:
    """End the run of the current turn, whose code has seen `through` events; all events by default."""
    (turn,) = worker.take()
    seen = activation(turn).through if through is None else through
    worker.report(Activated(turn.id, turn.attempt, 0.1, through=seen, commands=[CompleteRun(result)]))


def test_the_handle_refers_to_the_run_that_its_signal_starts(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    handle = signalled(basket)
    assert (handle, handle.id) == (first, first.id)
    end(worker, ONE)
    system.tick()
    assert (first.status(), first.result(0)) == ("success", 1)
    assert handle.status() == "running"
    assert handle.id == basket.find("b-1").id != first.id
    assert [event.what.__struct_config__.tag for event in handle.history().events] == ["run_started", "signal_received"]
    system.pass_seconds()
    end(worker, TWO)
    system.tick()
    assert (handle.result(0), asyncio.run(handle.aresult(0)), first.result(0)) == (2, 2, 1)


def test_the_handle_refers_to_the_run_that_another_signal_started(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    handles = [signalled(basket, number) for number in (1, 2, 3)]
    end(worker, ONE)
    system.pass_seconds()
    assert len({handle.history().run_id for handle in handles}) == 1
    end(worker, TWO, through=4)
    system.tick()
    assert [handle.result(0) for handle in handles] == [2, 2, 2]
    assert system.count("runs") == 2


def test_a_starting_signal_starts_a_run_behind_many_late_signals(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    """Of the plain signals that an ended run has not seen, only the first are read."""
    for _ in range(3):
        first.signal("note", "x" * 70_000)
    handle = signalled(basket)
    system.tick()
    end(worker, ONE, through=1)
    system.tick()
    assert (first.result(0), handle.status()) == (1, "running")
    assert handle.history().run_id != first.history().run_id


def test_the_handle_stays_with_the_run_that_receives_the_signal(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    """Also if that run continues as new."""
    handle = signalled(basket)
    system.tick()
    (turn,) = worker.take()
    worker.report(Activated(turn.id, turn.attempt, 0.1, through=1, commands=[ContinueRun(b"\x92\x90\x80", {})]))
    system.pass_seconds(2)
    assert handle.status() == "running"
    end(worker, TWO, through=2)
    system.tick()
    assert (first.result(0), handle.result(0)) == (2, 2)


def test_a_starting_signal_goes_to_a_run_started_concurrently(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    """The first to take the id has it, and the signal goes there."""
    handle = signalled(basket)
    end(worker, ONE)
    mine = uuid4()
    with system.engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("UPDATE orchestrator.run_keys SET run_id = :id"), {"id": mine})
        started = RunStarted("basket", 1, b"\x92\x90\x80")
        creation.create(connection, [code_runs.new_run(mine.bytes, [started])])
        ticking = threading.Thread(target=system.tick)
        ticking.start()
        eventually(lambda: system.sql("SELECT 1 FROM pg_locks WHERE NOT granted"))
        transaction.commit()
        ticking.join()
    system.pass_seconds()
    assert system.count("runs") == 2
    assert handle.history().run_id == mine.bytes
    assert [event.what.__struct_config__.tag for event in handle.history().events] == ["run_started", "signal_received"]


def test_a_signal_unseen_by_the_ended_code_starts_a_run(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    handles = [signalled(basket, number) for number in (1, 2)]
    system.tick()
    assert len(first.history().events) == 3, "they stand in its history"
    end(worker, ONE)  # seeing only earlier events
    system.tick()
    assert first.result(0) == 1
    assert [handle.status() for handle in handles] == ["running", "running"]
    whats = [event.what.__struct_config__.tag for event in handles[0].history().events]
    assert whats == ["run_started", "signal_received", "signal_received"]
    assert "otherwise" not in handles[0].history().to_json()
    system.pass_seconds()
    end(worker, TWO, through=3)
    system.tick()
    assert [handle.result(0) for handle in handles] == [2, 2]
    assert system.count("runs") == 2


def test_signals_of_a_sender_stay_in_order_around_an_unnoticed_end(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    handles = [signalled(basket, 1)]
    (request,) = system.sql("DELETE FROM orchestrator.inbox RETURNING *")
    end(worker, ONE)
    system.tick()
    system.sql(
        "INSERT INTO orchestrator.inbox (id, kind, target, body) OVERRIDING SYSTEM VALUE"
        " VALUES (:id, :kind, :target, CAST(:body AS jsonb))",
        **dict(request) | {"body": json.dumps(request["body"])},
    )
    handles.append(signalled(basket, 2))  # the first signal is on its way to an ended run
    assert handles[-1].id == first.id, "nothing is decided, as nobody leads"
    with system.engine.begin() as connection:  # another run takes over the id, and is signalled
        mine = uuid4()
        connection.execute(text("UPDATE orchestrator.run_keys SET run_id = :id"), {"id": mine})
        creation.create(connection, [code_runs.new_run(mine.bytes, [RunStarted("basket", 1, b"\x92\x90\x80")])])
    handles.append(signalled(basket, 3))
    system.pass_seconds()
    (numbers,) = {tuple(_numbers(handle)) for handle in handles}
    assert numbers == (1, 2, 3)
    assert system.count("runs") == 2


def _numbers(handle: WorkflowHandle[Any]) -> list[int]:
    facts = [event.what for event in handle.history().events]
    return [msgspec.msgpack.decode(fact.value) for fact in facts if isinstance(fact, SignalReceived)]


@pytest.mark.parametrize("options", [{"on_conflict": "anew"}, {"signal": ("number", 1)}], ids=["anew", "signal"])
@pytest.mark.parametrize("is_there", [True, False], ids=["ended", "unknown"])
def test_two_concurrent_starts_with_the_same_id_create_a_single_run(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, options: dict[str, Any], is_there: bool
) -> None:
    if is_there:
        basket.starting(id="b-1").start()
        system.pass_seconds()
        end(worker, ONE)
        system.tick()
    mine = uuid4()
    with system.engine.connect() as connection, connection.begin() as transaction, ThreadPoolExecutor() as pool:
        assert run_keys.take(connection, "basket/b-1", mine.bytes, anew=True) is None
        creation.create(connection, [code_runs.new_run(mine.bytes, [RunStarted("basket", 1, b"\x92\x90\x80")])])
        other = pool.submit(basket.starting(id="b-1", **options).start)
        eventually(lambda: system.sql("SELECT 1 FROM pg_locks WHERE NOT granted"))
        transaction.commit()
        if "signal" in options:
            assert other.result(60).id == str(mine)
        else:
            with pytest.raises(Duplicate, match=str(mine)):
                other.result(60)
    assert len(system.sql("SELECT 1 FROM orchestrator.runs WHERE ended_at IS NULL")) == 1


def test_a_result_waits_until_the_run_of_the_signal_is_known(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    handle = signalled(basket)
    (request,) = system.sql("DELETE FROM orchestrator.inbox RETURNING *")  # as if the request were not committed yet
    end(worker, ONE)
    system.tick()
    assert first.result(0) == 1
    system.sql(
        "INSERT INTO orchestrator.inbox (id, kind, target, body) OVERRIDING SYSTEM VALUE"
        " VALUES (:id, :kind, :target, CAST(:body AS jsonb))",
        id=request["id"],
        kind=request["kind"],
        target=request["target"],
        body=json.dumps(request["body"]),
    )
    with pytest.raises(ResultTimeout):
        handle.result(0)
    with pytest.raises(ResultTimeout):
        asyncio.run(handle.aresult(0))
    system.pass_seconds(2)
    end(worker, TWO)
    system.tick()
    assert handle.result(0) == 2


# -- signals that arrive with the signal that ends the run


@pytest.fixture
def collector(system: System) -> CodeWorkflow[..., Any]:
    """Collects numbers until a negative one: -1 returns them, -2 raises, -3 continues."""

    @system.app.workflow(name="basket")
    async def collector(ctx: WorkflowContext, taken: list[int] | None = None) -> list[int]:
        taken = taken or []
        async for number in ctx.signals("number", type=int):
            if number == -2:
                raise ValueError("no more")
            if number == -3:
                ctx.continue_as_new(taken)
            if number < 0:
                break
            taken.append(number)
        return taken

    return collector


@pytest.mark.parametrize("last", [-1, -2], ids=["returns", "raises"])
def test_signals_behind_the_signal_that_ends_a_run_start_another_run(
    system: System, collector: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, last: int
) -> None:
    handles = [signalled(collector, number) for number in (1, last, 5, 6)]
    rest(system, worker, engine_)
    ended, followed = handles[0], handles[-1]
    assert ended.status() == ("success" if last == -1 else "failed")
    (mark,) = [event.what for event in ended.history().events if isinstance(event.what, ActivationApplied)]
    assert (mark.through, _numbers(ended)) == (3, [1, last, 5, 6]), "the history says what the code was not shown"
    assert (followed.status(), _numbers(followed)) == ("running", [5, 6])
    signalled(collector, -1)
    rest(system, worker, engine_)
    assert followed.result(0) == [5, 6]
    assert system.count("runs") == 2


def test_signals_that_start_a_run_may_also_start_the_next_run(
    system: System, collector: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    """The signals were lost if the second run, too, ended before its code had seen all of them."""
    handles = [signalled(collector, number) for number in (1, -1, 2, -1, 3, -1, 4)]
    rest(system, worker, engine_)
    assert [handle.result(0) for handle in (handles[0], handles[2], handles[4])] == [[1], [2], [3]]
    assert (handles[6].status(), _numbers(handles[6])) == ("running", [4])
    assert system.count("runs") == 4


def test_signals_behind_the_signal_that_continues_a_run_reach_its_successor(
    system: System, collector: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handles = [signalled(collector, number) for number in (1, -3, 5, -1, 6)]
    rest(system, worker, engine_)
    assert handles[0].result(0) == [1, 5]
    assert (handles[-1].status(), _numbers(handles[-1])) == ("running", [6])
    assert system.count("runs") == 3


def _reset(system: System, handle: WorkflowHandle[Any], to: int) -> WorkflowHandle[Any]:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: handle.reset(to=to))
        eventually(lambda: system.pass_seconds(after=0.1) or asking.done(), "the leader answers")
        return asking.result()


def test_a_reset_delivers_plain_signals_behind_the_end_of_a_run(
    system: System, worker: Worker, engine_: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    refused = {2}

    @system.app.workflow(name="basket")
    async def mended(ctx: WorkflowContext) -> list[int]:
        taken: list[int] = []
        async for number in ctx.signals("number", type=int):
            if number in refused:
                raise ValueError("not that one")
            taken.append(number)
            if number == 3:
                break
        return taken

    handle = mended.start()
    for number in (1, 2, 3):
        handle.signal("number", number)
    rest(system, worker, engine_)
    assert (handle.status(), _numbers(handle)) == ("failed", [1, 2, 3])
    assert "the run had ended" not in caplog.text, "the code was shown it before it failed"
    refused.clear()
    again = _reset(system, handle, 1)
    rest(system, worker, engine_)
    assert again.result(0) == [1, 2, 3]


@pytest.mark.parametrize("to", [1, 4])
def test_signals_start_no_second_run_when_their_run_is_reset(
    system: System, collector: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, to: int
) -> None:
    handles = [signalled(collector, number) for number in (1, -1, 5)]
    rest(system, worker, engine_)
    again = _reset(system, handles[0], to)
    rest(system, worker, engine_)
    assert (again.result(0), _numbers(again)) == ([1], [1, -1, 5])
    assert _numbers(handles[-1]) == [5], "once"
    assert system.count("runs") == 3


def test_an_interrupted_end_keeps_signals_that_the_code_has_not_seen(
    system: System,
    collector: CodeWorkflow[..., Any],
    worker: Worker,
    engine_: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = [signalled(collector, number) for number in (1, -1, 5)]
    with monkeypatch.context() as broken:
        broken.setattr(code_runs, "forget", lambda *_: 1 / 0)
        rest(system, worker, engine_)
        assert system.sql("SELECT stuck FROM orchestrator.runs")[0]["stuck"]
    system.app.run(handles[0].id).retry()
    rest(system, worker, engine_)
    assert handles[0].result(0) == [1]
    assert (handles[-1].status(), _numbers(handles[-1])) == ("running", [5])


def test_a_signal_behind_a_pending_signal_returns_the_run_of_both(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    signalled(basket, 1)
    (request,) = system.sql("DELETE FROM orchestrator.inbox RETURNING *")
    end(worker, ONE)
    system.tick()
    system.sql(
        "INSERT INTO orchestrator.inbox (id, kind, target, body) OVERRIDING SYSTEM VALUE"
        " VALUES (:id, :kind, :target, CAST(:body AS jsonb))",
        **dict(request) | {"body": json.dumps(request["body"])},
    )
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(signalled, basket, 2)
        eventually(lambda: sending.done() or system.tick())
        handle = sending.result()
    assert handle != first
    assert handle.id == basket.find("b-1").id
    assert _numbers(handle) == [1, 2]


def test_updates_of_a_handle_go_to_the_run_that_has_the_signal(system: System, engine_: Engine) -> None:
    @system.app.workflow(name="basket")
    async def basket(ctx: WorkflowContext) -> int:
        @ctx.update
        def add(number: int) -> int:
            return number + 1

        await ctx.signals("number", type=int).get()
        return int(await ctx.signals("number", type=int).get())

    worker = system.worker(knows=("job", "basket"))
    first = basket.starting(id="b-1").start()
    system.pass_seconds()
    handle = signalled(basket)
    end(worker, ONE)
    system.tick()
    update = handle.options(id="u-1").start_update("add", 1)
    rest(system, worker, engine_)
    system.sql("DELETE FROM orchestrator.answers RETURNING 1")  # as after an hour
    assert (update.stage(), update.result()) == ("completed", 2)
    assert basket.find("b-1").update_handle("u-1").result() == 2
    assert handle.id != first.id
