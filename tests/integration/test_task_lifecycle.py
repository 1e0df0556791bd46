"""The life of a task, tick by tick: from enqueue to result, in batches, and within the fleet's slots."""

from __future__ import annotations

import os
from datetime import timedelta

from sqlalchemy import Engine

from orchestrator import Settings
from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.tasks.task import NewTask, Started, Succeeded
from orchestrator.store.tasks import enqueue
from orchestrator.transport.codec import (
    Applied,
    Ended,
    decode,
)
from orchestrator.transport.keys import GROUP
from tests.integration.stage import KEYS, ONE, System, raw
from tests.waiting import eventually

# -- a successful task


def test_a_task_passes_all_states_from_enqueue_to_result(system: System) -> None:
    worker = system.worker()
    handle = system.job.options(timeout=9).enqueue(7)
    assert handle.status() == "pending"
    system.pass_seconds()
    assert handle.status() == "dispatched"
    (task,) = worker.take()
    assert (task.id, task.attempt, task.name, task.queue, task.alone) == (raw(handle), 1, "job", "default", False)
    assert task.options is not None
    worker.start(task)
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["worker"]) == ("running", "w1")
    assert system.messages() == [(task.id, 1)]  # kept until the report is applied
    worker.succeed(task)
    system.tick()
    assert handle.result(0) == 1
    row = system.row(handle)
    assert (row["attempt"], row["failures"], row["losses"], row["worker"]) == (1, 0, 0, "w1")
    assert system.messages() == []
    assert system.count("tasks") == 0


def test_an_applied_report_is_recorded_published_and_trimmed(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    pubsub = system.redis.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
    pubsub.subscribe(KEYS.applied, KEYS.done(raw(handle)))
    eventually(lambda: len(pubsub.channels) == 2 and pubsub.get_message() is None, "both subscriptions")
    receipt = worker.report(*(Succeeded(task.id, task.attempt, 0.1, ONE) for task in worker.take()))
    system.tick()
    assert receipt.entry is not None
    (cursor,) = system.sql("SELECT generation, position FROM orchestrator.cursors")
    assert (cursor["generation"], cursor["position"]) == (system.generation, receipt.entry)
    assert system.redis.xlen(KEYS.events(system.generation)) == 0
    heard: dict[str, bytes] = {}

    def receive() -> bool:
        message = pubsub.get_message()
        if message is not None:
            heard[message["channel"].decode()] = message["data"]
        return len(heard) == 2

    eventually(receive, "the announcements")
    pubsub.close()
    assert decode(Applied, heard[KEYS.applied]) == Applied(system.generation, receipt.entry)
    assert decode(list[Ended], heard[KEYS.done(raw(handle))]) == [Ended(raw(handle), "success", ONE)]


def test_a_task_that_ends_between_two_ticks_keeps_its_duration(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.report(Started(task.id, 1, 2.0), Succeeded(task.id, 1, 2.5, ONE))
    system.tick()
    row = system.row(handle)
    assert row["ended_at"] - row["started_at"] == timedelta(seconds=2.5)


def test_a_nudge_between_two_reads_is_not_missed(system: System) -> None:
    """No second has passed, so only the nudge makes a new leader look for new runs."""
    system.pass_seconds()
    system.lead()
    system.pass_seconds()
    run = system.app.start_many(system.job, [1])
    system.tick()
    assert run.progress().status == "running"


def test_a_task_whose_nudge_was_lost_is_found(system: System) -> None:
    system.worker()
    new = NewTask(time_ordered_id(1, os.urandom(10)), "job", "default", b"\x92\x90\x80")
    with system.engine.begin() as connection:
        enqueue.insert_task(connection, new)
    system.pass_seconds()
    assert system.row(new.id)["status"] == "dispatched"


def test_nothing_is_dispatched_without_a_worker_of_the_queue(system: System) -> None:
    handle = system.job.enqueue()
    elsewhere = system.worker(queue="elsewhere")
    system.pass_seconds(3)
    assert handle.status() == "pending"
    assert elsewhere.take() == []


def test_dispatches_do_not_exceed_the_free_slots(system: System) -> None:
    worker = system.worker(slots=3)
    handles = [system.job.enqueue(number) for number in range(10)]
    system.pass_seconds(2)
    assert system.states(*handles) == ["dispatched"] * 3 + ["pending"] * 7
    worker.succeed(*worker.take()[:2])
    system.tick()
    assert system.states(*handles) == ["success"] * 2 + ["dispatched"] * 3 + ["pending"] * 5


def test_a_delayed_task_waits_in_postgres(system: System) -> None:
    worker = system.worker()
    handle = system.job.options(delay=60).enqueue()
    system.pass_seconds(3)
    assert (handle.status(), worker.take()) == ("pending", [])
    system.lead(offset=61)
    system.pass_seconds()
    assert handle.status() == "dispatched"


def test_the_workers_table_shows_the_state_of_the_fleet(system: System) -> None:
    worker = system.worker(slots=4)
    second = system.worker("w2", knows=["job", "other"])
    system.pass_seconds()
    rows = {row["id"]: row for row in system.sql("SELECT * FROM orchestrator.workers")}
    assert {name: (row["state"], row["slots"], row["names"]) for name, row in rows.items()} == {
        "w1": ("live", 4, ["job"]),
        "w2": ("live", 10, ["job", "other"]),
    }
    worker.die()
    second.leave()
    system.pass_seconds()
    states = {row["id"]: row["state"] for row in system.sql("SELECT id, state FROM orchestrator.workers")}
    assert states == {"w1": "dead", "w2": "stopped"}


# -- batches


def test_reports_are_applied_in_batches_and_completely_by_a_full_check(engine: Engine, system: System) -> None:
    worker = system.worker(slots=60)
    handles = system.dispatch(60)
    tasks = worker.take()
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 10}))
    small.clock = system.clock
    small.workers = system.workers
    small.lead()
    small.pass_seconds()
    for task in tasks:
        worker.succeed(task)
    small.tick()
    assert small.states(*handles).count("success") == 10
    small.tick()
    assert small.states(*handles).count("success") == 20
    small.pass_seconds()
    assert small.states(*handles).count("success") == 60
    small.close()


def test_workers_of_a_queue_share_its_messages(system: System) -> None:
    one, two = system.worker("one"), system.worker("two")
    handles = system.dispatch(20)
    stream = KEYS.queue(system.generation, "default")
    first = one.take()
    second = two.take()
    assert {task.id for task in first + second} == {raw(handle) for handle in handles}
    assert system.redis.xpending(stream, GROUP)["pending"] == len(system.messages())
    one.succeed(*first)
    two.succeed(*second)
    system.tick()
    assert system.states(*handles) == ["success"] * 20
