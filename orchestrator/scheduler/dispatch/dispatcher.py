"""Hand ready tasks to the fleet, up to each queue's window.

Each task that is claimed is either sent, to any worker of its queue or to one of them, or put back:

    it runs in an executor      sent to a worker that has it; put back if none has, or none has room
    its queue has no slot       put back: executions and tasks for slots stand in the same line
    nobody can read its input   held until a worker with the payload store comes
    nobody knows it             held as `unknown`, and others of its name with it
    only some know it           sent to one of them; held as `crowded` if they have no room
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
from orchestrator.references import MARK, SHORTEST
from orchestrator.scheduler.dispatch.executing import landed, over_room, place_executions
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

_SLOW = 0.05
"""Seconds; a claim from the front that takes less is made every time."""
_SLOW_QUEUE = 0.0001
"""The same for each queue: many of them are no reason to look at fewer."""
_FRONT_PAUSE = 5.0
"""Between two slow claims from the front, so many times as long as one takes."""


class Claims(CommitHooks):
    """Claims ready tasks from the front of each queue, or from behind the last one that was claimed.

    Every claim leaves dead entries at the front of the index. While a long transaction is open, vacuum cannot remove
    them, and every claim from the front reads all of them. Where that has become slow, the leader claims from behind
    the position of its last claim, and looks from the front for at most a sixth of its time. Until then it does not see
    tasks that became ready out of order: a task that came back, or whose transaction committed late.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.is_slow = False
        """The last claim from the front was: since then not all is seen that is ready."""
        self._front_at = 0.0
        self._positions: dict[str, ClaimPosition] = {}

    def claim(
        self, connection: Connection, rooms: dict[str, int], now: datetime, commit: Callable[[], object] | None = None
    ) -> list[Claimed]:
        """Claim the most urgent ready tasks of each queue, as many as it has room for, most urgent first.

        `commit` is called before, to have the claim commit: one round trip, unless a transaction has begun.
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
        self.is_slow = took >= _SLOW + _SLOW_QUEUE * len(rooms)
        self._front_at = began + took + _FRONT_PAUSE * took
        self._positions = {}
        if newest is not None:
            by_queue = claims.by_queue(found)
            for queue, room in rooms.items():
                self._set_position(queue, room, newest, by_queue.get(queue, ()))
        return found

    def rolled_back(self) -> None:
        """Forget the positions: the claims were rolled back."""
        self._positions = {}

    def _set_position(self, queue: str, room: int, newest: int, found: Sequence[Claimed]) -> None:
        """After a claim from the front, which has seen everything up to the newest task."""
        if len(found) < room:
            self._positions[queue] = ClaimPosition(found[-1].priority if found else 0, newest, emptied=True)
        else:
            self._positions[queue] = ClaimPosition(found[-1].priority, found[-1].seq, emptied=False)

    def _move_position(self, queue: str, room: int, found: Sequence[Claimed]) -> None:
        """After a claim from behind the mark."""
        position = self._positions[queue]
        if len(found) < room and not position.emptied:
            self._front_at = 0.0  # less urgent ones wait there, and slots are free
        if not found:
            return
        emptied = position.emptied and len(found) < room
        seq = max(task.seq for task in found) if emptied else found[-1].seq
        self._positions[queue] = ClaimPosition(found[-1].priority, seq, emptied)


_PART = "hand out tasks"
"""The part of a tick that this is."""
_STORE = key_name(PAYLOAD_STORE)
"""Announced by a worker that has a payload store."""
_UNKNOWN = "unknown"
_queue, _kind, _options = attrgetter("queue"), attrgetter("queue", "name"), attrgetter("options")


class LastClaim(NamedTuple):
    """What the last claim says about the next."""

    had_room: bool = False
    """It could have handed something out, had there been anything."""
    has_drained: bool = False
    """It had room in every queue, and has found less: nothing was ready that it has left."""
    has_executions: bool = False
    """It has found executions."""
    has_more: bool = False
    """It has found as many of them as it wanted: there may be more."""


@dataclass
class _Claim:
    """One claim, while it is decided where its tasks go."""

    tx: Transaction = field(repr=False)
    hold_for: float
    """Seconds for which a task waits for a worker that can do it."""
    back: dict[bytes, Requeue] = field(default_factory=dict)

    def send(self, tasks: Iterable[Claimed]) -> None:
        self.tx.result.outgoing.claimed.extend(tasks)

    def put_back(self, tasks: Iterable[Claimed], hold: str | None, delay: float | None = None) -> None:
        seconds = self.hold_for if delay is None else delay
        self.back.update((task.id, Requeue(task.id, task.attempt, seconds, hold=hold)) for task in tasks)

    def left(self, tasks: list[Claimed]) -> list[Claimed]:
        """Return the tasks without those that are put back."""
        return [task for task in tasks if task.id not in self.back] if self.back else tasks


class Dispatcher(CommitHooks):
    """Claims what fits into the windows of queues, and decides where it goes."""

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
        """Queues whose last claim has found nothing but executions."""
        self.last = LastClaim()

    @property
    def is_slow(self) -> bool:
        """Say whether the last claim from the front was slow."""
        return self._claims.is_slow

    @property
    def in_flight(self) -> int:
        """How many tasks are dispatched or running."""
        return self.windows.outstanding.total()

    def recount(self, in_flight: Sequence[InFlight]) -> None:
        """Start from what Postgres says is in flight."""
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
        """Claim what fits each queue's window. What no live worker knows is held back until one does."""
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
        if capabilities.mixed or tx.result.code.near:
            capabilities.begin(tx.result.over())
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
        if max(sizes, default=0) >= SHORTEST:
            tasks = self._readable(claim, tasks)
        (self._place if capabilities.mixed else self._send_known)(claim, tasks)
        self._settle(claim, found)
        asked = Counter(map(_queue, found)) if executions else {}
        has_more = any(asked[queue] >= rooms.get(queue, 0) for queue in set(map(_queue, executions)))
        return LastClaim(True, has_drained and not claim.back, bool(executions), has_more)

    def _claim_plain(self, tx: Transaction, rooms: dict[str, int], *, commits: bool) -> list[Claimed]:
        """Claim tasks. Those that this tick creates last are created as claimed, if none goes ahead of others so."""
        created = tx.created
        if created is None or not self.last.has_drained or created.queues - Counter(rooms):
            commit = tx.commit_with_next or channel(tx.connection).commit_with_next
            return self._claims.claim(tx.connection, rooms, tx.now, commit if commits else None)
        found, is_all = claims.create_claimed(tx.connection, created, rooms, tx.now, tx.commit_with_next)
        tx.result.tasks.foreseen += claims.successes_of(created, found)
        left = Counter(rooms) - Counter(map(_queue, found))
        return found if is_all or not left else found + self._claims.claim(tx.connection, left, tx.now)

    def _execute(
        self, claim: _Claim, tasks: list[Claimed], executions: Sequence[Claimed], slots: Mapping[str, int]
    ) -> list[Claimed]:
        """Send executions out; return the tasks for slots, without those that have none."""
        capabilities = self._fleet.capabilities
        back = place_executions(claim.tx, capabilities, executions, claim.hold_for)
        claim.back.update((row.id, row) for row in back)
        excess = over_room(tasks, slots)
        claim.put_back((task for task in tasks if task.id in excess), None, 0.0)
        self._executing |= set(map(_queue, executions))
        self._executing -= set(map(_queue, tasks))
        return claim.left(tasks)

    def _readable(self, claim: _Claim, tasks: list[Claimed]) -> list[Claimed]:
        """Return tasks without those whose arguments are stored where no worker of their queue can read them."""
        lacking = [task for task in tasks if _wants_store(task) and not self._fleet.knows(task.queue, _STORE)]
        if lacking:
            claim.put_back(lacking, hold_for_key(PAYLOAD_STORE))
            claim.tx.result.capacity.lacking.append(hold_for_key(PAYLOAD_STORE))
        return claim.left(tasks)

    def _send_known(self, claim: _Claim, tasks: list[Claimed]) -> None:
        """Send what the workers know, where all of a queue know the same: of many tasks, one is asked about."""
        unknown = {kind for kind in set(map(_kind, tasks)) if not self._fleet.knows(*kind)}
        if unknown:
            self._hold_unknown(claim, [task for task in tasks if _kind(task) in unknown])
        tasks = claim.left(tasks)
        if near := claim.tx.result.code.near:
            place_near = self._fleet.capabilities.place_near
            tasks = [
                task._replace(to=near[task.id]) if task.id in near and place_near(task.queue, near[task.id]) else task
                for task in tasks
            ]
        claim.send(tasks)

    def _place(self, claim: _Claim, tasks: list[Claimed]) -> None:
        """Send what only some workers know to one of them, and hold what finds no room; turns of code later."""
        capabilities = self._fleet.capabilities
        unknown: list[Claimed] = []
        for task in tasks:
            is_mixed = task.queue in capabilities.mixed
            kinds = capabilities.knowing(task.queue, task.name) if is_mixed else None
            wanted = ""
            if is_mixed and _wants_store(task) and (able := capabilities.knowing(task.queue, _STORE)):
                kinds, wanted = able if kinds is None else able & kinds, _STORE
            if not self._fleet.knows(task.queue, task.name) or kinds == frozenset():
                unknown.append(task)
            elif kinds is None or task.is_turn_task:
                claim.send([task])
            elif (worker := capabilities.place(task.queue, kinds)) is not None:
                claim.send([task._replace(to=worker)])
            else:
                held = CapacityHold(task.queue, task.name, wanted)
                claim.put_back([task], held.hold)
                claim.tx.result.capacity.holds[held] = capabilities.grows = True
        if unknown:
            self._hold_unknown(claim, unknown)

    def _settle(self, claim: _Claim, found: Sequence[Claimed]) -> None:
        """Write what is put back, and spend what the rates of queues allow."""
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

    # -- holding back what stands before others

    def _hold_crowds(self, tx: Transaction, rooms: Mapping[str, int], unknown_timeout: float) -> None:
        """Take tasks for which there is no room from the front of their queues, so that others come to their turn."""
        capabilities = self._fleet.capabilities
        full: list[tuple[str, str, str]] = []
        for held in capabilities.holds:
            is_of_tasks = not held.wanted or is_announced(held.wanted)
            if is_of_tasks and held.queue in rooms and capabilities.room(held) == 0:
                full.append((held.queue, held.name, held.hold))
        if full and waiting.keep_back(tx.connection, full, tx.now + timedelta(seconds=unknown_timeout), self._batch):
            capabilities.grows = True

    def _hold_unknown(self, claim: _Claim, unknown: Sequence[Claimed]) -> None:
        """Hold tasks that no worker knows, and take more of them from the front of their queues."""
        claim.put_back(unknown, _UNKNOWN)
        names = {(task.queue, task.name, _UNKNOWN) for task in unknown}
        until = claim.tx.now + timedelta(seconds=claim.hold_for)
        waiting.keep_back(claim.tx.connection, sorted(names), until, self._batch)
        self._fleet.capabilities.grows = True

    # -- between claims

    def due_in(self, now: datetime) -> float:
        """Return how many seconds may pass before there may be more to claim; infinite if nothing is waited for."""
        return 0.0 if self._fleet.capabilities.grows or self.last.has_more else self.windows.due_in(now)

    def rolled_back(self) -> None:
        """Nothing was claimed."""
        self.last = self.last._replace(has_drained=False)
        self._claims.rolled_back()
        self._lanes.rolled_back()
        self.windows.rolled_back()

    def committed(self, tick: TickResult) -> None:
        """Move the counts, and remember where tasks were placed."""
        self._lanes.committed(tick)
        self.windows.committed(tick, map(_queue, tick.outgoing.claimed))
        self._remember_places(tick)

    def _remember_places(self, tick: TickResult) -> None:
        capabilities, capacity = self._fleet.capabilities, tick.capacity
        for held, is_kept_back in capacity.holds.items():
            (capabilities.holds.add if is_kept_back else capabilities.holds.discard)(held)
        for worker, name in set(capacity.denied) if capacity.denied else ():
            capabilities.deny(worker, name)
        if capacity.lacking:
            capabilities.lacking.update(capacity.lacking)
        placed: dict[bytes, Placement] = {}
        executions: dict[bytes, tuple[str, str]] = {}
        if capabilities.mixed or self.last.has_executions or tick.code.near:
            for task in tick.outgoing.claimed:
                if task.to is not None and executor_of(task.options) is not None:
                    executions[task.id] = task.queue, task.to
                elif task.to is not None and task.worker is None:
                    wanted = (task.name, _STORE) if _wants_store(task) else (task.name,)
                    placed[task.id] = Placement(task.to, task.queue, wanted)
        if executions or capabilities.executions:
            capabilities.executions.committed(executions, landed(tick, capabilities))
        capabilities.committed(placed, tick.over())


def _split(found: list[Claimed]) -> tuple[list[Claimed], list[Claimed]]:
    """Return what workers run in their slots, and what executors do; as a rule, tasks share a few options."""
    outside = {options for options in set(map(_options, found)) if executor_of(options) is not None}
    if not outside:
        return found, []
    return [task for task in found if task.options not in outside], [task for task in found if task.options in outside]


def _wants_store(task: Claimed) -> bool:
    """Say whether a task has arguments in the payload store; of sealed arguments this is unknown."""
    return len(task.payload) >= SHORTEST and MARK in task.payload and not task.is_turn_task
