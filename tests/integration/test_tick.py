"""The scheduler, tick by tick."""

from __future__ import annotations

import os
import re
import threading
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from orchestrator import Retry, Settings, TaskCancelled, TaskFailed
from orchestrator.domain.dag.definition import Concurrency, Definition, Step
from orchestrator.domain.ids import derived_id, time_ordered_id
from orchestrator.domain.tasks.reports import Flush, Report
from orchestrator.domain.tasks.task import Dispatch, Enqueued, Failed, Lost, NewTask, Returned, Started, Succeeded
from orchestrator.scheduler.leadership import TermOver
from orchestrator.store.insights import list_workers, overview, show_task
from orchestrator.store.tasks import enqueue
from orchestrator.transport import leader
from orchestrator.transport.codec import (
    Applied,
    Attempt,
    Ended,
    Order,
    decode,
    encode,
)
from orchestrator.transport.keys import GROUP
from orchestrator.transport.leader import Deposed
from tests.integration.stage import ERROR, KEYS, ONE, TTL, System, raw
from tests.waiting import eventually

# -- the straight line


def test_from_enqueue_to_result(system: System) -> None:
    worker = system.worker()
    handle = system.job.options(timeout=9).enqueue(7)
    assert handle.status() == "pending"
    system.look()
    assert handle.status() == "dispatched"
    (task,) = worker.take()
    assert (task.id, task.attempt, task.name, task.queue, task.alone) == (raw(handle), 1, "job", "default", False)
    assert task.options is not None
    worker.start(task)
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["worker"]) == ("running", "w1")
    assert system.messages() == [(task.id, 1)]  # kept until the report is accepted
    worker.succeed(task)
    system.tick()
    assert handle.result(0) == 1
    row = system.row(handle)
    assert (row["attempt"], row["failures"], row["losses"], row["worker"]) == (1, 0, 0, "w1")
    assert system.messages() == []
    assert system.count("tasks") == 0


def test_what_is_applied_is_recorded_published_and_trimmed(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    pubsub = system.redis.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(KEYS.applied, KEYS.done(raw(handle)))
    eventually(lambda: len(pubsub.channels) == 2 and pubsub.get_message() is None, "both subscriptions")
    receipt = worker.report(*(Succeeded(task.id, task.attempt, 0.1, ONE) for task in worker.take()))
    system.tick()
    assert receipt.entry is not None
    (cursor,) = system.sql("SELECT generation, position FROM orchestrator.cursors")
    assert (cursor["generation"], cursor["position"]) == (system.generation, receipt.entry)
    assert system.redis.xlen(KEYS.events(system.generation)) == 0
    heard: dict[str, bytes] = {}

    def hear() -> bool:
        message = pubsub.get_message()
        if message is not None:
            heard[message["channel"].decode()] = message["data"]
        return len(heard) == 2

    eventually(hear, "the announcements")
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
    """No second has passed, so it is the nudge alone that has a new leader look for new runs."""
    system.look()
    system.lead()
    system.look()
    run = system.app.start_many(system.job, [1])
    system.tick()
    assert run.progress().status == "running"


def test_a_write_whose_nudge_was_lost_is_found(system: System) -> None:
    system.worker()
    new = NewTask(time_ordered_id(1, os.urandom(10)), "job", "default", b"\x92\x90\x80")
    with system.engine.begin() as connection:
        enqueue.insert_task(connection, new)
    system.look()
    assert system.row(new.id)["status"] == "dispatched"


def test_without_a_worker_nothing_is_dispatched(system: System) -> None:
    handle = system.job.enqueue()
    elsewhere = system.worker(queue="elsewhere")
    system.look(3)
    assert handle.status() == "pending"
    assert elsewhere.take() == []


def test_no_more_is_dispatched_than_there_are_slots(system: System) -> None:
    worker = system.worker(slots=3)
    handles = [system.job.enqueue(number) for number in range(10)]
    system.look(2)
    assert system.states(*handles) == ["dispatched"] * 3 + ["pending"] * 7
    worker.succeed(*worker.take()[:2])
    system.tick()
    assert system.states(*handles) == ["success"] * 2 + ["dispatched"] * 3 + ["pending"] * 5


def test_a_delayed_task_waits_in_postgres(system: System) -> None:
    worker = system.worker()
    handle = system.job.options(delay=60).enqueue()
    system.look(3)
    assert (handle.status(), worker.take()) == ("pending", [])
    system.lead(offset=61)
    system.look()
    assert handle.status() == "dispatched"


def test_the_fleet_is_mirrored_for_people(system: System) -> None:
    worker = system.worker(slots=4)
    second = system.worker("w2", knows=["job", "other"])
    system.look()
    rows = {row["id"]: row for row in system.sql("SELECT * FROM orchestrator.workers")}
    assert {name: (row["state"], row["slots"], row["names"]) for name, row in rows.items()} == {
        "w1": ("live", 4, ["job"]),
        "w2": ("live", 10, ["job", "other"]),
    }
    worker.die()
    second.leave()
    system.look()
    states = {row["id"]: row["state"] for row in system.sql("SELECT id, state FROM orchestrator.workers")}
    assert states == {"w1": "dead", "w2": "stopped"}


# -- failures


def test_a_failure_is_tried_again_after_its_backoff(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch(retries=Retry(max=3, base=60, jitter=0))
    worker.fail(*worker.take())
    system.look(3)
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["failures"]) == ("pending", 1, 1)
    (attempt,) = system.sql("SELECT *, CAST(:id AS uuid) FROM orchestrator.attempts", id=handle.id)
    assert (attempt["attempt"], attempt["outcome"], attempt["error"]["kind"]) == (1, "failed", "ValueError")
    assert row["wake_at"] - attempt["ended_at"] == timedelta(seconds=60)
    system.lead(offset=59)
    system.look()
    assert handle.status() == "pending"
    system.lead(offset=61)
    system.look()
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["failures"]) == ("dispatched", 2, 1)
    worker.fail(*worker.take())
    system.tick()
    (_, second) = system.sql("SELECT ended_at FROM orchestrator.attempts ORDER BY attempt")
    assert system.row(handle)["wake_at"] - second["ended_at"] == timedelta(seconds=120)


def test_a_task_fails_when_its_tries_are_used_up(system: System) -> None:
    worker = system.worker()
    handle = system.job.options(retries=Retry(max=2, base=0.001, jitter=0)).enqueue()
    system.look()
    for attempt in (1, 2, 3):
        taken: list[Dispatch] = []
        system.look_until(lambda taken=taken: taken.extend(worker.take()) or taken)  # type: ignore[misc]
        assert [task.attempt for task in taken] == [attempt]
        worker.fail(*taken)
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["reason"], row["attempt"], row["failures"]) == ("failed", "ValueError", 3, 3)
    assert system.count("attempts") == 2
    with pytest.raises(TaskFailed, match="ValueError: no") as caught:
        handle.result(0)
    assert (caught.value.kind, caught.value.traceback) == ("ValueError", "a traceback")
    system.look(3)
    assert worker.take() == []


def test_what_no_retry_can_mend_fails_at_once(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch(retries=5)
    worker.fail(*worker.take(), retryable=False)
    system.tick()
    assert handle.status() == "failed"


def test_what_is_given_back_costs_no_try(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    for attempt in range(1, 6):
        (task,) = worker.take()
        assert task.attempt == attempt
        worker.report(Returned(task.id, task.attempt, "drained"))
        system.tick()
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["failures"], row["losses"]) == ("dispatched", 6, 0, 0)
    assert system.count("attempts") == 0


def test_a_failed_task_can_be_retried_by_hand(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.fail(*worker.take())
    system.tick()
    handle.retry()
    system.look()
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["failures"]) == ("dispatched", 2, 0)
    worker.succeed(*worker.take())
    system.tick()
    assert handle.status() == "success"


# -- unknown tasks


def test_what_no_worker_knows_is_held_and_released_when_one_learns_it(system: System) -> None:
    worker = system.worker()
    other = system.app.task(name="other")(lambda: None)
    handle = other.enqueue()
    system.look(2)
    row = system.row(handle)
    assert (row["status"], row["hold"], row["failures"]) == ("pending", "unknown", 0)
    assert worker.take() == []
    newer = system.worker("w2", knows=["job", "other"])
    system.look(2)
    row = system.row(handle)
    assert (row["status"], row["hold"]) == ("dispatched", None)
    newer.succeed(*newer.take())
    system.tick()
    assert handle.status() == "success"


def test_a_worker_hands_back_free_what_it_does_not_know_after_all(system: System) -> None:
    """It may have said something else, or be of another release, which does not say what it does not know."""
    old = system.worker("old", knows=["job", "other"])
    handle = system.app.task(name="other")(lambda: None).enqueue()
    system.look()
    (task,) = old.take()
    old.report(Returned(task.id, task.attempt, "unknown task", 0.5))
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["failures"], row["hold"]) == ("pending", 0, None)
    system.lead(offset=1)
    system.look()
    old.succeed(*old.take())
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["attempt"]) == ("success", 2)


def test_what_no_worker_has_known_for_long_fails_with_the_names_that_are_known(system: System) -> None:
    system.worker(knows=["job", "jobs.more"])
    system.worker("w2", knows=["job", "elsewhere"], queue="elsewhere")
    handle = system.app.task(name="other")(lambda: None).enqueue()
    system.look(2)
    system.lead(offset=system.settings.unknown_task_timeout - 10)
    system.look(2)
    assert handle.status() == "pending"
    system.lead(offset=system.settings.unknown_task_timeout + 10)
    system.look()
    assert system.row(handle)["reason"] == "unknown task"
    with pytest.raises(TaskFailed, match=r"queue 'default' knows the task 'other'. They know: job, jobs.more\."):
        handle.result(0)


def test_a_worker_that_learns_a_name_just_in_time_saves_the_task(system: System) -> None:
    worker = system.worker()
    handle = system.app.task(name="other")(lambda: None).enqueue()
    system.look(2)
    worker.learn("other")
    system.lead(offset=system.settings.unknown_task_timeout + 10)
    system.look()
    assert handle.status() == "dispatched"


def test_what_is_held_can_be_cancelled(system: System) -> None:
    system.worker()
    handle = system.app.task(name="other")(lambda: None).enqueue()
    system.look(2)
    handle.cancel()
    system.look()
    assert handle.status() == "cancelled"


# -- cancel


def test_cancel_while_pending(system: System) -> None:
    handle = system.job.enqueue()
    handle.cancel()
    system.look()
    assert handle.status() == "cancelled"
    worker = system.worker()
    system.look(2)
    assert worker.take() == []
    with pytest.raises(TaskCancelled):
        handle.result(0)


def test_cancelling_twice_is_no_error(system: System) -> None:
    handle, run = system.job.enqueue(), system.app.start_many(system.job, [(1,), (2,)])
    for cancelled in (handle, run):
        cancelled.cancel()
        cancelled.cancel()
    system.look(2)
    assert (handle.status(), run.progress().status) == ("cancelled", "cancelled")
    handle.cancel()
    run.cancel()
    assert system.count("inbox") == 0


def test_what_had_started_or_ended_when_the_leader_comes_to_the_wish_is_told_apart(system: System) -> None:
    """The wish is stored when `cancel` returns; what happens before the leader applies it counts."""
    worker = system.worker()
    ended, started = system.dispatch(2)
    first, second = worker.take()
    ended.cancel()
    started.cancel()
    worker.succeed(first)
    worker.start(second)
    system.look()
    assert system.states(ended, started) == ["success", "cancelled"]
    worker.succeed(second)
    system.look()
    assert system.states(ended, started) == ["success", "cancelled"]


def test_cancel_while_dispatched_takes_the_message_back(system: System) -> None:
    worker = system.worker()
    handle, other = system.dispatch(2)
    handle.cancel()
    system.look()
    assert system.states(handle, other) == ["cancelled", "dispatched"]
    assert [task.id for task in worker.take()] == [raw(other)]


def test_cancel_of_one_in_a_bundle_leaves_its_neighbours(system: System) -> None:
    worker = system.worker(slots=1)
    system.scheduler._dispatcher._rates["default"] = 1_000.0  # a fast queue is bundled
    handles = system.dispatch(6)
    assert system.redis.xlen(KEYS.queue(system.generation, "default")) == 1
    handles[2].cancel()
    system.look()
    worker.succeed(*worker.take())
    system.tick()
    assert system.states(*handles) == ["success"] * 2 + ["cancelled"] + ["success"] * 3


def test_cancel_while_running_stops_the_worker_and_its_report_counts_no_more(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.start(task)
    system.look()
    handle.cancel()
    system.look()
    assert handle.status() == "cancelled"
    stop = Order(stop=[Attempt(task.id, 1)])
    assert worker.orders() == [stop]
    system.look(2)
    assert worker.orders() == [stop, stop]  # repeated while the heartbeat lists it
    worker.succeed(task)
    system.look(2)
    assert handle.status() == "cancelled"
    assert worker.orders() in ([], [stop])
    system.look()
    assert worker.orders() == []


def test_requests_are_applied_in_the_order_in_which_they_came(system: System) -> None:
    """Retry, then cancel: what was opened again is cancelled."""
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.fail(*worker.take())
    system.tick()
    for kind in ("retry task", "cancel task"):
        system.sql("INSERT INTO orchestrator.inbox (kind, target) VALUES (:kind, :target)", kind=kind, target=handle.id)
    system.look()
    assert handle.status() == "cancelled"
    assert system.count("inbox") == 0


def test_requests_for_what_does_not_exist_or_has_ended_do_nothing(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.succeed(*worker.take())
    system.tick()
    before = system.row(handle)
    for kind in ("cancel task", "retry task", "cancel run", "retry run", "make coffee"):
        for target in (handle.id, str(UUID(int=7))):
            system.sql(
                "INSERT INTO orchestrator.inbox (kind, target) VALUES (:kind, :target)", kind=kind, target=target
            )
    system.look()
    assert system.row(handle) == before
    assert system.count("inbox") == 0


# -- runs


def test_a_run_of_a_thousand_ends_exactly_with_its_last_task(system: System) -> None:
    worker = system.worker(slots=1_000)
    run = system.app.start_many(system.job, range(1_000), name="thousand")
    assert run.progress().status == "pending"
    system.look()
    assert run.progress().status == "running"
    tasks = worker.take()
    assert len({task.position for task in tasks}) == 1_000
    worker.start(*tasks[:10])
    worker.succeed(*tasks[:400])
    worker.succeed(*tasks[200:999])  # some of them again
    system.tick(3)
    progress = run.progress()
    assert (progress.status, progress.counters.open, progress.counters.success) == ("running", 1, 999)
    worker.succeed(tasks[999])
    system.tick()
    progress = run.progress()
    assert (progress.status, progress.counters.open, progress.counters.success) == ("success", 0, 1_000)
    assert run.wait_ended(0) == "success"
    assert run.results(0) == [1] * 1_000


def test_a_run_with_many_failures_is_retried_in_slices_and_each_task_once(engine: Engine, system: System) -> None:
    """One statement for all of them would take longer than a leader's statement may."""
    worker = system.worker(slots=1_000)
    run = system.app.start_many(system.job, range(350))
    system.look()
    worker.fail(*worker.take())
    system.tick()
    assert run.progress().status == "failed"
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 10}))
    small.clock, small.workers = system.clock, system.workers
    small.lead()
    small.look()
    run.retry()
    small.look()
    assert (run.progress().status, run.progress().counters.failed) == ("running", 250)
    worker.fail(*worker.take())  # again: not to be opened a second time by the same request
    small.look_until(lambda: small.count("inbox") == 0)
    assert small.count("attempts") == 350
    system.lead()
    system.look()
    assert run.progress().counters.open == 350 - run.progress().counters.failed > 0
    worker.succeed(*worker.take())
    system.look(2)
    again = run.progress().counters
    assert (again.open, again.failed + again.success) == (0, 350)
    assert system.sql("SELECT max(attempt) AS most FROM orchestrator.ended_tasks")[0]["most"] == 2
    small.close()


def test_a_retry_that_opens_nothing_does_not_stay_in_the_inbox(engine: Engine, system: System) -> None:
    """Of a run that was cancelled after hundreds of its tasks had failed."""
    worker = system.worker(slots=1_000)
    run = system.app.start_many(system.job, range(250))
    system.look()
    worker.fail(*worker.take()[:200])
    system.tick()
    run.cancel()
    system.look_until(lambda: run.progress().status == "cancelled")
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 10}))
    small.clock = system.clock
    small.lead()
    small.sql("INSERT INTO orchestrator.inbox (kind, target) VALUES ('retry run', :target)", target=run.id)
    small.look(2)
    assert small.count("inbox") == 0
    assert (run.progress().status, run.progress().counters.failed) == ("cancelled", 200)
    small.close()


def test_an_empty_run_succeeds(system: System) -> None:
    run = system.app.start_many(system.job, [])
    system.look()
    assert run.progress().status == "success"


def test_a_run_whose_tasks_end_before_it_has_begun(system: System) -> None:
    """Its nudge may be lost, and its tasks claimed by a tick that did not look for new runs."""
    worker = system.worker()
    system.look()
    run = system.app.start_many(system.job, [1, 2])
    system.redis.delete(KEYS.nudges)
    system.tick()
    tasks = worker.take()
    assert (len(tasks), run.progress().status) == (2, "pending")
    worker.succeed(*tasks)
    system.tick()
    system.look()
    assert (run.progress().status, run.progress().counters.success) == ("success", 2)


def test_cancel_a_run_in_every_stage_of_its_tasks(system: System) -> None:
    worker = system.worker(slots=4)
    run = system.app.start_many(system.job, range(3_000))
    system.look()
    tasks = sorted(worker.take(), key=lambda task: task.position or 0)
    worker.succeed(tasks[0])
    worker.start(tasks[1])
    system.tick()
    worker.held = [(tasks[1].id, 1)]
    run.cancel()
    system.look_until(lambda: run.progress().status == "cancelled")
    counters = run.progress().counters
    assert (counters.total, counters.open, counters.success, counters.cancelled) == (3_000, 0, 1, 2_999)
    assert system.count("tasks") == 0
    assert Order(stop=[Attempt(tasks[1].id, 1)]) in worker.orders()
    assert worker.take() == []


def test_cancel_a_run_that_has_not_begun(system: System) -> None:
    run = system.app.start_many(system.job, range(10))
    run.cancel()
    system.look_until(lambda: run.progress().status == "cancelled")
    assert run.progress().counters.cancelled == 10


def test_retry_a_run(system: System) -> None:
    worker = system.worker()
    run = system.app.start_many(system.job, range(10))
    system.look()
    tasks = worker.take()
    worker.succeed(*tasks[:6])
    worker.fail(*tasks[6:])
    system.tick()
    counters = run.progress().counters
    assert (run.progress().status, counters.success, counters.failed, counters.open) == ("failed", 6, 4, 0)
    run.retry()
    system.look()
    counters = run.progress().counters
    assert (run.progress().status, counters.success, counters.failed, counters.open) == ("running", 6, 0, 4)
    again = worker.take()
    assert {task.id for task in again} == {task.id for task in tasks[6:]}
    assert {task.attempt for task in again} == {2}
    worker.succeed(*again)
    system.tick()
    counters = run.progress().counters
    assert (run.progress().status, counters.success, counters.open) == ("success", 10, 0)
    assert system.count("attempts") == 4


# -- what cannot be applied


def poison(worker: str = "w1", *reports: Report) -> bytes:
    return encode(Flush(worker, list(reports)))


def enqueued(**changes: Any) -> Enqueued:
    fields = {"id": time_ordered_id(1, os.urandom(10)), "name": "job", "queue": "default", "payload": b"\x92\x90\x80"}
    return Enqueued([NewTask(**{**fields, **changes})])


ID = time_ordered_id(5, bytes(10))
POISON: dict[str, bytes] = {
    "nothing": b"",
    "noise": b"\xff\xfe\xfd",
    "another message": encode(["w1", "reports"]),
    "an unknown report": encode(["w1", [["exploded", ID, 1]]]),
    "an id of three bytes": poison("w1", Succeeded(b"abc", 1, 0.1, ONE)),
    "an empty id": poison("w1", enqueued(id=b"")),
    "an id of seventeen bytes": poison("w1", Lost(ID + b"x", 1, alone=False)),
    "a huge attempt": poison("w1", Succeeded(ID, 2**40, 0.1, ONE)),
    "an impossible duration": poison("w1", Succeeded(ID, 1, float("inf"), ONE)),
    "an impossible age": poison("w1", Started(ID, 1, float("inf"))),
    "an impossible delay": poison("w1", Returned(ID, 1, "", float("inf"))),
    "a huge priority": poison("w1", enqueued(priority=10**6)),
    "a NUL in a name": poison("w1", enqueued(name="a\0b")),
    "options that are no JSON": poison("w1", enqueued(options="{")),
    "options with a NUL": poison("w1", enqueued(options='{"a": "\\u0000"}')),
    "a queue that fits no index": poison("w1", enqueued(queue=os.urandom(5_000).hex())),
    "a child of a far future": poison("w1", enqueued(delay=1e300)),
    "a worker with a NUL": poison("\0", Started(ID, 1, 0.1)),
    "a worker that is no word": poison('"{', Succeeded(ID, 1, 0.1, ONE)),
}
HARMLESS = ("an impossible age", "an impossible duration", "an impossible delay", "a worker that is no word")
"""Postgres may never look at these, because the task does not exist."""


@pytest.mark.parametrize("name", POISON)
def test_what_cannot_be_applied_is_set_aside_alone(system: System, name: str) -> None:
    """Good reports of the same batch, before and after it, are applied; and the loop goes on."""
    worker = system.worker()
    handles = system.dispatch(5)
    tasks = worker.take()
    worker.succeed(*tasks[:2])
    worker.flush(POISON[name])
    worker.succeed(*tasks[2:4])
    system.tick(2)
    assert system.states(*handles) == ["success"] * 4 + ["dispatched"]
    quarantined = system.quarantine()
    if name not in HARMLESS or quarantined:
        (entry,) = quarantined
        assert entry[b"error"]
        assert b"-" in entry[b"entry"]
    worker.succeed(tasks[4])
    system.tick()
    assert system.states(*handles) == ["success"] * 5
    assert len(system.quarantine()) == len(quarantined)
    assert system.count("tasks") == 0


def test_one_bad_report_in_a_flush_does_not_take_the_others_with_it(system: System) -> None:
    worker = system.worker(slots=50)
    handles = system.dispatch(50)
    tasks = worker.take()
    reports: list[Report] = [Succeeded(task.id, 1, 0.1, ONE) for task in tasks]
    child = enqueued()
    reports[10:10] = [Succeeded(b"abc", 1, 0.1, ONE), child]
    reports[40:40] = [enqueued(priority=10**6), Failed(b"abc", 1, 0.1, ERROR)]
    worker.report(*(report for report in reports if not isinstance(report, Enqueued) and len(report.id) == 16))
    system.redis.xtrim(KEYS.events(system.generation), maxlen=0)
    worker.flush(encode(Flush("w1", reports)))
    system.tick(2)
    assert system.states(*handles) == ["success"] * 50
    assert system.row(child.tasks[0].id)["status"] in ("pending", "dispatched")
    assert len(system.quarantine()) == 3
    system.tick(3)
    assert len(system.quarantine()) == 3


def test_counters_are_exact_although_a_batch_was_halved(system: System) -> None:
    """What an undone half had counted must not count."""
    worker = system.worker(slots=20)
    run = system.app.start_many(system.job, range(20))
    system.look()
    tasks = worker.take()
    for start in range(0, 20, 2):
        worker.succeed(*tasks[start : start + 2])
        worker.flush(poison("w1", Failed(b"abc", 1, 0.1, ERROR)))  # noticed only when successes have been counted
    system.tick(2)
    assert len(system.quarantine()) == 10
    assert (run.progress().status, run.progress().counters.success) == ("success", 20)
    assert system.scheduler._dispatcher.in_flight == 0


def test_options_of_another_release_do_not_stop_the_loop(system: System) -> None:
    """They are valid JSON, and only the decision about a failure reads them."""
    worker = system.worker()
    strange = enqueued(options='{"retry": {"max": "many"}, "colour": "blue"}')
    system.look()
    worker.report(strange)
    system.tick(2)
    (handle,) = system.dispatch()
    tasks = worker.take()
    worker.fail(*tasks)
    system.tick(3)
    assert handle.status() == "failed"
    (other,) = system.dispatch()
    worker.succeed(*worker.take())
    system.tick()
    assert other.status() == "success"


def test_what_cannot_be_applied_does_not_stop_a_leader_that_reads_an_old_stream_to_its_end(system: System) -> None:
    """Redis has restarted and kept its data: what stands in the stream is applied before a new generation begins."""
    worker = system.worker()
    handles = system.dispatch(2)
    tasks = worker.take()
    old = system.generation
    worker.succeed(tasks[0])
    worker.flush(POISON["an id of three bytes"])
    worker.flush(POISON["noise"])
    worker.succeed(tasks[1])
    system.sql("UPDATE orchestrator.cursors SET server = 'an earlier life'")
    system.lead()
    system.look(2)
    assert system.generation != old
    assert system.states(*handles) == ["success"] * 2
    assert len(system.quarantine()) == 2
    assert system.redis.exists(KEYS.events(old)) == 0


def test_a_message_that_no_worker_can_read_is_set_aside_and_its_task_dispatched_again(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    stream = KEYS.queue(system.generation, "default")
    system.redis.delete(stream)
    system.redis.xadd(stream, {"d": b"\xff\xff"})
    assert worker.take() == []
    assert len(system.quarantine()) == 1
    assert system.redis.xlen(stream) == 0
    system.make_old()
    system.look_until(lambda: system.row(handle)["attempt"] == 2)
    assert [task.attempt for task in worker.take()] == [2]


# -- leadership


def test_a_standby_does_not_lead_while_the_lease_lasts(system: System) -> None:
    standby = system.stand_by()
    assert not standby._leadership.acquire()
    system.look(5)
    assert not standby._leadership.acquire()
    standby._leadership.disconnect()


def test_a_dead_leaders_lease_ends_although_the_clock_of_postgres_was_set_back(system: System) -> None:
    standby = system.stand_by()
    system.sql("UPDATE orchestrator.leases SET expires_at = now() + interval '1 hour'")
    assert not standby._candidacy.stand()
    system.clock.now += 5 * system.settings.lease
    assert not standby._candidacy.stand()
    system.clock.now += 6 * system.settings.lease
    assert standby._candidacy.stand()
    standby._leadership.disconnect()


def test_a_leader_that_lives_keeps_its_lease_whatever_the_clock_says(system: System) -> None:
    standby = system.stand_by()
    for _ in range(12):
        system.sql("UPDATE orchestrator.leases SET expires_at = now() + interval '1 hour'")
        system.clock.now += system.settings.lease
        system.tick()
        assert not standby._candidacy.stand()
    standby._leadership.disconnect()


def test_a_deposed_leader_cannot_write(system: System) -> None:
    worker = system.worker()
    first = system.scheduler
    (handle,) = system.dispatch()
    tasks = worker.take()
    system.job.enqueue()
    second = system.lead()
    assert second._leadership.term == first._leadership.term + 1
    worker.succeed(*tasks)
    before = system.sql("SELECT * FROM orchestrator.tasks ORDER BY seq")
    cursor = system.sql("SELECT * FROM orchestrator.cursors")
    for _ in range(3):
        with pytest.raises(TermOver):
            first.tick()
    assert system.sql("SELECT * FROM orchestrator.tasks ORDER BY seq") == before
    assert system.sql("SELECT * FROM orchestrator.cursors") == cursor
    second.tick()
    assert handle.status() == "success"  # the report is still there for the one that leads


def test_a_deposed_leader_cannot_push(system: System) -> None:
    """It may have committed just before it was stopped, and wake up with messages in its hands."""
    system.worker()
    system.look()
    first, generation = system.scheduler, system.generation
    term = first._leadership.term
    system.lead()
    stream = KEYS.queue(generation, "default")
    for attempt in (
        lambda: first._streams.publish(generation, term, {"default": [b"stale"]}),
        lambda: first._streams.begin_generation(term, "stale", "server"),
        lambda: first._streams.claim_term(term, ""),
    ):
        with pytest.raises(Deposed):
            attempt()
    assert system.redis.exists(stream) == 0
    assert system.generation == generation
    system.scheduler._streams.publish(generation, term + 1, {"default": [b"fresh"]})
    assert system.redis.xlen(stream) == 1


def test_a_leader_that_redis_has_forgotten_says_so_and_leads_on(
    system: System, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "orchestrator.scheduler")
    worker = system.worker()
    system.look()
    system.scheduler._leadership.release()
    leader = system.stand_by()
    thread = threading.Thread(target=leader.run)
    thread.start()
    try:
        eventually(leader.leading.is_set, "it leads")
        eventually(lambda: "generation" in caplog.text and leader._patience > 0, "it has looked, and waits")
        system.redis.flushall()
        worker.beat()  # its clock stands, so that it does not look before it hands something out
        handle = system.job.enqueue()
        eventually(lambda: "Redis has lost its data, and with it who leads; leading anew" in caplog.text, "it says so")
        eventually(lambda: handle.status() == "dispatched" and leader.leading.is_set(), "it leads on")
    finally:
        leader.stop()
        thread.join()
    assert "another scheduler leads" not in caplog.text


@pytest.mark.parametrize("renews", [False, True])
def test_a_takeover_waits_for_the_tick_that_is_under_way(system: System, renews: bool) -> None:
    first, second = system.scheduler, system.stand_by()
    system.look()
    system.expire_lease()
    acquired: list[bool] = []
    thread = threading.Thread(target=lambda: acquired.append(second._leadership.acquire()))
    waits = (
        "SELECT count(*) AS count FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    with first._leadership.writing(system.clock() + 3_600 if renews else 0.0):
        thread.start()
        eventually(lambda: acquired or system.sql(waits)[0]["count"] == 1, "the takeover waits")
        assert not acquired
    thread.join(10)
    assert acquired == [not renews]
    if not renews:
        with pytest.raises(TermOver):
            first.tick()
    second._leadership.disconnect()


def test_a_new_leader_goes_on_where_the_last_one_stopped(system: System) -> None:
    worker = system.worker()
    handles = system.dispatch(4)
    tasks = worker.take()
    worker.succeed(tasks[0])
    system.tick()
    worker.succeed(tasks[1])
    generation = system.generation
    system.lead()
    worker.succeed(tasks[2])
    system.look(3)
    assert system.generation == generation
    assert system.states(*handles) == ["success"] * 3 + ["dispatched"]
    assert system.row(handles[3])["attempt"] == 1
    assert system.scheduler._dispatcher.in_flight == 1


def test_a_leader_that_died_between_commit_and_push_loses_nothing(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        """The end of the process."""

    def die(*_: object) -> None:
        raise Killed

    worker = system.worker()
    system.look()
    handle = system.job.enqueue()
    monkeypatch.setattr(system.scheduler._streams, "publish", die)
    with pytest.raises(Killed):
        system.look()
    row = system.row(handle)
    assert (row["status"], row["attempt"], worker.take()) == ("dispatched", 1, [])
    system.make_old()
    system.lead()
    system.look_until(lambda: system.row(handle)["attempt"] == 2)
    assert [task.attempt for task in worker.take()] == [2]


# -- what is lost on the way


def test_a_lost_message_costs_a_fence_number_and_no_try(system: System) -> None:
    worker = system.worker()
    system.settle()
    lost, fine = system.dispatch(2)
    entries: Any = system.redis.xrange(KEYS.queue(system.generation, "default"))
    system.redis.xdel(KEYS.queue(system.generation, "default"), entries[0][0])
    system.make_old()
    system.look_until(lambda: system.row(lost)["attempt"] == 2)
    row = system.row(lost)
    assert (row["status"], row["failures"], row["losses"], row["alone"]) == ("dispatched", 0, 0, False)
    assert system.row(fine)["attempt"] == 1
    tasks = worker.take()
    assert {(task.id, task.attempt) for task in tasks} == {(raw(fine), 1), (raw(lost), 2)}


def test_an_unread_backlog_is_not_lost(system: System) -> None:
    system.worker()
    system.settle()
    handles = system.dispatch(5)
    system.make_old()
    system.look(20)
    assert [system.row(handle)["attempt"] for handle in handles] == [1] * 5


def test_a_long_task_is_left_alone_while_its_worker_lives(system: System) -> None:
    worker = system.worker()
    system.settle()
    (handle,) = system.dispatch()
    worker.start(*worker.take())
    system.tick()
    system.make_old()
    system.look(50)
    row = system.row(handle)
    assert (row["status"], row["attempt"]) == ("running", 1)


def test_a_message_that_its_receiver_never_got_is_taken_back(system: System) -> None:
    """The answer to its read was lost: the message counts as received, and no heartbeat lists it."""
    worker = system.worker()
    system.settle()
    (handle,) = system.dispatch()
    worker.take()
    worker.held = []
    system.make_old()
    system.look_until(lambda: system.row(handle)["attempt"] == 2)
    row = system.row(handle)
    assert (row["failures"], row["losses"], row["alone"]) == (0, 0, False)
    assert system.messages() == [(raw(handle), 2)]


def test_the_first_loss_is_free_and_the_next_attempt_runs_alone(system: System) -> None:
    """Only the death of a process of its own is held against a task, up to the limit; not that of its worker."""
    system.worker("spare", slots=1)
    system.settle()
    (handle,) = system.dispatch()
    seen: list[tuple[int, bool, int]] = []
    for attempt in range(1, 10):
        victim = system.worker(f"victim{attempt}")
        (task,) = victim.take()
        row = system.row(handle)
        seen.append((task.attempt, task.alone, row["losses"]))
        victim.start(task)
        system.look()
        if attempt <= 3:
            victim.die()
            system.make_old()
        else:
            victim.report(Lost(task.id, task.attempt, alone=True))
        system.look_until(
            lambda attempt=attempt: system.row(handle)["attempt"] > attempt or handle.status() == "failed"
        )
        if handle.status() == "failed":
            break
        assert system.messages() == [(raw(handle), attempt + 1)]
        victim.alive = False
    assert seen == [(1, False, 0), (2, True, 0), (3, True, 0), (4, True, 0), (5, True, 1), (6, True, 2)]
    row = system.row(handle)
    assert (row["reason"], row["losses"], row["failures"]) == ("worker lost", 3, 0)
    assert [a["outcome"] for a in system.sql("SELECT outcome FROM orchestrator.attempts")] == ["lost"] * 5
    with pytest.raises(TaskFailed, match="WorkerLost"):
        handle.result(0)


def test_a_task_that_is_there_whenever_a_worker_dies_is_given_up_in_the_end(system: System) -> None:
    worker = system.worker("w")
    system.settle()
    (handle,) = system.dispatch()
    for attempt in range(1, 31):
        (task,) = worker.take()
        assert task.attempt == attempt
        worker.report(Lost(task.id, task.attempt, alone=False))
        system.tick()
    row = system.row(handle)
    assert (row["reason"], row["losses"], row["failures"], row["attempt"]) == ("worker lost", 0, 0, 30)
    with pytest.raises(TaskFailed, match="it fails only if it was there 30 times; this was time 30"):
        handle.result(0)


def test_each_lost_worker_is_one_warning_that_says_why(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.settle()
    silent, dead = system.worker("silent"), system.worker("dead")
    handles = system.dispatch(3)
    silent.take()
    silent.die()
    system.make_old()
    system.look_until(lambda: all(system.row(handle)["attempt"] == 2 for handle in handles))
    for task in (tasks := dead.take()):
        dead.report(Lost(task.id, task.attempt, alone=False, reason="exit code 3"))
    dead.report(Lost(tasks[0].id, 1, alone=False, reason="of old"))
    system.tick()
    warnings = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert len(warnings) == 2
    assert re.fullmatch(
        r"worker silent is lost \(not heard from for \d+\.\d s\); attempts that are run again: 3", warnings[0]
    )
    died = "its parent says that its process died: exit code 3"
    assert warnings[1] == f"worker dead is lost ({died}); attempts that are run again: 3"
    errors = [row["error"]["message"] for row in system.sql("SELECT error FROM orchestrator.attempts ORDER BY attempt")]
    assert all(error.startswith("The worker that had this attempt was not heard from for ") for error in errors[:3])
    assert {error.partition(". ")[0] for error in errors[3:]} == {"The process that ran this attempt died: exit code 3"}


def test_the_neighbours_of_a_task_that_kills_its_worker_are_not_blamed(system: System) -> None:
    system.settle()
    victim = system.worker("victim")
    handles = system.dispatch(5)
    victim.take()
    victim.die()
    system.make_old()
    survivor = system.worker("survivor")
    system.look_until(lambda: all(system.row(handle)["attempt"] == 2 for handle in handles))
    assert {(row["losses"], row["failures"], row["alone"]) for row in map(system.row, handles)} == {(0, 0, True)}
    tasks = survivor.take()
    assert all(task.alone for task in tasks)
    survivor.succeed(*tasks)
    system.tick()
    assert system.states(*handles) == ["success"] * 5


def test_a_loss_that_its_parent_reports_needs_no_waiting(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.report(Lost(task.id, 1, alone=False))
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["alone"], row["losses"]) == ("dispatched", 2, True, 0)


def test_a_success_outranks_the_loss_of_its_process(system: System) -> None:
    """The child died after it had finished; its parent cannot know."""
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.report(Lost(task.id, 1, alone=False))
    worker.report(Succeeded(task.id, 1, 0.1, ONE))
    system.tick()
    assert handle.status() == "success"


def test_messages_are_withdrawn_although_a_cancel_comes_in_the_same_tick(system: System) -> None:
    worker, spare = system.worker(), system.worker("spare")
    system.settle()
    lost, cancelled = system.dispatch(2)
    tasks = worker.take()
    worker.report(Returned(tasks[1].id, 1, "drained"))
    system.tick()
    assert {handle.status() for handle in (lost, cancelled)} == {"dispatched"}
    worker.die()
    system.make_old()
    lost_handle = lost if raw(lost) == tasks[0].id else cancelled
    other = cancelled if lost_handle is lost else lost
    for _ in range(10):
        if system.row(lost_handle)["attempt"] == 2:
            break
        if system.scheduler._fleet.fair_time - system.scheduler._fleet._seen["w1"] >= TTL - 1:
            other.cancel()
        system.look()
    assert other.status() == "cancelled"
    assert system.messages() == [(raw(lost_handle), 2)]
    assert [task.id for task in spare.take()] == [raw(lost_handle)]


def test_nothing_is_judged_before_all_events_have_been_read(engine: Engine, system: System) -> None:
    """A worker died after it had reported, and its report stands behind more events than one look reads."""
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 1}))
    small.clock = system.clock
    small.lead()
    worker = small.worker()
    small.settle()
    (handle,) = small.dispatch()
    (task,) = worker.take()
    worker.start(task)
    small.look()
    for _ in range(200):
        worker.report(Started(ID, 1, 0.1))
    worker.succeed(task)
    worker.die()
    small.make_old()
    small.worker("spare")
    small.look_until(lambda: handle.status() == "success" or small.row(handle)["attempt"] > 1)
    assert (handle.status(), small.row(handle)["attempt"]) == ("success", 1)
    small.close()


def test_redis_without_memory_is_not_a_dead_fleet(system: System) -> None:
    worker = system.worker()
    system.settle()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.start(task)
    system.tick()
    system.make_old()
    worker.die()
    system.redis.config_set("maxmemory", 1)
    try:
        system.look(20)
    finally:
        system.redis.config_set("maxmemory", 0)
    worker.alive = True
    system.look(5)
    assert system.row(handle)["attempt"] == 1
    worker.succeed(task)
    system.tick()
    assert handle.status() == "success"


def test_what_redis_remembers_of_workers_that_are_gone_is_removed(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any leader, one that has never seen them too; but not the consumer that still has a message to answer for."""
    monkeypatch.setattr(leader, "_CONSUMER_IDLE", -1)
    gone, holder = system.worker("gone"), system.worker("holder")
    system.look()
    gone.take()
    system.dispatch()
    assert holder.take()
    gone.die()
    holder.die()
    system.lead()
    system.worker("live").take()
    system.look()
    assert system.redis.smembers(KEYS.workers) == {b"live"}
    stream = KEYS.queue(system.generation, "default")

    def consumers() -> set[bytes]:
        return {consumer["name"] for consumer in system.redis.xinfo_consumers(stream, GROUP)}

    assert b"gone" not in consumers()
    assert b"holder" in consumers()
    system.make_old()
    system.look_until(lambda: b"holder" not in consumers())
    assert system.redis.xlen(stream) == 1, "what it had is dispatched again"


# -- generations


def test_after_flushall_only_what_nobody_has_is_run_again(system: System) -> None:
    worker = system.worker()
    system.settle()
    kept, running, lost = system.dispatch(3)
    taken = {task.id: task for task in worker.take()}
    worker.start(taken[raw(running)])
    system.tick()
    unread = system.dispatch()[0]
    worker.held = [(raw(kept), 1), (raw(running), 1)]  # the third was never delivered
    old = system.generation
    system.redis.flushall()
    system.make_old()
    system.look()
    assert system.generation != old
    system.look_until(lambda: system.row(lost)["attempt"] == 2 and system.row(unread)["attempt"] == 2)
    system.look(20)
    assert [(row["attempt"], row["failures"], row["losses"]) for row in map(system.row, (kept, running))] == [
        (1, 0, 0)
    ] * 2
    worker.succeed(taken[raw(kept)], taken[raw(running)])
    worker.succeed(*worker.take())
    system.tick()
    assert system.states(kept, running, lost, unread) == ["success"] * 4
    assert [system.row(handle)["attempt"] for handle in (kept, running, lost, unread)] == [1, 1, 2, 2]


def test_nothing_is_judged_before_everyone_had_time_to_be_heard(system: System) -> None:
    system.worker()
    system.settle()
    (handle,) = system.dispatch()
    system.redis.flushall()
    system.make_old()
    for _ in range(int(TTL) - 1):
        system.look()
        assert system.row(handle)["attempt"] == 1


def test_a_report_from_before_the_flushall_counts_once_when_it_is_sent_again(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.succeed(task)
    system.redis.flushall()  # the report is gone with everything else
    worker.held = [(task.id, 1)]
    system.make_old()
    system.look(10)
    worker.succeed(task)
    worker.succeed(task)
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["attempt"]) == ("success", 1)


def test_an_applied_mark_that_went_back_begins_a_generation(system: System) -> None:
    """A failover dropped the last second."""
    worker = system.worker()
    (handle,) = system.dispatch()
    before: Any = system.redis.get(KEYS.applied)
    worker.succeed(*worker.take())
    system.tick()
    old = system.generation
    system.redis.set(KEYS.applied, before or encode(Applied(old, "0-1")))
    system.look()
    assert system.generation != old
    assert handle.status() == "success"
    (again,) = system.dispatch()
    assert [task.id for task in worker.take()] == [raw(again)]


def test_the_streams_of_an_old_generation_are_removed(system: System) -> None:
    worker = system.worker()
    system.dispatch(2)
    worker.take()
    old = system.generation
    system.redis.delete(KEYS.generation)
    system.look()
    assert system.generation != old
    assert system.redis.exists(KEYS.events(old), KEYS.queue(old, "default")) == 0
    assert system.redis.exists(KEYS.events(system.generation)) == 1


# -- workers that ask


def test_a_doubtful_worker_is_told_which_of_its_attempts_still_count(system: System) -> None:
    """Those that have succeeded did count: the worker would say that their results are dropped."""
    worker = system.worker()
    system.dispatch(3)
    current, stale, done = worker.take()
    worker.report(Returned(stale.id, 1, "drained"))
    worker.succeed(done)
    system.tick()
    worker.held = [(current.id, 1), (stale.id, 1), (done.id, 1), (ID, 3)]
    worker.doubtful = True
    system.look()
    orders = worker.orders()
    assert Order(stop=[Attempt(stale.id, 1), Attempt(ID, 3)], go_on=True) in orders


def test_a_worker_that_stands_still_is_shown_with_what_it_holds(system: System) -> None:
    worker = system.worker()
    system.dispatch(5)
    tasks = worker.take()
    system.look()
    worker.still = 7.0
    system.look()
    with system.engine.begin() as connection:
        (shown,) = list_workers(connection)
        found = overview(connection)
    assert (shown.state, shown.holds) == ("still", tuple(UUID(bytes=task.id) for task in tasks[:3]))
    assert shown.still is not None
    assert 7.0 <= shown.still < 60.0
    assert (found.workers, found.slots, [one.id for one in found.still_workers]) == (0, 0, ["w1"])
    worker.still = 0.0
    system.look()
    with system.engine.begin() as connection:
        (shown,) = list_workers(connection)
    assert (shown.state, shown.still, shown.holds) == ("live", None, ())


def test_an_attempt_that_was_handed_back_is_kept_if_it_had_begun(system: System) -> None:
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


def test_a_doubtful_worker_is_given_nothing_new(system: System) -> None:
    worker = system.worker()
    worker.doubtful = True
    handle = system.job.enqueue()
    system.look(2)
    assert handle.status() == "pending"


def test_a_burst_worker_is_told_to_drain_when_there_is_no_more(system: System) -> None:
    worker = system.worker()
    worker.burst = True
    system.dispatch()
    system.look()
    assert worker.orders() == []
    worker.succeed(*worker.take())
    system.tick()
    system.look()
    assert Order(drain=True) in worker.orders()


def test_a_hungry_worker_is_told_whether_work_waits(system: System) -> None:
    worker = system.worker(slots=2)
    worker.hungry = True
    first = system.job.enqueue(1)
    system.job.enqueue(2)
    system.look(2)
    (task, _) = worker.take()
    assert worker.orders() == [], "all of it could be handed out"
    for number in range(4):
        system.job.options(concurrency_key="a").enqueue(number)
    system.look()
    assert worker.orders() == [Order(work_waits=True)]
    first.cancel()
    system.look(2)
    assert Order(stop=[Attempt(task.id, 1)], work_waits=True) in worker.orders(), "one order does not hide another"
    system.sql("INSERT INTO orchestrator.queues (name, paused) VALUES ('default', true)")
    system.look(2)
    assert not any(order.work_waits for order in worker.orders()), "what is paused does not wait for a worker"


def test_a_worker_that_had_drained_has_stopped_and_is_not_dead(system: System) -> None:
    worker = system.worker()
    worker.draining = True
    system.look()
    worker.die()
    system.look(6)
    assert [row["state"] for row in system.sql("SELECT state FROM orchestrator.workers")] == ["stopped"]


# -- tasks that enqueue tasks


def child_of(task: Dispatch, number: int, **changes: Any) -> NewTask:
    identifier = derived_id(task.id, task.attempt, number)
    return NewTask(**{"id": identifier, "name": "job", "queue": "default", "payload": b"\x92\x90\x80", **changes})


def test_what_a_task_enqueues_is_applied_once(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    children = Enqueued([child_of(task, 1, priority=5), child_of(task, 2)])
    worker.report(children)
    worker.report(children)  # in one batch
    system.tick()
    worker.report(children)  # and in another
    system.tick()
    assert system.count("tasks") == 3
    assert system.row(children.tasks[0].id)["priority"] == 5
    worker.succeed(task, *worker.take())
    system.tick()
    assert (system.count("tasks"), system.count("ended_tasks")) == (0, 3)
    worker.report(children)  # and after they have ended
    system.look(2)
    assert (system.count("tasks"), system.count("ended_tasks")) == (0, 3)
    assert handle.status() == "success"
    assert system.quarantine() == []


def test_what_a_task_enqueued_stays_although_it_failed(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    child = child_of(task, 1)
    worker.report(Enqueued([child]), Failed(task.id, 1, 0.1, ERROR))
    system.tick()
    assert handle.status() == "failed"
    assert system.row(child.id)["status"] == "dispatched"


def test_on_success_comes_only_with_the_success_that_counts(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (first,) = worker.take()
    worker.report(Lost(first.id, 1, alone=False))
    system.tick()
    (second,) = worker.take()
    assert second.attempt == 2
    early, late = child_of(first, 1), child_of(second, 1)
    worker.report(Succeeded(first.id, 1, 0.1, ONE, [early]))  # too late: another attempt is current
    system.tick()
    assert handle.status() == "dispatched"
    assert system.count("tasks") == 1
    worker.report(Succeeded(second.id, 2, 0.1, ONE, [late]))
    worker.report(Succeeded(second.id, 2, 0.1, ONE, [late]))
    system.tick(2)
    assert handle.status() == "success"
    assert [row["id"].bytes for row in system.sql("SELECT id FROM orchestrator.tasks")] == [late.id]


def test_on_success_of_a_cancelled_task_never_comes(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    handle.cancel()
    system.look()
    worker.report(Succeeded(task.id, 1, 0.1, ONE, [child_of(task, 1)]))
    system.look(2)
    assert (handle.status(), system.count("tasks")) == ("cancelled", 0)


def test_a_success_that_came_with_the_cancel_counts_with_all_that_it_brings(system: System) -> None:
    """In one tick, reports are applied before requests."""
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    handle.cancel()
    worker.report(Succeeded(task.id, 1, 0.1, ONE, [child_of(task, 1)]))
    system.look()
    assert (handle.status(), system.count("tasks")) == ("success", 1)


def test_a_child_with_a_delay_waits(system: System) -> None:
    worker = system.worker()
    (_,) = system.dispatch()
    (task,) = worker.take()
    worker.report(Enqueued([child_of(task, 1, delay=60.0)]), Succeeded(task.id, 1, 0.1, ONE))
    system.look(2)
    assert worker.take() == []
    system.lead(offset=61)
    system.look()
    assert len(worker.take()) == 1


@pytest.mark.parametrize("what", ["a retry", "a child", "a child on success"])
def test_what_becomes_due_within_the_second_needs_no_look(system: System, what: str) -> None:
    """The leader wakes for a short delay in time, although no second has passed and nobody has nudged it."""
    worker = system.worker()
    system.dispatch(retries=Retry(max=1, base=0.02, jitter=0))
    (task,) = worker.take()
    child = child_of(task, 1, delay=0.02)
    report = {
        "a retry": Failed(task.id, 1, 0.1, ERROR),
        "a child": Enqueued([child]),
        "a child on success": Succeeded(task.id, 1, 0.1, ONE, [child]),
    }[what]
    system.tick(2)
    worker.report(report)

    def fires() -> list[Dispatch]:
        system.tick()
        return worker.take()

    (due,) = eventually(fires, "the timer fires")
    assert (due.id, due.attempt) == ((task.id, 2) if what == "a retry" else (child.id, 1))


# -- lanes


def test_a_run_begins_as_soon_as_another_makes_room_for_it(system: System) -> None:
    """Not at the next look around, which may be a second later."""
    definition = Definition(
        name="one-by-one", concurrency=Concurrency(limit=1), steps=(Step(name="only", task="job", input={"number": 1}),)
    )
    system.app.workflows.apply(definition)
    worker = system.worker()
    runs = [system.app.workflows["one-by-one"].start() for _ in range(2)]
    system.look()
    assert [run.progress().status for run in runs] == ["running", "pending"]
    worker.succeed(*worker.take())
    system.tick()
    assert [run.progress().status for run in runs] == ["success", "running"]
    assert len(worker.take()) == 1


# -- batches


def test_many_events_are_applied_in_bounded_batches_and_all_at_a_look(engine: Engine, system: System) -> None:
    worker = system.worker(slots=60)
    handles = system.dispatch(60)
    tasks = worker.take()
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 10}))
    small.clock = system.clock
    small.workers = system.workers
    small.lead()
    small.look()
    for task in tasks:
        worker.succeed(task)
    small.tick()
    assert small.states(*handles).count("success") == 10
    small.tick()
    assert small.states(*handles).count("success") == 20
    small.look()
    assert small.states(*handles).count("success") == 60
    small.close()


def test_the_group_of_workers_divides_the_work(system: System) -> None:
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
