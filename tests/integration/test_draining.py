"""Draining workers on request: which workers get the order, for how long, and which never do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from uuid import UUID

import pytest

from orchestrator.errors import NotFound, OrchestratorError, WrongState
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.backend.fleet import FleetBackend
from orchestrator.sdk.calls.fleet import Drained
from orchestrator.sdk.ids import new_id
from orchestrator.store.insights import WorkerView, list_workers
from orchestrator.transport.codec import Order
from tests.integration.stage import System

END = Order(end=True)


@pytest.fixture
def people(system: System) -> Iterator[FleetBackend]:
    with closing(Backend(system.settings)) as backend:
        yield backend.fleet


def shown(system: System) -> dict[str, WorkerView]:
    with system.engine.begin() as connection:
        return {worker.id: worker for worker in list_workers(connection)}


def drains(system: System) -> set[UUID]:
    return {UUID(row["parent"]) for row in system.sql("SELECT parent::text FROM orchestrator.drains")}


def test_all_processes_of_a_worker_get_the_order_until_they_drain(system: System, people: FleetBackend) -> None:
    first, second, other = (system.worker(name) for name in ("web-1-aa", "web-1-bb", "web-2-cc"))
    first.parent = second.parent = new_id()
    first.memory = 123 * 2**20
    system.pass_seconds()
    assert shown(system)["web-1-aa"].memory == 123 * 2**20
    assert shown(system)["web-1-bb"].memory is None, "it does not say"
    assert people.drain("web-1") == Drained(worker="web-1", processes=("web-1-aa", "web-1-bb"), is_heard=True)
    states = {id: worker.state for id, worker in shown(system).items()}
    assert states == {"web-1-aa": "draining", "web-1-bb": "draining", "web-2-cc": "live"}, "people see it at once"
    system.pass_seconds()
    assert (first.orders()[-1], second.orders()[-1], other.orders()) == (END, END, [])
    first.draining = True
    system.pass_seconds()
    assert (first.orders(), second.orders()[-1], other.orders()) == ([], END, []), "the other one has not said so"
    second.draining = True
    system.pass_seconds()
    assert (first.orders(), second.orders(), other.orders()) == ([], [], [])
    lines = system.sql("SELECT act, kind, target, detail FROM orchestrator.audit ORDER BY id DESC LIMIT 1")
    assert [tuple(line.values()) for line in lines] == [
        ("drain", "worker", "web-1", {"processes": ["web-1-aa", "web-1-bb"]})
    ]


def test_a_disconnected_worker_gets_the_order_when_it_returns(system: System, people: FleetBackend) -> None:
    worker = system.worker("web-1-aa")
    system.pass_seconds()
    system.settle()
    worker.die()
    system.tick_until(lambda: shown(system)["web-1-aa"].state == "dead")
    assert people.drain("web-1-aa") == Drained(worker="web-1", processes=("web-1-aa",), is_heard=False)
    system.pass_seconds()
    system.lead()
    system.pass_seconds()
    assert worker.orders() == []
    worker.alive = worker.doubtful = True
    system.pass_seconds()
    assert Order(go_on=True, end=True) in worker.orders()


def test_a_request_dropped_by_an_older_leader_reaches_the_next(system: System, people: FleetBackend) -> None:
    worker = system.worker("web-1-aa")
    system.pass_seconds()
    people.drain("host")
    system.sql("DELETE FROM orchestrator.inbox")
    system.pass_seconds()
    assert worker.orders() == []
    system.lead()
    system.pass_seconds()
    assert END in worker.orders()


def test_a_later_worker_of_the_same_name_is_not_drained(system: System, people: FleetBackend) -> None:
    """In a container, the parent is always process 1 of the same host."""
    worker = system.worker("web-1-aa")
    system.pass_seconds()
    people.drain("web-1")
    system.pass_seconds()
    assert END in worker.orders()
    worker.leave()
    successor = system.worker("web-1-bb")
    system.pass_seconds(3)
    system.lead()
    system.pass_seconds(3)
    assert successor.orders() == []
    assert shown(system)["web-1-bb"].state == "live"
    people.drain("web-1")
    system.pass_seconds()
    assert END in successor.orders(), "unless that is what somebody wants"


def rejection_message(ask: Callable[[], object], kind: type[OrchestratorError]) -> str:
    with pytest.raises(kind) as caught:
        ask()
    return str(caught.value)


def test_impossible_drain_requests_are_rejected_with_the_reason(system: System, people: FleetBackend) -> None:
    old, one, two = (system.worker(name) for name in ("old-7-aa", "web-1-bb", "web-2-cc"))
    old.parent = None
    one.draining = True
    system.pass_seconds()
    assert "earlier release. Send SIGTERM to process 7 on host" in rejection_message(
        lambda: people.drain("old-7"), WrongState
    )
    assert "There are old-7, web-1, web-2: see" in rejection_message(lambda: people.drain("web-3"), NotFound)
    assert "matches 3 workers" in rejection_message(lambda: people.drain("host"), OrchestratorError)
    one.leave()
    system.tick_until(lambda: shown(system)["web-1-bb"].state == "stopped")
    assert "has drained and ended already" in rejection_message(lambda: people.drain("web-1"), WrongState)
    assert drains(system) == set()
    assert two.orders() == []


def test_old_requests_are_deleted_when_their_worker_is_gone(system: System, people: FleetBackend) -> None:
    gone, there, fresh = (system.worker(name) for name in ("web-1-aa", "web-2-bb", "web-3-cc"))
    system.pass_seconds()
    for name in ("web-1", "web-2"):
        people.drain(name)
    gone.leave()
    system.tick_until(lambda: shown(system)["web-1-aa"].state == "stopped")
    system.sql("UPDATE orchestrator.drains SET asked_at = now() - interval '25 hours'")
    people.drain("web-3")
    system.pass_seconds()
    assert drains(system) == {UUID(bytes=worker.parent) for worker in (there, fresh) if worker.parent is not None}
    assert END in there.orders()
