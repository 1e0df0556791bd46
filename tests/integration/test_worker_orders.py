"""Orders to workers: attempts to stop, whether to drain, whether work waits."""

from __future__ import annotations

from uuid import UUID

import pytest
from redis.exceptions import ConnectionError

from orchestrator.domain.tasks.task import Returned
from orchestrator.store.insights import list_workers, overview, show_task
from orchestrator.transport.codec import (
    Attempt,
    Order,
    encode,
)
from tests.integration.stage import ID, KEYS, System


def test_a_doubtful_worker_is_told_which_attempts_no_longer_count(system: System) -> None:
    """Succeeded attempts are left out: the worker would say that their results are dropped."""
    worker = system.worker()
    system.dispatch(3)
    current, stale, done = worker.take()
    worker.report(Returned(stale.id, 1, "drained"))
    worker.succeed(done)
    system.tick()
    worker.held = [(current.id, 1), (stale.id, 1), (done.id, 1), (ID, 3)]
    worker.doubtful = True
    system.pass_seconds()
    orders = worker.orders()
    assert Order(stop=[Attempt(stale.id, 1), Attempt(ID, 3)], go_on=True) in orders


def test_a_stalled_worker_is_shown_with_its_held_tasks(system: System) -> None:
    worker = system.worker()
    system.dispatch(5)
    tasks = worker.take()
    system.pass_seconds()
    worker.still = 7.0
    system.pass_seconds()
    with system.engine.begin() as connection:
        (shown,) = list_workers(connection)
        found = overview(connection)
    assert (shown.state, shown.holds) == ("still", tuple(UUID(bytes=task.id) for task in tasks[:3]))
    assert shown.still is not None
    assert 7.0 <= shown.still < 60.0
    assert (found.workers, found.slots, [one.id for one in found.still_workers]) == (0, 0, ["w1"])
    worker.still = 0.0
    system.pass_seconds()
    with system.engine.begin() as connection:
        (shown,) = list_workers(connection)
    assert (shown.state, shown.still, shown.holds) == ("live", None, ())


def test_a_returned_attempt_is_kept_if_it_had_started(system: System) -> None:
    worker = system.worker()
    begun, waiting = system.dispatch(2)
    first, second = worker.take()
    worker.start(first)
    system.tick()
    worker.report(*(Returned(task.id, 1, "worker stops") for task in (first, second)))
    system.tick()
    assert system.states(begun, waiting) == ["dispatched", "dispatched"]
    with system.engine.begin() as connection:
        details = [show_task(connection, UUID(handle.id)) for handle in (begun, waiting)]
    attempts = [detail.attempts for detail in details if detail is not None]
    assert [[(one.attempt, one.outcome) for one in some] for some in attempts] == [
        [(1, "returned"), (2, "dispatched")],
        [(2, "dispatched")],
    ]
    returned = attempts[0][0]
    assert (returned.worker, returned.error) == ("w1", None)
    assert returned.started_at is not None
    assert returned.ended_at is not None
    assert returned.started_at < returned.ended_at


def test_a_doubtful_worker_receives_no_new_tasks(system: System) -> None:
    worker = system.worker()
    worker.doubtful = True
    handle = system.job.enqueue()
    system.pass_seconds(2)
    assert handle.status() == "pending"


def test_a_burst_worker_is_told_to_drain_when_no_work_is_left(system: System) -> None:
    worker = system.worker()
    worker.burst = True
    system.dispatch()
    system.pass_seconds()
    assert worker.orders() == []
    worker.succeed(*worker.take())
    system.tick()
    system.pass_seconds()
    assert Order(drain=True) in worker.orders()


def test_a_hungry_worker_is_told_whether_work_waits(system: System) -> None:
    worker = system.worker(slots=2)
    worker.hungry = True
    first = system.job.enqueue(1)
    system.job.enqueue(2)
    system.pass_seconds(2)
    (task, _) = worker.take()
    assert worker.orders() == [], "all of it could be handed out"
    for number in range(4):
        system.job.options(concurrency_key="a").enqueue(number)
    system.pass_seconds()
    assert worker.orders() == [Order(work_waits=True)]
    first.cancel()
    system.pass_seconds(2)
    assert Order(stop=[Attempt(task.id, 1)], work_waits=True) in worker.orders(), "one order does not hide another"
    system.sql("INSERT INTO orchestrator.queues (name, paused) VALUES ('default', true)")
    system.pass_seconds(2)
    assert not any(order.work_waits for order in worker.orders()), "what is paused does not wait for a worker"


def test_a_draining_worker_that_disappears_is_stopped_and_not_dead(system: System) -> None:
    worker = system.worker()
    worker.draining = True
    system.pass_seconds()
    worker.die()
    system.pass_seconds(6)
    assert [row["state"] for row in system.sql("SELECT state FROM orchestrator.workers")] == ["stopped"]


@pytest.mark.parametrize("left", [True, False])
def test_orders_arrive_after_a_failover_to_a_redis_with_a_late_clock(system: System, left: bool) -> None:
    worker, stream = system.worker(), KEYS.orders("w1")
    order = system.scheduler._streams.fleet.order
    late = KEYS.signing.sign(stream, encode(Order(work_waits=True)), 0)
    system.redis.xadd(stream, {"d": late}, id="9999999999000-0")
    assert worker.orders() == [Order(work_waits=True)]
    system.redis.delete(stream)  # the new master has not received this order
    if left:
        order({"w1": Order(go_on=True)})
    system.redis.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(ConnectionError):
        worker.orders()
    assert worker.orders() == [], "what stands there is old, and does not count again"
    order({"w1": Order(drain=True)})
    assert worker.orders() == [Order(drain=True)]
