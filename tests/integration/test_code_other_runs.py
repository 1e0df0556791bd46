"""Other runs, from inside a workflow, on the real leader: each answer is decided once, and replay returns the same
answer. The code is evicted after each turn, as if its worker had been killed, and is replayed from its history."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from orchestrator import NotFound, RunFailed, WorkflowContext, WorkflowHandle, WrongState
from orchestrator.domain.code.activation import Activation
from orchestrator.domain.code.other_runs import Target
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.scheduler.code import other_runs
from orchestrator.sdk.backend.code_requests import add_request
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.ids import new_id
from orchestrator.store.inbox import RequestKind
from orchestrator.transport.codec import decode, encode
from tests.integration.code_stage import act, kinds, run_row
from tests.integration.stage import System, Worker, raw

NOBODY = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"


class Stage:
    """Workflows that access other runs, and a worker that forgets their code after each turn."""

    def __init__(self, system: System, engine: Engine) -> None:
        self.system, self.engine, self.app = system, engine, system.app
        self.worker: Worker = system.worker("w1", knows=("job", "target", "asks"))
        app = system.app

        @app.workflow(name="target")
        async def target(ctx: WorkflowContext, how: str = "waits") -> str:
            if how == "continues":
                ctx.continue_as_new("waits")
            if how == "fails":
                raise ValueError("no")
            return how if how == "returns" else f"got {await ctx.signals('news').get()}"

        @app.workflow(name="asks")
        async def asks(ctx: WorkflowContext, of: str, what: str, by_key: bool = False) -> str:
            handle: WorkflowHandle[Any] = target.find(of) if by_key else app.workflow_run(of)
            calls = {"signal": lambda: handle.asignal("news", 7), "cancel": handle.acancel, "await": handle.aresult}
            try:
                return f"{await calls[what]()}"
            except (NotFound, WrongState, RunFailed) as error:
                return f"{type(error).__name__}: {error}"

        self.target, self.asks = target, asks

    def go_on(self) -> list[Dispatch]:
        """Take all possible turns; return the remaining tasks."""
        left: list[Dispatch] = []
        for _ in range(8):
            self.system.pass_seconds()
            for sent in self.worker.take():
                if sent.is_turn_task:
                    self.worker.report(act(self.engine, sent))
                    self.engine.evict(sent.id)
                else:
                    left.append(sent)
            self.system.tick()
        return left

    def ask(self, of: str, what: str, by_key: bool = False) -> WorkflowHandle[str]:
        return self.asks.start(of, what, by_key)


@pytest.fixture
def stage(system: System, engine_: Engine) -> Stage:
    return Stage(system, engine_)


def test_a_run_is_awaited_signalled_and_cancelled_by_its_id(stage: Stage) -> None:
    one, other, failing = stage.target.start(), stage.target.start(), stage.target.start("fails")
    awaiting, of_failing = stage.ask(one.id, "await"), stage.ask(failing.id, "await")
    stage.go_on()
    assert of_failing.result(0).endswith("failed: ValueError: no")
    assert awaiting.status() == "running"
    signalling, cancelling, of_other = (
        stage.ask(one.id, "signal"),
        stage.ask(other.id, "cancel"),
        stage.ask(other.id, "await"),
    )
    stage.go_on()
    assert [awaiting.result(0), signalling.result(0), cancelling.result(0)] == ["got 7", "None", "None"]
    assert of_other.result(0) == f"RunFailed: Run {other.id} was cancelled."
    assert other.status() == "cancelled"
    again = [stage.ask(one.id, what) for what in ("await", "signal", "cancel")]
    stage.go_on()
    assert [run.result(0) for run in again] == [
        "got 7",
        f"WrongState: Cannot signal run {one.id}: it is in state 'success'.",
        f"WrongState: Cannot cancel run {one.id}: it is in state 'success'.",
    ]
    told = ["signal_sent", "promise_rejected", "activation_applied", "run_completed"]
    assert kinds(stage.system, again[1])[-4:] == told
    assert stage.system.sql("SELECT * FROM orchestrator.promises") == []


def test_a_missing_run_is_not_found(stage: Stage) -> None:
    runs = [stage.ask(NOBODY, what) for what in ("await", "signal", "cancel")]
    by_key = [stage.ask("o-1", what, True) for what in ("await", "signal", "cancel")]
    stage.go_on()
    assert all(run.result(0).startswith(f"NotFound: No run has the id {NOBODY}.") for run in runs)
    assert all(run.result(0).startswith("NotFound: No run has the id target/o-1.") for run in by_key)


def test_a_run_is_found_by_custom_id_and_followed_to_its_successor(stage: Stage) -> None:
    one = stage.target.starting(id="o-1").start("continues")
    awaiting = stage.ask("o-1", "await", True)
    stage.go_on()
    (wait,) = stage.system.sql("SELECT name FROM orchestrator.promises")
    assert wait["name"] != Target.of_wait(wait["name"]).key  # the wait is held by the id of the run
    signalling = stage.ask("o-1", "signal", True)
    stage.go_on()
    assert [awaiting.result(0), signalling.result(0), one.result(0)] == ["got 7", "None", "got 7"]


def test_a_wait_follows_a_run_that_is_reset_later(stage: Stage) -> None:
    one = stage.target.start()
    awaiting = stage.ask(one.id, "await")
    stage.go_on()
    with stage.system.engine.begin() as connection:
        add_request(connection, RequestKind.RESET, raw(one), request=new_id(), to=1, reason="")
    stage.go_on()
    assert run_row(stage.system, one)["reason"] == "reset"
    assert awaiting.status() == "running"
    one.signal("news", 3)  # reaches the new run
    stage.go_on()
    assert awaiting.result(0) == "got 3"


def test_the_run_of_a_dag_is_awaited_and_cancelled(stage: Stage) -> None:
    many = stage.app.start_many(stage.system.job, [1])
    awaiting = stage.ask(many.id, "await")
    (task,) = stage.go_on()
    stage.worker.succeed(task)
    stage.go_on()
    assert awaiting.result(0) == "None"
    other = stage.app.start_many(stage.system.job, [1])
    stage.go_on()
    runs = [stage.ask(other.id, what) for what in ("cancel", "await", "signal")]
    stage.go_on()
    assert [run.result(0) for run in runs[:2]] == ["None", f"RunFailed: Run {other.id} was cancelled."]
    assert runs[2].result(0).startswith("WrongState: Cannot signal run ")


def test_a_new_leader_reports_ends_that_the_previous_release_missed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stage.target.start()
    awaiting = stage.ask(one.id, "await")
    stage.go_on()
    monkeypatch.setattr(other_runs, "ended", lambda *_: None)  # as a leader that ignores waits
    one.signal("news", 1)
    stage.go_on()
    assert awaiting.status() == "running"
    monkeypatch.undo()
    stage.system.lead()
    stage.go_on()
    assert awaiting.result(0) == "got 1"


def test_under_a_leader_of_the_previous_release_only_signals_work(stage: Stage) -> None:
    one = stage.target.start()
    signalling, awaiting = stage.ask(one.id, "signal"), stage.ask(one.id, "await")
    stage.system.pass_seconds()
    for sent in stage.worker.take():
        plain = decode(Activation, sent.payload)
        old = sent if plain.workflow == "target" else _of_old_leader(sent)
        report = act(stage.engine, old)
        if plain.run_id.hex() == awaiting.id.replace("-", ""):
            assert report.stuck is not None
            assert "the leading scheduler is of the previous release" in report.stuck.message
        stage.worker.report(report)
        stage.engine.evict(sent.id)
    stage.system.pass_seconds()
    assert signalling.status() == "success"  # the sender learns no outcome
    assert awaiting.status() == "stuck"
    awaiting.retry()
    stage.go_on()
    assert awaiting.result(0) == "got 7"


def _of_old_leader(sent: Dispatch) -> Dispatch:
    return msgspec.structs.replace(
        sent, payload=encode(msgspec.structs.replace(decode(Activation, sent.payload), tells=False))
    )


def test_a_parent_can_signal_and_cancel_a_child_at_once(stage: Stage) -> None:
    @stage.app.workflow(name="mother")
    async def mother(ctx: WorkflowContext) -> list[str]:
        one, other = stage.target.schedule(), stage.target.schedule()
        one.handle.signal("news", 8)
        await other.handle.acancel()
        try:
            await other
        except RunFailed as error:
            return [await one, str(error), one.handle.id]
        return []

    stage.worker.learn("mother")
    run = mother.start()
    stage.go_on()
    first, cancelled, child = run.result(0)
    assert (first, cancelled) == ("got 8", "Workflow 'target' was cancelled.")
    assert stage.app.workflow_run(child).result(0) == "got 8"
