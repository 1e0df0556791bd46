"""Workflow code that never returns is detected, named and stopped; code that only takes long is left alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import Orchestrator, WorkflowContext, unguarded
from orchestrator.domain.code import history
from orchestrator.domain.code.activation import Activated, Activation, Query
from orchestrator.domain.code.history import Event
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import Dispatch, Started, Succeeded
from orchestrator.sdk.code.engine import Running
from orchestrator.sdk.values.payload import encode_call, encode_value
from orchestrator.transport.codec import encode
from orchestrator.workers.functions import Allowed
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.running import turns
from orchestrator.workers.running.isolated import Isolation
from orchestrator.workers.running.job import Bundle, Job, Stage
from orchestrator.workers.running.pool import Pool
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.spec import WorkerSpec
from tests.waiting import eventually

pytestmark = pytest.mark.slow

LIMIT = 0.3
STOP_GRACE = 0.1
app = Orchestrator(database_url="postgresql://nowhere/x", redis_url="redis://nowhere")
let_go: list[bool] = []


@app.task(name="quick")
def quick() -> int:
    return 7


@app.workflow(name="spins")
async def spins(ctx: WorkflowContext) -> None:
    while not let_go:
        pass  # never returns


@app.workflow(name="clings")
async def clings(ctx: WorkflowContext) -> None:
    def spin() -> None:  # a function of its own: a jump of a loop may be outside of the `try` around it
        while not let_go:
            pass

    while not let_go:
        try:
            spin()
        except BaseException:  # noqa: BLE001
            continue


@app.workflow(name="sleeps")
async def sleeps(ctx: WorkflowContext) -> None:
    with unguarded():
        while not let_go:
            time.sleep(0.1)


@app.workflow(name="works")
async def works(ctx: WorkflowContext) -> int:
    """Compute for long, in short turns; then run an operation that takes long."""
    count = 0
    async for _ in ctx.signals("go"):
        count += 1
        compute(LIMIT / 5)
        if count == 10:
            break
    await ctx.run("wait", lambda: time.sleep(2 * LIMIT))
    return count


@app.workflow(name="commands")
async def commanding(ctx: WorkflowContext) -> None:
    for number in range(200):  # takes twice the time limit of a turn
        ctx.set("key", number)
        compute(LIMIT / 100)


@app.workflow(name="never-done")
async def commanding_for_ever(ctx: WorkflowContext) -> None:
    while not let_go:
        ctx.set("key", 1)


@app.workflow(name="computes")
async def computes(ctx: WorkflowContext) -> None:
    async for _ in ctx.signals("go"):
        compute(LIMIT / 3)


@app.workflow(name="asked")
async def asked(ctx: WorkflowContext) -> None:
    @ctx.query
    def endless() -> None:
        while not let_go:
            pass

    @ctx.query
    def fine() -> int:
        return 1

    await ctx.promise("never")


def compute(seconds: float) -> None:
    with unguarded():
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass


class Reports(list[AttemptReport]):
    """The reports of the pool."""

    def report(self, report: AttemptReport, *_: object, **__: object) -> None:
        if not isinstance(report, Started):
            self.append(report)

    def note(self, job: Job) -> None: ...

    def send(self) -> None: ...

    def wake(self) -> None: ...

    def code_ended(self, job: Job) -> None:
        job.lingers = False


class World:
    """A pool with one slot."""

    def __init__(
        self, isolation: Isolation | None = None, limit: float = LIMIT, stop_grace: float = STOP_GRACE
    ) -> None:
        self.reports, self.held = Reports(), HeldAttempts(capacity=9)
        self.replaced: list[str] = []
        runner = Runner(app, self.reports, Allowed(app, ()))  # type: ignore[arg-type]
        self.pool = Pool(
            runner,
            isolation,  # type: ignore[arg-type]
            self.reports,  # type: ignore[arg-type]
            self.held,
            concurrency=1,
            ttl=60.0,
            stop_grace=stop_grace,
            on_stuck=self.replaced.append,
            turn_timeout=limit,
        )
        self.pool.start()

    def submit(
        self, name: str, facts: tuple[history.Fact, ...] = (), queries: tuple[str, ...] = (), *, alone: bool = False
    ) -> Job:
        run = name.encode().ljust(16, b".")
        what = [history.RunStarted(name, 1, encode_call(name, (), {}, 1000)), *facts]
        events = [Event(number, 1_700_000_000.0, fact) for number, fact in enumerate(what, 1)]
        asked = [Query(query.encode().ljust(16), query, encode_call(query, (), {}, 1000)) for query in queries]
        turn = Activation(run, name, 1, 0, len(events), events, queries=asked)
        return self._submit(Dispatch(run, 1, name, encode(turn), "default", run_id=run, alone=alone))

    def submit_task(self) -> Job:
        return self._submit(Dispatch(b"q" * 16, 1, "quick", encode_call("quick", (), {}, 1000), "default"))

    def _submit(self, dispatch: Dispatch) -> Job:
        job = Job(dispatch, Bundle("", "", "", 1), self.held.add(dispatch.id, 1), time.monotonic())
        self.pool.submit([job])
        return job

    def reported(self, count: int = 1) -> Any:
        eventually(lambda: len(self.reports) >= count, f"{count} reports")
        return self.reports[count - 1]


@pytest.fixture
def world() -> Any:
    let_go.clear()
    world = World()
    yield world
    let_go.append(True)
    eventually(lambda: not world.pool.received.jobs, "all code has ended")


@pytest.mark.parametrize("name", ["spins", "sleeps"])
def test_code_that_never_returns_is_named_and_its_slot_is_freed(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        world.submit(name)
        report = world.reported()
    assert isinstance(report, Activated)
    assert report.stuck is not None
    assert (report.stuck.kind, report.commands) == ("TurnTooLong", [])
    where = "test_code_that_hangs.py, line"
    assert f"The code of workflow {name!r} ran for 0.3 s without waiting for anything: {where}" in report.stuck.message
    assert f"in {name}" in report.stuck.message
    assert f"workflow={name} run=" in caplog.text
    assert f"where={where}" in caplog.text
    world.submit_task()
    assert isinstance(world.reported(2), Succeeded)
    assert world.replaced == []


def test_a_process_is_replaced_if_its_code_cannot_be_stopped(world: World) -> None:
    world.submit("clings")
    report = world.reported()
    assert report.stuck is not None
    assert report.stuck.kind == "TurnTooLong"
    eventually(lambda: world.replaced == ["clings"], "the process is replaced")
    assert world.pool.received.wait_until_idle(60), "nothing is left but what does not end"


def test_many_short_turns_and_a_slow_operation_are_allowed(world: World) -> None:
    signals = tuple(history.SignalReceived("go", encode_value(None, "", 10)) for _ in range(10))
    world.submit("works", signals)
    report = world.reported()
    assert report.stuck is None
    assert type(report.commands[-1]).__name__ == "CompleteRun"


def test_many_commands_in_one_turn_are_allowed(world: World) -> None:
    world.submit("commands")
    report = world.reported()
    assert report.stuck is None
    assert len(report.commands) == 201


def test_endless_commands_in_one_turn_are_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_MAX_COMMANDS", 1_000)
    world.submit("never-done")
    assert world.reported().stuck.kind == "TurnTooLong"


def test_an_endless_query_gets_an_error_and_the_run_continues(world: World) -> None:
    world.submit("asked", queries=("endless", "fine"))
    report = world.reported()
    assert report.stuck is None
    first, second = report.answers
    assert first.error.kind == "TurnTooLong"
    assert "ran for too long" in first.error.message
    assert second.error is None
    assert world.replaced == []


def test_a_turn_that_competes_for_the_processor_is_not_stopped(world: World) -> None:
    """The limit counts the processor time of the code, not the time that other threads take."""
    signals = tuple(history.SignalReceived("go", encode_value(None, "", 10)) for _ in range(3))
    busy = [True]
    job = world.submit("computes", signals)
    eventually(lambda: job.stage is not Stage.WAITING, "it has a thread, or it would be handed back", every=0.001)
    neighbours = [_thread(lambda: _spin(busy)) for _ in range(3)]
    try:
        eventually(lambda: bool(world.reports), "the report", 60)
        assert world.reported().stuck is None
    finally:
        busy.clear()
        for neighbour in neighbours:
            neighbour.join()


@pytest.mark.parametrize("passing", [1, 2])
def test_a_turn_is_not_charged_for_time_before_it(passing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the watchdog reads clocks, code may run for long and an event may pass: here, at one of the readings."""
    commander = SimpleNamespace(step=1, commanded=0, is_away=False)
    running = Running(commander)  # type: ignore[arg-type]
    readings: list[float] = []

    def read(*_: object) -> float:
        readings.append(len(readings) * 2 * LIMIT)
        commander.step += len(readings) == passing
        return readings[-1]

    monkeypatch.setattr(turns, "_processor_time", read)
    watchdog = turns.Turns(LIMIT)
    verdicts = [watchdog._is_too_long(running, now) for now in range(4)]
    assert verdicts.index(True) == passing + 1, "the look after that which first saw the event"


def test_hanging_code_in_a_child_process_is_killed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looping.py").write_text(
        "from orchestrator import Orchestrator\napp = Orchestrator()\n"
        "@app.workflow(name='spins')\nasync def spins(ctx):\n    while True:\n        pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    isolation = Isolation(WorkerSpec(app="looping:app"), None)  # type: ignore[arg-type]
    world = World(isolation, limit=0.05, stop_grace=30.0)  # a busy machine is slow to end a process
    world.submit("spins", alone=True)
    report = world.reported()
    assert isinstance(report, Activated)
    assert report.stuck is not None
    assert "ran for 1.5 s in a process of its own, and did not return" in report.stuck.message
    assert world.pool.received.wait_until_idle(60)
    assert world.replaced == []
    isolation.close()


def test_a_turn_in_a_child_process_has_the_same_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whirling.py").write_text(
        "from orchestrator import Orchestrator\napp = Orchestrator()\n"
        "@app.workflow(name='spins')\nasync def spins(ctx):\n    while True:\n        pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ORCHESTRATOR_TURN_TIMEOUT", "0.2")
    isolation = Isolation(WorkerSpec(app="whirling:app"), None)  # type: ignore[arg-type]
    world = World(isolation, limit=60.0)
    world.submit("spins", alone=True)
    report = world.reported()
    assert isinstance(report, Activated)
    assert report.stuck is not None
    assert "ran for 0.2 s without waiting for anything: whirling.py, line " in report.stuck.message
    assert world.pool.received.wait_until_idle(60)
    isolation.close()


def _spin(busy: list[bool]) -> None:
    while busy:
        pass


def _thread(run: Callable[[], None]) -> Any:
    thread = threading.Thread(target=run)
    thread.start()
    return thread
