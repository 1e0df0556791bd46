"""Postgres comes back without its last commits: a backup was restored, or an asynchronous standby took over.

Redis and the workers have seen what Postgres has not: terms, generations and attempts that are now issued again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from unittest.mock import Mock

import msgspec
import pytest

from orchestrator.domain.fleet.generation import rewind_of
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import Enqueued, KnownTask, NewTask, Recalled
from orchestrator.scheduler.fleet.generations import Generations
from orchestrator.scheduler.leadership import TermOver
from orchestrator.transport.codec import Attempt
from orchestrator.transport.leader.terms import Deposed
from tests.emptying import TABLES, empty
from tests.integration.stage import KEYS, System, raw

ID = b"\x07" * 16


@pytest.fixture
def backup(system: System) -> Callable[[], Callable[[], None]]:
    """Return a function that backs up the tables and returns a function that restores them under a new leader."""

    def remember() -> Callable[[], None]:
        for table in TABLES:
            system.sql(f"DROP TABLE IF EXISTS kept_{table}")
            system.sql(f"CREATE TABLE kept_{table} AS TABLE orchestrator.{table}")
        return restore

    def restore() -> None:
        system.scheduler._leadership.disconnect()
        for table in TABLES:
            system.sql(f"DELETE FROM orchestrator.{table}")
            system.sql(f"INSERT INTO orchestrator.{table} OVERRIDING SYSTEM VALUE SELECT * FROM kept_{table}")
        system.lead()

    return remember


def lose_redis(system: System) -> None:
    system.redis.delete(KEYS.generation)
    system.pass_seconds()


def test_a_generation_forgotten_by_postgres_is_not_reused(
    system: System, backup: Callable[[], Callable[[], None]]
) -> None:
    system.pass_seconds()
    restore = backup()
    system.lead()
    lose_redis(system)
    forgotten, term = system.generation, system.scheduler._leadership.term
    for _ in range(2):  # the same backup may be restored twice
        restore()
        assert system.scheduler._leadership.term == term, "which is issued again"
        system.pass_seconds()
        assert system.generation != forgotten
        assert system.redis.exists(KEYS.events(forgotten)) == 0, "and what it left is removed"
        forgotten = system.generation


def test_tasks_enqueued_while_postgres_was_away_are_sent_again(
    system: System, backup: Callable[[], Callable[[], None]]
) -> None:
    worker = system.worker()
    system.pass_seconds()
    restore = backup()
    system.lead()
    lose_redis(system)
    known = system.generation
    worker.report(Enqueued([NewTask(ID, "job", "default", b"\x92\x90\x80")]))
    restore()
    system.pass_seconds(2)
    assert system.generation != known, "by which the worker knows what to do"
    worker.report(Enqueued([NewTask(ID, "job", "default", b"\x92\x90\x80")]))
    system.tick()
    assert system.row(ID)["name"] == "job"


def test_events_forgotten_by_postgres_are_noticed_and_logged(
    system: System, backup: Callable[[], Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    worker = system.worker()
    system.settle()
    system.dispatch(1)
    restore = backup()
    worker.succeed(*worker.take())
    system.tick()
    known = system.generation
    with caplog.at_level(logging.WARNING, "orchestrator"):
        restore()
        system.pass_seconds()
    assert system.generation != known
    assert "postgres.commits_lost" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "orchestrator"):
        now = system.generation
        system.pass_seconds(5)
    assert (system.generation, warnings(caplog)) == (now, []), "once"


def test_a_loss_is_noticed_by_the_next_leader_after_a_failed_one(
    system: System,
    backup: Callable[[], Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first leader had applied new reports from workers, and so moved past the lost events."""
    worker = system.worker()
    system.settle()
    system.dispatch(1)
    restore = backup()
    worker.succeed(*worker.take())
    system.tick()
    known = system.generation
    worker.report(Enqueued([NewTask(ID, "job", "default", b"\x92\x90\x80")]))
    restore()
    with monkeypatch.context() as deposed:
        deposed.setattr(Generations, "_begin", Mock(side_effect=TermOver))
        with pytest.raises(TermOver):
            system.pass_seconds()
    assert system.row(ID)["name"] == "job", "it has come so far"
    system.lead()
    with caplog.at_level(logging.WARNING, "orchestrator"):
        system.pass_seconds()
    assert system.generation != known
    assert "postgres.commits_lost" in caplog.text


def test_later_generations_name_the_loss_for_absent_workers(
    system: System, backup: Callable[[], Callable[[], None]]
) -> None:
    worker = system.worker()
    system.settle()
    assert rewind_of(system.generation) == ""
    for number in range(2):
        (handle,) = system.dispatch(1)
        restore = backup()
        worker.succeed(*worker.take())
        system.tick()
        assert system.row(handle)["status"] == "success", number
        known = system.generation
        restore()
        system.pass_seconds(2)
        lost = rewind_of(system.generation)
        assert lost not in ("", rewind_of(known)), number
        lose_redis(system)
        assert rewind_of(system.generation) == lost, "who was away while it began hears of it later"


def test_tasks_known_only_to_workers_are_reported(system: System) -> None:
    worker = system.worker()
    system.settle()
    (there,) = system.dispatch(1)
    worker.succeed(*worker.take())
    open_ = system.job.options(delay=60).enqueue()
    gone = [number.to_bytes(16, "big") for number in range(1, 252)]
    known = [KnownTask(task, "job", "succeeded") for task in (raw(there), raw(open_), *gone[:250])]
    worker.report(Recalled([*known, KnownTask(gone[250], "mail", "running")]))
    system.tick(2)
    told = [(found[b"error"].decode(), msgspec.msgpack.decode(found[b"body"])) for found in system.quarantine()]
    assert [error for error, _ in told] == [
        "Postgres has lost tasks: 200 of job (succeeded)",
        "Postgres has lost tasks: 50 of job (succeeded)",
        "Postgres has lost tasks: 1 of mail (running)",
    ]
    assert [to_text(task) for task in gone] == [task for _, tasks in told for task in tasks]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def fail_over(system: System) -> None:
    """Make Postgres look like a standby that has taken over."""
    system.redis.set(KEYS.database, "another life")


def test_a_complete_standby_takes_over_without_a_loss_warning(system: System, caplog: pytest.LogCaptureFixture) -> None:
    worker = system.worker()
    system.settle()
    applied, claimed = system.dispatch(2)
    first, second = worker.take()
    worker.succeed(first)
    system.tick()
    known = system.generation
    with caplog.at_level(logging.WARNING, "orchestrator"):
        fail_over(system)
        system.lead()
        system.pass_seconds(2)
        third = system.dispatch()[0]
        (last,) = worker.take()
        fail_over(system)  # also after a commit that only dispatched a task
        system.lead()
        system.pass_seconds(2)
    assert (system.generation, warnings(caplog)) == (known, [])
    assert system.redis.get(KEYS.database) != b"another life"
    worker.succeed(second, last)
    system.tick()
    for handle in (applied, claimed, third):
        row = system.row(handle)
        assert (row["status"], row["attempt"]) == ("success", 1), "numbers go on where they were"


def test_a_lost_claim_is_noticed_without_applied_events(
    system: System, backup: Callable[[], Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    worker = system.worker()
    system.settle()
    worker.succeed(*worker.take())
    handle = system.job.enqueue()
    system.sql("UPDATE orchestrator.leases SET term = term + 10")  # so that the term does not reveal the loss
    restore = backup()
    system.sql("UPDATE orchestrator.leases SET term = term - 10")
    system.pass_seconds()
    (forgotten,) = worker.take()
    with caplog.at_level(logging.WARNING, "orchestrator"):
        restore()
        fail_over(system)
        system.pass_seconds(2)
    assert "postgres.commits_lost" in caplog.text
    assert [task.id for task in worker.take()] == [forgotten.id] == [raw(handle)]
    assert system.row(handle)["attempt"] > forgotten.attempt + 100


def test_a_term_issued_twice_reveals_a_lost_claim(
    system: System, backup: Callable[[], Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of the files has the identity of the lost database, and lacks no applied event."""
    worker = system.worker()
    system.settle()
    worker.succeed(*worker.take())
    system.pass_seconds()  # applies all reports
    handle = system.job.enqueue()
    restore = backup()
    first = system.lead()
    system.pass_seconds()
    (forgotten,) = worker.take()
    with caplog.at_level(logging.WARNING, "orchestrator"):
        restore()
        assert system.scheduler._leadership.term == first._leadership.term
        system.pass_seconds(2)
    assert "postgres.commits_lost" in caplog.text
    assert [task.id for task in worker.take()] == [forgotten.id] == [raw(handle)]
    assert system.row(handle)["attempt"] > forgotten.attempt + 100


def test_a_forgotten_attempt_does_not_end_its_replacement(
    system: System, backup: Callable[[], Callable[[], None]]
) -> None:
    dead, alive = system.worker("dead"), system.worker("alive")
    system.settle()
    dead.succeed(*dead.take())
    first = system.dispatch()[0]
    dead.succeed(*dead.take())
    system.tick()
    assert first.status() == "success"
    handle = system.job.enqueue()
    restore = backup()
    system.pass_seconds()
    (forgotten,) = dead.take()
    other = system.job.enqueue()
    system.pass_seconds()
    dead.succeed(*dead.take())
    system.tick()
    assert other.status() == "success"
    restore()
    system.pass_seconds(2)
    (again,) = alive.take()
    assert again.id == forgotten.id == raw(handle)
    assert again.attempt > forgotten.attempt
    assert [Attempt(forgotten.id, forgotten.attempt)] in [order.stop for order in dead.orders()]
    dead.fail(forgotten, retryable=False)
    system.tick()
    assert handle.status() == "dispatched"
    alive.succeed(again)
    system.tick()
    assert handle.status() == "success"


def test_an_attempt_from_before_the_backup_still_counts(
    system: System, backup: Callable[[], Callable[[], None]]
) -> None:
    worker = system.worker()
    system.settle()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    restore = backup()
    system.dispatch()
    worker.succeed(*worker.take())
    system.tick()
    restore()
    system.pass_seconds(2)
    worker.succeed(task)
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["attempt"]) == ("success", 1)


def test_of_two_leaders_with_the_same_term_only_the_later_pushes(
    system: System, backup: Callable[[], Callable[[], None]]
) -> None:
    restore = backup()
    first = system.lead()
    restore()
    assert system.scheduler._leadership.term == first._leadership.term
    system.pass_seconds()
    with pytest.raises(Deposed):
        first._streams.publish(system.generation, first._leadership.term, {"default": [b"stale"]})


def test_an_empty_database_numbers_attempts_from_one(system: System) -> None:
    """A fresh database on a Redis that was used before."""
    worker = system.worker()
    system.pass_seconds()
    with system.engine.begin() as connection:
        empty(connection)
    system.lead()
    system.pass_seconds()
    system.dispatch()
    assert [task.attempt for task in worker.take()] == [1]
