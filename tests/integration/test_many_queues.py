"""If the fleet serves many queues, a claim visits only queues with ready tasks."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import chain
from orchestrator.scheduler.fleet import reconcile
from orchestrator.store.tasks import claims
from tests.integration.stage import System, Worker

QUEUES = [f"queue-{number:03}" for number in range(300)]


@pytest.fixture
def claimed_queues(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The queues of each claim."""
    found: list[list[str]] = []

    def noting(connection: Any, rooms: dict[str, int], now: Any) -> list[claims.Claimed]:
        found.append(sorted(rooms))
        return claim(connection, rooms, now)

    claim = claims.claim
    monkeypatch.setattr(claims, "claim", noting)
    return found


@pytest.fixture
def worker(system: System) -> Worker:
    """A worker of all queues."""
    worker = Worker(system.redis, "w1", knows=["job"], slots=10, queues=QUEUES, keys=system.keys)
    worker.beat()
    system.workers.append(worker)
    system.settle()
    return worker


def test_claims_visit_only_queues_with_ready_tasks(
    system: System, worker: Worker, claimed_queues: list[list[str]]
) -> None:
    handles = [system.job.options(queue=queue).enqueue() for queue in ("queue-007", "queue-299", "elsewhere")]
    system.pass_seconds()
    assert system.states(*handles) == ["dispatched", "dispatched", "pending"]
    assert claimed_queues == [["queue-007", "queue-299"]]
    worker.succeed(*worker.take())
    system.pass_seconds(2)
    assert system.states(*handles) == ["success", "success", "pending"]
    assert len(claimed_queues) == 1
    assert system.scheduler.term.dispatcher.last.has_drained


@pytest.mark.usefixtures("worker")
def test_a_claim_visits_all_queues_when_most_have_ready_tasks(system: System, claimed_queues: list[list[str]]) -> None:
    handles = [system.job.options(queue=queue).enqueue() for queue in QUEUES[::2]]
    system.pass_seconds()
    assert set(system.states(*handles)) == {"dispatched"}
    assert claimed_queues == [QUEUES]


@pytest.mark.usefixtures("worker")
def test_tasks_with_concurrency_keys_are_claimed(system: System) -> None:
    task = system.job.options(queue="queue-123", concurrency=1, concurrency_key="one")
    handles = [task.enqueue(), task.enqueue()]
    system.pass_seconds(2)
    assert system.states(*handles) == ["dispatched", "pending"]


def test_tasks_created_by_a_tick_are_claimed_in_the_same_tick(system: System, worker: Worker) -> None:
    run: Any = chain(*(system.job.options(queue=queue).si(1) for queue in ("queue-001", "queue-002"))).start()
    system.tick()
    worker.succeed(*worker.take())
    system.tick()
    assert [task.name for task in worker.take()] == ["job"]
    assert run.status() == "running"


@pytest.mark.usefixtures("worker")
def test_many_queues_are_swept_in_turns(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "_MAX_SWEPT", 200)
    swept: list[list[str]] = []
    fleet = system.scheduler.term._fleet_check.streams.fleet
    forget = fleet.forget_gone

    def noting(generation: str, queues: list[str]) -> list[str]:
        swept.append(queues)
        return forget(generation, queues)

    monkeypatch.setattr(fleet, "forget_gone", noting)
    system.pass_seconds(3, after=11.0)
    assert swept == [QUEUES[:200], QUEUES[200:], QUEUES[:200]]
