"""The leader rests after nudges that led to no dispatch because no worker had room, and at no other time."""

from __future__ import annotations

import threading

import pytest

from orchestrator.transport.client import nudge
from tests.integration.stage import KEYS, System


class RecordingEvent(threading.Event):
    """Records the timeouts of waits."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.taken.append(timeout)
        return False


@pytest.fixture
def rests(system: System) -> RecordingEvent:
    system.worker(slots=3)
    system.settle()
    system.pass_seconds()
    rests = system.scheduler.term._stopping = RecordingEvent()
    return rests


def test_nudges_are_batched_while_no_worker_has_room(system: System, rests: RecordingEvent) -> None:
    """Otherwise every enqueue would cost a tick, and a second commit."""
    while system.scheduler.term.dispatcher.last.had_room:
        waiting = system.job.enqueue()
        system.tick()
    assert system.states(waiting) == ["pending"]
    assert not rests.taken
    system.tick()
    assert rests.taken == [pytest.approx(0.005)]
    system.tick(2)
    assert len(rests.taken) == 1, "nobody has nudged since"


def test_a_late_nudge_for_a_claimed_task_causes_no_rest(system: System, rests: RecordingEvent) -> None:
    """An earlier tick has claimed the task before its nudge arrives; the next task may come just as late."""
    found = system.job.enqueue()
    system.redis.xtrim(KEYS.nudges, maxlen=0)
    system.tick()
    assert system.states(found) == ["dispatched"]
    assert nudge(system.redis, KEYS)
    system.tick(2)
    assert not rests.taken


def test_reports_are_read_without_a_rest(system: System, rests: RecordingEvent) -> None:
    [worker] = system.workers
    system.job.enqueue()
    system.tick()
    worker.succeed(*worker.take())
    system.job.enqueue()
    system.tick(2)
    assert not rests.taken
