"""A run that cannot be planned is set aside and does not block other work; it continues when it can be planned."""

from __future__ import annotations

import base64
import json
from typing import Any
from uuid import UUID

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator import RunHandle, WorkflowContext, WrongState
from orchestrator.cli import main
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import CancelTask, Command, StartTimer
from orchestrator.domain.dag.definition import Definition, Hook, Param, Step
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.scheduler.runs.triggers import Triggers
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.dag.definitions import loads
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import transitions as runs
from orchestrator.store.schedules import fires
from tests.integration.code_stage import act
from tests.integration.stage import System, Worker, raw

CHAIN = Definition(
    name="chain",
    steps=(
        Step(name="one", task="job"),
        Step(name="each", task="job", depends_on=("one",), parallel=3),
        Step(name="last", task="job", depends_on=("each",)),
    ),
)


OF_RUN = "SELECT FROM orchestrator.tasks WHERE id = CAST(:id AS uuid) AND run_id = CAST(:run AS uuid)"


def row_of(system: System, run: RunHandle[Any] | str) -> dict[str, Any]:
    identifier = run if isinstance(run, str) else run.id
    return dict(system.sql("SELECT * FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=identifier)[0])


def counters(system: System, run: RunHandle[Any]) -> tuple[int, ...]:
    row = row_of(system, run)
    return tuple(row[name] for name in ("total", "open", "success", "failed", "cancelled", "skipped"))


def work(system: System, worker: Worker, rounds: int = 10) -> None:
    """Complete all dispatched tasks, for some rounds."""
    for _ in range(rounds):
        system.pass_seconds()
        worker.succeed(*worker.take())


def corrupt(system: System, run: RunHandle[Any]) -> bytes:
    """Make the stored plan of a run unreadable for a new leader; return the original."""
    before = row_of(system, run)["state"]
    system.sql("UPDATE orchestrator.runs SET state = '\\xc1' WHERE id = CAST(:id AS uuid)", id=run.id)
    system.lead()
    system.settle()
    return bytes(before)


def mend(system: System, run: RunHandle[Any], state: bytes) -> None:
    system.sql("UPDATE orchestrator.runs SET state = :state WHERE id = CAST(:id AS uuid)", id=run.id, state=state)


@pytest.fixture(params=["remembered", "too many"])
def remembered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the leader either cache waiting runs, or query them."""
    if request.param == "too many":
        monkeypatch.setattr("orchestrator.scheduler.runs.backlog._MAX_CACHED", 0)


@pytest.fixture
def worker(system: System) -> Worker:
    system.app.workflows.apply(CHAIN)
    return system.worker(slots=100)


def start(system: System) -> RunHandle[Any]:
    return system.app.workflows["chain"].start()


def in_the_middle(system: System, worker: Worker) -> tuple[RunHandle[Any], list[Dispatch]]:
    """Start a run; return it with the three tasks of its fan-out."""
    run = start(system)
    system.pass_seconds(2)
    worker.succeed(*worker.take())
    system.pass_seconds()
    each = worker.take()
    assert len(each) == 3
    return run, each


@pytest.mark.usefixtures("remembered")
def test_an_unplannable_run_does_not_block_other_runs(system: System, worker: Worker) -> None:
    poisoned, healthy = start(system), start(system)
    system.pass_seconds(2)
    tasks = worker.take()
    state = corrupt(system, poisoned)
    alone = system.job.enqueue(1)
    worker.succeed(*tasks)
    work(system, worker)
    assert row_of(system, healthy)["status"] == "success"
    assert system.row(alone)["status"] == "success"
    stuck = row_of(system, poisoned)
    assert (stuck["status"], stuck["stuck"]["kind"]) == ("running", "DecodeError")
    assert "release" in stuck["stuck"]
    assert [row["status"] for row in system.sql("SELECT status FROM orchestrator.ended_tasks")] == ["success"] * 7
    mend(system, poisoned, state)
    poisoned.retry()
    work(system, worker)
    assert row_of(system, poisoned)["stuck"] is None
    assert poisoned.progress().status == "success"
    assert counters(system, poisoned) == (5, 0, 5, 0, 0, 0)
    assert system.count("untold") == 0


@pytest.mark.usefixtures("remembered")
def test_events_of_a_stuck_run_are_counted_when_it_is_freed(system: System, worker: Worker) -> None:
    poisoned, each = in_the_middle(system, worker)
    state = corrupt(system, poisoned)
    worker.succeed(each[0])
    system.pass_seconds(3)
    worker.fail(each[1], retryable=False)
    system.pass_seconds()
    worker.succeed(each[2])
    system.pass_seconds(2)
    assert row_of(system, poisoned)["stuck"] is not None
    assert counters(system, poisoned) == (5, 4, 1, 0, 0, 0), "it has not been told"
    mend(system, poisoned, state)
    poisoned.retry()
    system.pass_seconds(3)
    assert poisoned.progress().status == "failed"
    assert counters(system, poisoned) == (5, 0, 3, 1, 0, 1)
    poisoned.retry()
    work(system, worker)
    assert poisoned.progress().status == "success"
    assert counters(system, poisoned) == (5, 0, 5, 0, 0, 0)


def test_pending_changes_of_a_repeatedly_stuck_run_keep_their_order(
    system: System, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduler.runs.backlog._QUEUE_BATCH", 1)  # changes taken at once
    poisoned, (first, *others) = in_the_middle(system, worker)
    state = corrupt(system, poisoned)
    worker.fail(first, retryable=False)
    system.pass_seconds(3)
    system.app.handle(str(UUID(bytes=first.id))).retry()
    system.pass_seconds(2)
    worker.succeed(*worker.take())
    system.pass_seconds(2)
    for _ in range(2):  # without effect
        poisoned.retry()
        system.pass_seconds(3)
        assert row_of(system, poisoned)["stuck"] is not None
    assert system.count("untold") == 3, "nothing is kept twice"
    mend(system, poisoned, state)
    poisoned.retry()
    worker.succeed(*others)
    work(system, worker)
    assert poisoned.progress().status == "success"
    assert counters(system, poisoned) == (5, 0, 5, 0, 0, 0)
    assert system.count("untold") == 0


@pytest.mark.usefixtures("remembered")
def test_a_stuck_run_can_be_cancelled(system: System, worker: Worker) -> None:
    poisoned, each = in_the_middle(system, worker)
    corrupt(system, poisoned)
    worker.succeed(each[0])
    system.pass_seconds(3)
    assert row_of(system, poisoned)["stuck"] is not None
    poisoned.cancel()
    system.pass_seconds(4)
    row = row_of(system, poisoned)
    assert (row["status"], row["stuck"]) == ("cancelled", None)
    assert counters(system, poisoned) == (5, 0, 2, 0, 3, 0)
    assert system.count("tasks") == 0
    assert system.count("untold") == 0


def test_a_stuck_run_that_cannot_end_does_not_block_other_cancels(
    system: System, worker: Worker, monkeypatch: Any
) -> None:
    run, each = in_the_middle(system, worker)
    other = system.app.workflows["chain"].start()
    corrupt(system, run)
    worker.succeed(each[0])
    system.pass_seconds(3)
    assert row_of(system, run)["stuck"] is not None
    count, tries = runs.count, list[bytes]()

    def fail(connection: Any, counted: dict[bytes, Any]) -> Any:
        if raw(run) in counted:
            tries.append(raw(run))
            raise ZeroDivisionError("a defect")
        return count(connection, counted)

    with monkeypatch.context() as patched:
        patched.setattr(runs, "count", fail)
        run.cancel()
        other.cancel()
        work(system, worker)
        assert row_of(system, other)["status"] == "cancelled"
        assert row_of(system, run)["stuck"]["kind"] == "ZeroDivisionError"
        assert len(tries) == 2  # in the batch, and alone
    run.retry()
    work(system, worker)
    assert row_of(system, run)["status"] == "cancelled"


@pytest.mark.usefixtures("remembered")
def test_a_stuck_run_is_cancelled_with_its_children(system: System, worker: Worker) -> None:
    """A child that ends with its parent is counted once, although its end is noticed while the parent is being
    ended."""
    steps = (Step(name="own", task="job"), Step(name="child", workflow="chain"))
    system.app.workflows.apply(Definition(name="parent", steps=steps))
    poisoned = system.app.workflows["parent"].start()
    system.pass_seconds(3)
    tasks = worker.take()
    corrupt(system, poisoned)
    worker.succeed(*(task for task in tasks if system.sql(OF_RUN, id=str(UUID(bytes=task.id)), run=poisoned.id)))
    system.pass_seconds(2)
    assert row_of(system, poisoned)["stuck"] is not None
    poisoned.cancel()
    system.pass_seconds(4)
    row = row_of(system, poisoned)
    assert (row["status"], row["stuck"]) == ("cancelled", None)
    assert counters(system, poisoned) == (2, 0, 1, 0, 1, 0)
    assert system.count("untold") == 0


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_run_that_timed_out_while_stuck_can_be_retried(system: System, worker: Worker, is_mended: bool) -> None:
    system.app.workflows.apply(msgspec.structs.replace(CHAIN, name="limited", timeout=60.0))
    poisoned = system.app.workflows["limited"].start()
    system.pass_seconds(2)
    worker.succeed(*worker.take())
    system.pass_seconds()
    each = worker.take()
    state = corrupt(system, poisoned)
    worker.succeed(each[0])
    worker.fail(each[1], retryable=False)
    system.pass_seconds(3)
    assert row_of(system, poisoned)["stuck"] is not None
    system.lead(offset=100)
    system.tick_until(lambda: poisoned.progress().status == "failed")
    assert counters(system, poisoned) == (5, 0, 2, 1, 2, 0)
    worker.held.clear()
    with pytest.raises(WrongState, match="Retry the run"):
        system.app.handle(str(UUID(bytes=each[1].id))).retry()
    if not is_mended:
        poisoned.retry()
        work(system, worker)
        assert row_of(system, poisoned)["stuck"] is not None
    mend(system, poisoned, state)
    poisoned.retry()
    work(system, worker)
    assert poisoned.progress().status == "success"
    assert counters(system, poisoned) == (5, 0, 5, 0, 0, 0)
    assert system.count("untold") == 0


def test_runs_with_an_unreadable_definition_do_not_block_new_runs(system: System, worker: Worker) -> None:
    system.app.workflows.apply(Definition(name="broken", steps=CHAIN.steps))
    poisoned, healthy = system.app.workflows["broken"].start(), start(system)
    (whole,) = system.sql("SELECT definition::text AS text FROM orchestrator.workflows WHERE name = 'broken'")
    system.sql("UPDATE orchestrator.workflows SET definition = '{\"name\": 5}' WHERE name = 'broken'")
    work(system, worker)
    assert row_of(system, healthy)["status"] == "success"
    assert row_of(system, poisoned)["stuck"]["kind"] == "ValidationError"
    system.sql(
        "UPDATE orchestrator.workflows SET definition = CAST(:text AS jsonb) WHERE name = 'broken'", text=whole["text"]
    )
    poisoned.retry()
    work(system, worker)
    assert counters(system, poisoned) == (5, 0, 5, 0, 0, 0)


@pytest.mark.parametrize("how", ["cancelled with its parent", "waits for itself"])
def test_a_failing_follow_up_of_a_run_that_never_began_blocks_nothing(
    system: System, worker: Worker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The error stands for any that no check foresees."""
    original = Triggers.runs_ended

    def runs_ended(self: Triggers, tx: Any, ended: Any) -> None:
        if any(run.workflow == "single" for _, run in ended):
            raise ZeroDivisionError("a defect")
        original(self, tx, ended)

    monkeypatch.setattr(Triggers, "runs_ended", runs_ended)
    text = "name: single\nconcurrency: 1\nparams: {deep: {default: true}}\ntasks:\n"
    text += "  a: {task: job}\n  b: {workflow: single, when: 'not params.deep'}\n"
    for one in (text, "name: above\ntasks: {a: {workflow: single}}"):
        system.app.workflows.apply(loads(one))
    system.app.workflows["single"].start(deep=how == "cancelled with its parent")
    system.pass_seconds(2)
    above = system.app.workflows["above"].start()
    system.pass_seconds(2)
    above.cancel()
    system.pass_seconds(2)
    other, cancelled = start(system), start(system)
    system.pass_seconds(2)
    cancelled.cancel()
    work(system, worker)
    assert [row_of(system, run)["status"] for run in (above, other, cancelled)] == ["cancelled", "success", "cancelled"]


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize(("unreadable", "kind"), [("plan", "DecodeError"), ("definition", "ValidationError")])
def test_commands_show_which_run_is_stuck_and_why(system: System, worker: Worker, unreadable: str, kind: str) -> None:
    def output_of(*words: str) -> str:
        return " ".join(CliRunner().invoke(main, words).output.split())

    system.app.workflows.apply(Definition(name="told", steps=CHAIN.steps))
    poisoned = system.app.workflows["told"].start()
    if unreadable == "definition":
        system.sql("UPDATE orchestrator.workflows SET definition = '{\"name\": 5}' WHERE name = 'told'")
    else:
        system.pass_seconds(2)
        tasks = worker.take()
        corrupt(system, poisoned)
        worker.succeed(*tasks)
    system.pass_seconds(3)
    try:
        shown = output_of("runs", "show", poisoned.id)
        assert f"stuck {kind}: " in shown, shown
        assert f": orchestrator runs retry {poisoned.id}" in shown
        assert json.loads(output_of("runs", "show", poisoned.id, "--json"))["stuck"]["kind"] == kind
        assert poisoned.id[:8] in output_of("runs", "list", "--stuck")
        assert f"1 run cannot continue; the newest: {poisoned.id}: {kind}: " in output_of("status")
    finally:
        system.sql("DELETE FROM orchestrator.workflows WHERE name = 'told'")


def test_a_stuck_child_does_not_make_its_parent_stuck(system: System, worker: Worker) -> None:
    system.app.workflows.apply(Definition(name="parent", steps=(Step(name="child", workflow="chain"),)))
    parent, other = system.app.workflows["parent"].start(), start(system)
    system.pass_seconds(3)
    (child,) = system.sql("SELECT id FROM orchestrator.runs WHERE parent_run IS NOT NULL")
    handle = system.app.run(str(child["id"]))
    tasks = worker.take()
    state = corrupt(system, handle)
    worker.succeed(*tasks)
    work(system, worker)
    assert other.progress().status == "success"
    assert (parent.progress().status, row_of(system, parent)["stuck"]) == ("running", None)
    mend(system, handle, state)
    handle.retry()
    work(system, worker)
    assert parent.progress().status == "success"


def test_a_new_release_retries_stuck_runs(system: System, worker: Worker, monkeypatch: Any) -> None:
    poisoned = start(system)
    system.pass_seconds(2)
    tasks = worker.take()
    state = corrupt(system, poisoned)
    worker.succeed(*tasks)
    system.pass_seconds(3)
    system.lead()
    system.settle()
    assert row_of(system, poisoned)["stuck"] is not None, "the same release would come no further"
    mend(system, poisoned, state)
    monkeypatch.setattr("orchestrator.__version__", "99.0")
    system.lead()
    system.settle()
    work(system, worker)
    assert poisoned.progress().status == "success"


def test_a_run_that_is_neither_failed_nor_stuck_is_not_retried(system: System, worker: Worker) -> None:
    del worker
    with pytest.raises(WrongState):
        start(system).retry()


# -- other defects


def test_an_invalid_item_fails_its_step_and_creates_no_children(system: System, worker: Worker) -> None:
    child = Definition(name="child", params={"n": Param(type="integer")}, steps=(Step(name="a", task="job"),))
    parent = Definition(
        name="parent",
        params={"numbers": Param(type="list")},
        steps=(Step(name="each", workflow="child", foreach="params.numbers", input={"n": "${item}"}),),
    )
    system.app.workflows.apply(child)
    system.app.workflows.apply(parent)
    run, other = system.app.workflows["parent"].start(numbers=[1, 2, "no number"]), start(system)
    work(system, worker)
    assert (run.progress().status, other.progress().status) == ("failed", "success")
    assert counters(system, run) == (3, 0, 0, 3, 0, 0)
    assert not system.sql("SELECT FROM orchestrator.runs WHERE workflow = 'child'")


@pytest.mark.parametrize("number", [1e20, 1e16, 1e300, -1.5e18, 12345678901234567, 2**63, 0.1])
def test_numbers_keep_their_value_and_type(system: System, worker: Worker, number: float) -> None:
    definition = Definition(
        name="hooked",
        params={"number": Param(type="number")},
        steps=(Step(name="a", task="job", input={"number": "${params.number}"}),),
        on_success=(Hook(task="job"),),
    )
    system.app.workflows.apply(definition)
    run = system.app.workflows["hooked"].start(number=number)
    system.pass_seconds(2)
    (task,) = worker.take()
    _, given, _ = msgspec.msgpack.decode(task.payload)
    assert (given["number"], type(given["number"])) == (number, type(number))
    worker.succeed(task)
    system.pass_seconds(2)
    assert run.progress().status == "success"
    (hook,) = worker.take()
    _, body, _ = msgspec.msgpack.decode(hook.payload)
    assert (body["params"]["number"], type(body["params"]["number"])) == (number, type(number))


def test_a_cancel_that_is_rolled_back_stops_no_worker(system: System) -> None:
    job = system.job

    @system.app.workflow(name="careless")
    async def careless(ctx: WorkflowContext) -> None:
        await job.schedule(1)

    worker = system.worker(knows=("job", "careless"))
    engine = Engine(system.app.code_workflows.find, 1_000_000)
    careless.start()
    system.pass_seconds()
    (turn,) = worker.take()
    worker.report(act(engine, turn))
    engine.close()
    system.pass_seconds()
    (task,) = worker.take()
    worker.start(task)
    worker.orders()
    system.sql("UPDATE orchestrator.tasks SET blockers = 0 WHERE id = CAST(:id AS uuid)", id=turn.id.hex())
    system.pass_seconds()
    (again,) = worker.take()
    commands: list[Command] = [CancelTask(task.id), StartTimer(9, b"\x01" * 16, 1e300, 0.0)]
    worker.report(Activated(again.id, again.attempt, 0.1, through=2, commands=commands))
    system.pass_seconds(3)
    assert system.quarantine(), "the turn could not be applied"
    assert system.row(task.id)["status"] == "running", "so nothing of it was"
    assert worker.orders() == [], "and nobody is told to stop"
    worker.succeed(task)
    system.pass_seconds()
    assert system.row(task.id)["status"] == "success"


def test_an_unreadable_history_does_not_block_other_code(system: System) -> None:
    job = system.job

    @system.app.workflow(name="patient")
    async def patient(ctx: WorkflowContext) -> int:
        return int(await job.schedule(1))

    worker = system.worker(knows=("job", "patient"))
    poisoned, healthy = patient.start(), patient.start()
    system.sql("UPDATE orchestrator.histories SET data = '\\xc1' WHERE run_id = CAST(:id AS uuid)", id=poisoned.id)
    system.pass_seconds(3)
    (turn,) = worker.take()
    assert turn.id.hex() == healthy.id.replace("-", "")
    assert poisoned.status() == "stuck"
    assert "cannot be sent" in row_of(system, poisoned.id)["stuck"]["message"]


def test_an_inapplicable_request_is_quarantined_and_answered(system: System) -> None:
    @system.app.workflow(name="asked")
    async def asked(ctx: WorkflowContext) -> None:
        await ctx.sleep(1_000)

    handle = asked.start()
    system.pass_seconds()
    alone = system.job.enqueue(1)
    request = b"\x07" * 16
    body = {"name": "x", "value": 5, "request": base64.b64encode(request).decode()}
    with system.engine.begin() as connection:
        inbox.add(connection, RequestKind.UPDATE, raw(handle), msgspec.json.encode(body).decode())
        inbox.add(connection, RequestKind.CANCEL_TASK, raw(alone))
    system.pass_seconds(2)
    assert system.row(alone)["status"] == "cancelled"
    assert system.count("inbox") == 0
    (refused,) = system.quarantine()
    assert refused[b"entry"].startswith(b"inbox/")
    (answer,) = system.sql("SELECT error FROM orchestrator.answers")
    assert answer["error"]["kind"] == "CannotBeApplied"


def test_a_failing_schedule_does_not_block_other_schedules(system: System, worker: Worker, monkeypatch: Any) -> None:
    """The error stands for any that no check foresees."""
    system.app.workflows.apply(Definition(name="broken", steps=CHAIN.steps))
    for name in ("broken", "chain"):
        system.app.schedules.set(name, cron="* * * * *")
    system.sql("UPDATE orchestrator.schedules SET due_at = now() - interval '1 second', next_fire = now()")
    original = fires.run_of

    def run_of(target: Any, *arguments: Any, **options: Any) -> Any:
        if target.name == "broken":
            raise ZeroDivisionError("a defect")
        return original(target, *arguments, **options)

    monkeypatch.setattr(fires, "run_of", run_of)
    work(system, worker)
    assert [row["workflow"] for row in system.sql("SELECT DISTINCT workflow FROM orchestrator.runs")] == ["chain"]
    (row,) = system.sql("SELECT * FROM orchestrator.schedules WHERE workflow = 'broken'")
    assert "a defect" in row["error"]
