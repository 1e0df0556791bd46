"""Invalid reports are quarantined, and all others are applied."""

from __future__ import annotations

import os
from typing import Any

import pytest

from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.domain.tasks.task import Enqueued, Failed, Lost, NewTask, Returned, Started, Succeeded
from orchestrator.transport.codec import (
    encode,
)
from tests.integration.stage import ERROR, ID, KEYS, ONE, System


def poison(worker: str = "w1", *reports: Report) -> bytes:
    return encode(Flush(worker, list(reports)))


def enqueued(**changes: Any) -> Enqueued:
    fields = {"id": time_ordered_id(1, os.urandom(10)), "name": "job", "queue": "default", "payload": b"\x92\x90\x80"}
    return Enqueued([NewTask(**{**fields, **changes})])


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
"""Postgres may never read these values, because the task does not exist."""


@pytest.mark.parametrize("name", POISON)
def test_an_invalid_report_is_quarantined_alone(system: System, name: str) -> None:
    """Valid reports of its batch, before and after, are applied; and the loop goes on."""
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


def test_an_invalid_report_does_not_affect_the_rest_of_its_flush(system: System) -> None:
    worker = system.worker(slots=50)
    handles = system.dispatch(50)
    tasks = worker.take()
    reports: list[Report] = [Succeeded(task.id, 1, 0.1, ONE) for task in tasks]
    child = enqueued()
    reports[10:10] = [Succeeded(b"abc", 1, 0.1, ONE), child]
    reports[40:40] = [enqueued(priority=10**6), Failed(b"abc", 1, 0.1, ERROR)]
    worker.report(*(report for report in reports if isinstance(report, Succeeded) and len(report.id) == 16))
    system.redis.xtrim(KEYS.events(system.generation), maxlen=0)
    worker.flush(encode(Flush("w1", reports)))
    system.tick(2)
    assert system.states(*handles) == ["success"] * 50
    assert system.row(child.tasks[0].id)["status"] in ("pending", "dispatched")
    assert len(system.quarantine()) == 3
    system.tick(3)
    assert len(system.quarantine()) == 3


def test_counters_are_exact_although_a_batch_was_halved(system: System) -> None:
    """Counts of a half that was rolled back do not count."""
    worker = system.worker(slots=20)
    run = system.app.start_many(system.job, range(20))
    system.pass_seconds()
    tasks = worker.take()
    for start in range(0, 20, 2):
        worker.succeed(*tasks[start : start + 2])
        worker.flush(poison("w1", Failed(b"abc", 1, 0.1, ERROR)))  # found only after successes have been counted
    system.tick(2)
    assert len(system.quarantine()) == 10
    assert (run.progress().status, run.progress().counters.success) == ("success", 20)
    assert system.scheduler.term.dispatcher.in_flight == 0


def test_options_of_another_release_do_not_stop_the_loop(system: System) -> None:
    """The options are valid JSON, and only the decision about a failure reads them."""
    worker = system.worker()
    strange = enqueued(options='{"retry": {"max": "many"}, "colour": "blue"}')
    system.pass_seconds()
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


def test_invalid_reports_do_not_stop_a_leader_reading_an_old_stream(system: System) -> None:
    """Redis has restarted and kept its data: the entries of its stream are applied before a new generation begins."""
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
    system.pass_seconds(2)
    assert system.generation != old
    assert system.states(*handles) == ["success"] * 2
    assert len(system.quarantine()) == 2
    assert system.redis.exists(KEYS.events(old)) == 0


def test_an_unreadable_message_is_quarantined_and_its_task_dispatched_again(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    stream = KEYS.queue(system.generation, "default")
    system.redis.delete(stream)
    system.redis.xadd(stream, {"d": b"\xff\xff"})
    assert worker.take() == []
    assert len(system.quarantine()) == 1
    assert system.redis.xlen(stream) == 0
    system.make_old()
    system.tick_until(lambda: system.row(handle)["attempt"] == 2)
    assert [task.attempt for task in worker.take()] == [2]
