"""When the leader rests: after nudges that came to nothing because no worker had room, and after nothing else."""

from __future__ import annotations

import threading

import pytest

from orchestrator.transport.client import nudge
from tests.integration.stage import KEYS, System


class Rests(threading.Event):
    """Notes for how long somebody has waited."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.taken.append(timeout)
        return False


@pytest.fixture
def rests(system: System) -> Rests:
    system.worker(slots=3)
    system.settle()
    system.pass_seconds()
    rests = system.scheduler.term._stopping = Rests()
    return rests


def test_nudges_are_gathered_where_no_worker_has_room(system: System, rests: Rests) -> None:
    """Else every enqueue would cost a tick, and a commit beside its own."""
    while system.scheduler.term.dispatcher.last.had_room:
        waiting = system.job.enqueue()
        system.tick()
    assert system.states(waiting) == ["pending"]
    assert not rests.taken
    system.tick()
    assert rests.taken == [pytest.approx(0.005)]
    system.tick(2)
    assert len(rests.taken) == 1, "nobody has nudged since"


def test_a_nudge_whose_task_was_found_before_it_leads_to_no_rest(system: System, rests: Rests) -> None:
    """A tick that began for something else has claimed the task; the nudge comes behind, and so may the next task."""
    found = system.job.enqueue()
    system.redis.xtrim(KEYS.nudges, maxlen=0)
    system.tick()
    assert system.states(found) == ["dispatched"]
    assert nudge(system.redis, KEYS)
    system.tick(2)
    assert not rests.taken


def test_reports_are_heard_at_once(system: System, rests: Rests) -> None:
    [worker] = system.workers
    system.job.enqueue()
    system.tick()
    worker.succeed(*worker.take())
    system.job.enqueue()
    system.tick(2)
    assert not rests.taken
