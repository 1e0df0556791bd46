"""The engine of a worker: the cache of live workflows, replay on a cache miss, and eviction."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from orchestrator import NotFound, Orchestrator, WorkflowContext
from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Activated, Activation, Query
from orchestrator.domain.code.history import Event
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.values.payload import encode_value
from orchestrator.testing.leader import MemoryLeader
from orchestrator.testing.memory_run import Run

app = Orchestrator()
LIMIT = 1_000_000
left: list[str] = []


def encoded(value: Any) -> bytes:
    return encode_value(value, "a value", LIMIT)


@app.task(name="work")
def work(number: int) -> int: ...


@app.workflow(name="adds")
async def adds(ctx: WorkflowContext, count: int) -> int:
    total = 0

    @ctx.query
    def so_far() -> int:
        return total

    for number in range(count):
        total += await work.schedule(number)
    return total


@app.workflow(name="clings")
async def clings(ctx: WorkflowContext) -> None:
    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            left.append("generator")
            await asyncio.sleep(1)

    async def inner() -> None:
        try:
            await ctx.promise("never")
        finally:
            left.append("inner")
            await work.schedule(1)
            left.append("must not come here")

    async def not_begun() -> None:
        left.append("must not come here")

    try:
        task = asyncio.create_task(inner())
        async for _ in numbers():
            await asyncio.gather(task, asyncio.sleep(1000))
    except Exception:  # noqa: BLE001
        left.append("must not come here")
    finally:
        left.append("outer")
        ctx.logger.warning("must not be said")
        try:
            await asyncio.sleep(5)
        finally:
            left.append("outer still")
            asyncio.create_task(not_begun())  # noqa: RUF006


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(app.code_workflows.find, LIMIT)
    yield engine
    engine.close()


def begin(leader: MemoryLeader, workflow: str, *args: Any, number: int = 1) -> Run:
    return leader.start(history.RunStarted(workflow, 1, encoded((args, {}))), number.to_bytes(16, "big"))


def leader_of(engine: Engine) -> MemoryLeader:
    return MemoryLeader(engine, app.code_workflows.find, 1_700_000_000.0)


def finish_tasks(leader: MemoryLeader, run: Run) -> None:
    for task in list(run.tasks):
        leader.settle(run, task, history.TaskCompleted(task, encoded(1)))


def play(leader: MemoryLeader, run: Run) -> Any:
    while run.end is None:
        leader.activate(run)
        finish_tasks(leader, run)
    assert isinstance(run.end, commands.CompleteRun)
    return msgspec.msgpack.decode(run.end.result)


def test_a_cached_workflow_receives_only_new_events(engine: Engine) -> None:
    leader = leader_of(engine)
    run = begin(leader, "adds", 3)
    shown: list[int] = []
    activate = engine.activate

    def spy(activation: Activation, identifier: bytes, attempt: int) -> Activated:
        shown.append(len(activation.events))
        return activate(activation, identifier, attempt)

    engine.activate = spy  # type: ignore[method-assign]
    assert play(leader, run) == 3
    assert shown == [1, 1, 1, 1]
    assert len(engine) == 0  # the run has ended


def test_a_stale_cache_entry_is_reported_missing(engine: Engine) -> None:
    leader = leader_of(engine)
    run = begin(leader, "adds", 3)
    leader.activate(run)
    finish_tasks(leader, run)
    news = [run.history[-1]]
    wrong = Activation(run.id, "adds", 1, after=2, through=4, events=news, cached=9)
    report = engine.activate(wrong, run.id, 2)
    assert report == Activated(run.id, 2, report.duration, missing=True)
    assert run.id not in engine  # the state left by an attempt that was not applied is useless
    assert play(leader, run) == 3


def test_the_run_idle_for_longest_is_evicted_first() -> None:
    engine = Engine(app.code_workflows.find, LIMIT, capacity=2)
    leader = leader_of(engine)
    runs = [begin(leader, "adds", 2, number=number) for number in range(4)]
    for run in runs:
        leader.activate(run)
    assert [run.id in engine for run in runs] == [False, False, True, True]
    for run in runs:  # in turn, so that the others have evicted each run
        finish_tasks(leader, run)
        leader.activate(run)
    assert [play(leader, run) for run in runs] == [2, 2, 2, 2]
    engine.close()


def test_evicting_a_run_issues_no_commands_and_logs_nothing(
    engine: Engine, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    leader = leader_of(engine)
    run = begin(leader, "clings")
    leader.activate(run)
    assert [type(event.what).__name__ for event in run.history] == [
        *("RunStarted", "ActivationApplied", "PromiseCreated", "TimerStarted")
    ]
    left.clear()
    noise: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, noise.append
    try:
        with caplog.at_level(logging.DEBUG):
            engine.evict(run.id)
            gc.collect()
    finally:
        sys.unraisablehook = hook
    assert left == ["outer", "outer still", "inner", "generator"]
    assert not noise
    assert not [record for record in caplog.records if record.name != "asyncio"]
    assert capsys.readouterr() == ("", "")


def test_a_coroutine_that_cannot_be_closed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    app = Orchestrator()
    stop = threading.Event()

    @app.workflow(name="stubborn")
    async def stubborn(ctx: WorkflowContext) -> None:
        while not stop.is_set():
            try:
                await asyncio.Event().wait()
            except BaseException:  # noqa: BLE001
                continue

    engine = Engine(app.code_workflows.find, LIMIT)
    leader = MemoryLeader(engine, app.code_workflows.find, 0.0)
    leader.activate(begin(leader, "stubborn"))
    engine.close()
    assert "workflow.not_evicted" in caplog.text
    stop.set()


def test_a_query_of_an_uncached_run_replays_its_history(engine: Engine) -> None:
    leader = leader_of(engine)
    run = begin(leader, "adds", 3)
    for _ in range(2):
        leader.activate(run)
        finish_tasks(leader, run)
    leader.activate(run)
    before = list(run.history)
    engine.close()
    answers = leader.activate(run, [Query(b"q", "so_far", encoded(([], {})))])
    assert [msgspec.msgpack.decode(answer.result or b"") for answer in answers] == [2]
    assert run.history == before


def test_a_query_leaves_the_cache_unchanged(engine: Engine) -> None:
    leader = leader_of(engine)
    run = begin(leader, "adds", 3)
    leader.activate(run)
    question = Activation(run.id, "adds", 1, len(run.history), len(run.history), [], run.applied)
    question = msgspec.structs.replace(question, queries=[Query(b"q", "so_far", encoded(([], {})))])
    assert [answer.result for answer in engine.activate(question, run.id, 2).answers] == [encoded(0)]
    finish_tasks(leader, run)  # the leader never received the report of that attempt
    news = Activation(run.id, "adds", 1, run.shown, len(run.history), run.history[-1:], run.applied)
    assert not engine.activate(news, run.id, 3).missing


@pytest.mark.slow
def test_many_runs_interleave_in_several_threads(engine: Engine) -> None:
    leader = leader_of(engine)
    runs = [begin(leader, "adds", 10, number=number) for number in range(100)]
    with ThreadPoolExecutor(4) as pool:
        while open_runs := [run for run in runs if run.end is None]:
            list(pool.map(leader.activate, open_runs))
            for run in open_runs:
                finish_tasks(leader, run)
    assert all(run.end == commands.CompleteRun(encoded(10)) for run in runs)


def test_a_superseded_attempt_does_not_replace_a_newer_one(engine: Engine) -> None:
    leader = leader_of(engine)
    run = begin(leader, "adds", 3)
    whole = Activation(run.id, "adds", 1, after=0, through=1, events=list(run.history))
    held, go = threading.Event(), threading.Event()

    def find(name: str, version: int | None) -> Any:
        if threading.current_thread() is late:
            held.set()
            assert go.wait(60)
        return app.code_workflows.find(name, version)

    engine._find = find
    late = threading.Thread(target=lambda: engine.activate(whole, run.id, 1))
    late.start()
    assert held.wait(60)
    engine.activate(whole, run.id, 2)
    go.set()
    late.join(60)
    done = commands.command_id(run.id, "task", 1)
    news = Event(4, 1_700_000_001.0, history.TaskCompleted(done, encoded(1)))
    report = engine.activate(Activation(run.id, "adds", 1, after=3, through=4, events=[news], cached=2), run.id, 3)
    assert not report.missing
    assert [type(command) for command in report.commands] == [commands.ScheduleTask]


def test_an_unknown_workflow_raises_not_found(engine: Engine) -> None:
    with pytest.raises(NotFound, match="No workflow is registered as 'addz'. Did you mean 'adds'"):
        engine.activate(Activation(b"r" * 16, "addz", 1, after=0, through=1, events=[]), b"r" * 16, 1)


def test_a_violation_makes_a_run_stuck_until_the_code_is_fixed() -> None:
    engine = Engine(lambda *_: current, LIMIT)
    leader = MemoryLeader(engine, lambda *_: current, 1_700_000_000.0)

    def code(*names: str) -> Any:
        app = Orchestrator()
        tasks = [app.task(name=name)(lambda: None) for name in names]

        async def workflow(ctx: WorkflowContext) -> str:
            for task in tasks:
                await task.schedule()
            return "done"

        return app.workflow(name="shop")(workflow)

    current = code("charge", "ship")
    run = begin(leader, "shop")
    leader.activate(run)
    engine.close()
    finish_tasks(leader, run)
    before = list(run.history)

    current = code("pay", "ship")
    leader.activate(run)
    assert run.stuck is not None
    assert run.stuck.kind == "TaskTypeMismatch"
    assert run.stuck.event == 3
    assert run.stuck.message == (
        "Task type mismatch at task 1 (event 3): history has 'charge' and the code says 'pay'."
    )
    assert run.stuck.difference.splitlines()[-2:] == ["-task 1 charge", "+task 1 pay"]
    assert run.history == before

    current = code("charge", "pack", "ship")
    leader.activate(run)
    assert run.stuck is None
    while run.end is None:
        finish_tasks(leader, run)
        leader.activate(run)
    assert run.end == commands.CompleteRun(encoded("done"))


def test_code_that_catches_a_violation_is_still_stuck() -> None:
    app = Orchestrator()
    task = app.task(name="new")(lambda: None)

    @app.workflow(name="careless")
    async def careless(ctx: WorkflowContext) -> None:
        try:
            await task.schedule()
        except Exception:  # noqa: BLE001
            await ctx.sleep(5)

    engine = Engine(app.code_workflows.find, LIMIT)
    leader = MemoryLeader(engine, app.code_workflows.find, 0.0)
    run = begin(leader, "careless")
    leader.append(run, history.ActivationApplied(1))
    leader.append(run, history.TaskScheduled(1, commands.command_id(run.id, "task", 1), "old"))
    leader.activate(run)
    assert run.stuck is not None
    assert len(run.history) == 3


def test_the_memory_leader_rejects_an_end_with_unread_messages() -> None:
    app = Orchestrator()

    @app.workflow(name="drains")
    async def drains(ctx: WorkflowContext) -> list[int]:
        numbers = ctx.signals("number", type=int)
        taken = [await numbers.get()]
        while len(numbers):
            taken.append(numbers.get_nowait())
        return taken

    engine = Engine(app.code_workflows.find, LIMIT)
    leader = MemoryLeader(engine, app.code_workflows.find, 0.0)
    run = begin(leader, "drains")
    leader.activate(run)
    for number in (1, 2, 3):
        leader.append(run, history.SignalReceived("number", encoded(number)))
    leader.activate(run)
    assert (run.end, run.history[-1].what) == (None, history.ActivationApplied(0, ended=3))
    leader.activate(run)
    assert run.end == commands.CompleteRun(encoded([1, 2, 3]))


def test_activations_and_reports_survive_encoding() -> None:
    leader = leader_of(Engine(app.code_workflows.find, LIMIT))
    run = begin(leader, "clings")
    leader.activate(run)
    activation = Activation(run.id, "clings", 1, 0, 4, run.history, 1, [Query(b"q" * 16, "x", b"")])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(activation), type=Activation) == activation
    engine = Engine(app.code_workflows.find, LIMIT)
    report = engine.activate(Activation(run.id, "clings", 1, 0, 1, run.history[:1]), run.id, 1)
    assert report.commands
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=Activated) == report
    engine.close()
    leader._engine.close()


def seconds_per_step(steps: int) -> float:
    engine = Engine(app.code_workflows.find, LIMIT)
    leader = leader_of(engine)
    run = begin(leader, "adds", steps)
    spent = 0.0
    while run.end is None:
        begun = time.thread_time()
        leader.activate(run)
        spent += time.thread_time() - begun
        finish_tasks(leader, run)
    engine.close()
    return spent / steps


@pytest.mark.slow
def test_the_cost_of_a_step_does_not_grow_with_the_history() -> None:
    """Measures processor time of this thread, the best of several runs: the machine may be shared."""
    seconds_per_step(10)
    short = min(seconds_per_step(50) for _ in range(3))
    long = min(seconds_per_step(2000) for _ in range(2))
    assert long < short * 3
