"""Dispatch executions, each to a worker with its executor. The name of the execution is stored before it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.domain.executors.record import displayed_requirement, encode_record, next_record
from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.domain.tasks.obstacles import hold_for_executor
from orchestrator.domain.tasks.task import Noted, executor_of
from orchestrator.scheduler.fleet.capabilities import Capabilities, CapacityHold
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.tasks import details
from orchestrator.store.tasks.claims import Claimed
from orchestrator.store.tasks.transitions import Requeue

_MACHINE_RETRY_DELAY = 1.0
"""Seconds before retrying an execution whose machine has no live worker at the moment."""


def place_executions(
    tx: Transaction, capabilities: Capabilities, tasks: Iterable[Claimed], unknown_timeout: float
) -> list[Requeue]:
    """Send executions to workers with room. Return those that must wait."""
    back: list[Requeue] = []
    notes: list[Noted] = []
    workers: dict[tuple[str, str], tuple[str, ...]] = {}
    capabilities.executions.begin()
    now = tx.now.timestamp()
    for task in tasks:
        call = executor_of(task.options)
        assert call is not None
        capable = workers.get((task.queue, call.requirement))
        if capable is None:
            capable = workers[task.queue, call.requirement] = tuple(
                capabilities.executing(task.queue, call.requirement)
            )
        if not capable:
            hold = hold_for_executor(displayed_requirement(call.requirement))
            back.append(Requeue(task.id, task.attempt, unknown_timeout, hold=hold))
            tx.result.capacity.resource_holds.append(hold)
            continue
        record, is_new = next_record(task.id, task.attempt, task.failures, task.details, now)
        host = record.host if call.ends is None else call.ends.host
        if host and capabilities.executions.waits_for(host, capable):
            back.append(Requeue(task.id, task.attempt, _MACHINE_RETRY_DELAY))
            continue
        on_host = host and any(capabilities.executions.is_on(worker, host) for worker in capable)
        worker = capabilities.executions.place(capable, host if on_host else "")
        if worker is None:
            capacity_hold = CapacityHold(task.queue, task.name, call.requirement)
            back.append(Requeue(task.id, task.attempt, unknown_timeout, hold=capacity_hold.hold))
            tx.result.capacity.holds[capacity_hold] = True
            continue
        details_json = encode_record(record)
        if is_new:
            notes.append(Noted(task.id, task.attempt, details_json))
        tx.result.outgoing.claimed.append(task._replace(to=worker, details=details_json, alone=False))
    if notes:
        details.save(tx.connection, notes)
    tx.result.wake.delayed |= any(row.hold is None for row in back)
    return back


def out_of_flight(tick: TickResult, capabilities: Capabilities) -> list[bytes]:
    """Return the executions that are no longer in flight."""
    executions = capabilities.executions
    if not executions:
        return []
    return [
        task.id
        for task in tick.outgoing.moved
        if task.before in IN_FLIGHT_STATES
        and task.state not in IN_FLIGHT_STATES
        and executions.watcher(task.id) is not None
    ]


def over_room(tasks: Sequence[Claimed], rooms: Mapping[str, int]) -> set[bytes]:
    """Return the tasks in excess of the free slots of their queues."""
    taken: Counter[str] = Counter()
    excess: set[bytes] = set()
    for task in tasks:
        taken[task.queue] += 1
        if taken[task.queue] > rooms.get(task.queue, 0):
            excess.add(task.id)
    return excess
