"""Workers of two versions of an application share a queue: each task goes to workers that know it, within their
slots."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from orchestrator import Handle, InvalidWorkflow, ResultTimeout, Task, TaskFailed, WorkflowContext
from orchestrator.domain.code.activation import Activated, Violation
from orchestrator.domain.fleet.announced import WITH_DATABASE
from orchestrator.domain.tasks.task import Dispatch, Returned
from orchestrator.monitoring.trouble import of_the_system as trouble_of
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.store.insights import overview
from orchestrator.transport.keys import private_queue
from orchestrator.transport.leader.streams import LeaderStreams
from tests.integration.code_stage import act, activation, run_row
from tests.integration.stage import KEYS, System, Worker, raw

MISFIT = Violation(1, "DeterminismViolation", "it does not fit")


@pytest.fixture
def old(system: System) -> Worker:
    return system.worker("old", slots=4)


@pytest.fixture
def new(system: System) -> Worker:
    return system.worker("new", slots=4, knows=["job", "fresh"])


def echo(number: int) -> int:
    return number


def enqueue(system: System, count: int, name: str = "fresh", **options: Any) -> list[Handle[Any]]:
    task: Task[..., Any] = system.app.tasks.get(name) or system.app.task(name=name)(echo)
    return [task.options(**options).enqueue(number) for number in range(count)]


def work(system: System, *workers: Worker) -> Counter[tuple[str, str]]:
    """Let workers complete tasks until none arrives; return the number of tasks by worker and name."""
    done: Counter[tuple[str, str]] = Counter()
    while True:
        taken = {worker: worker.take() for worker in workers}
        if not any(taken.values()):
            return done
        for worker, tasks in taken.items():
            done.update((worker.name, task.name) for task in tasks)
            if tasks:
                worker.succeed(*tasks)
        system.tick(2)


def test_tasks_known_to_some_workers_go_only_to_these(system: System, old: Worker, new: Worker) -> None:
    system.pass_seconds()
    handles = enqueue(system, 80)
    common = enqueue(system, 20, "job")
    system.pass_seconds()
    done = work(system, old, new)
    assert done["new", "fresh"] == 80
    assert ("old", "fresh") not in done
    assert done["old", "job"] + done["new", "job"] == 20
    assert {handle.status() for handle in (*handles, *common)} == {"success"}
    assert max(system.row(handle)["attempt"] for handle in handles) <= 3, "claimed, kept back, and placed"


def test_tasks_without_a_free_slot_do_not_block_other_tasks(system: System, old: Worker, new: Worker) -> None:
    """Other tasks are dispatched although hundreds before them wait for the one worker that knows them."""
    system.pass_seconds()
    fresh = enqueue(system, 300)
    common = enqueue(system, 4, "job")
    for _ in range(50):
        if any(task.name == "job" for task in old.take()):
            break
        system.tick()
    else:
        raise AssertionError("the common tasks never came")
    states = Counter(system.row(handle)["status"] for handle in fresh)
    assert states["dispatched"] == 4, "as many as the new worker has slots"
    holds = Counter(system.row(handle)["hold"] for handle in fresh)
    assert holds["crowded"] > 0
    assert system.row(common[0])["status"] == "dispatched"


def test_tasks_that_wait_for_the_same_worker_share_its_slots(system: System, old: Worker, new: Worker) -> None:
    """Each name used to be claimed for all slots, and tasks without a slot were claimed and held again in every
    tick."""
    new.learn("fresh2", "fresh3", "fresh4")
    system.pass_seconds()
    handles = [handle for name in ("fresh", "fresh2", "fresh3", "fresh4") for handle in enqueue(system, 20, name)]
    system.pass_seconds()
    done = work(system, old, new)
    assert sum(done.values()) == 80
    assert max(system.row(handle)["attempt"] for handle in handles) <= 6, "they went round"
    assert sum(system.row(handle)["attempt"] for handle in handles) <= 2 * 80


def test_concurrency_limits_hold_for_tasks_known_to_some_workers(system: System, old: Worker, new: Worker) -> None:
    system.pass_seconds()
    handles = enqueue(system, 30, concurrency=2)
    system.pass_seconds()
    for _ in range(100):
        taken = new.take()
        assert len(taken) <= 2
        assert old.take() == []
        if taken:
            new.succeed(*taken)
        system.pass_seconds()
        if all(handle.status() == "success" for handle in handles):
            return
    raise AssertionError(Counter(handle.status() for handle in handles))


def test_held_tasks_are_released_when_all_workers_know_them(system: System, old: Worker, new: Worker) -> None:
    system.pass_seconds()
    handles = enqueue(system, 50)
    system.pass_seconds()
    new.take()  # and does not complete them
    old.learn("fresh")
    system.pass_seconds(3)
    assert Counter(system.row(handle)["hold"] for handle in handles) == {None: 50}
    assert len(old.take()) > 0


@pytest.mark.parametrize("again", [False, True])
def test_a_task_waits_when_the_only_worker_that_knows_it_dies(
    system: System, old: Worker, new: Worker, again: bool
) -> None:
    system.pass_seconds()
    (handle,) = enqueue(system, 1)
    system.pass_seconds()
    assert system.messages(private_queue("new")) == [(raw(handle), 1)]
    if again:
        system.lead()  # which does not know where the task is
    new.die()
    system.make_old()
    system.tick_until(lambda: system.row(handle)["hold"] == "unknown")
    newer = system.worker("newer", slots=4, knows=["job", "fresh"])
    system.tick_until(lambda: system.row(handle)["status"] == "dispatched")
    newer.succeed(*newer.take())
    system.tick()
    assert handle.status() == "success"
    assert old.take() == []


@pytest.mark.parametrize("again", [False, True])
def test_an_undelivered_task_moves_to_another_worker_and_runs_once(
    system: System, old: Worker, new: Worker, again: bool
) -> None:
    other = system.worker("other", slots=4, knows=["job", "fresh"])
    system.pass_seconds()
    (handle,) = enqueue(system, 1)
    system.pass_seconds()
    first = next(worker for worker in (new, other) if system.messages(private_queue(worker.name)))
    if again:
        system.lead()
    first.doubtful = True
    system.make_old()
    second = other if first is new else new
    system.tick_until(lambda: system.messages(private_queue(second.name)))
    assert first.take() == []
    (task,) = second.take()
    second.succeed(task)
    system.tick()
    assert handle.status() == "success"


def test_a_withdrawn_task_is_sent_to_another_worker_in_the_same_tick(system: System, old: Worker, new: Worker) -> None:
    """No worker has it, so nothing waits for the TTL of a worker to pass."""
    other = system.worker("other", slots=4, knows=["job", "fresh"])
    system.pass_seconds()
    (handle,) = enqueue(system, 1)
    system.pass_seconds()
    first = next(worker for worker in (new, other) if system.messages(private_queue(worker.name)))
    second = other if first is new else new
    first.doubtful = True
    system.make_old()
    system.pass_seconds()
    assert system.messages(private_queue(first.name)) == []
    assert system.messages(private_queue(second.name)) == [(raw(handle), 2)]


@pytest.mark.parametrize("received", [False, True])
def test_a_placed_task_stays_until_another_worker_has_room(
    system: System, old: Worker, new: Worker, received: bool
) -> None:
    """It is first in its worker's queue; moving it would put it behind tasks that all workers know, and gain
    nothing."""
    system.pass_seconds()
    enqueue(system, 4, "job")
    system.pass_seconds()
    assert len(new.take()) == 4
    system.pass_seconds()
    (placed,) = enqueue(system, 1)
    system.pass_seconds()
    assert system.messages(private_queue("new")) == [(raw(placed), 1)]
    if received:
        assert raw(placed) in [task.id for task in new.take()]
    for _ in range(5):
        system.make_old()
        system.pass_seconds(2)
    assert system.row(placed)["attempt"] == 1
    assert [order for order in new.orders() if order.spare] == []
    newer = system.worker("newer", slots=4, knows=["job", "fresh"])
    system.pass_seconds(2)
    if received:
        assert (raw(placed), 1) in {(one.id, one.attempt) for order in new.orders() for one in order.spare}
        new.report(Returned(raw(placed), 1, "other workers have free slots"))
        system.pass_seconds()
    assert raw(placed) in [task.id for task in newer.take()]


@pytest.mark.parametrize("known_by", ["one", "all"])
@pytest.mark.parametrize("received", [False, True])
def test_a_task_that_expires_before_its_start_fails(
    system: System, old: Worker, new: Worker, known_by: str, received: bool
) -> None:
    """It used to start whenever the worker continued, although `expires` forbids that."""
    system.pass_seconds()
    (handle,) = enqueue(system, 1, "fresh" if known_by == "one" else "job", expires=3600)
    system.pass_seconds()
    taken = new.take() if received else []
    assert len(taken) == received
    system.make_old()
    system.pass_seconds()
    assert [order for order in new.orders() if order.spare] == []
    assert handle.status() == "dispatched"
    system.sql("UPDATE orchestrator.tasks SET expires_at = now() - interval '1 second'")
    system.pass_seconds()
    if received:
        (attempt,) = [one for order in new.orders() for one in order.spare]
        assert (attempt.id, attempt.attempt) == (taken[0].id, 1)
        new.report(Returned(taken[0].id, 1, "other workers have free slots"))
        system.pass_seconds()
    with pytest.raises(TaskFailed, match="TaskExpired"):
        handle.result(timeout=5)
    assert new.take() == old.take() == []


@pytest.mark.parametrize("mixed", [False, True])
def test_tasks_known_to_no_worker_do_not_block_other_tasks(system: System, old: Worker, mixed: bool) -> None:
    """Only as many as there were free slots used to be held in a tick, and the next tick came half a second later."""
    if mixed:
        system.worker("other", slots=4, knows=["job", "something else"])
    system.pass_seconds()
    unknown = enqueue(system, 100, "unheard")
    known = enqueue(system, 3, "job")
    system.tick(3)
    taken = [task.id for worker in system.workers for task in worker.take()]
    assert sorted(taken) == sorted(map(raw, known))
    assert {system.row(handle)["hold"] for handle in unknown} == {"unknown"}


def test_tasks_received_by_a_worker_are_not_withdrawn(system: System, old: Worker, new: Worker) -> None:
    system.pass_seconds()
    enqueue(system, 3)
    system.pass_seconds()
    streams: LeaderStreams = system.scheduler._streams
    queue = private_queue("new")
    entries = [entry.decode() for entry, _ in system.redis.xrange(KEYS.queue(system.generation, queue))]  # type: ignore[union-attr]
    assert len(new.take()) == 3
    assert streams.queues.take_back(system.generation, queue, entries) == []
    assert streams.queues.take_back(system.generation, "@nobody", ["1-0"]) == []
    system.make_old()
    system.pass_seconds(3)
    assert len(new.held) == 3
    assert system.count("ended_tasks") == 0


def test_a_cancelled_task_is_withdrawn_from_its_workers_queue(system: System, old: Worker, new: Worker) -> None:
    system.pass_seconds()
    (handle,) = enqueue(system, 1)
    system.pass_seconds()
    handle.cancel()
    system.pass_seconds()
    assert handle.status() == "cancelled"
    assert system.messages(private_queue("new")) == []


def test_a_task_that_no_worker_finds_is_held_after_two_attempts(system: System) -> None:
    """Workers may import functions by name: only an attempt shows what exists."""
    one, two = (system.worker(name, knows=["job", "*:*"]) for name in ("one", "two"))
    (handle,) = enqueue(system, 1, "jobs:missing")
    tries = 0
    for _ in range(8):
        system.pass_seconds()
        for worker in (one, two):
            for task in worker.take():
                tries += 1
                worker.report(Returned(task.id, task.attempt, "unknown task", 0.0, task.name))
        system.tick()
        if system.row(handle)["hold"] == "unknown":
            break
    assert tries <= 2
    system.pass_seconds(5)
    assert system.row(handle)["hold"] == "unknown"
    three = system.worker("three", knows=["job", "*:*"])  # this worker may have the file
    system.pass_seconds(2)
    taken = [task for worker in (one, two, three) for task in worker.take()]
    assert [task.name for task in taken] == ["jobs:missing"]


# -- workers with and without the database


def return_tasks(system: System, worker: Worker) -> int:
    """Return all tasks like a worker without the database, until none arrives; return their number."""
    count = 0
    while tasks := worker.take():
        count += len(tasks)
        for task in tasks:
            worker.report(Returned(task.id, task.attempt, "no database", 0.0, task.name))
        system.pass_seconds(2)
    return count


def test_tasks_that_need_the_database_go_to_workers_with_it(system: System) -> None:
    plain = system.worker("plain", knows=["job", "pay"], slots=2)
    (first,) = enqueue(system, 1, "pay")
    system.pass_seconds()
    assert return_tasks(system, plain) <= 2, "it may be claimed again in the tick that hears of it"
    given = system.worker("given", knows=["job", "pay", WITH_DATABASE], slots=2)
    system.pass_seconds(2)
    rest = enqueue(system, 20, "pay")
    common = enqueue(system, 20, "job")
    system.pass_seconds(2)
    done = work(system, plain, given)
    assert (done["given", "pay"], done["plain", "pay"]) == (21, 0)
    assert done["plain", "job"] + done["given", "job"] == 20
    assert {handle.status() for handle in (first, *rest, *common)} == {"success"}
    assert {system.row(handle)["failures"] for handle in (first, *rest)} == {0}


def test_a_missing_worker_with_the_database_is_reported(system: System) -> None:
    plain = system.worker("plain", knows=["job", "pay"], slots=2)
    (handle,) = enqueue(system, 1, "pay", retries=0)
    system.pass_seconds()
    assert return_tasks(system, plain) <= 2
    system.pass_seconds(5)
    row = system.row(handle)
    assert (row["status"], row["hold"], row["failures"]) == ("pending", "unknown", 0)

    system.sql("UPDATE orchestrator.tasks SET created_at = created_at - interval '1 minute'")
    told = r"No live worker of queue 'default' has the database, which ctx\.transaction\(\) needs in 'pay'"
    with pytest.raises(ResultTimeout, match=f"{told}. Start one: .* --queues default --database"):
        handle.result(0.01)
    with system.engine.connect() as connection:
        (trouble,) = trouble_of(overview(connection), system.settings.lease)
    assert (trouble.kind, trouble.about) == ("no database", "pay")
    assert re.search(f"{told}: 1 waiting, the first fails in ", trouble.message)

    system.sql("UPDATE orchestrator.tasks SET wake_at = now() - interval '1 second'")
    system.pass_seconds(2)
    with pytest.raises(TaskFailed, match=f"ConfigurationError: {told}"):
        handle.result(1)


# -- workflow code


@pytest.fixture
def patient(system: System) -> CodeWorkflow[..., Any]:
    job = system.job

    @system.app.workflow(name="patient")
    async def patient(ctx: WorkflowContext) -> int:
        return int(await job.schedule(1)) + int(await job.schedule(2))

    return patient


def with_version(system: System, version: int, name: str = "", slots: int = 10) -> Worker:
    return system.worker(name or f"v{version}", knows=["job", "patient", f"patient@{version}"], slots=slots)


def turns(tasks: list[Dispatch]) -> list[Dispatch]:
    return [task for task in tasks if task.is_turn_task]


def test_runs_go_to_workers_that_have_their_version(
    system: System, patient: CodeWorkflow[..., Any], engine_: Engine
) -> None:
    two, one = with_version(system, 2), with_version(system, 1)
    system.pass_seconds()
    handles = [patient.start() for _ in range(20)]
    for _ in range(60):
        system.pass_seconds()
        assert turns(two.take()) == []
        for task in [*one.take()]:
            one.report(act(engine_, task)) if task.is_turn_task else one.succeed(task)
        two.succeed(*[Dispatch(task, attempt, "job", b"", "default") for task, attempt in two.held])
        if all(handle.status() == "success" for handle in handles):
            return
    raise AssertionError(Counter(handle.status() for handle in handles))


def test_turns_waiting_for_a_version_do_not_block_other_tasks(system: System, patient: CodeWorkflow[..., Any]) -> None:
    two, one = with_version(system, 2), with_version(system, 1, slots=2)
    system.pass_seconds()
    for _ in range(40):
        patient.start()
    (plain,) = enqueue(system, 1, "job")
    for _ in range(30):
        system.tick()
        if any(task.id == raw(plain) for task in two.take()):
            break
    else:
        raise AssertionError("the plain task never came")
    assert len(turns(one.take())) == 2
    assert system.sql("SELECT count(*) AS n FROM orchestrator.tasks WHERE hold = 'crowded: patient@1'")[0]["n"] > 0


def test_another_version_runs_the_code_if_no_worker_has_the_right_one(
    system: System, patient: CodeWorkflow[..., Any]
) -> None:
    none, two = system.worker("none"), with_version(system, 2)
    system.pass_seconds()
    patient.start()
    system.pass_seconds()
    assert none.take() == []
    assert len(two.take()) == 1


def test_stuck_runs_are_freed_when_a_worker_with_their_version_arrives(
    system: System, patient: CodeWorkflow[..., Any]
) -> None:
    two = with_version(system, 2)
    handle = patient.start()
    system.pass_seconds()
    (turn,) = two.take()
    two.report(Activated(turn.id, turn.attempt, 0.1, stuck=MISFIT))
    system.tick()
    assert handle.status() == "stuck"
    one = with_version(system, 1)
    system.pass_seconds(2)
    assert run_row(system, handle)["stuck"] is None
    assert two.take() == []
    (turn,) = one.take()
    assert activation(turn).after == 0


def test_all_stuck_runs_are_freed_over_several_batches(system: System, patient: CodeWorkflow[..., Any]) -> None:
    two = with_version(system, 2, slots=100)
    system.pass_seconds()
    handles = [patient.start() for _ in range(30)]
    system.scheduler.term.pending_work.settings = system.settings.__class__(**{**vars(system.settings), "batch": 7})
    for _ in range(30):
        system.pass_seconds()
        for turn in two.take():
            two.report(Activated(turn.id, turn.attempt, 0.1, stuck=MISFIT))
    assert {handle.status() for handle in handles} == {"stuck"}
    with_version(system, 1, slots=100)
    system.tick_until(lambda: not any(run_row(system, handle)["stuck"] for handle in handles))


def test_a_run_goes_on_with_the_version_that_took_its_last_turn(
    system: System, patient: CodeWorkflow[..., Any]
) -> None:
    @system.app.workflow(name="patient", version=2)
    async def second(ctx: WorkflowContext) -> int:
        ctx.set("version", 2)
        return int(await system.job.schedule(1)) + int(await system.job.schedule(2))

    engine = Engine(lambda *_: second, 1_000_000)
    handle = patient.start()  # started with version 1, which no worker has any more
    two = with_version(system, 2)
    system.pass_seconds()
    two.report(act(engine, *two.take()))
    system.tick()
    assert run_row(system, handle)["version"] == 2
    (job,) = two.take()
    two.succeed(job)
    two.leave()
    one, other = with_version(system, 1), with_version(system, 2, "other")
    system.tick_until(lambda: system.row(raw(handle))["attempt"] > 1)
    assert turns(one.take()) == []
    (turn,) = turns(other.take())
    assert (activation(turn).version, activation(turn).after) == (2, 0)
    engine.close()


def upgrading(system: System, version: int, *older: str) -> Worker:
    """Return a worker whose newest version takes over runs of older versions."""
    knows = ["job", "patient", f"patient@{version}", f"patient@{version}+", *older]
    return system.worker(f"v{version}", knows=knows)


def run_turn(system: System, worker: Worker, engine: Engine) -> None:
    """Run the next turn of a run's code, and apply its report."""
    system.pass_seconds()
    (turn,) = turns(worker.take())
    worker.report(act(engine, turn))
    system.pass_seconds()


@pytest.mark.parametrize("upgrades", [True, False])
def test_open_runs_continue_with_the_newest_version_if_its_worker_upgrades(
    system: System, patient: CodeWorkflow[..., Any], engine_: Engine, upgrades: bool
) -> None:
    one = with_version(system, 1)
    system.pass_seconds()
    patient.start()
    run_turn(system, one, engine_)  # the code stays in the memory of this worker
    two = upgrading(system, 2) if upgrades else with_version(system, 2)
    system.pass_seconds(2)
    for worker in (one, two):
        for job in worker.take():
            worker.succeed(job)
    system.pass_seconds(2)
    (turn,) = turns((two if upgrades else one).take())
    assert turns((one if upgrades else two).take()) == []
    found = activation(turn)
    assert (found.version, found.after == 0) == ((2, True) if upgrades else (1, False))


def test_a_pinned_run_is_not_upgraded(system: System, patient: CodeWorkflow[..., Any], engine_: Engine) -> None:
    both = upgrading(system, 2, "patient@1")
    system.pass_seconds()
    patient.starting(pinned=True).start()
    system.pass_seconds()
    (turn,) = turns(both.take())
    assert activation(turn).version == 1
    patient.start()
    system.pass_seconds()
    (turn,) = turns(both.take())
    assert activation(turn).version == 2


def test_the_versioning_option_sets_whether_runs_are_pinned(system: System, patient: CodeWorkflow[..., Any]) -> None:
    app = system.app

    @app.workflow(name="patient", version=2, versioning="auto_upgrade")
    async def second(ctx: WorkflowContext) -> int: ...

    @app.workflow(name="fixed", version=3, versioning="pinned")
    async def fixed(ctx: WorkflowContext) -> None: ...

    assert {"patient", "patient@1", "patient@2", "patient@2+", "fixed", "fixed@3"} <= app.code_workflows._announced
    assert "fixed@3+" not in app.code_workflows._announced
    runs = [fixed.start(), fixed.options(timeout=9).start(), fixed.starting(pinned=False).start()]
    assert [system.row(run.id)["name"] for run in runs] == ["fixed@3", "fixed@3", "fixed"]
    app.schedules.set("fixed", every="1h")
    assert system.row(app.schedules["fixed"].trigger().id)["name"] == "fixed@3"
    with pytest.raises(InvalidWorkflow, match="versioning: expected one of pinned and auto_upgrade, found 'auto'"):
        app.workflow(name="third", versioning="auto")(second.function)  # type: ignore[call-overload]


def test_a_child_of_a_pinned_workflow_is_pinned(system: System, engine_: Engine) -> None:
    @system.app.workflow(name="child", version=4, versioning="pinned")
    async def child(ctx: WorkflowContext) -> None: ...

    @system.app.workflow(name="parent")
    async def parent(ctx: WorkflowContext) -> None:
        await child.schedule()

    worker = system.worker(knows=["parent"])
    parent.start()
    run_turn(system, worker, engine_)
    assert system.sql("SELECT name FROM orchestrator.tasks ORDER BY name")[0]["name"] == "child@4"
