"""The leader's view of the fleet: which workers are live, which tasks they can run, and which attempts they hold.

A worker's silence counts only between two successful checks, each of which begins with a write by the leader. While
Redis is down or refuses writes, no heartbeat can arrive, and no worker is blamed. A new leader, or one that has seen
Redis lose its data, gives every worker a full TTL.

Heartbeats are numbered. A heartbeat that does not change is silence, whatever its age by Redis's clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from orchestrator.domain.executors.record import is_announced, meets_requirement
from orchestrator.scheduler.fleet.capabilities import ANY_FUNCTION, Capabilities
from orchestrator.store.tasks.claims import Claimed
from orchestrator.transport.codec import Heartbeat, unpack_attempts

ReadNames = Callable[[str], "list[str] | None"]


class Fleet:
    """Live workers and their abilities, from their heartbeats."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self.fair_time = 0.0
        """Seconds in which workers could have been heard."""
        self._last_check: float | None = None
        self._grace_until = ttl
        self._seen: dict[str, float] = {}
        self._numbers: dict[str, int] = {}
        self._names: dict[str, frozenset[str]] = {}
        self.beats: dict[str, Heartbeat] = {}
        self.capabilities = Capabilities()
        self.leaving: frozenset[str] = frozenset()
        """Draining workers: they finish their tasks and have no slots for more."""
        self._indexed_shape: list[object] = []
        """The inputs of the index of slots and names. Indexing is costly with many queues, and they seldom change."""
        self._slots: dict[str, int] = {}
        self._processes: Counter[str] = Counter()
        self._known: dict[str, frozenset[str]] = {}

    def observe(self, beats: Sequence[Heartbeat], monotonic: float, names: ReadNames) -> None:
        """Record the heartbeats of a successful check, at a time of the leader's monotonic clock."""
        if self._last_check is not None:
            self.fair_time += min(monotonic - self._last_check, self.ttl / 2)
        self._last_check = monotonic
        for beat in beats:
            if beat.number == 0 or beat.number != self._numbers.get(beat.worker):
                self._seen[beat.worker] = self.fair_time
                self._numbers[beat.worker] = beat.number
        self.beats = {beat.worker: beat for beat in beats if self.fair_time - self._seen[beat.worker] < self.ttl}
        for digest in {beat.names for beat in self.beats.values()} - self._names.keys():
            published = names(digest)
            if published is not None:
                self._names[digest] = frozenset(published)
        self._index()

    def interrupted(self) -> None:
        """Ignore the time until the next check, because Redis was down."""
        self._last_check = None

    def grace(self) -> None:
        """Give every worker a full TTL before any attempt is declared lost."""
        self._grace_until = self.fair_time + self.ttl

    @property
    def is_in_view(self) -> bool:
        """Return whether the last check succeeded."""
        return self._last_check is not None

    @property
    def in_grace(self) -> bool:
        return self.fair_time < self._grace_until

    def is_dead(self, worker: str) -> bool:
        """Return whether a worker has been silent for a TTL of `fair_time`."""
        if worker in self.beats:
            return False
        return self.fair_time - self._seen.setdefault(worker, self.fair_time) >= self.ttl and not self.in_grace

    def silence(self, worker: str) -> float:
        """Return the seconds of `fair_time` since a worker was last heard."""
        return self.fair_time - self._seen.get(worker, self.fair_time)

    def forget_dead(self) -> list[str]:
        """Forget workers that have been dead for a while. Return them."""
        gone = [
            worker
            for worker, seen in self._seen.items()
            if worker not in self.beats and self.fair_time - seen > 10 * self.ttl
        ]
        for worker in gone:
            del self._seen[worker]
            self._numbers.pop(worker, None)
        return gone

    def held(self) -> set[tuple[bytes, int]]:
        """Return every attempt that a live worker holds, or has finished without a confirmation of its report."""
        return {attempt for beat in self.beats.values() for attempt in unpack_attempts(beat.held)}

    # -- queries for dispatch

    @property
    def queues(self) -> Mapping[str, int]:
        """The queues that have workers, with the slots of each."""
        return self._slots

    def slots(self, queue: str) -> int:
        """Return how many tasks of a queue the fleet can run at once."""
        return self._slots.get(queue, 0)

    def processes(self, queue: str) -> int:
        """Return how many worker processes run tasks of a queue."""
        return self._processes[queue]

    def knows(self, queue: str, name: str) -> bool:
        """Return whether a live worker of this queue knows a task."""
        if queue in self.capabilities.mixed:
            return self.capabilities.knowing(queue, name) != frozenset()
        known = self._known.get(queue, frozenset())
        if is_announced(name):
            return meets_requirement(known, name)
        return name in known or (":" in name and ANY_FUNCTION in known)

    def is_outdated(self, task: Claimed) -> bool:
        """Return whether the worker of a turn lacks the version with which open runs of its workflow continue."""
        newest = self.capabilities.newest(task.queue, task.name)
        known = self.names_of(self.beats[task.worker].names) if task.worker in self.beats else frozenset()
        return newest > 0 and f"{task.name}@{newest}" not in known

    def known(self) -> set[tuple[str, str]]:
        """Return every (queue, name) that a live worker can run."""
        return {(queue, name) for queue, names in self._known.items() for name in names}

    def names_of(self, digest: str) -> frozenset[str]:
        """Return the names announced under a digest."""
        return self._names.get(digest, frozenset())

    def known_on(self, queue: str) -> list[str]:
        """Return the names that live workers of a queue know."""
        return sorted(self._known.get(queue, ()))

    def _index(self) -> None:
        self.leaving = frozenset(beat.worker for beat in self.beats.values() if beat.draining)
        at_work = [beat for beat in self.beats.values() if not (beat.draining or beat.doubtful)]
        shape = [len(self._names), *((beat.worker, beat.queues, beat.slots, beat.names) for beat in at_work)]
        is_same = shape == self._indexed_shape
        if not is_same:
            self._indexed_shape = shape
            slots: dict[str, int] = defaultdict(int)
            known: dict[str, set[str]] = defaultdict(set)
            for beat in at_work:
                for queue in beat.queues:
                    slots[queue] += beat.slots
                    known[queue] |= self._names.get(beat.names, frozenset())
            self._slots = dict(slots)
            self._processes = Counter(queue for beat in at_work for queue in beat.queues)
            self._known = {queue: frozenset(names) for queue, names in known.items()}
        self.capabilities.index(at_work, self._names, self.fair_time, is_same=is_same)
