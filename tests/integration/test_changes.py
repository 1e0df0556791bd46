"""The leader's change log for watchers: complete while somebody listens, and not written otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis

from orchestrator.domain.tasks.task import Failed, Started, Succeeded
from orchestrator.scheduler import link as change_log
from orchestrator.transport.changes import Entry, Follower, find_entries, history, read_entries
from orchestrator.transport.codec import Changes, encode
from orchestrator.transport.keys import SPOKEN_CAP, WATCHED_TTL
from tests.integration.stage import ERROR, KEYS, ONE, System, engine, system  # fixtures

__all__ = ["engine", "system"]


def logged_changes(redis: Redis) -> list[Changes]:
    entries: Any = redis.xrange(KEYS.changes)
    return [entry.changes for entry in read_entries(KEYS, entries)]


def first_entry_ids(redis: Redis) -> list[str]:
    entries: Any = redis.xrange(KEYS.changes)
    return [entry.id for entry in read_entries(KEYS, entries) if entry.changes.is_first]


def watch(system: System) -> Follower:
    """Start a follower, and tell the leader."""
    follower = Follower(system.redis, KEYS)
    follower.begin()
    system.pass_seconds()
    follower.wait()
    return follower


def test_without_listeners_no_changes_are_written(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "TaskChange", None)  # building a change would fail
    worker = system.worker()
    system.dispatch(3)
    worker.report(*(Succeeded(task.id, task.attempt, 0.1, ONE) for task in worker.take()))
    system.tick()
    assert not system.redis.exists(KEYS.changes)


def test_task_changes_are_logged_after_a_first_entry(system: System) -> None:
    worker = system.worker("w1")
    watch(system)
    first, *rest = logged_changes(system.redis)
    assert (first.is_first, first.generation, rest) == (True, system.generation, [])
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.report(Started(task.id, task.attempt, 0.0))
    system.tick()
    worker.report(Succeeded(task.id, task.attempt, 0.1, ONE))
    system.tick()
    moves = [move for entry in logged_changes(system.redis) for move in entry.tasks]
    assert [(move.status, move.name, move.queue, move.attempt, move.run) for move in moves] == [
        (status, "job", "default", 1, None) for status in ("dispatched", "running", "success")
    ]
    assert {move.id.hex() for move in moves} == {handle.id.replace("-", "")}


def test_changes_of_runs_workers_and_queues_are_logged(system: System) -> None:
    watch(system)
    worker = system.worker("w1")
    system.pass_seconds()
    run = system.app.start_many(system.job, range(2))
    system.pass_seconds()
    worker.report(*(Succeeded(task.id, task.attempt, 0.1, ONE) for task in worker.take()))
    system.tick()
    system.app.queue("default").pause()
    system.tick()
    worker.die()
    system.pass_seconds(2)
    entries = logged_changes(system.redis)
    runs = [change for entry in entries for change in entry.runs]
    assert {change.id.hex() for change in runs} == {run.id.replace("-", "")}
    assert [change.status for change in runs if change.status][-1] == "success"
    assert any(entry.queues for entry in entries)
    assert [(w.id, w.state) for entry in entries for w in entry.workers] == [("w1", "live"), ("w1", "gone")]


def test_a_retry_is_logged_as_a_change_to_pending(system: System) -> None:
    worker = system.worker()
    watch(system)
    system.job.options(retries=1).enqueue()
    system.pass_seconds()
    (task,) = worker.take()
    worker.report(Failed(task.id, task.attempt, 0.1, ERROR, retryable=True))
    system.tick()
    moves = [move.status for entry in logged_changes(system.redis) for move in entry.tasks]
    assert moves[:2] == ["dispatched", "pending"]


def test_a_new_leader_writes_a_first_entry(system: System) -> None:
    """The previous leader may have died between a commit and its publication."""
    worker = system.worker()
    watch(system)
    system.dispatch()
    (task,) = worker.take()
    worker.report(Succeeded(task.id, task.attempt, 0.1, ONE))
    system.scheduler.term.link.publish = lambda *_, **__: None  # type: ignore[method-assign]
    system.tick()
    assert all(move.status != "success" for entry in logged_changes(system.redis) for move in entry.tasks)
    system.lead()
    system.pass_seconds()
    assert logged_changes(system.redis)[-1].is_first


def test_after_a_failed_write_the_next_entry_is_a_first_entry(system: System) -> None:
    system.worker()
    watch(system)
    before = first_entry_ids(system.redis)
    system.redis.config_set("maxmemory", 1)
    try:
        system.job.enqueue()
        system.pass_seconds()
    finally:
        system.redis.config_set("maxmemory", 0)
    system.pass_seconds(2)
    assert [entry for entry in first_entry_ids(system.redis) if entry not in before]
    system.dispatch()
    assert [move.status for move in logged_changes(system.redis)[-1].tasks] == ["dispatched"]


@pytest.mark.parametrize("rubbish", ["string", "last entry"])
def test_a_corrupt_change_stream_is_recreated(system: System, rubbish: str) -> None:
    system.worker()
    watch(system)
    generation = system.generation
    system.redis.delete(KEYS.changes)
    if rubbish == "string":
        system.redis.set(KEYS.changes, b"banana")
    else:
        system.redis.xadd(KEYS.changes, {"d": b""}, id=f"{2**64 - 1}-{2**64 - 1}")
    system.dispatch()
    assert [move.status for entry in logged_changes(system.redis) for move in entry.tasks] == ["dispatched"]
    assert system.generation == generation


def test_logging_stops_without_listeners_and_resumes_with_a_first_entry(system: System) -> None:
    system.worker()
    watch(system)
    assert 0 < system.redis.ttl(KEYS.watched) <= WATCHED_TTL
    system.redis.delete(KEYS.watched)
    system.pass_seconds()
    before = len(logged_changes(system.redis))
    system.dispatch()
    assert len(logged_changes(system.redis)) == before
    watch(system)
    assert logged_changes(system.redis)[-1].is_first


def test_the_change_log_is_trimmed_to_a_byte_limit(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "_MAX_LOG_BYTES", 5_000)
    worker = system.worker(slots=100)
    watch(system)
    for _ in range(200):
        system.job.enqueue()
        system.pass_seconds()
        worker.report(*(Succeeded(task.id, task.attempt, 0.1, ONE) for task in worker.take()))
    system.tick()
    assert system.redis.xlen(KEYS.changes) < 300, "of some 400 entries"


# -- the listener's side


def test_a_follower_receives_changes_and_notices_gaps(system: System) -> None:
    system.worker()
    follower = watch(system)
    system.dispatch()
    heard = follower.wait()
    assert [move.status for entry in heard.entries for move in entry.changes.tasks] == ["dispatched"]
    assert (heard.has_gap, follower.generation) == (False, system.generation)
    system.redis.delete(KEYS.changes, KEYS.watched)
    follower._refresh_at = 0.0
    nudges = system.redis.xlen(KEYS.nudges)
    assert follower._has_lost()
    follower._show_interest()
    assert system.redis.xlen(KEYS.nudges) == nudges + 1, "the leader is to look at once"


def test_past_entries_of_the_change_log_can_be_read_again(system: System) -> None:
    system.worker()
    watch(system)
    system.dispatch()
    system.dispatch()
    entries: Any = system.redis.xrange(KEYS.changes)
    ids = [entry.decode() for entry, _ in entries]
    assert [entry.id for entry in history(system.redis, KEYS, ids[0], ids[2])] == ids[1:3]
    assert [entry.id for entry in history(system.redis, KEYS, ids[0], ids[1])] == ids[1:2]
    system.redis.xadd(KEYS.changes, {"d": b"rubbish"})
    last = system.redis.xrevrange(KEYS.changes, count=1)[0][0].decode()  # type: ignore[index,union-attr]
    assert list(history(system.redis, KEYS, ids[-1], last)) == [Entry(last, Changes("?", is_first=True))]
    assert find_entries(system.redis, KEYS, [ids[0], "1-1"]).keys() == {ids[0]}
    system.redis.xtrim(KEYS.changes, maxlen=1, approximate=False)
    assert not find_entries(system.redis, KEYS, [ids[0]])


def test_corrupt_entries_count_as_a_gap(system: System) -> None:
    follower = watch(system)
    system.redis.xadd(KEYS.changes, {"d": b"rubbish"})
    system.redis.xadd(KEYS.spoken, {"d": b"rubbish"})
    heard = follower.wait()
    assert (heard.entries, heard.logged_tasks, heard.has_gap) == ([], set(), True)


@pytest.mark.long
def test_a_full_stream_of_log_announcements_misses_no_task(system: System) -> None:
    follower = watch(system)
    pipeline = system.redis.pipeline()
    for number in range(SPOKEN_CAP):
        pipeline.xadd(KEYS.spoken, {"d": encode([number.to_bytes(16, "big")])})
    pipeline.execute()
    heard = [follower.wait() for _ in range(10)]
    spoken = {task for one in heard for task in one.logged_tasks}
    assert len(spoken) == SPOKEN_CAP or any(one.any_logged for one in heard)
