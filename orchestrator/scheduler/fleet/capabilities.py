"""Who knows what: where the workers of a queue differ, tasks go to those that know them.

In a rolling deploy, workers of two versions of an application serve the same queue. What all of them know goes into the
queue's stream, and whoever is free takes it. What only some know is placed: it goes into the own stream of one of them,
up to as many as it has slots (and what it finishes in a moment). What finds no place waits in Postgres, kept back as
`crowded`, and is made ready as places become free. So nothing goes round among workers that do not know it.

Workers say what they know in their heartbeats. Of functions that may be imported by name only trying tells: one that
hands such a task back does not know it, nor do those like it, until another of them comes. A program may be missing on
one machine alone: only when all workers of a kind have handed a command back do they count as not having it.

Where all workers of a queue know the same, nothing of this costs anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from orchestrator.domain.executors.call import has_means, is_announced, is_program
from orchestrator.domain.fleet.window import HORIZON
from orchestrator.scheduler.fleet.executions import Executions
from orchestrator.transport.codec import Heartbeat

ANY_FUNCTION = "*:*"
"""Published by workers that may import functions by name (`module:function`): only trying tells what they find."""
_BELIEVED = 600.0
"""Seconds after which a function that was not there is looked for once more."""

Kinds = frozenset[str]
"""Digests of what workers know: those that say the same are of a kind."""


class Crowd(NamedTuple):
    """Tasks of a queue that are kept back because those who know them have their hands full."""

    queue: str
    name: str
    wanted: str = ""
    """What has to be known: their name or, of turns of code, the version."""

    @property
    def hold(self) -> str:
        """Return why they are kept back, as it is stored."""
        return f"crowded: {self.wanted}" if self.wanted else "crowded"

    @classmethod
    def parse(cls, queue: str, name: str, hold: str) -> Crowd:
        """Return what is stored of tasks that are kept back."""
        return cls(queue, name, hold.removeprefix("crowded").removeprefix(": "))


class Place(NamedTuple):
    """Where a task was placed, and what has to be known there."""

    worker: str
    queue: str
    wanted: tuple[str, ...]


class Capabilities:
    """The workers that take tasks, by what they know, and what was placed with each."""

    def __init__(self) -> None:
        self.mixed: frozenset[str] = frozenset()
        """Queues of which some workers know what others do not."""
        self.crowds: set[Crowd] = set()
        """What may be kept back."""
        self.lacking: set[str] = set()
        """Why tasks may be kept back that no worker can open, or has the executor of."""
        self.executions = Executions()
        self.grows = False
        """Something was kept back, so others may come to the front."""
        self.rates: Mapping[str, float] = {}
        """How many tasks each queue finishes in a second."""
        self._now = 0.0
        self._names: dict[str, frozenset[str]] = {}
        self._kinds: dict[str, dict[str, list[str]]] = {}
        self._slots: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._who: dict[tuple[str, str], Kinds | None] = {}
        self._denied: dict[str, dict[str, float]] = {}
        self._missing: dict[str, dict[str, float]] = {}
        """By program, the workers that have handed a command back, and when."""
        self._members: frozenset[str] = frozenset()
        self._placed: dict[bytes, Place] = {}
        self._left: dict[bytes, Place] = {}
        self._load: Counter[str] = Counter()
        self._ahead: dict[str, int] = {}
        self._lines: dict[tuple[str, Kinds], list[tuple[int, str]]] = {}

    def index(self, beats: Iterable[Heartbeat], names: Mapping[str, frozenset[str]], now: float) -> None:
        """Take in the workers that take tasks, and the names published under each digest."""
        self._now = now
        self._names = {}
        self._kinds = defaultdict(lambda: defaultdict(list))
        self._slots, self._running = {}, {}
        for beat in beats:
            self._names[beat.names] = names.get(beat.names, frozenset())
            self._slots[beat.worker], self._running[beat.worker] = beat.slots, beat.running
            self.executions.heard(beat, now)
            for queue in beat.queues:
                self._kinds[queue][beat.names].append(beat.worker)
            if beat.worker not in self._members:
                self._denied.pop(beat.names, None)  # it may have come with other files
        self._members = frozenset(self._slots)
        self.executions.keep(self._members)
        self._refresh()

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
        self._who, self._lines = {}, {}

    def deny(self, worker: str, name: str) -> None:
        """A worker has handed a task back that it does not know, whatever it had said."""
        missing: Mapping[str, float] | None = None
        if is_program(name):
            missing = self._missing.setdefault(name, {})
            self._missing[name][worker] = self._now
        for kinds in self._kinds.values():
            for kind, members in kinds.items():
                if worker in members and self._knows(kind, name) and (missing is None or missing.keys() >= {*members}):
                    self._denied.setdefault(kind, {})[name] = self._now
        self._refresh()

    def who(self, queue: str, name: str) -> Kinds | None:
        """Return the kinds of workers of a queue that know a name: None if it is all of them, empty if nobody does."""
        key = (queue, name)
        if key not in self._who:
            kinds = self._kinds.get(queue, {})
            knowing = frozenset(kind for kind in kinds if self._knows(kind, name))
            self._who[key] = None if knowing and len(knowing) == len(kinds) else knowing
        return self._who[key]

    def able(self, queue: str, names: Iterable[str]) -> Kinds:
        """Return the kinds of workers of a queue that know all of these names."""
        every = frozenset(self._kinds.get(queue, ()))
        return every.intersection(*(kinds for name in names if (kinds := self.who(queue, name)) is not None))

    def _knows(self, kind: str, name: str) -> bool:
        if name in self._denied.get(kind, ()):
            return False
        names = self._names[kind]
        if is_announced(name):
            return has_means(names, name)
        return name in names or (":" in name and ANY_FUNCTION in names)

    def denied(self) -> list[tuple[str, str]]:
        """Return queues and names that nobody there knows, although somebody may import functions by name."""
        names = {name for denied in self._denied.values() for name in denied}
        return [(queue, name) for queue in self.mixed for name in names if self.who(queue, name) == frozenset()]

    # -- places

    def begin(self, over: Iterable[bytes]) -> None:
        """Begin to place tasks: of those in flight, these have just ended."""
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
        kinds, missing = self.who(queue, means), self._missing.get(means, {})
        workers = self._of(queue, frozenset(self._kinds.get(queue, ())) if kinds is None else kinds)
        return [worker for worker in workers if worker not in missing]

    def watching(self, queue: str) -> list[str]:
        """Return the workers of a queue."""
        return self._of(queue, frozenset(self._kinds.get(queue, ())))

    def places(self, queue: str, kinds: Kinds) -> int:
        """Return how many tasks workers of these kinds can still be given."""
        return sum(max(0, self._limit(queue, worker) - self._load[worker]) for worker in self._of(queue, kinds))

    def room(self, crowd: Crowd) -> int | None:
        """Return how many of those that are kept back have a place now; None if they need not wait for any."""
        if is_announced(crowd.wanted):
            return self.executions.room(self.executing(crowd.queue, crowd.wanted))
        kinds = self.who(crowd.queue, crowd.wanted or crowd.name) if crowd.queue in self.mixed else None
        return self.places(crowd.queue, kinds) if kinds else None

    def rooms(self) -> dict[Crowd, int | None]:
        """Return for each crowd how many of those that are kept back may try now; None if they need not wait for any.

        Crowds that wait for the same workers share their places: more than these would only be kept back again.
        """
        rivals: Counter[object] = Counter(self._awaited(crowd) for crowd in self.crowds)
        found: dict[Crowd, int | None] = {}
        for crowd in self.crowds:
            room = self.room(crowd)
            found[crowd] = room and -(-room // rivals[self._awaited(crowd)])
        return found

    def _awaited(self, crowd: Crowd) -> object:
        """Return whose places a crowd waits for."""
        if is_announced(crowd.wanted):
            return crowd.queue, crowd.wanted
        return crowd.queue, self.who(crowd.queue, crowd.wanted or crowd.name)

    def place(self, queue: str, kinds: Kinds) -> str | None:
        """Return the worker of these kinds that seems to have most room, and count the task; None if all are full."""
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

    def _of(self, queue: str, kinds: Kinds) -> list[str]:
        return [worker for kind in kinds for worker in self._kinds[queue].get(kind, ())]

    def _limit(self, queue: str, worker: str) -> int:
        return self._slots[worker] + self._ahead.get(queue, 0)

    def _free(self, worker: str) -> int:
        return self._slots[worker] - max(self._running[worker], self._load[worker])

    # -- what was placed

    def committed(self, placed: Mapping[bytes, Place], over: Iterable[bytes]) -> None:
        """Remember what was placed, and forget what is no longer in flight."""
        self._left = {task: self._placed.pop(task) for task in over if task in self._placed} if self._placed else {}
        self._placed.update(placed)

    def recount(self, in_flight: Iterable[bytes]) -> None:
        """Forget all but what Postgres says is in flight."""
        if self._placed:
            self._placed = {task: self._placed[task] for task in in_flight if task in self._placed}

    def holder(self, task: bytes) -> str | None:
        """Return the worker that a task was placed with, also if the last tick has ended it."""
        place = self._placed.get(task) or self._left.get(task)
        return place.worker if place is not None else self.executions.watcher(task)

    def better_elsewhere(self, waiting: Iterable[bytes]) -> dict[str, list[bytes]]:
        """Return, by worker, which of these were placed with one that is full, while others have slots for them."""
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

    def is_of_use(self, place: Place) -> bool:
        """Say whether a worker that has not received a task yet is still the one to have it: nobody has a free slot."""
        able = self._of(place.queue, self.able(place.queue, place.wanted))
        return place.worker in able and all(self._free(worker) <= 0 for worker in able if worker != place.worker)
