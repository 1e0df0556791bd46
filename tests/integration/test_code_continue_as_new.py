"""A run that continues as new: messages to the run reach its successor, or are answered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest

from orchestrator import RunFailed, WorkflowContext, WorkflowHandle
from orchestrator.domain.code import history
from orchestrator.domain.ids import successor_id
from orchestrator.domain.runs import CONTINUED
from orchestrator.domain.states import RunState
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.store.code import runs as code_runs
from orchestrator.store.runs import creation, transitions
from tests.integration.code_stage import act, rest, run_row, turn
from tests.integration.stage import System, Worker, raw
from tests.waiting import eventually

T = TypeVar("T")

MOMENTS = ("before", "in the same turn", "while the turn is out", "with its report", "after it")
"""When a message is sent to a run, relative to the turn in which the run continues."""


@pytest.fixture
def looper(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="looper", timeout=100)
    async def looper(ctx: WorkflowContext, rounds: int = 0) -> int:
        @ctx.update
        async def poke(by: int) -> int:
            return by + rounds

        @ctx.query
        def count() -> int:
            return rounds

        if await ctx.signals("go", type=str).get() == "end":
            return rounds
        ctx.continue_as_new(rounds + 1)

    return looper


@pytest.fixture
def parent(system: System, looper: CodeWorkflow[..., Any]) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="parent")
    async def parent(ctx: WorkflowContext, rounds: int = 0, detached: bool = False) -> None:
        child = looper.options(detached=detached).schedule()
        match await ctx.signals("do", type=str).get():
            case "cancel child":
                child.cancel()
                await ctx.sleep(days=1)
            case "continue":
                if rounds == 0:
                    ctx.continue_as_new(rounds + 1)

    return parent


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "looper", "parent"))


def continue_with(
    system: System, worker: Worker, engine: Engine, handle: WorkflowHandle[Any], moment: str, say: Callable[[], object]
) -> None:
    """Let a run continue as new, and call `say` at the given moment."""
    if moment != "before":
        rest(system, worker, engine)
    else:
        say()
    handle.signal("go", "on")
    if moment == "in the same turn":
        say()
    system.pass_seconds()
    turns = [task for task in worker.take() if task.is_turn_task]
    if moment == "while the turn is out":
        say()
        system.pass_seconds()
    reports = [act(engine, one) for one in turns]
    if moment == "with its report":
        say()
    worker.report(*reports)
    system.pass_seconds()
    if moment == "after it":
        say()
    system.pass_seconds()
    rest(system, worker, engine)


def asking(system: System, ask: Callable[[], T]) -> Future[T]:
    """Call `ask` in its own thread, and return when the request is stored."""
    before = system.count("inbox")
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(ask)
    pool.shutdown(wait=False)
    eventually(lambda: system.count("inbox") > before)
    return asked


def successor(system: System, handle: WorkflowHandle[Any]) -> WorkflowHandle[Any]:
    return WorkflowHandle(system.app._client, successor_id(raw(handle)))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cancel_reaches_a_run_that_continues(
    system: System, looper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, moment: str
) -> None:
    handle = looper.start()
    continue_with(system, worker, engine_, handle, moment, handle.cancel)
    assert handle.status() == "cancelled"


@pytest.mark.parametrize("why", ["cancelled", "timed out"])
def test_a_loop_that_continues_without_ever_waiting_can_be_cancelled(
    system: System, worker: Worker, engine_: Engine, why: str
) -> None:
    @system.app.workflow(name="looper", timeout=100)
    async def whirl(ctx: WorkflowContext, rounds: int = 0) -> None:
        ctx.continue_as_new(rounds + 1)

    handle = whirl.start()
    turn(system, worker, engine_)
    assert turn(system, worker, engine_)  # the loop would go on forever
    if why == "cancelled":
        handle.cancel()
    else:
        system.sql("UPDATE orchestrator.runs SET deadline = now() - interval '1 second' WHERE ended_at IS NULL")
    rest(system, worker, engine_)
    assert handle.status() == ("cancelled" if why == "cancelled" else "failed")


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_update_of_a_run_that_continues_is_answered(
    system: System, looper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, moment: str
) -> None:
    handle = looper.start()
    asked: list[Future[int]] = []

    def ask() -> None:
        asked.append(asking(system, lambda: handle.update("poke", 10, timeout=60)))

    continue_with(system, worker, engine_, handle, moment, ask)
    assert asked[0].result(60) in (10, 11)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_continues_can_be_terminated(
    system: System, looper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, moment: str
) -> None:
    handle = looper.start()
    continue_with(system, worker, engine_, handle, moment, handle.terminate)
    assert handle.status() == "terminated"


def test_a_run_that_is_being_terminated_cannot_continue(
    system: System, looper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    """The run's tasks are cancelled in slices, and its code may end before its slice comes."""
    handle = looper.start()
    rest(system, worker, engine_)
    handle.signal("go", "on")
    system.pass_seconds()
    turns = worker.take()
    system.sql("UPDATE orchestrator.runs SET cancelling = true")
    worker.report(*(act(engine_, one) for one in turns))
    system.pass_seconds(3)
    assert handle.status() == "cancelled"


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_timeout_of_a_run_includes_its_continuation(
    system: System, looper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, moment: str
) -> None:
    handle = looper.start()
    continue_with(system, worker, engine_, handle, moment, lambda: system.lead(offset=101))
    system.pass_seconds(2)
    rest(system, worker, engine_)
    assert handle.status() == "failed"
    with pytest.raises(RunFailed, match="RunTimedOut"):
        handle.result(0)


def test_a_run_keeps_its_deadline_however_often_it_continues(
    system: System, looper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = looper.start()
    first = run_row(system, handle)["deadline"]
    for offset in (30, 60):
        system.lead(offset=offset)
        continue_with(system, worker, engine_, handle, "before", lambda: None)
        handle = successor(system, handle)
    assert abs((run_row(system, handle)["deadline"] - first).total_seconds()) < 1
    system.lead(offset=101)
    rest(system, worker, engine_)
    assert handle.status() == "failed"


def child_of(system: System, handle: WorkflowHandle[Any]) -> WorkflowHandle[Any]:
    rows = system.sql("SELECT id FROM orchestrator.runs WHERE parent_run = CAST(:id AS uuid) ORDER BY id", id=handle.id)
    return WorkflowHandle(system.app._client, rows[0]["id"].bytes)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", ["end", "terminate", "cancel child"])
def test_a_cancel_reaches_a_child_that_continues(
    system: System, parent: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, how: str, moment: str
) -> None:
    handle = parent.start()
    rest(system, worker, engine_)
    child = child_of(system, handle)

    def end() -> None:
        if how == "terminate":
            handle.terminate()
        else:
            handle.signal("do", how)
        if moment == "while the turn is out":  # the parent's own turn ends before the child's
            system.pass_seconds()
            turns = [task for task in worker.take() if task.is_turn_task]
            worker.report(*(act(engine_, one) for one in turns))
            system.pass_seconds()

    continue_with(system, worker, engine_, child, moment, end)
    assert child.status() == "cancelled"


@pytest.mark.parametrize(("detached", "status"), [(False, "cancelled"), (True, "running")])
def test_continuing_cancels_children_unless_they_are_detached(
    system: System, parent: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, detached: bool, status: str
) -> None:
    handle = parent.start(0, detached)
    rest(system, worker, engine_)
    child = child_of(system, handle)
    handle.signal("do", "continue")
    rest(system, worker, engine_)
    assert child.status() == status
    second = child_of(system, successor(system, handle))
    assert second.status() == "running"


def test_a_late_query_is_answered_by_the_successor(
    system: System, looper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = looper.start()
    asked: list[Future[int]] = []

    def ask() -> None:
        asked.append(asking(system, lambda: handle.query("count", timeout=60)))

    continue_with(system, worker, engine_, handle, "while the turn is out", ask)
    assert asked[0].result(60) == 1  # long before the client asks again


def test_messages_reach_the_successor_in_order(
    system: System, looper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = looper.start()
    rest(system, worker, engine_)
    handle.signal("go", "on")
    system.pass_seconds()
    turns = worker.take()
    handle.signal("other", 1)
    handle.cancel()
    handle.signal("other", 2)
    system.pass_seconds()
    worker.report(*(act(engine_, one) for one in turns))
    system.pass_seconds()
    rows = system.sql(
        "SELECT kind FROM orchestrator.histories WHERE run_id = CAST(:id AS uuid) ORDER BY number",
        id=successor(system, handle).id,
    )
    assert [row["kind"] for row in rows][:4] == [
        *("run_started", "signal_received", "run_cancel_requested", "signal_received")
    ]


@pytest.mark.parametrize("length", [1, 2, 5, 6, 300])
def test_the_last_run_of_a_long_chain_is_found(
    system: System, looper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, length: int
) -> None:
    handle = looper.start()
    last = raw(handle)
    with system.engine.begin() as connection:
        for _ in range(length):
            transitions.end(connection, [(last, RunState.SUCCESS, CONTINUED)], datetime.now(UTC))
            last = successor_id(last)
            creation.create(connection, [code_runs.new_run(last, [history.RunStarted("looper", 1, b"\x92\x90\x80")])])
        assert code_runs.latest(connection, [raw(handle), last]) == {raw(handle): last, last: last}
    assert handle.status() == "running"
