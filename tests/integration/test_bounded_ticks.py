"""However much is pending, a tick ends well within the lease, and other work is dispatched between two ticks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import Engine

from orchestrator import RunHandle, Settings
from orchestrator.domain.dag.definition import Definition, EventTrigger, Hook, Param, Step
from orchestrator.scheduler import budget
from orchestrator.scheduler.dag.outputs import Outputs
from orchestrator.scheduler.dag.plans import Dags
from orchestrator.scheduler.loop import Scheduler
from orchestrator.scheduler.tasks.creation import create_tasks
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.insights import list_steps
from orchestrator.transport.connection import connect
from orchestrator.transport.leader.streams import LeaderStreams
from tests.integration.stage import KEYS, System, Worker
from tests.waiting import eventually

LEASE = 2.0


@contextmanager
def real(engine: Engine, system: System, lease: float) -> Iterator[Scheduler]:
    """Yield a leader with a real clock."""
    streams = LeaderStreams(connect(system.settings.redis_url), KEYS)
    settings = Settings(**{**vars(system.settings), "lease": lease})
    scheduler = Scheduler(engine, streams, settings)
    system.expire_lease()
    assert scheduler._leadership.acquire()
    scheduler.take_over()
    yield scheduler
    scheduler._leadership.disconnect()
    streams._connection.close()
    streams._redis.close()


def spend(scheduler: Scheduler) -> float:
    """Tick; return the CPU seconds that the tick took."""
    began = time.thread_time()
    scheduler.tick()
    return time.thread_time() - began


def pending(system: System) -> int:
    waits = "SELECT count(*) AS count FROM orchestrator.runs WHERE status = 'pending' OR (open > 0 AND total = 0)"
    return int(system.sql(waits)[0]["count"]) + system.count("untold")


def counter(system: System, run: RunHandle[Any], name: str) -> int:
    row = system.sql(f"SELECT {name} AS number FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=run.id)[0]
    return int(row["number"])


def wide(name: str, steps: int) -> Definition:
    return Definition(name=name, steps=tuple(Step(name=f"s{number}", task="job") for number in range(steps)))


def test_many_large_runs_that_are_pending_begin_tick_by_tick(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves only with the tick's work, which is counted: a busy machine takes any time for it."""
    in_time = 2_000
    share = budget.SHARE * system.settings.lease

    def creating(tx: Any, tasks: Any, *more: Any) -> None:
        system.clock.now += len(tasks) * share / in_time
        create_tasks(tx, tasks, *more)

    monkeypatch.setattr("orchestrator.scheduler.dag.creation.create_tasks", creating)
    system.app.workflows.apply(wide("large", 200))
    worker = system.worker()
    runs = [system.app.workflows["large"].start() for _ in range(60)]
    alone = system.job.enqueue(1)
    created = [system.count("tasks")]
    while pending(system):
        worker.beat()
        system.tick()
        created.append(system.count("tasks"))
        assert 0 < created[-1] - created[-2] <= in_time + budget.SLICE, (
            "what is begun when the time is over is the last"
        )
        assert system.row(alone)["status"] == "dispatched", "and others are served between two ticks"
    assert created[-1] == 60 * 200 + 1
    assert {counter(system, run, "open") for run in runs} == {200}


def test_a_join_over_thousands_of_steps_takes_linear_time(system: System) -> None:
    """The time was quadratic in the number of steps: for these, more than two seconds."""
    steps = wide("", 5_000).steps
    join = Step(name="join", task="join", depends_on=tuple(step.name for step in steps))
    system.app.workflows.apply(Definition(name="join", steps=(*steps, join)), elsewhere=["join"])
    worker = system.worker(slots=10_000)
    run = system.app.workflows["join"].start()
    longest = 0.0
    while counter(system, run, "success") < len(steps):
        worker.beat()
        longest = max(longest, spend(system.scheduler))
        system.clock.now += 1.0
        worker.succeed(*worker.take())
    assert system.count("tasks") == 1, "only the join is left"
    assert longest < 1.2


def test_a_wide_run_starts_its_steps_in_slices(engine: Engine, system: System) -> None:
    system.app.workflows.apply(wide("wide", 300))
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 10}))
    run = small.app.workflows["wide"].start()
    small.lead()
    created = []
    for _ in range(10):
        small.tick()
        created.append(small.count("tasks"))
    assert created[0] <= 50 < created[2] < 300 == created[-1]
    small.lead()  # a new leader, without memory
    assert counter(system, run, "open") == 300
    small.close()


def test_steps_that_wait_for_room_are_found_by_the_next_leader(engine: Engine, system: System) -> None:
    system.app.workflows.apply(wide("wide", 300))
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 10}))
    small.app.workflows["wide"].start()
    for _ in range(10):
        small.lead()
        small.tick(2)
    assert small.count("tasks") == 300
    small.close()


def test_a_step_that_reads_too_many_output_values_fails(system: System, monkeypatch: Any) -> None:
    monkeypatch.setattr("orchestrator.scheduler.dag.outputs._MAX_OUTPUTS", 5)
    each = Step(name="each", task="job", parallel=6)
    reads = Step(name="reads", task="job", depends_on=("each",), input={"number": "${each[0]}"})
    waits = Step(name="waits", task="job", depends_on=("each",), input={"number": 1})
    system.app.workflows.apply(Definition(name="fan", steps=(each, reads, waits)))
    run = system.app.workflows["fan"].start()
    worker = system.worker()
    for _ in range(5):
        system.pass_seconds()
        worker.succeed(*worker.take())
    assert run.progress().status == "failed"
    (row,) = system.sql("SELECT state FROM orchestrator.runs")
    assert b"6 values" in bytes(row["state"])


def test_each_slice_of_new_children_reads_their_workflow_once(
    engine: Engine, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workflow was read and planned for each child: for a thousand children of 500 steps, longer than a lease."""
    reads = 0
    original = workflows.latest

    def counting(connection: Any, name: str) -> Any:
        nonlocal reads
        reads += 1
        return original(connection, name)

    system.app.workflows.apply(wide("child", 1))
    system.app.workflows.apply(Definition(name="many", steps=(Step(name="each", workflow="child", parallel=60),)))
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 10}))
    run = small.app.workflows["many"].start()
    small.lead()
    monkeypatch.setattr(workflows, "latest", counting)
    created: list[int] = []
    while not created or created[-1] < 61:
        small.tick()
        created.append(small.count("runs"))
        assert len(created) < 60
    assert created[0] < 61, "not all at once"
    assert reads <= 20
    assert counter(system, run, "open") == 60
    small.close()


def test_a_fan_out_with_limited_concurrency_reads_its_list_once(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `concurrency`, the list was read in every tick in which a task of the step ended."""
    first = Step(name="first", task="job")
    each = Step(
        name="each", task="job", depends_on=("first",), foreach="first", concurrency=2, input={"number": "${item}"}
    )
    system.app.workflows.apply(Definition(name="narrow", steps=(first, each)))
    worker = system.worker()
    run = system.app.workflows["narrow"].start()
    system.pass_seconds()
    reads: list[Any] = []
    original = dags.outputs

    def noting(connection: Any, keys: Any) -> Any:
        reads.extend(keys)
        return original(connection, keys)

    monkeypatch.setattr(dags, "outputs", noting)
    worker.succeed(*worker.take(), result=msgspec.msgpack.encode(list(range(20))))
    given: list[int] = []
    for _ in range(60):
        system.pass_seconds()
        taken = worker.take()
        assert len(taken) <= 2
        given += [msgspec.msgpack.decode(task.payload)[1]["number"] for task in taken]
        worker.succeed(*taken)
        if run.progress().status == "success":
            break
    assert run.progress().status == "success"
    assert sorted(given) == list(range(20))
    assert len(reads) <= 2, "to decide how many there are, and to create the first"


def test_event_triggers_are_matched_without_reading_all_definitions(
    system: System, monkeypatch: Any, worker_of_all: Worker
) -> None:
    """Each apply makes the next end reread the triggers, but not thousands of large definitions."""
    listener = Definition(
        name="listener",
        params={"who": Param(type="string")},
        on=(EventTrigger(workflow="heard", params={"who": "${event.workflow}"}),),
        steps=(Step(name="a", task="job"),),
    )
    system.app.workflows.apply(listener)
    system.app.workflows.apply(wide("heard", 1))
    system.app.workflows.apply(wide("bystander", 500))
    compiled: list[str] = []
    original = Dags.compiled

    def noting(self: Dags, tick: Any, name: str, version: int) -> Any:
        compiled.append(name)
        return original(self, tick, name, version)

    monkeypatch.setattr(Dags, "compiled", noting)
    system.app.workflows["heard"].start()
    for _ in range(4):
        system.pass_seconds()
        worker_of_all.succeed(*worker_of_all.take())
    assert [row["workflow"] for row in system.sql("SELECT workflow FROM orchestrator.runs ORDER BY id")].count(
        "listener"
    ) == 1
    assert "bystander" not in compiled


@pytest.fixture
def worker_of_all(system: System) -> Worker:
    return system.worker()


def test_a_run_whose_planning_exceeds_the_lease_becomes_stuck(
    engine: Engine, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres ends the session of a leader that computes for longer than its lease; the leader learns for which
    run."""
    system.app.workflows.apply(wide("slow", 3))
    system.app.workflows.apply(wide("quick", 3))
    slow, quick = system.app.workflows["slow"].start(), system.app.workflows["quick"].start()
    original = Dags._settle

    def settle(self: Dags, tx: Any, runs: Any) -> None:
        if any(run.info["workflow"] == "slow" for run in runs):
            until = time.thread_time() + 0.9 * LEASE
            while time.thread_time() < until:
                pass
            raise _ended_by_postgres(tx)
        original(self, tx, runs)

    def tick(leader: Scheduler) -> None:
        try:
            leader.tick()
        except Exception:  # noqa: BLE001  # as `run` does; on a frozen machine, Postgres ends a session too
            leader._leadership.disconnect()
            system.expire_lease()
            assert leader._leadership.acquire()
            leader.take_over()

    def stuck() -> Any:
        (row,) = system.sql("SELECT stuck FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=slow.id)
        return row["stuck"]

    monkeypatch.setattr(Dags, "_settle", settle)
    with real(engine, system, LEASE) as leader:
        eventually(lambda: tick(leader) or (stuck() and counter(system, quick, "open") == 3), "it is set aside", 120)
        assert stuck()["kind"] == "TooSlow"
        monkeypatch.setattr(Dags, "_settle", original)
        slow.retry()
        eventually(lambda: tick(leader) or counter(system, slow, "open") == 3, "it goes on")


def _ended_by_postgres(tick: Any) -> Exception:
    """Fail as the next statement does after the session has idled in its transaction for too long."""
    try:
        tick.connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError


def test_runs_go_on_however_little_time_a_tick_has(
    engine: Engine, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, the time for planning may be over before planning begins."""
    monkeypatch.setattr("orchestrator.scheduler.budget.SHARE", 0.0)
    chain = Definition(name="chain", steps=(Step(name="a", task="job"), Step(name="b", task="job", depends_on=("a",))))
    system.app.workflows.apply(chain)
    worker = system.worker()
    runs = [system.app.workflows["chain"].start() for _ in range(5)]
    many = system.app.start_many(system.job, [1, 2, 3])
    with real(engine, system, system.settings.lease) as leader:
        for _ in range(200):
            leader.tick()
            worker.beat()
            worker.succeed(*worker.take())
            if {run.progress().status for run in (*runs, many)} == {"success"}:
                break
    assert {run.progress().status for run in (*runs, many)} == {"success"}
    assert {counter(system, run, "success") for run in runs} == {2}
    assert system.count("untold") == 0


def test_expressions_that_take_long_together_are_evaluated_in_several_ticks(system: System) -> None:
    """Each expression may cost this much; a step does not fail for the cost of its neighbors."""
    long = " and ".join(["params.list == params.list"] * 30)
    steps = tuple(Step(name=f"s{number}", task="job", when=f"${{{long}}}") for number in range(8))
    inputs = tuple(Step(name=f"i{number}", task="job", input={"number": f"${{{long}}}"}) for number in range(8))
    definition = Definition(name="expensive", params={"list": Param(type="list")}, steps=steps + inputs)
    system.app.workflows.apply(definition)
    run = system.app.workflows["expensive"].start(list=list(range(100_000)))
    created = []
    while system.count("tasks") < 16:
        system.tick()
        created.append(system.count("tasks"))
        assert len(created) < 40
    assert 0 < created[0] < 8
    assert counter(system, run, "failed") == 0


def test_a_long_chain_of_empty_steps_continues_in_the_next_tick(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0
    original = Outputs.names

    def counting(*given: Any, **named: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return original(*given, **named)

    monkeypatch.setattr(Outputs, "names", counting)
    first = Step(name="s0", task="job", foreach="params.list")
    rest = (
        Step(name=f"s{number}", task="job", depends_on=(f"s{number - 1}",), foreach=f"s{number - 1}")
        for number in range(1, 1_000)
    )
    definition = Definition(name="chain", params={"list": Param(type="list")}, steps=(first, *rest))
    system.app.workflows.apply(definition)
    run = system.app.workflows["chain"].start(list=[])
    longest = 0
    while run.progress().status != "success":
        rounds = 0
        system.tick()
        longest = max(longest, rounds)
        assert rounds
    assert longest <= 250


def test_a_run_with_large_inputs_does_not_delay_other_runs(system: System, monkeypatch: Any) -> None:
    monkeypatch.setattr("orchestrator.scheduler.budget._MAX_DATA", 5_000)
    worker = system.worker(slots=100)
    large = Step(name="each", task="job", parallel=200, input={"number": "x" * 1_000})
    system.app.workflows.apply(Definition(name="large", steps=(large,)))
    system.app.workflows.apply(wide("small", 1))
    system.app.workflows["large"].start()
    system.pass_seconds(2)
    small = system.app.workflows["small"].start()
    for _ in range(4):
        worker.succeed(*worker.take())
        system.pass_seconds()
    assert small.progress().status == "success"
    assert system.count("tasks") + system.count("ended_tasks") < 100, "the large one goes on"


def test_runs_with_large_hooks_end_over_several_ticks(system: System, monkeypatch: Any) -> None:
    """One tick created the hooks of all runs that ended in it, whatever their size: Postgres ended its transaction."""
    monkeypatch.setattr("orchestrator.scheduler.budget._MAX_DATA", 20_000)
    monkeypatch.setattr("orchestrator.scheduler.runs.triggers._MAX_HOOK_BYTES", 2_500)
    system.app.workflows.apply(
        Definition(
            name="followed",
            params={"text": Param(type="string")},
            on_success=(Hook(task="hook"),) * 5,
            steps=(Step(name="a", task="job"),),
        ),
        elsewhere=["hook"],
    )
    runs = [system.app.workflows["followed"].start(text="x" * 1_000) for _ in range(6)]
    worker = system.worker(slots=100)
    system.tick_until(lambda: system.count("tasks") == 6)
    system.pass_seconds()
    worker.succeed(*worker.take())
    hooks = "SELECT count(*) AS count FROM orchestrator.tasks WHERE name = 'hook'"
    created = [0]
    while created[-1] < 30:
        system.tick()
        created.append(int(system.sql(hooks)[0]["count"]))
        assert created[-1] - created[-2] <= 10, "those of one run, and of another that fits beside it"
        assert len(created) < 20
    system.tick()
    assert {run.progress().status for run in runs} == {"success"}
    assert int(system.sql(hooks)[0]["count"]) == 30
    assert system.count("untold") == 0


def test_runs_with_large_parameters_are_read_a_few_at_once(system: System, monkeypatch: Any) -> None:
    """All runs that began in a tick were read and decoded in one go, before the clock was checked."""
    monkeypatch.setattr("orchestrator.scheduler.dag.plans._PARAMETER_BYTES_PER_STEP", 1)
    read: list[int] = []
    original = dags.load

    def counting(connection: Any, ids: Any) -> Any:
        read.append(len(ids))
        return original(connection, ids)

    system.app.workflows.apply(
        Definition(name="given", params={"text": Param(type="string")}, steps=(Step(name="a", task="job"),))
    )
    system.app.workflows["given"].start(text="")
    system.tick_until(lambda: system.count("tasks") == 1)
    runs = [system.app.workflows["given"].start(text=f"{number}" + "x" * 900) for number in range(8)]
    monkeypatch.setattr(dags, "load", counting)
    system.tick_until(lambda: system.count("tasks") == 1 + len(runs))
    assert sum(read) == len(runs)
    assert max(read) <= 2


def finish_with(system: System, worker: Worker, result: bytes) -> None:
    while taken := worker.take():
        for start in range(0, len(taken), 50):
            worker.succeed(*taken[start : start + 50], result=result)
        system.pass_seconds()


LARGE = b"\xc5" + (10_000).to_bytes(2, "big") + b"x" * 10_000
"""A result of 10 kB."""


def small_payloads(system: System) -> None:
    """Limit the payload of a task to 50 kB."""
    system.settings = Settings(**{**vars(system.settings), "max_payload": 50_000})
    system.lead()


def test_steps_that_read_large_outputs_are_created_a_few_at_once(system: System, monkeypatch: Any) -> None:
    """Each step alone is within the limits."""
    small_payloads(system)
    sizes: list[int] = []
    original = dags.outputs

    def weighing(connection: Any, keys: Any) -> Any:
        found = original(connection, keys)
        sizes.append(sum(len(result or b"") for results in found.values() for _, result in results))
        return found

    above = [Step(name=f"a{number}", task="job") for number in range(300)]
    below = [
        Step(name=f"b{step.name}", task="job", depends_on=(step.name,), input={"number": f"${{{step.name}}}"})
        for step in above
    ]
    system.app.workflows.apply(Definition(name="pairs", steps=(*above, *below)))
    worker = system.worker(slots=1_000)
    run = system.app.workflows["pairs"].start()
    system.pass_seconds(2)
    monkeypatch.setattr(dags, "outputs", weighing)
    finish_with(system, worker, LARGE)
    for _ in range(20):
        system.pass_seconds()
    finish_with(system, worker, b"\x01")
    assert run.progress().status == "success"
    assert max(sizes) <= 20 * 50_000


def test_a_join_whose_inputs_are_too_large_fails_with_the_reason(system: System) -> None:
    small_payloads(system)
    each = Step(name="each", task="job", parallel=300)
    join = Step(name="join", task="job", depends_on=("each",), input={"number": "${len(each)}"})
    system.app.workflows.apply(Definition(name="fan", steps=(each, join)))
    worker = system.worker(slots=1_000)
    run = system.app.workflows["fan"].start()
    system.pass_seconds(2)
    finish_with(system, worker, LARGE)
    assert run.progress().status == "failed"
    with system.engine.connect() as connection:
        *_, step = list_steps(connection, UUID(run.id))
    assert str(step.reason).startswith(
        "The outputs that it reads have 3,000,900 bytes together, and at most 1,000,000 can be read."
    )


def test_large_tasks_are_claimed_a_few_at_once(system: System) -> None:
    worker = system.worker(slots=200)
    system.settle()
    small = [system.job.enqueue(number) for number in range(3)]
    system.app.enqueue_many(system.job, [("x" * 900_000,) for _ in range(10)])
    system.pass_seconds()
    assert len(worker.take()) == 13, "nobody knows yet how large they are"
    system.app.enqueue_many(system.job, [("x" * 900_000,) for _ in range(60)])
    system.pass_seconds()
    first = worker.take()
    assert 0 < len(first) <= 25
    taken = len(first)
    for _ in range(10):
        system.tick()
        taken += len(worker.take())
    assert taken == 60
    assert all(system.row(handle)["status"] == "dispatched" for handle in small)
