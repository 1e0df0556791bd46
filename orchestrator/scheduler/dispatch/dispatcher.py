"""Hand ready tasks to the fleet, up to each queue's window."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter

from orchestrator.domain.executors.call import is_announced
from orchestrator.domain.fleet.window import room, smoothed_rate
from orchestrator.domain.limits.names import queue_bucket
from orchestrator.domain.tasks.obstacles import PAYLOAD_STORE, hold_for_key
from orchestrator.domain.tasks.task import Dispatch, executor_of
from orchestrator.references import MARK, SHORTEST
from orchestrator.scheduler.commit_hooks import CommitHooks
from orchestrator.scheduler.dispatch.claims import Claims
from orchestrator.scheduler.dispatch.executing import landed, over_room, place_executions, split
from orchestrator.scheduler.fleet.capabilities import Crowd, Place
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.limits import LaneService
from orchestrator.scheduler.tick_result import TickResult, Wake
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sealing import key_name
from orchestrator.store.limits import queues
from orchestrator.store.limits.queues import QueueRow
from orchestrator.store.tasks import transitions, unique, waiting
from orchestrator.store.tasks.claims import Claimed
from orchestrator.store.tasks.transitions import Requeue
from orchestrator.store.tasks.waiting import InFlight
from orchestrator.trace_context import below, run_span
from orchestrator.transport.codec import LARGEST_BUNDLE, encode
from orchestrator.transport.keys import private_queue

BUNDLE_BYTES = 1_000_000
"""Most bytes of payload in one message, unless one task alone has more."""
_QUEUE_AHEAD = 0.25
"""Seconds of a queue's rate that may be handed out before anybody has heard of a start: a worker does not know the
rates of queues, and says of a task that it has begun only when that has run for a while."""
_SHORTEST = 0.01
"""Seconds between two looks at a rate that allows one task now and then."""


_MOST_DATA = 16_000_000
"""Bytes of payload that are claimed of a queue at once, as far as the last claims tell."""
_LARGE = 10_000
"""Bytes of payload from which on it matters how many tasks are claimed."""


_PART = "hand out tasks"
"""The part of a tick that this is."""
_STORE = key_name(PAYLOAD_STORE)
"""What a worker says that has a payload store."""
Crowded = tuple[Claimed, Crowd]
"""A task that is kept back, and among which."""
_queue, _kind, _alone = attrgetter("queue"), attrgetter("queue", "name"), attrgetter("alone")


class Dispatcher(CommitHooks):
    """Remembers how much each queue has in flight and how fast it drains; claims what fits."""

    def __init__(
        self,
        fleet: Fleet,
        lanes: LaneService,
        batch: int,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        has_spans: bool = False,
    ) -> None:
        self._has_spans = has_spans
        self._monotonic = monotonic
        self._claims = Claims(monotonic)
        self._fleet = fleet
        self._lanes = lanes
        self._batch = batch
        self._settings: dict[str, QueueRow] | None = None
        self._outstanding: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        """Of these, what ran in workers that drain when it was last counted: their slots are not to be had any more."""
        self._sizes: dict[str, float] = {}
        """Mean size of payloads, of queues with large ones."""
        self._rates: dict[str, float] = {}
        self._measured_at = 0.0
        self._finished: Counter[str] = Counter()
        fleet.capabilities.rates = self._rates
        self._slot_rooms: dict[str, int] = {}
        """How many tasks that need slots each queue may be given, in the claim that is made."""
        self._executes: set[str] = set()
        """Queues whose last claim has found nothing but executions."""
        self._has_executions = False
        """The last claim has found executions."""
        self._has_more = False
        """It has found as many as it wanted: there may be more."""
        self.had_room = False
        """The last claim could have handed something out, had there been anything."""
        self.has_drained = False
        """The last claim had room in every queue, and has found less: nothing was ready that it has left."""

    @property
    def in_flight(self) -> int:
        """How many tasks are dispatched or running."""
        return self._outstanding.total()

    def recount(self, in_flight: Sequence[InFlight]) -> None:
        """Start from what Postgres says is in flight."""
        self._outstanding = Counter(task.queue for task in in_flight)
        leaving = self._fleet.leaving
        ran = (task for task in in_flight if task.worker in leaving and task.status == "running")
        self._leaving = Counter(task.queue for task in ran if not task.is_execution) if leaving else Counter()
        self._fleet.capabilities.recount(task.id for task in in_flight)
        self._fleet.capabilities.executions.recount(
            {task.id: (task.queue, task.worker) for task in in_flight if task.is_execution}
        )
        rated = self._lanes.queue_rates
        self._lanes.recount([task for task in in_flight if task.lane is not None or task.queue in rated])

    def claim(self, tx: Transaction, unknown_timeout: float) -> None:
        """Claim what fits each queue's window. What no live worker knows is held back until one does."""
        if self._settings is None or Wake.QUEUES_CHANGED in tx.result.wakeups:
            self._settings = {row.name: row for row in queues.read(tx.connection)}
            self._lanes.queue_rates = {row.name: row.rate for row in self._settings.values() if row.rate is not None}
        with tx.budget.doing(_PART):
            self._claim(tx, unknown_timeout)

    def _claim(self, tx: Transaction, unknown_timeout: float) -> None:
        self._lanes.refresh(tx)
        self._has_executions = self._has_more = self._fleet.capabilities.grows = self.has_drained = False
        rooms = self._rooms(tx)
        self.had_room = bool(rooms)
        if not rooms:
            return
        if self._fleet.capabilities.mixed:
            self._fleet.capabilities.begin(tx.result.over())
        if self._fleet.capabilities.crowds:
            self._keep_back(tx, rooms, unknown_timeout)
        wanted = dict(rooms)
        plain = {queue: room for queue, room in rooms.items() if not self._lanes.serves(queue)}
        found = self._claims.claim(tx.connection, plain, tx.now) if plain else []
        if len(plain) < len(rooms):
            found += self._lanes.claim(tx, {queue: room for queue, room in rooms.items() if queue not in plain})
        is_simple = len(plain) == len(self._slot_rooms) and not self._fleet.capabilities.crowds
        self.has_drained = is_simple and len(found) < min(rooms.values()) and not self._claims.is_slow
        sizes = [len(task.payload) for task in found]
        self._weigh(found, sizes)
        found, executions = split(found)
        if executions or self._executes:
            found = self._execute(tx, wanted, found, executions, unknown_timeout)
        unknown: list[Claimed] = []
        unreadable: list[Claimed] = []
        crowded: list[Crowded] = []
        if max(sizes, default=0) >= SHORTEST:
            found = self._readable(tx.result, found, unreadable)
        if self._fleet.capabilities.mixed:
            self._place(tx.result, found, unknown, crowded)
        else:
            found = self._known(found, unknown)
            tx.result.outgoing.claimed += found
        if unknown:
            self._hold_others(tx, unknown, unknown_timeout)
        kept = [(task, "unknown") for task in unknown] + [(task, crowd.hold) for task, crowd in crowded]
        kept += [(task, hold_for_key(PAYLOAD_STORE)) for task in unreadable]
        if kept:
            self.has_drained = False
            held = [Requeue(task.id, task.attempt, unknown_timeout, hold=hold) for task, hold in kept]
            transitions.requeue(tx.connection, held, tx.now)
            for task, _ in kept:
                self._lanes.refuse(task)
        self._spend(tx)
        self._lanes.save(tx)
        keyed = [(task.unique_key, task.id) for task in tx.result.outgoing.claimed if task.unique_key is not None]
        if keyed:
            unique.free(tx.connection, keyed, ended=False)

    def _execute(
        self,
        tx: Transaction,
        rooms: Mapping[str, int],
        found: list[Claimed],
        executions: Sequence[Claimed],
        unknown_timeout: float,
    ) -> list[Claimed]:
        """Send executions out; return what is left for slots, without what has none. Both stand in the same line."""
        capabilities = self._fleet.capabilities
        back = place_executions(tx, capabilities, executions, unknown_timeout)
        excess = over_room(found, self._slot_rooms)
        back += [Requeue(task.id, task.attempt, 0.0) for task in found if task.id in excess]
        if back:
            self.has_drained = False
            transitions.requeue(tx.connection, back, tx.now)
            put_back = {row.id for row in back}
            for task in (*found, *executions):
                if task.id in put_back:
                    self._lanes.refuse(task)
        self._has_executions = bool(executions)
        asked = Counter(task.queue for task in (*found, *executions))
        for queue in {task.queue for task in executions}:
            self._executes.add(queue)
            self._has_more |= asked[queue] >= rooms.get(queue, 0)
        self._executes -= {task.queue for task in found}
        return [task for task in found if task.id not in excess]

    def _keep_back(self, tx: Transaction, rooms: Mapping[str, int], unknown_timeout: float) -> None:
        """Take tasks for which there is no place from the front of their queues, so that others come to their turn."""
        capabilities = self._fleet.capabilities
        full: list[tuple[str, str, str]] = []
        for crowd in capabilities.crowds:
            is_of_tasks = not crowd.wanted or is_announced(crowd.wanted)
            if is_of_tasks and crowd.queue in rooms and capabilities.room(crowd) == 0:
                full.append((crowd.queue, crowd.name, crowd.hold))
        if full and waiting.keep_back(tx.connection, full, tx.now + timedelta(seconds=unknown_timeout), self._batch):
            capabilities.grows = True

    def _place(
        self, tick: TickResult, found: Sequence[Claimed], unknown: list[Claimed], crowded: list[Crowded]
    ) -> None:
        """Send what only some workers know to one of them, and keep back what finds no place; turns of code later."""
        capabilities = self._fleet.capabilities
        for task in found:
            is_mixed = task.queue in capabilities.mixed
            kinds = capabilities.who(task.queue, task.name) if is_mixed else None
            wanted = ""
            if is_mixed and _wants_store(task) and (able := capabilities.who(task.queue, _STORE)):
                kinds, wanted = able if kinds is None else able & kinds, _STORE
            if not self._fleet.knows(task.queue, task.name) or kinds == frozenset():
                unknown.append(task)
            elif kinds is None or task.is_turn_task:
                tick.outgoing.claimed.append(task)
            elif (worker := capabilities.place(task.queue, kinds)) is not None:
                tick.outgoing.claimed.append(task._replace(to=worker))
            else:
                crowd = Crowd(task.queue, task.name, wanted)
                crowded.append((task, crowd))
                tick.capacity.crowds[crowd] = capabilities.grows = True

    def _hold_others(self, tx: Transaction, unknown: Sequence[Claimed], unknown_timeout: float) -> None:
        """Take more tasks that nobody knows from the front of their queues, so that others come to their turn."""
        names = {(task.queue, task.name, "unknown") for task in unknown}
        waiting.keep_back(tx.connection, sorted(names), tx.now + timedelta(seconds=unknown_timeout), self._batch)
        self._fleet.capabilities.grows = True

    def _readable(self, tick: TickResult, found: list[Claimed], unreadable: list[Claimed]) -> list[Claimed]:
        """Return tasks without those whose arguments are stored where no worker of their queue can read them."""
        if not any(map(_wants_store, found)):
            return found
        lacking = [task for task in found if _wants_store(task) and not self._fleet.knows(task.queue, _STORE)]
        if lacking:
            unreadable.extend(lacking)
            tick.capacity.lacking.append(hold_for_key(PAYLOAD_STORE))
        left = {task.id for task in lacking}
        return [task for task in found if task.id not in left]

    def _known(self, found: list[Claimed], unknown: list[Claimed]) -> list[Claimed]:
        """Return tasks without those that no worker knows: of many that call the same, one is asked about."""
        strange = {kind for kind in set(map(_kind, found)) if not self._fleet.knows(*kind)}
        if not strange:
            return found
        unknown += [task for task in found if _kind(task) in strange]
        return [task for task in found if _kind(task) not in strange]

    def _rooms(self, tx: Transaction) -> dict[str, int]:
        """Return how many tasks each queue may be given now."""
        rooms: dict[str, int] = {}
        executions = self._fleet.capabilities.executions
        gone = executions.among(landed(tx.result, self._fleet.capabilities)) if executions else {}
        self._slot_rooms = {}
        for queue in self._fleet.queues:
            outstanding = in_slots = self._outstanding[queue] - tx.result.capacity.landed.get(queue, 0)
            if executions:
                in_slots -= executions.outstanding[queue] - gone.get(queue, 0)
            if self._leaving:
                in_slots = max(0, in_slots - self._leaving[queue])
            free = room(self._fleet.slots(queue), in_slots, self._rates.get(queue, 0.0))
            self._slot_rooms[queue] = free
            if queue in self._executes:
                free = max(free, executions.room(self._fleet.capabilities.watching(queue)))
            limits = self._settings.get(queue) if self._settings else None
            if limits is not None:
                free = min(free, self._allowed(limits, outstanding, tx.now.timestamp()))
            if free > 0:
                most = max(1, int(_MOST_DATA / self._sizes[queue])) if queue in self._sizes else free
                rooms[queue] = min(tx.budget.parts.most(_PART, self._batch), free, most)
        return rooms

    def _weigh(self, found: Sequence[Claimed], sizes: Sequence[int]) -> None:
        """Learn how large the tasks of queues are, as far as that limits how many are claimed at once."""
        if not self._sizes and sum(sizes) < _MOST_DATA // 4:
            return
        total: Counter[str] = Counter()
        for task, weight in zip(found, sizes, strict=True):
            total[task.queue] += weight
        for queue, number in Counter(task.queue for task in found).items():
            size = max(total[queue] / number, self._sizes.get(queue, 0.0) / 2)
            if size > _LARGE:
                self._sizes[queue] = size
            else:
                self._sizes.pop(queue, None)

    def _allowed(self, limits: QueueRow, outstanding: int, now: float) -> int:
        if limits.paused:
            return 0
        allowed = self._batch if limits.concurrency is None else limits.concurrency - outstanding
        if limits.rate is not None:
            admitted = self._lanes.buckets.admits(queue_bucket(limits.name), limits.rate, now, _QUEUE_AHEAD)
            allowed = min(allowed, admitted)
        return allowed

    def _spend(self, tx: Transaction) -> None:
        for queue in self._lanes.queue_rates:
            tasks = [task for task in tx.result.outgoing.claimed if task.queue == queue]
            if tasks:
                self._lanes.spend_of_queue(queue, tasks, tx.now.timestamp())

    def due_in(self, now: datetime) -> float:
        """Return how many seconds may pass before a rate allows more; infinite if none is waited for."""
        if self._fleet.capabilities.grows or self._has_more:
            return 0.0
        seconds = self._lanes.due_in(now.timestamp())
        times = [] if seconds is None else [seconds]
        for limits in (self._settings or {}).values():
            if limits.rate is not None and not limits.paused:
                bucket, moment = queue_bucket(limits.name), now.timestamp()
                if self._lanes.buckets.is_unheard(bucket, limits.rate, _QUEUE_AHEAD):
                    continue  # until a report tells of one
                if not self._lanes.buckets.admits(bucket, limits.rate, moment, _QUEUE_AHEAD):
                    times.append(self._lanes.buckets.next_admission(bucket, limits.rate, moment) - moment)
        return max(_SHORTEST, min(times, default=math.inf)) if min(times, default=1.0) > 0 else 0.0

    def rolled_back(self) -> None:
        """Nothing was claimed."""
        self.has_drained = False
        self._claims.rolled_back()
        self._lanes.rolled_back()

    def committed(self, tick: TickResult) -> None:
        """Move the counts, and measure how fast each queue drains."""
        self._lanes.committed(tick)
        if tick.capacity.landed:
            self._outstanding.subtract(tick.capacity.landed)
        if tick.capacity.finished:
            self._finished.update(tick.capacity.finished)
        if sent := tick.sent():
            self._outstanding.update(map(_queue, sent))
        self._remember_places(tick)
        monotonic = self._monotonic()
        elapsed = monotonic - self._measured_at
        if elapsed >= 0.02:
            for queue in {*self._rates, *self._finished}:
                self._rates[queue] = smoothed_rate(self._rates.get(queue, 0.0), self._finished[queue], elapsed)
                if self._rates[queue] < 1.0:
                    del self._rates[queue]
            self._finished.clear()
            self._measured_at = monotonic

    def _remember_places(self, tick: TickResult) -> None:
        capabilities, capacity = self._fleet.capabilities, tick.capacity
        for crowd, is_kept_back in capacity.crowds.items():
            (capabilities.crowds.add if is_kept_back else capabilities.crowds.discard)(crowd)
        for worker, name in set(capacity.denied) if capacity.denied else ():
            capabilities.deny(worker, name)
        if capacity.lacking:
            capabilities.lacking.update(capacity.lacking)
        placed: dict[bytes, Place] = {}
        executions: dict[bytes, tuple[str, str]] = {}
        if capabilities.mixed or self._has_executions:
            for task in tick.sent():
                if task.to is not None and executor_of(task.options) is not None:
                    executions[task.id] = task.queue, task.to
                elif task.to is not None and task.worker is None:
                    wanted = (task.name, _STORE) if _wants_store(task) else (task.name,)
                    placed[task.id] = Place(task.to, task.queue, wanted)
        if executions or capabilities.executions:
            capabilities.executions.committed(executions, landed(tick, capabilities))
        capabilities.committed(placed, tick.over())

    def messages(self, claimed: Sequence[Claimed]) -> dict[str, list[bytes]]:
        """Return the claimed tasks as messages by queue. A long line is bundled; a short one is spread."""
        by_queue: dict[str, list[Claimed]] = defaultdict(list)
        for task in claimed:
            by_queue[task.queue if task.to is None else private_queue(task.to)].append(task)
        return {queue: self._bundles(queue, tasks) for queue, tasks in by_queue.items()}

    def _bundles(self, queue: str, tasks: Sequence[Claimed]) -> list[bytes]:
        size = max(1, min(LARGEST_BUNDLE, len(tasks) // max(1, self._fleet.slots(queue))))
        bundles: list[list[Dispatch]] = []
        room = weight = 0
        for task in sorted(tasks, key=_alone):
            weight += len(task.payload)
            if room == 0 or task.alone or weight > BUNDLE_BYTES:
                bundles.append([])
                room, weight = size, len(task.payload)
            bundles[-1].append(self._message(task))
            room -= 1
        return [encode(bundle) for bundle in bundles]

    def _message(self, task: Claimed) -> Dispatch:
        trace = task.trace
        if trace is not None and task.is_turn_task and self._has_spans:  # whoever created it did not know that
            trace = below(trace, run_span(task.id))
        return Dispatch(
            task.id,
            task.attempt,
            task.name,
            task.payload,
            task.queue,
            task.options,
            task.run_id,
            task.position,
            task.alone,
            task.failures,
            task.details,
            trace,
        )


def _wants_store(task: Claimed) -> bool:
    """Say whether a task has arguments that are stored elsewhere; what is sealed does not tell."""
    return len(task.payload) >= SHORTEST and MARK in task.payload and not task.is_turn_task
