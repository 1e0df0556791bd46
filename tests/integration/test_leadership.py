"""Leaders that die, are deposed, and follow each other."""

from __future__ import annotations

import threading

import pytest

from orchestrator.scheduler.leadership import TermOver
from orchestrator.transport.leader.terms import Deposed
from tests.integration.stage import KEYS, System
from tests.waiting import eventually


def test_a_standby_does_not_lead_while_the_lease_lasts(system: System) -> None:
    standby = system.stand_by()
    assert not standby._leadership.acquire()
    system.pass_seconds(5)
    assert not standby._leadership.acquire()
    standby._leadership.disconnect()


def test_a_dead_leaders_lease_expires_despite_a_clock_set_back(system: System) -> None:
    standby = system.stand_by()
    system.sql("UPDATE orchestrator.leases SET expires_at = now() + interval '1 hour'")
    assert not standby._candidacy.try_to_lead()
    system.clock.now += 5 * system.settings.lease
    assert not standby._candidacy.try_to_lead()
    system.clock.now += 6 * system.settings.lease
    assert standby._candidacy.try_to_lead()
    standby._leadership.disconnect()


@pytest.mark.parametrize("longer", [1, 4])
def test_a_dead_leaders_lease_ends_after_its_own_length_although_the_clock_of_postgres_was_set_back(
    system: System, longer: int
) -> None:
    standby, lease = system.stand_by(), longer * system.settings.lease  # other settings may have had another length
    system.sql(
        "UPDATE orchestrator.leases SET useful_at = now() + interval '1 hour',"
        f" expires_at = now() + interval '1 hour {lease} seconds'"
    )
    assert not standby._candidacy.try_to_lead()
    system.clock.now += 0.9 * lease
    assert not standby._candidacy.try_to_lead()
    system.clock.now += 0.2 * lease
    assert standby._candidacy.try_to_lead()
    standby._leadership.disconnect()


def test_a_live_leader_keeps_its_lease_despite_clock_changes(system: System) -> None:
    standby = system.stand_by()
    for _ in range(12):
        system.sql("UPDATE orchestrator.leases SET expires_at = now() + interval '1 hour'")
        system.clock.now += system.settings.lease
        system.tick()
        assert not standby._candidacy.try_to_lead()
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
    assert handle.status() == "success"  # the current leader still finds the report


def test_a_deposed_leader_cannot_push(system: System) -> None:
    """It may have committed just before it was suspended, and resume with messages still to push."""
    system.worker()
    system.pass_seconds()
    first, generation = system.scheduler, system.generation
    term = first._leadership.term
    system.lead()
    stream = KEYS.queue(generation, "default")
    for attempt in (
        lambda: first._streams.publish(generation, term, {"default": [b"stale"]}),
        lambda: first._streams.terms.begin(term, "stale", "server"),
        lambda: first._streams.terms.claim(term, ""),
    ):
        with pytest.raises(Deposed):
            attempt()
    assert system.redis.exists(stream) == 0
    assert system.generation == generation
    system.scheduler._streams.publish(generation, term + 1, {"default": [b"fresh"]})
    assert system.redis.xlen(stream) == 1


def test_a_leader_forgotten_by_redis_logs_it_and_continues(system: System, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "orchestrator.scheduler")
    worker = system.worker()
    system.pass_seconds()
    system.scheduler._leadership.release()
    leader = system.stand_by()
    thread = threading.Thread(target=leader.run)
    thread.start()
    try:
        eventually(leader.leading.is_set, "it leads")
        eventually(lambda: "generation" in caplog.text and leader.term.due_in > 0, "it has looked, and waits")
        system.redis.flushall()
        worker.beat()  # its clock stands still, so that it checks only when it dispatches
        handle = system.job.enqueue()
        eventually(lambda: "redis.leader_forgotten" in caplog.text, "it says so")
        eventually(lambda: handle.status() == "dispatched" and leader.leading.is_set(), "it leads on")
    finally:
        leader.stop()
        thread.join()
    assert "another scheduler leads" not in caplog.text


@pytest.mark.parametrize("renews", [False, True])
def test_a_takeover_waits_for_the_tick_that_is_under_way(system: System, renews: bool) -> None:
    first, second = system.scheduler, system.stand_by()
    system.worker()  # gives the tick a reason to claim: an idle tick sends Postgres nothing
    system.pass_seconds()
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
    system.pass_seconds(3)
    assert system.generation == generation
    assert system.states(*handles) == ["success"] * 3 + ["dispatched"]
    assert system.row(handles[3])["attempt"] == 1
    assert system.scheduler.term.dispatcher.in_flight == 1


def test_a_leader_that_died_between_commit_and_push_loses_nothing(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        """The end of the process."""

    def die(*_: object) -> None:
        raise Killed

    worker = system.worker()
    system.pass_seconds()
    handle = system.job.enqueue()
    monkeypatch.setattr(system.scheduler._streams, "publish", die)
    with pytest.raises(Killed):
        system.pass_seconds()
    row = system.row(handle)
    assert (row["status"], row["attempt"], worker.take()) == ("dispatched", 1, [])
    system.make_old()
    system.lead()
    system.tick_until(lambda: system.row(handle)["attempt"] == 2)
    assert [task.attempt for task in worker.take()] == [2]
