"""Promises resolved before the code waits: the resolutions are kept, like signals."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from click.testing import CliRunner, Result

from orchestrator import PayloadError, PromiseRejected, WorkflowContext, WorkflowHandle, WrongState
from orchestrator.cli import main
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import CompleteRun
from orchestrator.sdk import acting
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.testing import WorkflowTest
from tests.integration.code_stage import act, kinds, rest
from tests.integration.stage import ONE, System, Worker
from tests.waiting import eventually


@pytest.fixture
def waits(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="waits")
    async def waits(ctx: WorkflowContext, rounds: int = 0, names: list[str] | None = None) -> list[Any]:
        found: list[Any] = []
        go = ctx.signals("go", type=str)
        for name in names or ["approval"]:
            if await go.get() == "continue":
                ctx.continue_as_new(rounds + 1, names)
            promise = ctx.promise(name)
            if await go.get() == "continue":
                ctx.continue_as_new(rounds + 1, names)
            try:
                found.append(await promise)
            except PromiseRejected as error:
                found.append(str(error))
        return found

    return waits


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "waits"))


@pytest.fixture
def stage(system: System, worker: Worker, engine_: Engine) -> Stage:
    return Stage(system, worker, engine_)


class Stage:
    """A leader, a worker, and a client that resolves promises."""

    def __init__(self, system: System, worker: Worker, engine: Engine) -> None:
        self.system = system
        self.worker = worker
        self.engine = engine

    def rest(self) -> None:
        """Let the code take its turns until nothing is new."""
        rest(self.system, self.worker, self.engine)

    def ask(self, ask: Callable[[], object]) -> None:
        """Send a request, and let the leader answer it."""
        asked = self.sent(ask)
        self.system.pass_seconds()
        asked.result(60)

    def sent(self, ask: Callable[[], object]) -> Future[object]:
        before = self.system.count("inbox")
        pool = ThreadPoolExecutor(1)
        asked = pool.submit(ask)
        pool.shutdown(wait=False)
        eventually(lambda: self.system.count("inbox") > before or asked.done())
        return asked

    def go(self, handle: WorkflowHandle[Any], *words: str) -> None:
        for word in words:
            handle.signal("go", word)
            self.rest()


@pytest.mark.parametrize("moment", ["before it begins", "before it waits", "in the same turn", "while it waits"])
def test_a_promise_may_be_resolved_at_any_time(stage: Stage, waits: CodeWorkflow[..., Any], moment: str) -> None:
    handle = waits.start()
    if moment != "before it begins":
        stage.rest()
    if moment == "while it waits":
        stage.go(handle, "on")
    if moment == "in the same turn":
        handle.signal("go", "on")
        stage.system.pass_seconds()
        turns = stage.worker.take()
        stage.ask(lambda: handle.resolve("approval", 7))
        stage.worker.report(*(act(stage.engine, one) for one in turns))
        stage.system.pass_seconds()
    else:
        stage.ask(lambda: handle.resolve("approval", 7))
    stage.go(handle, *["on"] * (2 if moment.startswith("before") else 1))
    assert handle.result(0) == [7]


def test_resolving_an_unknown_promise_names_the_open_promises(
    stage: Stage, waits: CodeWorkflow[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", stage.system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", stage.system.settings.redis_url)
    said: list[str] = []

    def say(*words: str) -> None:
        said.append(CliRunner().invoke(main, ["runs", *words]).output)

    handle = waits.start()
    stage.rest()
    stage.ask(lambda: say("reject", handle.id, "other", "no"))
    assert said.pop().startswith(
        f"Stored for later: run {handle.id} is not waiting for a promise 'other' now; it waits for none."
    )
    stage.go(handle, "on")
    stage.ask(lambda: say("resolve", handle.id, "aproval", "7"))
    assert "it waits for 'approval'. Did you mean 'approval'? The first promise of that name" in said.pop()
    stage.ask(lambda: say("resolve", handle.id, "approval", "7"))
    assert said.pop() == f"Resolved 'approval' of run {handle.id}.\n"
    lines = stage.system.sql(
        "SELECT act, detail FROM orchestrator.audit WHERE target = :run AND act LIKE 're%' ORDER BY id", run=handle.id
    )
    assert [(line["act"], line["detail"]) for line in lines] == [
        ("reject", {"name": "other", "reason": "no"}),
        ("resolve", {"name": "aproval", "value": "7"}),
        ("resolve", {"name": "approval", "value": "7"}),
    ]


@pytest.mark.parametrize(("command", "given"), [("resolve", {"value": "7"}), ("reject", {"reason": "7"})])
def test_the_reason_of_a_decision_is_in_the_audit_log(
    stage: Stage,
    waits: CodeWorkflow[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    given: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", stage.system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", stage.system.settings.redis_url)
    done: list[Result] = []
    handle = waits.start()
    stage.rest()
    stage.go(handle, "on")
    words = ["runs", command, handle.id, "approval", "7", "--why", "a good customer"]
    stage.ask(lambda: done.append(CliRunner().invoke(main, words)))
    assert (done[0].exit_code, "approval" in done[0].output) == (0, True), done[0].output
    (line,) = stage.system.sql(
        "SELECT act, detail FROM orchestrator.audit WHERE target = :run AND act LIKE 're%' ORDER BY id", run=handle.id
    )
    assert (line["act"], line["detail"]) == (command, {"name": "approval", **given, "why": "a good customer"})
    shown = CliRunner().invoke(main, ["audit", "--target", handle.id])
    assert "a good customer" in shown.output, shown.output


class Decision(msgspec.Struct):
    approved: bool
    by: Literal["Ada", "Bob"]
    amounts: list[int] = []
    note: str | None = None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "expected an object, found 'yes'"),
        ({"approved": True}, "expected a field 'by', found {'approved': True}"),
        ({"approved": "yes", "by": "Ada"}, "expected true or false at 'approved', found 'yes'"),
        ({"approved": True, "by": "Eve"}, "expected one of 'Ada', 'Bob' at 'by', found 'Eve'"),
        ({"approved": True, "by": "Ada", "amounts": [1, 2.5]}, "expected a whole number at 'amounts.1', found 2.5"),
        ({"approved": True, "by": "Ada", "note": 7}, "expected a text at 'note', found 7, or expected null at 'note'"),
    ],
)
def test_a_value_of_the_wrong_type_is_rejected_at_the_sender(
    system: System, engine_: Engine, value: Any, message: str
) -> None:
    @system.app.workflow(name="decides")
    async def decides(ctx: WorkflowContext) -> Any:
        return (await ctx.promise("approval", type=Decision)).by

    stage = Stage(system, system.worker(knows=("decides",)), engine_)
    handle = decides.start()
    stage.rest()
    with pytest.raises(PayloadError, match=re.escape(f"Promise 'approval' of run {handle.id}: {message}")):
        stage.ask(lambda: handle.resolve("approval", value))
    assert stage.system.count("inbox") == 0
    stage.ask(lambda: handle.resolve("approval", {"approved": True, "by": "Ada", "amounts": [1, 2], "more": 1}))
    stage.rest()
    assert handle.result(0) == "Ada"

    async def tested() -> Any:
        async with WorkflowTest() as test:
            run = await test.start(decides)
            with pytest.raises(PayloadError, match=re.escape(f"Promise 'approval': {message}")):
                await run.resolve("approval", value)
            await run.resolve("approval", Decision(approved=False, by="Bob"))
            return await run.result()

    assert asyncio.run(tested()) == "Bob"


def test_an_early_rejection_is_kept(stage: Stage, waits: CodeWorkflow[..., Any]) -> None:
    handle = waits.start()
    stage.ask(lambda: handle.reject("approval", "too dear"))
    stage.go(handle, "on", "on")
    assert handle.result(0) == ["Promise 'approval' was rejected: too dear"]


def test_the_first_resolution_wins_even_if_it_was_early(stage: Stage, waits: CodeWorkflow[..., Any]) -> None:
    handle = waits.start(0, ["approval", "other"])
    stage.ask(lambda: handle.resolve("approval", 1))
    with pytest.raises(WrongState, match="No promise 'approval' is open"):
        stage.ask(lambda: handle.resolve("approval", 2))
    stage.go(handle, "on")
    with pytest.raises(WrongState, match="No promise 'approval' is open"):
        stage.ask(lambda: handle.reject("approval", "no"))
    stage.go(handle, "on", "on")
    with pytest.raises(WrongState, match="No promise 'approval' is open"):
        stage.ask(lambda: handle.resolve("approval", 3))
    stage.ask(lambda: handle.resolve("other", 4))
    stage.go(handle, "on")
    assert handle.result(0) == [1, 4]
    assert stage.system.count("resolutions") == 0


def test_a_second_resolution_is_rejected_with_the_first_decision(stage: Stage, waits: CodeWorkflow[..., Any]) -> None:
    handle = waits.start(0, ["approval"])
    by = rf"by {re.escape(acting.current(stage.system.settings.audit_as).who)} at \d{{4}}-.* UTC"
    stage.ask(lambda: handle.resolve("approval", {"ok": True}))
    known = rf"it was resolved with \{{\"ok\":true\}} {by}\."
    refused = f"No promise 'approval' is open in run {handle.id}: {known}"
    with pytest.raises(WrongState, match=refused):
        handle.resolve("approval", 2)
    stage.go(handle, "on")
    with pytest.raises(WrongState, match=refused):
        handle.reject("approval", "no")
    stage.go(handle, "on")
    assert handle.status() == "success"
    with pytest.raises(
        WrongState, match=f"it is in state 'success'. Promise 'approval' was {known.removeprefix('it was ')}"
    ):
        handle.reject("approval", "no")


def test_resolutions_of_several_promises_in_one_tick_are_kept_apart(
    stage: Stage, waits: CodeWorkflow[..., Any]
) -> None:
    handle = waits.start(0, ["a", "b"])
    asked = [stage.sent(partial(handle.resolve, name, name)) for name in ("a", "b")]
    stage.system.pass_seconds()
    for one in asked:
        one.result(60)
    stage.go(handle, "on", "on", "on", "on")
    assert handle.result(0) == ["a", "b"]


@pytest.mark.parametrize("moment", ["never waited for", "waited for", "while the turn is out"])
def test_a_resolution_unseen_by_the_code_reaches_the_successor(
    stage: Stage, waits: CodeWorkflow[..., Any], moment: str
) -> None:
    handle = waits.start()
    stage.rest()
    if moment != "never waited for":
        stage.go(handle, "on")
    handle.signal("go", "continue")
    if moment == "while the turn is out":
        stage.system.pass_seconds()
        turns = stage.worker.take()
        stage.ask(lambda: handle.resolve("approval", 7))
        stage.worker.report(*(act(stage.engine, one) for one in turns))
        stage.rest()
    else:
        stage.ask(lambda: handle.resolve("approval", 7))
        stage.rest()
    stage.go(handle, "on", "on")
    assert handle.result(0) == [7]


def test_a_run_that_has_ended_keeps_no_resolutions(stage: Stage, waits: CodeWorkflow[..., Any]) -> None:
    handle = waits.start()
    stage.system.pass_seconds()
    (turn,) = stage.worker.take()
    asked = stage.sent(lambda: handle.resolve("approval", 7))
    stage.worker.report(Activated(turn.id, turn.attempt, 0.1, through=1, commands=[CompleteRun(ONE)]))
    stage.system.pass_seconds()
    with pytest.raises(WrongState, match="has ended"):
        asked.result(60)
    assert stage.system.count("resolutions") == 0


def test_a_run_that_is_reset_keeps_early_resolutions(stage: Stage, waits: CodeWorkflow[..., Any]) -> None:
    handle = waits.start(0, ["first", "approval"])
    stage.ask(lambda: handle.resolve("first", 1))
    stage.go(handle, "on", "on")
    stage.ask(lambda: handle.resolve("approval", 7))
    events = [event.number for event in handle.history().events if type(event.what).__name__ == "PromiseResolved"]
    stage.ask(lambda: handle.reset(to=events[0]))
    with pytest.raises(WrongState, match="No promise 'first' is open"):
        stage.ask(lambda: handle.resolve("first", 2))
    stage.rest()
    stage.go(handle, "on", "on")
    assert handle.result(0) == [1, 7]


@pytest.mark.parametrize("waits_for_another", [False, True])
def test_a_resolution_of_an_abandoned_promise_goes_to_its_namesake(
    system: System, worker: Worker, engine_: Engine, waits_for_another: bool
) -> None:
    """Before, the leader accepted the resolution, but the code had seen its timeout and never received it."""

    @system.app.workflow(name="waits")
    async def reminds(ctx: WorkflowContext) -> list[Any]:
        first = ctx.promise("approval")
        other = ctx.promise("approval") if waits_for_another else None
        try:
            await asyncio.wait_for(first, timeout=3_600)
        except TimeoutError:
            await ctx.signals("go").get()
        return [await (other or ctx.promise("approval")), await ctx.promise("late")]

    stage = Stage(system, worker, engine_)
    handle = reminds.start()
    stage.rest()
    system.sql("UPDATE orchestrator.timers SET due = now() - interval '1 second'")
    system.pass_seconds()
    (given_up,) = [task for task in worker.take() if task.is_turn_task]
    stage.ask(lambda: handle.resolve("approval", 7))
    worker.report(act(engine_, given_up))
    stage.rest()
    with pytest.raises(WrongState, match="No promise 'approval' is open"):
        stage.ask(lambda: handle.resolve("approval", 8))
    stage.go(handle, "on")
    stage.ask(lambda: handle.resolve("late", 1))
    stage.rest()
    assert handle.result(0) == [7, 1]


# -- a cancel and a decision at the same moment


@pytest.mark.parametrize("cancel_first", [False, True])
def test_a_cancel_and_a_resolution_take_effect_in_order_of_acceptance(
    stage: Stage, waits: CodeWorkflow[..., Any], cancel_first: bool
) -> None:
    handle = waits.start()
    stage.go(handle, "on", "on")
    if cancel_first:
        handle.cancel()
    decided = stage.sent(lambda: handle.resolve("approval", 1))
    if not cancel_first:
        handle.cancel()
    stage.rest()
    decided.result(60)
    assert handle.status() == ("cancelled" if cancel_first else "success")
    said = ["promise_resolved", "run_cancel_requested"]
    found = [kind for kind in kinds(stage.system, handle) if kind in said]
    assert found == (said[::-1] if cancel_first else said), "the history has both"
    lines = stage.system.sql(
        "SELECT act FROM orchestrator.audit WHERE target = :run AND act <> 'signal' ORDER BY id", run=handle.id
    )
    assert sorted(line["act"] for line in lines) == ["cancel", "resolve"]
    with pytest.raises(WrongState, match="it is in state"):
        handle.signal("go", "on")


def test_a_run_that_cleans_up_receives_signals_and_resolutions(
    system: System, worker: Worker, engine_: Engine, stage: Stage
) -> None:
    heard: list[Any] = []

    @system.app.workflow(name="waits")
    async def tidy(ctx: WorkflowContext) -> None:
        promise, confirmed = ctx.promise("confirmed"), ctx.signals("go", type=str)
        try:
            await ctx.sleep(10_000)
        finally:
            heard[:] = [await confirmed.get(), await promise]

    handle = tidy.start()
    stage.rest()
    handle.cancel()
    stage.rest()
    assert handle.status() == "running"
    stage.go(handle, "on")
    stage.ask(lambda: handle.resolve("confirmed", 7))
    stage.rest()
    assert (handle.status(), heard) == ("cancelled", ["on", 7])
