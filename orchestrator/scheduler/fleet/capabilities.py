"""Which workers know which tasks. If the workers of a queue differ, tasks go to those that know them.

In a rolling deploy, workers of two versions of an application serve the same queue. A task that all of them know goes
into the queue's stream, where any free worker takes it. A task that only some know is placed: it goes into the private
stream of one of them, up to that worker's slots plus its tasks about to finish. If all are full, the task waits with
the hold `crowded`.

Heartbeats announce what workers know. A function imported by name must be tried: if a worker returns the task, its kind
of worker does not know the function, until a new worker of the kind appears. A program may be missing on a single
machine, so a kind lacks a program only when all its workers have returned it.

If all workers of a queue know the same, none of this costs anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from orchestrator.domain.executors.record import is_announced, is_program, meets_requirement
from orchestrator.domain.fleet.announced import upgrades_among
from orchestrator.domain.fleet.window import HORIZON
from orchestrator.scheduler.fleet.executions import Executions
from orchestrator.transport.codec import Heartbeat

ANY_FUNCTION = "*:*"
"""Announced by workers that may import functions by name (`module:function`)."""
_RETRY_MISSING_AFTER = 600.0
"""Seconds after which a function or program that was missing is tried again."""

Kinds = frozenset[str]
"""Digests of what workers know. Workers with the same digest are of one kind."""


class CapacityHold(NamedTuple):
    """Tasks of a queue that are held because all workers that know them are full."""

    queue: str
    name: str
    wanted: str = ""
    """The name that a worker must know: of the task, of the version for turns of code, or of the executor."""

    @property
    def hold(self) -> str:
        """The reason as stored in `tasks.hold`."""
        return f"crowded: {self.wanted}" if self.wanted else "crowded"

    @classmethod
    def parse(cls, queue: str, name: str, hold: str) -> CapacityHold:
        """Parse the stored reason."""
        return cls(queue, name, hold.removeprefix("crowded").removeprefix(": "))


class Placement(NamedTuple):
    """The worker that a task was placed with, and the names that this worker must know."""

    worker: str
    queue: str
    wanted: tuple[str, ...]


class Capabilities:
    """The live workers, the names that they know, and the tasks placed with each."""

    def __init__(self) -> None:
        self.mixed: frozenset[str] = frozenset()
        """Queues whose workers know different names."""
        self.holds: set[CapacityHold] = set()
        """Tasks that may be held now."""
        self.resource_holds: set[str] = set()
        """Holds of tasks whose data key or executor no worker has."""
        self.executions = Executions()
        self.grows = False
        """A task was held, so further tasks may be claimed."""
        self.rates: Mapping[str, float] = {}
        """The throughput of each queue, in tasks per second."""
        self._now = 0.0
        self.upgrades: dict[tuple[str, str], int] = {}
        """By queue and workflow as code, the version with which open runs of older versions continue."""
        self._upgrades: dict[str, dict[str, int]] = {}
        """The same, by digest of names."""
        self._names: dict[str, frozenset[str]] = {}
        self._kinds: dict[str, dict[str, list[str]]] = {}
        self._slots: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._knowing: dict[tuple[str, str], Kinds | None] = {}
        self._denied: dict[str, dict[str, float]] = {}
        self._missing: dict[str, dict[str, float]] = {}
        """By program, the workers that returned a command, and when."""
        self._members: frozenset[str] = frozenset()
        self._placed: dict[bytes, Placement] = {}
        self._just_ended: dict[bytes, Placement] = {}
        self._load: Counter[str] = Counter()
        self._ahead: dict[str, int] = {}
        self._heaps: dict[tuple[str, Kinds], list[tuple[int, str]]] = {}

    def index(
        self, beats: Sequence[Heartbeat], names: Mapping[str, frozenset[str]], now: float, *, is_same: bool = False
    ) -> None:
        """Index the live workers, and the names announced under each digest. With `is_same`, queues are unchanged."""
        self._now = now
        self._names = {}
        self._slots, self._running = {}, {}
        for beat in beats:
            self._names[beat.names] = names.get(beat.names, frozenset())
            self._slots[beat.worker], self._running[beat.worker] = beat.slots, beat.running
            self.executions.heard(beat, now)
            if beat.worker not in self._members:
                self._denied.pop(beat.names, None)  # a new worker may have other files
        if not is_same:
            self._index_queues(beats)
        self._members = frozenset(self._slots)
        self.executions.keep(self._members)
        self._refresh()

    def _index_queues(self, beats: Sequence[Heartbeat]) -> None:
        self._kinds = defaultdict(lambda: defaultdict(list))
        for beat in beats:
            for queue in beat.queues:
                self._kinds[queue][beat.names].append(beat.worker)
        self._upgrades = {
            kind: self._upgrades[kind] if kind in self._upgrades else upgrades_among(known)
            for kind, known in self._names.items()
            if known
        }
        self.upgrades = {}
        for queue, kinds in self._kinds.items() if any(self._upgrades.values()) else ():
            for workflow, version in [item for kind in kinds for item in self._upgrades.get(kind, {}).items()]:
                self.upgrades[queue, workflow] = max(version, self.upgrades.get((queue, workflow), 0))

    def _refresh(self) -> None:
        self._denied = {
            kind: recent
            for kind, denied in self._denied.items()
            if (recent := {name: since for name, since in denied.items() if self._now - since < _RETRY_MISSING_AFTER})
        }
        self._missing = {
            name: recent
            for name, workers in self._missing.items()
            if (
                recent := {
                    worker: since
                    for worker, since in workers.items()
                    if worker in self._slots and self._now - since < _RETRY_MISSING_AFTER
                }
            )
        }
        self.mixed = frozenset(
            queue for queue, kinds in self._kinds.items() if len(kinds) > 1 or not self._denied.keys().isdisjoint(kinds)
        )
        self._knowing, self._heaps = {}, {}

    def deny(self, worker: str, name: str) -> None:
        """Record that a worker returned a task that it does not know."""
        missing: Mapping[str, float] | None = None
        if is_program(name):
            missing = self._missing.setdefault(name, {})
            self._missing[name][worker] = self._now
        for kinds in self._kinds.values():
            for kind, members in kinds.items():
                if worker in members and self._knows(kind, name) and (missing is None or missing.keys() >= {*members}):
                    self._denied.setdefault(kind, {})[name] = self._now
        self._refresh()

    def knowing(self, queue: str, name: str) -> Kinds | None:
        """Return the kinds of workers of a queue that know a name: None for all kinds, empty for none."""
        key = (queue, name)
        if key not in self._knowing:
            kinds = self._kinds.get(queue, {})
            knowing = frozenset(kind for kind in kinds if self._knows(kind, name))
            self._knowing[key] = None if knowing and len(knowing) == len(kinds) else knowing
        return self._knowing[key]

    def newest(self, queue: str, workflow: str) -> int:
        """Return the version with which open runs of older versions continue; 0 for none."""
        return self.upgrades.get((queue, workflow), 0)

    def able(self, queue: str, names: Iterable[str]) -> Kinds:
        """Return the kinds of workers of a queue that know all of these names."""
        every = frozenset(self._kinds.get(queue, ()))
        return every.intersection(*(kinds for name in names if (kinds := self.knowing(queue, name)) is not None))

    def _knows(self, kind: str, name: str) -> bool:
        if name in self._denied.get(kind, ()):
            return False
        names = self._names[kind]
        if is_announced(name):
            return meets_requirement(names, name)
        return name in names or (":" in name and ANY_FUNCTION in names)

    def denied(self) -> list[tuple[str, str]]:
        """Return queues and names that no worker knows, although some workers may import functions by name."""
        names = {name for denied in self._denied.values() for name in denied}
        return [(queue, name) for queue in self.mixed for name in names if self.knowing(queue, name) == frozenset()]

    # -- placing

    def begin(self, over: Iterable[bytes]) -> None:
        """Begin a round of placing tasks. `over` have just ended."""
        self._ahead = {
            queue: int(self.rates.get(queue, 0.0) * HORIZON / max(1, sum(map(len, self._kinds[queue].values()))))
            for queue in self.mixed
        }
        self.grows = False
        self._load = Counter(placement.worker for placement in self._placed.values())
        if self._placed:
            self._load.subtract(self._placed[task].worker for task in set(over) if task in self._placed)
        self._heaps = {}

    def executing(self, queue: str, means: str) -> list[str]:
        """Return the workers of a queue that have an executor."""
        kinds, missing = self.knowing(queue, means), self._missing.get(means, {})
        workers = self._of(queue, frozenset(self._kinds.get(queue, ())) if kinds is None else kinds)
        return [worker for worker in workers if worker not in missing]

    def watching(self, queue: str) -> list[str]:
        return self._of(queue, frozenset(self._kinds.get(queue, ())))

    def places(self, queue: str, kinds: Kinds) -> int:
        """Return how many more tasks workers of these kinds can take."""
        return sum(max(0, self._limit(queue, worker) - self._load[worker]) for worker in self._of(queue, kinds))

    def room(self, hold: CapacityHold) -> int | None:
        """Return how many held tasks workers can take now; None if they need not wait."""
        if is_announced(hold.wanted):
            return self.executions.room(self.executing(hold.queue, hold.wanted))
        kinds = self.knowing(hold.queue, hold.wanted or hold.name) if hold.queue in self.mixed else None
        return self.places(hold.queue, kinds) if kinds else None

    def rooms(self) -> dict[CapacityHold, int | None]:
        """Return for each hold how many of its tasks may be released now; None if they need not wait.

        Holds that wait for the same workers share the capacity: more tasks would only be held again.
        """
        rivals: Counter[object] = Counter(self._awaited(hold) for hold in self.holds)
        released: dict[CapacityHold, int | None] = {}
        for hold in self.holds:
            room = self.room(hold)
            released[hold] = room and -(-room // rivals[self._awaited(hold)])
        return released

    def _awaited(self, hold: CapacityHold) -> object:
        if is_announced(hold.wanted):
            return hold.queue, hold.wanted
        return hold.queue, self.knowing(hold.queue, hold.wanted or hold.name)

    def place(self, queue: str, kinds: Kinds) -> str | None:
        """Return the worker of these kinds with the most free slots, and count the task; None if all are full."""
        heap = self._heaps.get((queue, kinds))
        if heap is None:
            heap = self._heaps[queue, kinds] = [(-self._free(worker), worker) for worker in self._of(queue, kinds)]
            heapify(heap)
        while heap:
            cached, worker = heap[0]
            if self._load[worker] >= self._limit(queue, worker):
                heappop(heap)
            elif cached != -self._free(worker):
                heapreplace(heap, (-self._free(worker), worker))
            else:
                self._load[worker] += 1
                return worker
        return None

    def place_near(self, queue: str, worker: str) -> bool:
        """Return whether this worker has a free slot for a task that all workers know; count the task if so."""
        if worker not in self._slots or self._free(worker) <= 0 or worker not in self.watching(queue):
            return False
        self._load[worker] += 1
        return True

    def _of(self, queue: str, kinds: Kinds) -> list[str]:
        return [worker for kind in kinds for worker in self._kinds[queue].get(kind, ())]

    def _limit(self, queue: str, worker: str) -> int:
        return self._slots[worker] + self._ahead.get(queue, 0)

    def _free(self, worker: str) -> int:
        return self._slots[worker] - max(self._running[worker], self._load[worker])

    # -- placed tasks

    def committed(self, placed: Mapping[bytes, Placement], over: Iterable[bytes]) -> None:
        """Remember placed tasks, and forget those that are no longer in flight."""
        self._just_ended = (
            {task: self._placed.pop(task) for task in over if task in self._placed} if self._placed else {}
        )
        self._placed.update(placed)

    def recount(self, in_flight: Iterable[bytes]) -> None:
        """Forget placed tasks that Postgres does not have in flight."""
        if self._placed:
            self._placed = {task: self._placed[task] for task in in_flight if task in self._placed}

    def holder(self, task: bytes) -> str | None:
        """Return the worker that a task was placed with, even if the last tick ended the task."""
        placement = self._placed.get(task) or self._just_ended.get(task)
        return placement.worker if placement is not None else self.executions.watcher(task)

    def better_elsewhere(self, waiting: Iterable[bytes]) -> dict[str, list[bytes]]:
        """Return, by full worker, the waiting tasks for which another worker has a free slot."""
        found: dict[str, list[bytes]] = defaultdict(list)
        candidates: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        free_slots = Counter({worker: self._free(worker) for worker in self._slots})
        for task in waiting:
            placement = self._placed.get(task)
            if placement is None or self._running.get(placement.worker, 0) < self._slots.get(placement.worker, 1):
                continue  # the task is about to begin, or its worker is gone
            heap = candidates.get(placement[1:])
            if heap is None:
                heap = candidates[placement[1:]] = self._of(
                    placement.queue, self.able(placement.queue, placement.wanted)
                )
            while heap and free_slots[heap[-1]] <= 0:
                heap.pop()
            if heap:
                free_slots[heap[-1]] -= 1
                found[placement.worker].append(task)
        return found

    def is_of_use(self, placement: Placement) -> bool:
        """Return whether a task not yet received should stay with its worker, because no other has a free slot."""
        capable = self._of(placement.queue, self.able(placement.queue, placement.wanted))
        return placement.worker in capable and all(
            self._free(worker) <= 0 for worker in capable if worker != placement.worker
        )
