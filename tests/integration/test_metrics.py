"""A leader's metrics count each committed change once, by queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from orchestrator.domain.tasks.task import Lost, Returned
from orchestrator.monitoring.exposition import MAX_QUEUES, OTHER_QUEUES, Family, Histogram
from orchestrator.monitoring.system import SystemGauges
from orchestrator.scheduler.process import ObservedScheduler
from orchestrator.store.load import MAX_COUNTED, queue_demands, queue_loads, system_load, use_indexes
from tests.integration.stage import System
from tests.integration.test_rolled_back import rolled_back

DEFAULT = {"queue": "default"}


def sample(families: Mapping[str, Family], name: str, **labels: str) -> float:
    found = [value for known, value in families[name].samples if known == labels]
    assert len(found) <= 1
    value = found[0] if found else 0.0
    assert not isinstance(value, Histogram)
    return value


def metrics(system: System) -> dict[str, Family]:
    return {family.name: family for family in system.scheduler.meter.metrics()}


def test_a_leader_counts_the_outcomes_of_tasks(system: System) -> None:
    worker = system.worker(slots=10)
    system.settle()
    system.dispatch(5, retries=3)
    good, bad, lost, back, last = worker.take()
    worker.succeed(good)
    worker.fail(bad)
    worker.fail(last, retryable=False)
    worker.report(Lost(lost.id, lost.attempt, alone=False), Returned(back.id, back.attempt, "worker stops"))
    system.tick()
    found = metrics(system)
    assert sample(found, "orchestrator_tasks_ended_total", queue="default", state="success") == 1
    assert sample(found, "orchestrator_tasks_ended_total", queue="default", state="failed") == 1
    assert sample(found, "orchestrator_attempts_retried_total", **DEFAULT) == 1
    assert sample(found, "orchestrator_attempts_lost_total", **DEFAULT) == 1
    assert sample(found, "orchestrator_tasks_dispatched_total", **DEFAULT) >= 5
    assert system.scheduler.meter.reports == 5
    (ran,) = (value for labels, value in found["orchestrator_task_run_seconds"].samples if labels == DEFAULT)
    assert isinstance(ran, Histogram)
    assert (sum(ran.counts), round(ran.sum, 3)) == (3, 0.3)
    (waited,) = (value for labels, value in found["orchestrator_task_wait_seconds"].samples if labels == DEFAULT)
    assert isinstance(waited, Histogram)
    assert sum(waited.counts) >= 5


def test_a_rolled_back_tick_counts_no_outcomes(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = system.worker()
    system.settle()
    system.dispatch()
    worker.succeed(*worker.take())
    with rolled_back(monkeypatch):
        system.tick()
    found = metrics(system)
    assert sample(found, "orchestrator_tasks_ended_total", queue="default", state="success") == 0
    assert sample(found, "orchestrator_ticks_total", outcome="failed") == 1
    system.tick()
    found = metrics(system)
    assert sample(found, "orchestrator_tasks_ended_total", queue="default", state="success") == 1
    assert sample(found, "orchestrator_ticks_total", outcome="failed") == 1


def test_all_tasks_of_a_large_batch_are_counted(system: System) -> None:
    worker = system.worker(slots=500)
    system.settle()
    system.app.enqueue_many(system.job, [(number,) for number in range(450)])
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.tick()
    meter = system.scheduler.meter
    assert meter.ended["default", "success"] == 450
    assert sum(meter.runs["default"].counts) == 450
    assert sum(meter.waits["default"].counts) == 450


def test_queues_beyond_the_maximum_share_one_label(system: System) -> None:
    meter = system.scheduler.meter
    labels = {meter.label(f"q{number}") for number in range(3 * MAX_QUEUES)}
    assert len(labels) == MAX_QUEUES + 1
    assert OTHER_QUEUES in labels
    assert meter.label("q0") == "q0"


def test_queue_load_is_read_with_index_scans(system: System, engine: Engine) -> None:
    worker = system.worker(slots=2)
    system.settle()
    for queue, priority in (("a", 0), ("a", 5), ("b", 0)):
        system.job.options(queue=queue, priority=priority).enqueue()
    keyed = system.app.task(name="keyed", concurrency=1, queue="b")(lambda: 1)
    keyed.enqueue()
    system.job.options(queue="a", delay=600).enqueue()
    system.dispatch(2)
    system.app.queue("paused").pause()
    system.sql(
        "UPDATE orchestrator.tasks SET created_at = now() - interval '1 hour' WHERE queue = 'a' AND priority = 0"
    )
    system.sql(
        "INSERT INTO orchestrator.tasks (id, name, queue, payload) "
        f"SELECT gen_random_uuid(), 'job', 'many', '' FROM generate_series(1, {MAX_COUNTED + 5})"
    )
    worker.take()
    with engine.connect() as connection:
        use_indexes(connection, 10)
        loads = {load.queue: load for load in queue_loads(connection)}
        whole = system_load(connection)
        demands = {demand.queue: demand for demand in queue_demands(connection)}
        connection.rollback()
        connection.exec_driver_sql("RESET ALL")
    assert (loads["a"].ready, loads["a"].delayed) == (2, 1)
    assert loads["a"].oldest is not None
    assert 3_600 <= loads["a"].oldest < 3_700
    assert loads["b"].ready == 2
    assert (loads["default"].in_flight, loads["default"].slots) == (2, 2)
    assert loads["many"].ready == MAX_COUNTED
    assert loads["paused"].paused
    assert (demands["default"].wanted, demands["a"].wanted, demands["paused"].wanted) == (2, 1, 0)
    assert (whole.live_workers, whole.slots, whole.stuck_runs, whole.late_schedules) == (1, 2, 0, 0)
    assert whole.lease_remaining is not None
    assert whole.lease_remaining > 0


def test_a_scheduler_exposes_its_metrics_and_problems(system: System) -> None:
    observed = ObservedScheduler(system.settings)
    assert "start" in observed.obstacles()
    observed.scheduler = system.scheduler
    assert observed.obstacles() == {}
    families = {family.name: family for family in observed.metrics()}
    assert families["orchestrator_scheduler_leading"].samples == (({}, 1.0),)
    of_shard = ObservedScheduler(replace(system.settings, shards=2).of_shard(1))
    of_shard.scheduler = system.scheduler
    (leading,) = (family for family in of_shard.metrics() if family.name == "orchestrator_scheduler_leading")
    assert leading.samples == (({"shard": "1"}, 1.0),), "so that a standby is counted for each"
    assert families["orchestrator_stats_up"].samples == (({"server": "postgres"}, 1.0),)
    system.scheduler.postgres.failed("it is away")
    assert observed.obstacles() == {"postgres": "it is away"}
    observed._system.close()


def test_gauges_report_unreachable_servers(system: System) -> None:
    gauges = SystemGauges(
        system.settings.__class__(database_url="postgresql://localhost:1/x", redis_url="redis://localhost:1")
    )
    families = {family.name: family for family in gauges.metrics()}
    assert families["orchestrator_stats_up"].samples == (({"server": "postgres"}, 0.0),)
    assert families["orchestrator_redis_up"].samples == (({}, 0),)
    assert "orchestrator_queue_tasks" not in families
    assert gauges.redis_trouble() is not None
