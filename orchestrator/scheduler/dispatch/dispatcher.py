"""Dispatch ready tasks to workers, up to each queue's window.

Each claimed task is sent to any worker of its queue, sent to one particular worker, or put back:

    it runs in an executor                sent to a worker that has the executor; put back if none has, or none has room
    its queue has no free slot            put back: a claim for executions may also fetch tasks that need slots
    no worker can read its input          held until a worker with the payload store appears
    no worker knows it                    held as `unknown`, together with other tasks of its name
    only some workers know it             sent to one of them; held as `crowded` if they have no room
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from operator import attrgetter
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.executors.record import is_announced
from orchestrator.domain.tasks.obstacles import PAYLOAD_STORE, hold_for_key
from orchestrator.domain.tasks.task import executor_of
from orchestrator.references import MARK, MIN_SIZE
from orchestrator.scheduler.dispatch.executing import out_of_flight, over_room, place_executions
from orchestrator.scheduler.dispatch.windows import Windows
from orchestrator.scheduler.fleet.capabilities import CapacityHold, Placement
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.limits import LaneService
from orchestrator.scheduler.tick_result import CommitHooks, TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sealing import key_name
from orchestrator.store.driver import channel
from orchestrator.store.tasks import claims, transitions, unique, waiting
from orchestrator.store.tasks.claims import Claimed, ClaimPosition
from orchestrator.store.tasks.transitions import Requeue
from orchestrator.store.tasks.waiting import InFlight

_SLOW_CLAIM = 0.05
"""Seconds below which a claim from the front of the queues is repeated every time."""
_SLOW_CLAIM_PER_QUEUE = 0.0001
"""Additional seconds allowed for each queue, so that many queues do not make a claim count as slow."""
_FRONT_PAUSE = 5.0
"""The pause between two slow claims from the front, as a multiple of the duration of one."""


class Claims(CommitHooks):
    """Claims ready tasks from the front of each queue, or from behind the last claimed task.

    Every claim leaves dead entries at the front of the index. Vacuum cannot remove them while a long transaction is
    open, and every claim from the front reads all of them. When that has become slow, the leader claims from behind the
    position of its last claim, and spends at most a sixth of its time on claims from the front. Until the next of those
    it misses tasks that became ready out of order: returned tasks, and tasks whose transactions committed late.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.is_slow = False
        """The last claim from the front was slow, so some ready tasks may be missed until the next one."""
        self._front_at = 0.0
        self._positions: dict[str, ClaimPosition] = {}

    def claim(
        self, connection: Connection, rooms: dict[str, int], now: datetime, commit: Callable[[], object] | None = None
    ) -> list[Claimed]:
        """Claim up to `rooms` ready tasks of each queue, the most urgent first.

        `commit` is called before the statement and makes it commit: one round trip, unless a transaction has begun.
        """
        began = self._monotonic()
        if self.is_slow and began < self._front_at and rooms.keys() <= self._positions.keys():
            found = claims.claim_behind(connection, rooms, self._positions, now)
            by_queue = claims.by_queue(found)
            for queue, room in rooms.items():
                self._move_position(queue, room, by_queue.get(queue, ()))
            return found
        newest = claims.newest(connection) if self.is_slow else None
        if commit is not None:
            commit()
        found = claims.claim(connection, rooms, now)
        took = self._monotonic() - began
        self.is_slow = took >= _SLOW_CLAIM + _SLOW_CLAIM_PER_QUEUE * len(rooms)
        self._front_at = began + took + _FRONT_PAUSE * took
        self._positions = {}
        if newest is not None:
            by_queue = claims.by_queue(found)
            for queue, room in rooms.items():
                self._set_position(queue, room, newest, by_queue.get(queue, ()))
        return found

    def rolled_back(self) -> None:
        self._positions = {}

    def _set_position(self, queue: str, room: int, newest: int, found: Sequence[Claimed]) -> None:
        """Set the position after a claim from the front, which saw everything up to the newest task."""
        if len(found) < room:
            self._positions[queue] = ClaimPosition(found[-1].priority if found else 0, newest, emptied=True)
        else:
            self._positions[queue] = ClaimPosition(found[-1].priority, found[-1].seq, emptied=False)

    def _move_position(self, queue: str, room: int, found: Sequence[Claimed]) -> None:
        position = self._positions[queue]
        if len(found) < room and not position.emptied:
            self._front_at = 0.0  # less urgent tasks wait in front, and slots are free
        if not found:
            return
        emptied = position.emptied and len(found) < room
        seq = max(task.seq for task in found) if emptied else found[-1].seq
        self._positions[queue] = ClaimPosition(found[-1].priority, seq, emptied)


_PART = "hand out tasks"
"""The name of this part of a tick."""
_STORE = key_name(PAYLOAD_STORE)
"""The name that a worker with a payload store announces."""
_UNKNOWN = "unknown"
_queue, _kind, _options = attrgetter("queue"), attrgetter("queue", "name"), attrgetter("options")


class LastClaim(NamedTuple):
    """The outcome of the last claim, as far as the next one depends on it."""

    had_room: bool = False
    """The claim could have dispatched a task if one had been ready."""
    has_drained: bool = False
    """The claim had room in every queue and left no ready task."""
    has_executions: bool = False
    """The claim found executions."""
    has_more: bool = False
    """The claim was filled with executions, so more may be ready."""


@dataclass
class _Claim:
    """The tasks of one claim that are put back."""

    tx: Transaction = field(repr=False)
    hold_for: float
    """Seconds for which a task waits for a capable worker."""
    back: dict[bytes, Requeue] = field(default_factory=dict)

    def send(self, tasks: Iterable[Claimed]) -> None:
        self.tx.result.outgoing.claimed.extend(tasks)

    def put_back(self, tasks: Iterable[Claimed], hold: str | None, delay: float | None = None) -> None:
        seconds = self.hold_for if delay is None else delay
        self.back.update((task.id, Requeue(task.id, task.attempt, seconds, hold=hold)) for task in tasks)

    def remaining(self, tasks: list[Claimed]) -> list[Claimed]:
        """Return the tasks that are not put back."""
        return [task for task in tasks if task.id not in self.back] if self.back else tasks


class Dispatcher(CommitHooks):
    """Claims tasks up to the windows of their queues, and decides where to send them."""

    def __init__(
        self, fleet: Fleet, lanes: LaneService, batch: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._claims = Claims(monotonic)
        self._fleet = fleet
        self._lanes = lanes
        self._batch = batch
        self.windows = Windows(fleet, lanes, batch, monotonic)
        fleet.capabilities.rates = self.windows.rates
        self._executing: set[str] = set()
        """Queues whose last claim found only executions."""
        self.last = LastClaim()

    @property
    def is_slow(self) -> bool:
        """Return whether the last claim from the front was slow."""
        return self._claims.is_slow

    @property
    def in_flight(self) -> int:
        """The number of tasks dispatched or running."""
        return self.windows.outstanding.total()

    def recount(self, in_flight: Sequence[InFlight]) -> None:
        """Recount the tasks in flight from Postgres."""
        leaving = [task for task in in_flight if task.worker in self._fleet.leaving and task.status == "running"]
        self.windows.recount(map(_queue, in_flight), (task.queue for task in leaving if not task.is_execution))
        self._fleet.capabilities.recount(task.id for task in in_flight)
        self._fleet.capabilities.executions.recount(
            {task.id: (task.queue, task.worker) for task in in_flight if task.is_execution}
        )
        rated = self._lanes.queue_rates
        self._lanes.recount([task for task in in_flight if task.lane is not None or task.queue in rated])

    # -- claiming

    def claim(self, tx: Transaction, unknown_timeout: float) -> None:
        """Claim tasks up to each queue's window. Hold tasks that no live worker knows until one does."""
        self.windows.refresh(tx)
        before, tx.budget.part = tx.budget.part, _PART
        self.last = self._claim(tx, unknown_timeout)
        tx.budget.finish(_PART, before)

    def _claim(self, tx: Transaction, unknown_timeout: float) -> LastClaim:
        self._lanes.refresh(tx)
        capabilities = self._fleet.capabilities
        capabilities.grows = False
        ready = self._fleet.queues if self._claims.is_slow else self.windows.ready(tx)
        rooms, slots = self.windows.rooms(tx, tx.budget.parts.row_limit(_PART, self._batch), self._executing, ready)
        if not rooms:
            is_idle = not ready and bool(self._fleet.queues)
            return LastClaim(is_idle, is_idle and not capabilities.holds and not self._lanes.is_shared)
        if capabilities.mixed or tx.result.code.preferred_workers:
            capabilities.begin(tx.result.ended_ids())
        if capabilities.holds:
            self._hold_crowds(tx, rooms, unknown_timeout)
        plain = {queue: room for queue, room in rooms.items() if not self._lanes.serves(queue)}
        is_plain = len(plain) == len(rooms) and not self._lanes.queue_rates and not self._lanes.is_locked
        found = self._claim_plain(tx, plain, commits=tx.may_end_with_claim and is_plain) if plain else []
        if len(plain) < len(rooms):
            found += self._lanes.claim(tx, {queue: room for queue, room in rooms.items() if queue not in plain})
        is_simple = len(plain) == len(slots) and not capabilities.holds and not self._lanes.is_shared
        has_drained = is_simple and len(found) < min(rooms.values()) and not self._claims.is_slow
        sizes = [len(task.payload) for task in found]
        self.windows.weigh(zip(map(_queue, found), sizes, strict=True), sum(sizes))

        claim = _Claim(tx, unknown_timeout)
        tasks, executions = _split(found)
        if executions or self._executing:
            tasks = self._execute(claim, tasks, executions, slots)
        if max(sizes, default=0) >= MIN_SIZE:
            tasks = self._with_readable_input(claim, tasks)
        (self._place if capabilities.mixed else self._send_known)(claim, tasks)
        self._settle(claim, found)
        claimed = Counter(map(_queue, found)) if executions else {}
        has_more = any(claimed[queue] >= rooms.get(queue, 0) for queue in set(map(_queue, executions)))
        return LastClaim(True, has_drained and not claim.back, bool(executions), has_more)

    def _claim_plain(self, tx: Transaction, rooms: dict[str, int], *, commits: bool) -> list[Claimed]:
        """Claim tasks. If no earlier task would be overtaken, create the tick's latest tasks as claimed."""
        created = tx.created
        if created is None or not self.last.has_drained or created.queues - Counter(rooms):
            commit = tx.commit_with_next or channel(tx.connection).commit_with_next
            return self._claims.claim(tx.connection, rooms, tx.now, commit if commits else None)
        found, is_all = claims.create_claimed(tx.connection, created, rooms, tx.now, tx.commit_with_next)
        tx.result.tasks.foreseen += claims.successes_of(created, found)
        remaining = Counter(rooms) - Counter(map(_queue, found))
        return found if is_all or not remaining else found + self._claims.claim(tx.connection, remaining, tx.now)

    def _execute(
        self, claim: _Claim, tasks: list[Claimed], executions: Sequence[Claimed], slots: Mapping[str, int]
    ) -> list[Claimed]:
        """Send executions. Return the other tasks that have a slot."""
        capabilities = self._fleet.capabilities
        back = place_executions(claim.tx, capabilities, executions, claim.hold_for)
        claim.back.update((row.id, row) for row in back)
        excess = over_room(tasks, slots)
        claim.put_back((task for task in tasks if task.id in excess), None, 0.0)
        self._executing |= set(map(_queue, executions))
        self._executing -= set(map(_queue, tasks))
        return claim.remaining(tasks)

    def _with_readable_input(self, claim: _Claim, tasks: list[Claimed]) -> list[Claimed]:
        """Return the tasks whose arguments a worker of their queue can read. Hold the rest for a payload store."""
        lacking = [task for task in tasks if _wants_store(task) and not self._fleet.knows(task.queue, _STORE)]
        if lacking:
            claim.put_back(lacking, hold_for_key(PAYLOAD_STORE))
            claim.tx.result.capacity.resource_holds.append(hold_for_key(PAYLOAD_STORE))
        return claim.remaining(tasks)

    def _send_known(self, claim: _Claim, tasks: list[Claimed]) -> None:
        """Send tasks of queues whose workers all know the same names. Tasks are checked by name, not one by one."""
        unknown = {kind for kind in set(map(_kind, tasks)) if not self._fleet.knows(*kind)}
        if unknown:
            self._hold_unknown(claim, [task for task in tasks if _kind(task) in unknown])
        tasks = claim.remaining(tasks)
        if near := claim.tx.result.code.preferred_workers:
            place_near = self._fleet.capabilities.place_near
            tasks = [
                task._replace(to=near[task.id]) if task.id in near and place_near(task.queue, near[task.id]) else task
                for task in tasks
            ]
        claim.send(tasks)

    def _place(self, claim: _Claim, tasks: list[Claimed]) -> None:
        """Send a task that only some workers know to one of them; hold it if they are full. Turns are placed later."""
        capabilities = self._fleet.capabilities
        unknown: list[Claimed] = []
        for task in tasks:
            is_mixed = task.queue in capabilities.mixed
            kinds = capabilities.knowing(task.queue, task.name) if is_mixed else None
            requirement = ""
            if is_mixed and _wants_store(task) and (able := capabilities.knowing(task.queue, _STORE)):
                kinds, requirement = able if kinds is None else able & kinds, _STORE
            if not self._fleet.knows(task.queue, task.name) or kinds == frozenset():
                unknown.append(task)
            elif kinds is None or task.is_turn_task:
                claim.send([task])
            elif (worker := capabilities.place(task.queue, kinds)) is not None:
                claim.send([task._replace(to=worker)])
            else:
                hold = CapacityHold(task.queue, task.name, requirement)
                claim.put_back([task], hold.hold)
                claim.tx.result.capacity.holds[hold] = capabilities.grows = True
        if unknown:
            self._hold_unknown(claim, unknown)

    def _settle(self, claim: _Claim, found: Sequence[Claimed]) -> None:
        """Store the tasks that are put back, and charge the rate limits of queues."""
        tx = claim.tx
        if claim.back:
            transitions.requeue(tx.connection, list(claim.back.values()), tx.now)
            for task in found:
                if task.id in claim.back:
                    self._lanes.refuse(task)
        for queue in self._lanes.queue_rates:
            tasks = [task for task in tx.result.outgoing.claimed if task.queue == queue]
            if tasks:
                self._lanes.spend_of_queue(queue, tasks, tx.now.timestamp())
        self._lanes.save(tx)
        keyed = [(task.unique_key, task.id) for task in tx.result.outgoing.claimed if task.unique_key is not None]
        if keyed:
            unique.free(tx.connection, keyed, ended=False)

    # -- hold tasks that block the front of a queue

    def _hold_crowds(self, tx: Transaction, rooms: Mapping[str, int], unknown_timeout: float) -> None:
        """Hold tasks without room at the front of their queues, so that the tasks behind them get their turn."""
        capabilities = self._fleet.capabilities
        full: list[tuple[str, str, str]] = []
        for hold in capabilities.holds:
            is_of_tasks = not hold.wanted or is_announced(hold.wanted)
            if is_of_tasks and hold.queue in rooms and capabilities.room(hold) == 0:
                full.append((hold.queue, hold.name, hold.hold))
        if full and waiting.hold_at_front(
            tx.connection, full, tx.now + timedelta(seconds=unknown_timeout), self._batch
        ):
            capabilities.grows = True

    def _hold_unknown(self, claim: _Claim, unknown: Sequence[Claimed]) -> None:
        """Hold tasks that no worker knows, and others of their names at the front of their queues."""
        claim.put_back(unknown, _UNKNOWN)
        names = {(task.queue, task.name, _UNKNOWN) for task in unknown}
        until = claim.tx.now + timedelta(seconds=claim.hold_for)
        waiting.hold_at_front(claim.tx.connection, sorted(names), until, self._batch)
        self._fleet.capabilities.grows = True

    # -- between claims

    def due_in(self, now: datetime) -> float:
        """Return the seconds until there may be more to claim; infinite if no rate is waited for."""
        return 0.0 if self._fleet.capabilities.grows or self.last.has_more else self.windows.due_in(now)

    def rolled_back(self) -> None:
        self.last = self.last._replace(has_drained=False)
        self._claims.rolled_back()
        self._lanes.rolled_back()
        self.windows.rolled_back()

    def committed(self, tick: TickResult) -> None:
        self._lanes.committed(tick)
        self.windows.committed(tick, map(_queue, tick.outgoing.claimed))
        self._remember_places(tick)

    def _remember_places(self, tick: TickResult) -> None:
        capabilities, capacity = self._fleet.capabilities, tick.capacity
        for hold, is_kept_back in capacity.holds.items():
            (capabilities.holds.add if is_kept_back else capabilities.holds.discard)(hold)
        for worker, name in set(capacity.denied) if capacity.denied else ():
            capabilities.deny(worker, name)
        if capacity.resource_holds:
            capabilities.resource_holds.update(capacity.resource_holds)
        placed: dict[bytes, Placement] = {}
        executions: dict[bytes, tuple[str, str]] = {}
        if capabilities.mixed or self.last.has_executions or tick.code.preferred_workers:
            for task in tick.outgoing.claimed:
                if task.to is not None and executor_of(task.options) is not None:
                    executions[task.id] = task.queue, task.to
                elif task.to is not None and task.worker is None:
                    requirements = (task.name, _STORE) if _wants_store(task) else (task.name,)
                    placed[task.id] = Placement(task.to, task.queue, requirements)
        if executions or capabilities.executions:
            capabilities.executions.committed(executions, out_of_flight(tick, capabilities))
        capabilities.committed(placed, tick.ended_ids())


def _split(found: list[Claimed]) -> tuple[list[Claimed], list[Claimed]]:
    """Split tasks into those that need slots and executions. Usually tasks share a few options."""
    outside = {options for options in set(map(_options, found)) if executor_of(options) is not None}
    if not outside:
        return found, []
    return [task for task in found if task.options not in outside], [task for task in found if task.options in outside]


def _wants_store(task: Claimed) -> bool:
    """Return whether a task has arguments in the payload store; False if they are sealed, when that is unknown."""
    return len(task.payload) >= MIN_SIZE and MARK in task.payload and not task.is_turn_task
