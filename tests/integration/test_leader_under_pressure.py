"""The leader while Redis accepts no writes, and while scans of tasks in flight are slow."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from orchestrator.domain.tasks.task import Returned
from orchestrator.sdk.values.payload import decode_value
from orchestrator.store.tasks import claims, waiting
from tests.integration.stage import KEYS, System


def test_events_are_applied_and_trimmed_while_redis_is_full(system: System) -> None:
    worker = system.worker()
    system.settle()
    handles = system.dispatch(5)
    worker.succeed(*worker.take())
    waits = system.job.enqueue()
    system.redis.config_set("maxmemory", 1)
    try:
        system.clock.now += 1.0
        system.tick(2)
        assert system.states(*handles) == ["success"] * 5
        assert system.redis.xlen(KEYS.events(system.generation)) == 0, "what is applied makes room"
        assert waits.status() == "pending", "nothing is handed out that could not be pushed"
    finally:
        system.redis.config_set("maxmemory", 0)
    system.pass_seconds(2)
    assert waits.status() == "dispatched"


def test_no_generation_begins_while_redis_rejects_writes(system: System) -> None:
    system.pass_seconds()
    system.redis.flushall()
    before = system.sql("SELECT generation FROM orchestrator.cursors")
    system.redis.config_set("maxmemory", 1)
    try:
        system.pass_seconds(20)
        assert system.sql("SELECT generation FROM orchestrator.cursors") == before
    finally:
        system.redis.config_set("maxmemory", 0)
    system.pass_seconds()
    assert system.sql("SELECT generation FROM orchestrator.cursors") != before


def test_an_outage_is_logged_with_two_lines(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.tick_until(lambda: system.redis.get(KEYS.generation))
    with caplog.at_level(logging.INFO, "orchestrator"):
        system.redis.config_set("maxmemory", 1)
        try:
            system.pass_seconds(50)
        finally:
            system.redis.config_set("maxmemory", 0)
        system.pass_seconds(20)
    lines = [record.message for record in caplog.records if "Redis can" in record.message]
    assert [line.partition(":")[0] for line in lines] == ["service.unavailable", "service.available"]


def test_slow_scans_of_tasks_in_flight_are_limited(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long transaction of another client makes the scan slow, and slower with every task."""
    system.worker()
    system.settle()
    system.dispatch()
    looks: list[float] = []

    def slow(*arguments: Any) -> list[waiting.InFlight]:
        looks.append(system.clock.now)
        system.clock.now += 1.0
        return in_flight(*arguments)

    in_flight = waiting.in_flight
    monkeypatch.setattr(waiting, "in_flight", slow)
    began = system.clock.now
    system.pass_seconds(100)
    assert 2 <= len(looks) <= 1 + (system.clock.now - began) / 20


@pytest.fixture
def slow_front(system: System, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make every claim from the front of the queue take a second; return the times of these claims."""
    moments: list[float] = []

    def slow(*arguments: Any) -> list[claims.Claimed]:
        moments.append(system.clock.now)
        system.clock.now += 1.0
        return claim(*arguments)

    claim = claims.claim
    monkeypatch.setattr(claims, "claim", slow)
    return moments


def test_with_a_slow_front_claims_continue_behind_the_last(system: System, slow_front: list[float]) -> None:
    worker = system.worker(slots=5)
    system.settle()
    taken: list[int] = []
    began = system.clock.now
    for number in range(100):
        system.job.enqueue(number)
    while len(taken) < 100:
        system.pass_seconds(after=0.1)
        tasks = worker.take()
        taken += [decode_value(task.payload)[0][0] for task in tasks]
        worker.succeed(*tasks)
    assert taken == list(range(100)), "oldest first, none twice"
    assert len(slow_front) <= 3 + (system.clock.now - began) / 6


@pytest.mark.long
def test_with_a_slow_front_urgent_tasks_still_go_first(system: System, slow_front: list[float]) -> None:
    worker = system.worker(slots=2)
    system.settle()
    system.job.enqueue(0)
    system.pass_seconds(3, after=0.1)
    worker.succeed(*worker.take())
    for number, priority in enumerate([-5, 0, 0, 5, 0, -5, 0, 5, 0, 0]):
        system.job.options(priority=priority).enqueue(number)
    taken: list[int] = []
    for _ in range(200):
        system.pass_seconds(after=0.05)
        tasks = worker.take()
        taken += [decode_value(task.payload)[0][0] for task in tasks]
        worker.succeed(*tasks)
    assert taken == [3, 7, 1, 2, 4, 6, 8, 9, 0, 5]
    assert slow_front


def test_with_a_slow_front_returned_tasks_wait_for_the_next_scan(system: System, slow_front: list[float]) -> None:
    worker = system.worker(slots=2)
    system.settle()
    back = system.job.enqueue(1)
    system.pass_seconds(3, after=0.1)
    (task,) = worker.take()
    for number in range(4):
        system.job.enqueue(number)
    worker.report(Returned(task.id, task.attempt, "no free slot"))
    began = system.clock.now
    system.tick_until(lambda: back.status() == "dispatched")
    assert system.clock.now - began < 15
    assert len(slow_front) >= 2
