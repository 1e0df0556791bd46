"""What tasks cost, counted: round trips, transactions, write-ahead log, commands of Redis, calls of Python.

Counts do not depend on how busy the machine is: a change that makes a task more expensive fails here, and does not wait
for somebody to run a benchmark. If a figure falls, write the new one down in `COSTS`.

The client and the leader are the real ones. The worker is made of its streams, so its own Python is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from psycopg2.extensions import cursor as driver_cursor

from orchestrator import WorkflowContext, chain
from orchestrator.domain.tasks.outcomes import Flush
from orchestrator.domain.tasks.task import Succeeded
from orchestrator.sdk.code.engine import Engine
from orchestrator.transport.codec import encode
from tests.integration.code_stage import act
from tests.integration.stage import ONE, System, Worker

MANY = 1_000
_TRIES = 3


class Cost(NamedTuple):
    """The total cost of an operation."""

    round_trips: int
    """Round trips to Postgres."""
    transactions: int
    """Transactions that wrote something."""
    wal: int
    """Bytes of write-ahead log, without full-page images."""
    redis: int
    """Redis commands, including those inside scripts."""
    calls: int
    """Python and C functions that the client and the leader called."""


ROOM = (1.1, 1.1, 1.1, 1.02, 1.1)
"""Allowed factor for each figure in the table; for Redis, less than one more command per tick."""
COSTS = {
    "a thousand tasks at once": Cost(round_trips=7, transactions=3, wal=1_024_000, redis=1_040, calls=96_632),
    "a thousand tasks of ten keys with a limit": Cost(
        round_trips=13, transactions=3, wal=1_286_000, redis=1_040, calls=155_002
    ),
    "ten tasks, one after another": Cost(round_trips=30, transactions=30, wal=13_040, redis=260, calls=20_583),
    "ten tasks, each enqueued while another ends": Cost(
        round_trips=21, transactions=21, wal=12_472, redis=233, calls=18_545
    ),
    "ten steps of a workflow as code": Cost(round_trips=25, transactions=13, wal=25_920, redis=226, calls=26_114),
    "a chain of ten tasks": Cost(round_trips=24, transactions=12, wal=17_816, redis=225, calls=25_560),
    "ten ticks with nothing to do": Cost(round_trips=10, transactions=10, wal=960, redis=0, calls=3_354),
}


def at_once(system: System, worker: Worker) -> None:
    system.app.enqueue_many(system.job, [(number,) for number in range(MANY)])
    finish(system, worker, MANY)


def limited_by_keys(system: System, worker: Worker) -> None:
    task = system.job.options(concurrency=MANY, concurrency_key=lambda number: f"customer {number % 10}")
    system.app.enqueue_many(task, [(number,) for number in range(MANY)])
    finish(system, worker, MANY)


def one_by_one(system: System, worker: Worker) -> None:
    for number in range(10):
        system.job.enqueue(number)
        finish(system, worker, 1)


def overlapping(system: System, worker: Worker) -> None:
    for number in range(10):
        system.job.enqueue(number)
        system.tick()
        worker.succeed(*worker.take())
    system.tick()


def steps(system: System, worker: Worker) -> None:
    """Run the steps of one run; each report includes the workflow turn that follows."""
    engine = Engine(system.app.code_workflows.find, 1_000_000)
    system.app.code_workflows["steps"].start(10)
    system.tick()
    (first,) = worker.take()
    worker.report(act(engine, first))
    system.tick()
    for _ in range(10):
        (task,) = worker.take()
        assert task.run_id is not None
        turn = engine.follow(task.run_id, task.id, ONE, lambda attempt: attempt, task.at)
        assert turn is not None
        worker.held.clear()
        worker.flush(encode(Flush(worker.name, [Succeeded(task.id, task.attempt, 0.1, ONE)], [turn])))
        system.tick()


def chained(system: System, worker: Worker) -> None:
    chain([system.job.si(1)] * 10).start()
    finish(system, worker, 10)


def nothing(system: System, worker: Worker) -> None:
    del worker
    system.tick(10)


WORK: dict[str, Callable[[System, Worker], None]] = dict(
    zip(COSTS, (at_once, limited_by_keys, one_by_one, overlapping, steps, chained, nothing), strict=True)
)


def finish(system: System, worker: Worker, count: int) -> None:
    """Dispatch `count` tasks and report their success."""
    while count:
        system.tick()
        taken = worker.take()
        assert taken, "nothing was dispatched"
        worker.succeed(*taken)
        count -= len(taken)
    system.tick()


class Counts:
    """Running totals since the start."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._round_trips = self._calls = 0

    def saw(self, _: object, event: str, called: Any) -> None:
        if event == "call":
            self._calls += 1
        elif event == "c_call":
            self._calls += 1
            if called.__name__ in ("execute", "copy_expert") and isinstance(called.__self__, driver_cursor):
                self._round_trips += 1

    def now(self) -> Cost:
        (row,) = self._system.sql("""
            SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS transactions,
                   pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint AS wal""")
        commands: Any = self._system.redis.info("commandstats")
        redis = sum(command["calls"] for name, command in commands.items() if name != "cmdstat_info")
        return Cost(self._round_trips, row["transactions"], row["wal"], redis, self._calls)


def measure(system: System, work: Callable[[], None]) -> Cost:
    counts = Counts(system)
    before = counts.now()
    sys.setprofile(counts.saw)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Cost(*(after - since for after, since in zip(counts.now(), before, strict=True)))


@pytest.fixture
def quiet_log(system: System) -> Iterator[None]:
    """Switch off full-page images, which depend on the last checkpoint."""

    def change(sql: str) -> None:
        with system.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(sql)
            connection.exec_driver_sql("SELECT pg_reload_conf()")

    change("ALTER SYSTEM SET full_page_writes = off")
    yield
    change("ALTER SYSTEM RESET full_page_writes")


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("name", COSTS)
def test_costs_do_not_exceed_the_recorded_figures(system: System, name: str) -> None:
    worker = system.worker(slots=MANY, knows=("job", "steps"))

    @system.app.workflow(name="steps")
    async def steps(ctx: WorkflowContext, count: int) -> int:
        return sum([await system.job.schedule() for _ in range(count)])

    system.settle()
    WORK[name](system, worker)  # warm up: prepares statements, imports code
    for _ in range(_TRIES):  # if a second passes on a busy machine, the leader checks more
        cost, bounds = measure(system, lambda: WORK[name](system, worker)), COSTS[name]
        print(f'\n    "{name}": {cost},')
        more = {
            field: (now, most)
            for field, now, most, room in zip(Cost._fields, cost, bounds, ROOM, strict=True)
            if now > most * room
        }
        if not more:
            break
    assert not more, f"{name} costs more than it did (now, before): {more}"


def test_a_tick_without_free_slots_does_not_query_postgres(system: System) -> None:
    system.settle()
    system.tick()  # prepares statements
    system.job.enqueue()
    cost = measure(system, system.tick)
    assert (cost.round_trips, cost.transactions, cost.wal) == (0, 0, 0)
