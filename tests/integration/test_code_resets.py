"""Runs of workflows as code that are reset to an earlier event, tick by tick."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator import NotFound, RunFailed, WorkflowContext, WorkflowHandle, WrongState
from orchestrator.cli import main
from orchestrator.domain.code.activation import Activation
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.scheduler.code import resets as code_resets
from orchestrator.sdk.code.engine import Engine, replay
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.store.code import expectations
from orchestrator.store.code import keys as run_keys
from orchestrator.store.runs import creation
from orchestrator.transport.codec import decode
from tests.integration.stage import System, Worker
from tests.waiting import eventually

NAMES = ("one", "two", "three", "order", "parent", "slow", "mailer", "rounds", "patient")


class Stage:
    """A system whose worker runs activations at once, and ends tasks when the test says so."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.app = system.app
        self.engine = Engine(system.app.code_workflows.find, 1_000_000)
        self.worker: Worker = system.worker(knows=NAMES, slots=100)
        self.held: dict[str, list[Dispatch]] = {}
        self.ran: Counter[str] = Counter()
        self.tasks = {name: system.app.task(name=name)(lambda: None) for name in ("one", "two", "three")}

    def play(self, *, until: Callable[[], object] = lambda: False, most: int = 40) -> None:
        """Take turns until none is left; tasks are held."""
        quiet = 0
        for _ in range(most):
            self.system.pass_seconds(after=0.1)
            taken = self.worker.take()
            for dispatch in taken:
                if dispatch.is_turn_task:
                    activation = decode(Activation, dispatch.payload)
                    self.worker.report(self.engine.activate(activation, dispatch.id, dispatch.attempt))
                else:
                    self.ran[dispatch.name] += 1
                    self.held.setdefault(dispatch.name, []).append(dispatch)
            quiet = 0 if taken else quiet + 1
            if until() or quiet == 3:
                return

    def finish(self, name: str, value: Any = None) -> None:
        """End the oldest task of a name, and take the next turns."""
        self.worker.succeed(self.held[name].pop(0), result=msgspec.msgpack.encode(value))
        self.play()

    def fail(self, name: str) -> None:
        self.worker.fail(self.held[name].pop(0), retryable=False)
        self.play()

    def ask(self, call: Callable[[], Any], *, working: bool = False) -> Any:
        """Make a call that waits for the leader while it ticks, and with `working` for the worker, too."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(call)
            pass_time = partial(self.play, most=1) if working else partial(self.system.pass_seconds, after=0.1)
            eventually(lambda: pass_time() or future.done(), "the leader answers")
            return future.result()

    def reset(self, handle: WorkflowHandle[Any], to: int, reason: str = "") -> WorkflowHandle[Any]:
        new = self.ask(lambda: handle.reset(to=to, reason=reason))
        assert isinstance(new, WorkflowHandle)
        self.play()
        return new

    def kinds(self, handle: WorkflowHandle[Any]) -> list[str]:
        return [str(event.what.__struct_config__.tag) for event in handle.history().events]

    def row(self, handle: WorkflowHandle[Any]) -> dict[str, Any]:
        return dict(self.system.sql("SELECT * FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=handle.id)[0])

    def open_tasks(self, handle: WorkflowHandle[Any]) -> list[str]:
        rows = self.system.sql(
            "SELECT name FROM orchestrator.tasks WHERE run_id = CAST(:id AS uuid) AND id <> run_id ORDER BY name",
            id=handle.id,
        )
        return [row["name"] for row in rows]


@pytest.fixture
def stage(system: System) -> Iterator[Stage]:
    stage = Stage(system)
    yield stage
    stage.engine.close()


@pytest.fixture
def order(stage: Stage) -> CodeWorkflow[..., Any]:
    one, two, three = stage.tasks.values()

    @stage.app.workflow(name="order")
    async def order(ctx: WorkflowContext) -> list[Any]:
        ctx.set("stage", "began")
        first = await one.schedule()
        second, third = await asyncio.gather(two.schedule(), three.schedule())
        return [first, second, third]

    return order


def test_a_reset_is_shown_on_the_old_and_the_new_run(
    stage: Stage, order: CodeWorkflow[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", stage.system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", stage.system.settings.redis_url)

    def show(handle: WorkflowHandle[Any], *options: str) -> str:
        return " ".join(CliRunner().invoke(main, ["runs", "show", handle.id, *options]).output.split())

    old = order.start()
    stage.play()
    stage.finish("one", 1)
    assert "reset of" not in show(old)
    new = stage.reset(old, 4, "one was wrong")
    assert f"continues as {new.id}: it was reset, and is repeated up to its event 4: one was wrong" in show(old)
    assert f"reset of run {old.id}, repeated up to its event 4: one was wrong" in show(new)
    assert json.loads(show(new, "--json"))["reset"] == {"run": old.id, "to": 4, "reason": "one was wrong"}


def test_a_reset_of_an_open_run_keeps_its_earlier_results(stage: Stage, order: CodeWorkflow[..., Any]) -> None:
    old = order.starting(id="o-1", tags=["vip"]).start()
    stage.play()
    stage.finish("one", 1)
    stage.finish("two", 2)
    before = old.history().events
    assert stage.kinds(old)[4:10] == [
        *("task_completed", "activation_applied", "task_scheduled", "task_scheduled"),
        *("task_completed", "activation_applied"),
    ]
    new = stage.reset(old, 8, "two was wrong")

    assert old.history().events == before
    row = stage.row(old)
    assert (row["status"], row["reason"], row["open"]) == ("cancelled", "reset", 0)
    assert stage.open_tasks(old) == []
    assert stage.open_tasks(new) == ["three", "two"]
    assert stage.ran == Counter(one=1, two=2, three=2)
    assert stage.kinds(new)[:9] == [
        *("run_started", "activation_applied", "state_set", "task_scheduled", "task_completed", "activation_applied"),
        *("reopened", "reopened", "run_reset"),
    ]
    assert [event.at for event in new.history().events[:8]] == [event.at for event in before[:8]]
    assert stage.row(new)["tags"] == ["vip"]
    assert order.starting(id="o-1", on_conflict="return").start() == new

    stage.worker.succeed(stage.held["three"].pop(0))  # a task of the old run: too late
    stage.finish("two", 22)
    stage.finish("three", 3)
    assert new.result(0) == old.result(0) == [1, 22, 3]
    assert old.status() == "success"
    replay(order, new.history())


def test_an_ended_run_can_be_reset_repeatedly_and_stays_unchanged(stage: Stage, order: CodeWorkflow[..., Any]) -> None:
    old = order.starting(id="o-1").start()
    stage.play()
    stage.finish("one", 1)
    stage.fail("two")
    assert old.status() == "failed"
    first, second = stage.reset(old, 1), stage.reset(old, 5)
    assert len({old.id, first.id, second.id}) == 3
    assert stage.row(old)["status"] == "failed"
    with pytest.raises(RunFailed):
        old.result(0)
    assert stage.open_tasks(first) == ["one"]
    assert stage.open_tasks(second) == ["three", "two"]
    assert order.starting(id="o-1", on_conflict="return").start() == first  # the old run had lost the id
    again = stage.reset(second, 5)  # event numbers are those of the first run
    assert again.history().events[8 - 1].number == 8
    assert stage.kinds(again)[:6] == [*stage.kinds(old)[:5], "run_reset"]
    stage.held["two"], stage.held["three"] = stage.held["two"][-1:], stage.held["three"][-1:]
    stage.finish("two", 2)
    stage.finish("three", 3)
    assert again.result(0) == second.result(0) == [1, 2, 3]


def test_a_stuck_run_can_be_reset_to_a_matching_event(stage: Stage) -> None:
    names = ["one", "two"]

    @stage.app.workflow(name="order")
    async def order(ctx: WorkflowContext) -> list[Any]:
        return [await ctx.schedule(name) for name in names]

    old = order.start()
    stage.play()
    stage.finish("one", 1)
    assert stage.open_tasks(old) == ["two"]
    names[1] = "three"
    stage.engine.close()
    stage.finish("two", 2)
    assert old.status() == "stuck"
    new = stage.reset(old, 4)
    assert stage.open_tasks(new) == ["three"]
    stage.finish("three", 3)
    assert old.result(0) == [1, 3]
    assert stage.row(old)["stuck"] is None


def test_a_reset_run_with_an_unknown_workflow_is_stuck_not_failed(stage: Stage, order: CodeWorkflow[..., Any]) -> None:
    old = order.start()
    stage.play()
    stage.worker.die()
    stage.system.worker("w2")
    stage.system.tick_until(lambda: not stage.system.scheduler.term.fleet.knows("default", "order"))
    begun, anew = stage.ask(lambda: old.reset(to=4)), order.start()
    stage.system.pass_seconds(10)
    stage.system.lead(offset=stage.system.settings.unknown_task_timeout + 60)
    stage.system.settle()
    stage.system.tick_until(lambda: anew.status() == "failed")
    assert begun.status() == "stuck"


def test_cancelling_a_reset_run_cancels_the_new_run(stage: Stage, order: CodeWorkflow[..., Any]) -> None:
    old = order.start()
    stage.play()
    new = stage.reset(old, 4)
    old.cancel()
    stage.play()
    assert new.status() == "cancelled"
    assert stage.kinds(new)[-1] == "run_cancelled"
    with pytest.raises(RunFailed, match="was cancelled"):
        old.result(0)
    old.cancel()
    stage.play()
    assert new.status() == "cancelled"


# -- messages


def test_messages_after_the_event_of_a_reset_are_repeated(stage: Stage) -> None:
    @stage.app.workflow(name="patient")
    async def patient(ctx: WorkflowContext) -> list[Any]:
        said: list[Any] = []

        def odd(number: int) -> None:
            if number % 2 == 0:
                raise ValueError("even")

        @ctx.update(validate=odd)
        def add(number: int) -> int:
            said.append(number)
            return number

        approval = ctx.promise("approval")
        said.append(await ctx.signals("more").get())
        said.append(await ctx.signals("more").get())
        said.append(await approval)
        said.append(await ctx.promise("later"))
        return said

    old = patient.start()
    stage.play()
    old.signal("more", "first")
    stage.play()
    old.signal("more", "second")
    stage.play()
    assert stage.ask(lambda: old.update("add", 7), working=True) == 7
    with pytest.raises(Exception, match="even"):
        stage.ask(lambda: old.update("add", 8), working=True)
    stage.ask(lambda: old.resolve("approval", "yes"))
    stage.play()
    stage.ask(lambda: old.resolve("later", "at last"))
    stage.play()
    assert old.result(0) == ["first", "second", 7, "yes", "at last"]

    new = stage.reset(old, 3)
    told = stage.kinds(new)
    assert told[:8] == [
        *("run_started", "activation_applied", "promise_created", "run_reset"),
        *("signal_received", "signal_received", "update_requested", "promise_resolved"),
    ]
    assert new.status() == "running"
    stage.ask(lambda: new.resolve("later", "again"))
    stage.play()
    assert new.result(0) == ["first", "second", 7, "yes", "again"]


def test_a_new_runs_promises_are_open_before_its_first_turn(stage: Stage) -> None:
    @stage.app.workflow(name="patient")
    async def patient(ctx: WorkflowContext) -> Any:
        return await ctx.promise("approval")

    old = patient.start()
    stage.play()
    new = stage.ask(lambda: old.reset(to=3))
    stage.ask(lambda: old.resolve("approval", "yes"))
    with pytest.raises(WrongState, match="No promise 'approval' is open"):
        stage.ask(lambda: new.resolve("approval", "no"))
    stage.play()
    assert new.result(0) == "yes"


def test_a_reset_keeps_the_due_time_of_a_timer(stage: Stage) -> None:
    @stage.app.workflow(name="patient", timeout=86_400)
    async def patient(ctx: WorkflowContext) -> str:
        await ctx.sleep(hours=1)
        return "awake"

    def due() -> list[Any]:
        return [row["due"] for row in stage.system.sql("SELECT due FROM orchestrator.timers")]

    old = patient.start()
    stage.play()
    first = due()
    stage.system.lead(offset=60)
    new = stage.reset(old, 3)
    assert due() == first
    given = "SELECT extract(epoch FROM deadline - created_at)::int AS seconds FROM orchestrator.runs"
    assert [row["seconds"] for row in stage.system.sql(given)] == [86_400, 86_400]
    stage.system.lead(offset=3_601)
    stage.play()
    assert new.result(0) == "awake"


# -- children


def test_the_parent_of_a_reset_child_waits_for_the_new_run(stage: Stage) -> None:
    one = stage.tasks["one"]

    @stage.app.workflow(name="slow")
    async def slow(ctx: WorkflowContext) -> Any:
        return await one.schedule()

    @stage.app.workflow(name="parent")
    async def parent(ctx: WorkflowContext) -> Any:
        return await slow.schedule()

    handle = parent.start()
    stage.play()
    (row,) = stage.system.sql("SELECT id FROM orchestrator.runs WHERE parent_run IS NOT NULL")
    child = stage.app.workflow_run(row["id"])
    new = stage.reset(child, 1)
    assert handle.status() == "running"
    stage.held["one"].pop(0)
    stage.finish("one", 5)
    assert handle.result(0) == new.result(0) == 5
    row = stage.row(handle)
    assert (row["total"], row["open"], row["success"]) == (1, 0, 1)

    late = stage.reset(child, 1)  # the child has ended, and its parent already knows the end
    stage.finish("one", 6)
    assert late.result(0) == 6
    assert stage.row(late)["parent_run"] is None
    assert stage.row(handle)["success"] == 1


def test_a_reset_restarts_children_and_takes_over_detached_children(stage: Stage) -> None:
    one, two = stage.tasks["one"], stage.tasks["two"]

    @stage.app.workflow(name="slow")
    async def slow(ctx: WorkflowContext) -> Any:
        return await one.schedule()

    @stage.app.workflow(name="mailer")
    async def mailer(ctx: WorkflowContext) -> Any:
        return await two.schedule()

    @stage.app.workflow(name="parent")
    async def parent(ctx: WorkflowContext) -> list[Any]:
        detached = mailer.options(detached=True).schedule()
        return [await slow.schedule(), await detached]

    old = parent.start()
    stage.play()
    assert stage.ran == Counter(one=1, two=1)
    new = stage.reset(old, 4)
    assert stage.ran == Counter(one=2, two=1)
    states = stage.system.sql("SELECT workflow, status FROM orchestrator.runs ORDER BY workflow, status")
    assert [tuple(row.values()) for row in states] == [
        *(("mailer", "running"), ("parent", "cancelled"), ("parent", "running")),
        *(("slow", "cancelled"), ("slow", "running")),
    ]
    assert (stage.row(old)["open"], stage.row(new)["open"]) == (0, 2)
    stage.held["one"].pop(0)
    stage.finish("one", 1)
    stage.finish("two", 2)
    assert old.result(0) == [1, 2]
    assert stage.row(new)["open"] == 0


@pytest.mark.parametrize("child_first", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_parent_and_its_detached_child_are_both_reset(stage: Stage, child_first: bool, at_once: bool) -> None:
    two = stage.tasks["two"]

    @stage.app.workflow(name="mailer")
    async def mailer(ctx: WorkflowContext) -> Any:
        return await two.schedule()

    @stage.app.workflow(name="parent")
    async def parent(ctx: WorkflowContext) -> Any:
        return await mailer.options(detached=True).schedule()

    old = parent.start()
    stage.play()
    (row,) = stage.system.sql("SELECT id FROM orchestrator.runs WHERE workflow = 'mailer'")
    resets = [(old, 3), (stage.app.workflow_run(row["id"]), 1)]
    if child_first:
        resets.reverse()
    if at_once:
        with ThreadPoolExecutor(2) as pool:
            futures = []
            for count, (handle, to) in enumerate(resets, 1):
                futures.append(pool.submit(handle.reset, to=to))
                eventually(lambda count=count: stage.system.count("inbox") == count)  # type: ignore[misc]
            eventually(lambda: stage.system.pass_seconds(after=0.1) or all(one.done() for one in futures))
        stage.play()
    else:
        for handle, to in resets:
            stage.reset(handle, to)
    stage.held["two"] = stage.held["two"][-1:]
    stage.finish("two", 2)
    assert old.result(0) == 2
    assert stage.system.sql("SELECT id FROM orchestrator.runs WHERE open <> 0 OR ended_at IS NULL") == []


def test_the_unseen_end_of_a_detached_child_reaches_the_new_run(stage: Stage) -> None:
    two, three = stage.tasks["two"], stage.tasks["three"]

    @stage.app.workflow(name="mailer")
    async def mailer(ctx: WorkflowContext) -> Any:
        return await two.schedule()

    @stage.app.workflow(name="parent")
    async def parent(ctx: WorkflowContext) -> Any:
        detached = mailer.options(detached=True).schedule()
        await three.schedule()
        return await detached

    old = parent.start()
    stage.play()
    stage.fail("three")
    assert old.status() == "failed"
    stage.finish("two", 2)
    new = stage.reset(old, 4)
    assert stage.kinds(new)[4:6] == ["run_reset", "child_completed"]
    stage.finish("three")
    assert new.result(0) == 2
    assert stage.ran["two"] == 1


# -- rejections and failures


def test_an_invalid_reset_is_rejected_with_the_reason(stage: Stage, order: CodeWorkflow[..., Any]) -> None:
    handle = order.start()
    stage.play()
    for event, message in (
        (0, "its events are numbered 1 to 4"),
        (5, "its events are numbered 1 to 4"),
        (2, "inside a batch of commands.*event 1 or 4"),
    ):
        with pytest.raises(WrongState, match=message):
            handle.reset(to=event)
    plain = stage.app.start_many(stage.tasks["one"], [()])
    with pytest.raises(NotFound, match="is not a run of a workflow as code.*runs rerun"):
        stage.app.workflow_run(plain.id).reset(to=1)
    with pytest.raises(NotFound, match="No run has the id"):
        stage.app.workflow_run("0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17").reset(to=1)


def test_a_run_with_an_open_continuation_cannot_be_reset(stage: Stage) -> None:
    @stage.app.workflow(name="rounds")
    async def rounds(ctx: WorkflowContext, number: int = 1) -> int:
        await ctx.signals("next").get()
        if number < 2:
            ctx.continue_as_new(number + 1)
        return number

    old = rounds.start()
    old.signal("next")
    stage.play()
    (last,) = stage.system.sql("SELECT id FROM orchestrator.runs WHERE ended_at IS NULL")
    with pytest.raises(WrongState, match=f"continued as run {last['id']}, which is open: reset that"):
        stage.ask(lambda: old.reset(to=1))
    reset = stage.reset(stage.app.workflow_run(last["id"]), 1)
    with pytest.raises(WrongState, match=f"continued as run {reset.id}"):
        stage.ask(lambda: old.reset(to=1))
    old.signal("next")
    stage.play()
    assert old.result(0) == 2
    assert stage.reset(old, 1).status() == "running"  # allowed now that all these runs have ended


def test_a_reset_request_applied_twice_creates_a_single_run(
    stage: Stage, order: CodeWorkflow[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [order.start(), order.start()]
    stage.play()
    handles[1].terminate()
    stage.play()
    real = code_resets.reset_runs

    def twice(*given: Any) -> Any:
        real(*given)
        return real(*given)

    monkeypatch.setattr("orchestrator.scheduler.requests.reset_runs", twice)
    for handle in handles:
        new = stage.reset(handle, 4)
        assert stage.kinds(new).count("run_reset") == 1
    assert stage.system.count("runs") == 4


def test_resets_are_bounded_per_tick_and_applied_once_per_run(
    stage: Stage, order: CodeWorkflow[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_resets, "MAX_EVENTS", 4)
    handles = [order.start() for _ in range(3)]
    stage.play()
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(handle.reset, to=1) for handle in (*handles, handles[0])]
        eventually(lambda: stage.system.count("inbox") == 4)
        stage.system.pass_seconds(after=0.1)
        assert stage.system.count("inbox") == 3
        eventually(lambda: stage.system.pass_seconds(after=0.1) or all(one.done() for one in futures))
    errors = [future.exception() for future in futures]
    refused = [error for error in errors if error is not None]
    assert len(refused) == 1
    assert "continued as run" in str(refused[0])
    assert "The run was reset before, or its code continued" in str(refused[0])
    assert stage.system.count("runs") == 6


@pytest.mark.parametrize(
    ("where", "at"), [(creation, "create"), (run_keys, "pass_to_successors"), (expectations, "create_promises")]
)
def test_a_leader_that_dies_amid_a_reset_has_done_nothing(
    stage: Stage, order: CodeWorkflow[..., Any], monkeypatch: pytest.MonkeyPatch, where: Any, at: str
) -> None:
    handle = order.starting(id="o-1").start()
    stage.play()
    real, died = getattr(where, at), list[Any]()

    def die(*arguments: Any, **named: Any) -> Any:
        if not died:
            died.append(True)
            real(*arguments, **named)
            raise RuntimeError("killed")
        return real(*arguments, **named)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(handle.reset, to=4)
        eventually(lambda: stage.system.count("inbox") == 1)
        monkeypatch.setattr(where, at, die)
        eventually(lambda: stage.system.pass_seconds(after=0.1) or died)  # the nudge comes after the commit
        assert stage.system.count("runs") == stage.system.count("inbox") == 1
        assert handle.status() == "running"
        stage.system.lead()
        eventually(lambda: stage.system.pass_seconds(after=0.1) or future.done())
    assert stage.system.count("runs") == 2
    assert order.starting(id="o-1", on_conflict="return").start() == future.result()
