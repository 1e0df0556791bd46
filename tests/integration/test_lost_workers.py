"""Lost messages, and lost workers."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator import Settings, TaskFailed
from orchestrator.domain.tasks.task import Lost, Returned, Started, Succeeded
from orchestrator.transport.keys import GROUP
from orchestrator.transport.leader import fleet
from tests.integration.stage import ID, KEYS, ONE, TTL, System, raw


def test_a_lost_message_costs_a_fence_number_but_no_attempt(system: System) -> None:
    worker = system.worker()
    system.settle()
    lost, fine = system.dispatch(2)
    entries: Any = system.redis.xrange(KEYS.queue(system.generation, "default"))
    system.redis.xdel(KEYS.queue(system.generation, "default"), entries[0][0])
    system.make_old()
    system.tick_until(lambda: system.row(lost)["attempt"] == 2)
    row = system.row(lost)
    assert (row["status"], row["failures"], row["losses"], row["alone"]) == ("dispatched", 0, 0, False)
    assert system.row(fine)["attempt"] == 1
    tasks = worker.take()
    assert {(task.id, task.attempt) for task in tasks} == {(raw(fine), 1), (raw(lost), 2)}


def test_an_unread_backlog_does_not_count_as_lost(system: System) -> None:
    system.worker()
    system.settle()
    handles = system.dispatch(5)
    system.make_old()
    system.pass_seconds(20)
    assert [system.row(handle)["attempt"] for handle in handles] == [1] * 5


def test_a_long_task_stays_while_its_worker_lives(system: System) -> None:
    worker = system.worker()
    system.settle()
    (handle,) = system.dispatch()
    worker.start(*worker.take())
    system.tick()
    system.make_old()
    system.pass_seconds(50)
    row = system.row(handle)
    assert (row["status"], row["attempt"]) == ("running", 1)


def test_a_message_that_never_reached_its_worker_is_dispatched_again(system: System) -> None:
    """The reply to the worker's read was lost: the message counts as received, and no heartbeat lists it."""
    worker = system.worker()
    system.settle()
    (handle,) = system.dispatch()
    worker.take()
    worker.held = []
    system.make_old()
    system.tick_until(lambda: system.row(handle)["attempt"] == 2)
    row = system.row(handle)
    assert (row["failures"], row["losses"], row["alone"]) == (0, 0, False)
    assert system.messages() == [(raw(handle), 2)]


def test_only_the_death_of_its_own_process_charges_a_task(system: System) -> None:
    """The loss of its worker is free; the next attempt runs alone.

    Deaths of the task's own process count, up to the limit.
    """
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
        system.pass_seconds()
        if attempt <= 3:
            victim.die()
            system.make_old()
        else:
            victim.report(Lost(task.id, task.attempt, alone=True))
        system.tick_until(
            partial(lambda attempt: system.row(handle)["attempt"] > attempt or handle.status() == "failed", attempt)
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
    handle.retry()
    system.tick(2)
    row = system.row(handle)
    assert (row["losses"], row["alone"]) == (0, True)


def test_a_task_fails_after_thirty_deaths_of_shared_processes(system: System) -> None:
    worker = system.worker("w")
    system.settle()
    (handle,) = system.dispatch()
    for attempt in range(1, 31):
        (task,) = worker.take()
        assert task.attempt == attempt
        worker.report(Lost(task.id, task.attempt, alone=False))
        system.tick_until(lambda: (row := system.row(handle))["attempt"] > task.attempt or row["status"] == "failed")  # noqa: B023
    row = system.row(handle)
    assert (row["reason"], row["losses"], row["failures"], row["attempt"]) == ("worker lost", 0, 0, 30)
    with pytest.raises(TaskFailed, match="it fails after 30 such deaths; so far: 30"):
        handle.result(0)


def test_each_lost_worker_logs_one_warning_with_the_reason(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.settle()
    silent, dead = system.worker("silent"), system.worker("dead")
    handles = system.dispatch(3)
    silent.take()
    silent.die()
    system.make_old()
    system.tick_until(lambda: all(system.row(handle)["attempt"] == 2 for handle in handles))
    for task in (tasks := dead.take()):
        dead.report(Lost(task.id, task.attempt, alone=False, reason="exit code 3"))
    dead.report(Lost(tasks[0].id, 1, alone=False, reason="of old"))
    system.tick()
    warnings = [record.getMessage() for record in caplog.records if "worker.lost" in record.getMessage()]
    assert len(warnings) == 2
    assert re.fullmatch(
        r"worker.lost worker=silent reason='not heard from for \d+\.\d s' attempts=3: its attempts run again",
        warnings[0],
    )
    died = "its parent reports that its process died: exit code 3"
    assert warnings[1] == f"worker.lost worker=dead reason={died!r} attempts=3: its attempts run again"
    errors = [row["error"]["message"] for row in system.sql("SELECT error FROM orchestrator.attempts ORDER BY attempt")]
    assert all(error.startswith("The worker that had this attempt was not heard from for ") for error in errors[:3])
    assert {error.partition(". ")[0] for error in errors[3:]} == {"The process that ran this attempt died: exit code 3"}


def test_tasks_that_share_a_lost_worker_are_not_charged(system: System) -> None:
    system.settle()
    victim = system.worker("victim")
    handles = system.dispatch(5)
    victim.take()
    victim.die()
    system.make_old()
    survivor = system.worker("survivor")
    system.tick_until(lambda: all(system.row(handle)["attempt"] == 2 for handle in handles))
    assert {(row["losses"], row["failures"], row["alone"]) for row in map(system.row, handles)} == {(0, 0, True)}
    tasks = survivor.take()
    assert all(task.alone for task in tasks)
    survivor.succeed(*tasks)
    system.tick()
    assert system.states(*handles) == ["success"] * 5


def test_a_loss_reported_by_the_parent_process_is_retried_at_once(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.report(Lost(task.id, 1, alone=False))
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["alone"], row["losses"]) == ("dispatched", 2, True, 0)


def test_a_success_outranks_the_loss_of_its_process(system: System) -> None:
    """The child process died after it had finished, which its parent cannot know."""
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.report(Lost(task.id, 1, alone=False))
    worker.report(Succeeded(task.id, 1, 0.1, ONE))
    system.tick()
    assert handle.status() == "success"


def test_messages_of_a_lost_worker_are_withdrawn_despite_a_cancel(system: System) -> None:
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
        if system.scheduler.term.fleet.fair_time - system.scheduler.term.fleet._seen["w1"] >= TTL - 1:
            other.cancel()
        system.pass_seconds()
    assert other.status() == "cancelled"
    assert system.messages() == [(raw(lost_handle), 2)]
    assert [task.id for task in spare.take()] == [raw(lost_handle)]


def test_a_worker_counts_as_lost_only_after_all_events_are_read(engine: Engine, system: System) -> None:
    """A worker died after it had reported, and its report is behind more events than one tick reads."""
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 1}))
    small.clock = system.clock
    small.lead()
    worker = small.worker()
    small.settle()
    (handle,) = small.dispatch()
    (task,) = worker.take()
    worker.start(task)
    small.pass_seconds()
    for _ in range(200):
        worker.report(Started(ID, 1, 0.1))
    worker.succeed(task)
    worker.die()
    small.make_old()
    small.worker("spare")
    small.tick_until(lambda: handle.status() == "success" or small.row(handle)["attempt"] > 1)
    assert (handle.status(), small.row(handle)["attempt"]) == ("success", 1)
    small.close()


def test_a_full_redis_does_not_count_as_the_death_of_all_workers(system: System) -> None:
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
        system.pass_seconds(20)
    finally:
        system.redis.config_set("maxmemory", 0)
    worker.alive = True
    system.pass_seconds(5)
    assert system.row(handle)["attempt"] == 1
    worker.succeed(task)
    system.tick()
    assert handle.status() == "success"


def test_redis_keys_of_dead_workers_are_removed(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any leader removes them, also one that never saw these workers; but not a consumer with a pending message."""
    monkeypatch.setattr(fleet, "_CONSUMER_IDLE", -1)
    gone, holder = system.worker("gone"), system.worker("holder")
    system.pass_seconds()
    gone.take()
    system.dispatch()
    assert holder.take()
    gone.die()
    holder.die()
    system.lead()
    system.worker("live").take()
    system.pass_seconds()
    assert system.redis.smembers(KEYS.workers) == {b"live"}
    stream = KEYS.queue(system.generation, "default")

    def consumers() -> set[bytes]:
        return {consumer["name"] for consumer in system.redis.xinfo_consumers(stream, GROUP)}

    assert b"gone" not in consumers()
    assert b"holder" in consumers()
    system.make_old()
    system.tick_until(lambda: b"holder" not in consumers())
    assert system.redis.xlen(stream) == 1, "what it had is dispatched again"
