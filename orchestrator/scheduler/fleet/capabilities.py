"""Which workers know which tasks. Where the workers of a queue differ, tasks go to those that know them.

In a rolling deploy, workers of two versions of an application serve the same queue. A task that all of them know goes
into the queue's stream, and any free worker takes it. A task that only some know is placed: it goes into the own stream
of one of them, up to as many as that worker has slots (plus those that it finishes in a moment). If all of them are
full, the task waits in Postgres with the hold `crowded`, until one has capacity.

Heartbeats say what workers know. Functions that may be imported by name must be tried: a worker that returns such a
task does not know it, nor do the workers of its kind, until a new one of them appears. A program may be missing on one
machine alone, so a kind of worker lacks a program only when all workers of that kind have returned it.

Where all workers of a queue know the same, this costs nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from orchestrator.domain.executors.record import has_means, is_announced, is_program
from orchestrator.domain.fleet.announced import upgrades_among
from orchestrator.domain.fleet.window import HORIZON
from orchestrator.scheduler.fleet.executions import Executions
from orchestrator.transport.codec import Heartbeat

ANY_FUNCTION = "*:*"
"""Published by workers that may import functions by name (`module:function`)."""
_BELIEVED = 600.0
"""Seconds after which a missing function is tried again."""

Kinds = frozenset[str]
"""Digests of what workers know. Workers with the same digest are of one kind."""


class CapacityHold(NamedTuple):
    """Tasks of a queue that are held because all workers that know them are full."""

    queue: str
    name: str
    wanted: str = ""
    """What a worker must know: the name of the task or, for turns of code, the version; or its executor."""

    @property
    def hold(self) -> str:
        """Return the reason as it is stored in `tasks.hold`."""
        return f"crowded: {self.wanted}" if self.wanted else "crowded"

    @classmethod
    def parse(cls, queue: str, name: str, hold: str) -> CapacityHold:
        """Read the stored reason."""
        return cls(queue, name, hold.removeprefix("crowded").removeprefix(": "))


class Placement(NamedTuple):
    """The worker that a task was placed with, and what that worker must know."""

    worker: str
    queue: str
    wanted: tuple[str, ...]


class Capabilities:
    """The live workers, what they know, and the tasks placed with each."""

    def __init__(self) -> None:
        self.mixed: frozenset[str] = frozenset()
        """Queues whose workers differ in what they know."""
        self.holds: set[CapacityHold] = set()
        """Tasks that may be held now."""
        self.lacking: set[str] = set()
        """Holds of tasks whose data key or executor no worker has."""
        self.executions = Executions()
        self.grows = False
        """Something was held, so other tasks may be next."""
        self.rates: Mapping[str, float] = {}
        """Tasks that each queue finishes per second."""
        self._now = 0.0
        self.upgrades: dict[tuple[str, str], int] = {}
        """By queue and workflow as code, the version with which open runs of older ones go on."""
        self._upgrades: dict[str, dict[str, int]] = {}
        """The same by digest of names."""
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
        self._left: dict[bytes, Placement] = {}
        self._load: Counter[str] = Counter()
        self._ahead: dict[str, int] = {}
        self._lines: dict[tuple[str, Kinds], list[tuple[int, str]]] = {}

    def index(
        self, beats: Sequence[Heartbeat], names: Mapping[str, frozenset[str]], now: float, *, is_same: bool = False
    ) -> None:
        """Index the live workers, and the names published under each digest; their queues may be the `same`."""
        self._now = now
        self._names = {}
        self._slots, self._running = {}, {}
        for beat in beats:
            self._names[beat.names] = names.get(beat.names, frozenset())
            self._slots[beat.worker], self._running[beat.worker] = beat.slots, beat.running
            self.executions.heard(beat, now)
            if beat.worker not in self._members:
                self._denied.pop(beat.names, None)  # it may have come with other files
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
            for workflow, version in [one for kind in kinds for one in self._upgrades.get(kind, {}).items()]:
                self.upgrades[queue, workflow] = max(version, self.upgrades.get((queue, workflow), 0))

    def _refresh(self) -> None:
        self._denied = {
            kind: kept
            for kind, denied in self._denied.items()
            if (kept := {name: since for name, since in denied.items() if self._now - since < _BELIEVED})
        }
        self._missing = {
            name: kept
            for name, workers in self._missing.items()
            if (
                kept := {
                    worker: since
                    for worker, since in workers.items()
                    if worker in self._slots and self._now - since < _BELIEVED
                }
            )
        }
        self.mixed = frozenset(
            queue for queue, kinds in self._kinds.items() if len(kinds) > 1 or not self._denied.keys().isdisjoint(kinds)
        )
        self._knowing, self._lines = {}, {}

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
        """Return the kinds of workers of a queue that know a name: None for all of them, empty for none."""
        key = (queue, name)
        if key not in self._knowing:
            kinds = self._kinds.get(queue, {})
            knowing = frozenset(kind for kind in kinds if self._knows(kind, name))
            self._knowing[key] = None if knowing and len(knowing) == len(kinds) else knowing
        return self._knowing[key]

    def newest(self, queue: str, workflow: str) -> int:
        """Return the version with which open runs of older ones go on; 0 if that is none."""
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
            return has_means(names, name)
        return name in names or (":" in name and ANY_FUNCTION in names)

    def denied(self) -> list[tuple[str, str]]:
        """Return queues and names that no worker knows, although some workers may import functions by name."""
        names = {name for denied in self._denied.values() for name in denied}
        return [(queue, name) for queue in self.mixed for name in names if self.knowing(queue, name) == frozenset()]

    # -- placing

    def begin(self, over: Iterable[bytes]) -> None:
        """Begin to place tasks. `over` have just ended."""
        self._ahead = {
            queue: int(self.rates.get(queue, 0.0) * HORIZON / max(1, sum(map(len, self._kinds[queue].values()))))
            for queue in self.mixed
        }
        self.grows = False
        self._load = Counter(place.worker for place in self._placed.values())
        if self._placed:
            self._load.subtract(self._placed[task].worker for task in set(over) if task in self._placed)
        self._lines = {}

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

    def room(self, held: CapacityHold) -> int | None:
        """Return how many of the held tasks workers can take now; None if they need not wait."""
        if is_announced(held.wanted):
            return self.executions.room(self.executing(held.queue, held.wanted))
        kinds = self.knowing(held.queue, held.wanted or held.name) if held.queue in self.mixed else None
        return self.places(held.queue, kinds) if kinds else None

    def rooms(self) -> dict[CapacityHold, int | None]:
        """Return for each hold how many of its tasks may be released now; None if they need not wait.

        Holds that wait for the same workers share their capacity: further tasks would only be held again.
        """
        rivals: Counter[object] = Counter(self._awaited(held) for held in self.holds)
        found: dict[CapacityHold, int | None] = {}
        for held in self.holds:
            room = self.room(held)
            found[held] = room and -(-room // rivals[self._awaited(held)])
        return found

    def _awaited(self, held: CapacityHold) -> object:
        """Return the workers whose capacity a hold waits for."""
        if is_announced(held.wanted):
            return held.queue, held.wanted
        return held.queue, self.knowing(held.queue, held.wanted or held.name)

    def place(self, queue: str, kinds: Kinds) -> str | None:
        """Return the worker of these kinds with most free slots, and count the task; None if all are full."""
        line = self._lines.get((queue, kinds))
        if line is None:
            line = self._lines[queue, kinds] = [(-self._free(worker), worker) for worker in self._of(queue, kinds)]
            heapify(line)
        while line:
            believed, worker = line[0]
            if self._load[worker] >= self._limit(queue, worker):
                heappop(line)
            elif believed != -self._free(worker):
                heapreplace(line, (-self._free(worker), worker))
            else:
                self._load[worker] += 1
                return worker
        return None

    def place_near(self, queue: str, worker: str) -> bool:
        """Say whether a worker that knows what all of its queue know has a free slot for a task, and count the task."""
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
        self._left = {task: self._placed.pop(task) for task in over if task in self._placed} if self._placed else {}
        self._placed.update(placed)

    def recount(self, in_flight: Iterable[bytes]) -> None:
        """Forget all tasks but those that Postgres has in flight."""
        if self._placed:
            self._placed = {task: self._placed[task] for task in in_flight if task in self._placed}

    def holder(self, task: bytes) -> str | None:
        """Return the worker that a task was placed with, also if the last tick ended the task."""
        place = self._placed.get(task) or self._left.get(task)
        return place.worker if place is not None else self.executions.watcher(task)

    def better_elsewhere(self, waiting: Iterable[bytes]) -> dict[str, list[bytes]]:
        """Return, by full worker, the waiting tasks for which another worker has a free slot."""
        found: dict[str, list[bytes]] = defaultdict(list)
        free: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        left = Counter({worker: self._free(worker) for worker in self._slots})
        for task in waiting:
            place = self._placed.get(task)
            if place is None or self._running.get(place.worker, 0) < self._slots.get(place.worker, 1):
                continue  # it is about to begin, or its worker has gone
            line = free.get(place[1:])
            if line is None:
                line = free[place[1:]] = self._of(place.queue, self.able(place.queue, place.wanted))
            while line and left[line[-1]] <= 0:
                line.pop()
            if line:
                left[line[-1]] -= 1
                found[place.worker].append(task)
        return found

    def is_of_use(self, place: Placement) -> bool:
        """Say whether a task that its worker has not received yet should stay there: no other one has a free slot."""
        able = self._of(place.queue, self.able(place.queue, place.wanted))
        return place.worker in able and all(self._free(worker) <= 0 for worker in able if worker != place.worker)
