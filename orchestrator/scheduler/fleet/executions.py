"""Which worker watches which execution, and which have room for more.

Executions need no slots of tasks. Each is sent to one worker, into its own stream, up to the worker's limit. An
execution that only workers of its machine can watch goes to one of those; if none of them lives, it waits for a while,
because a restarted worker would find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace

from orchestrator.transport.codec import Heartbeat

_MACHINE_IS_BACK = 60.0
"""Seconds, in which workers could be heard, after which the machine of a silent worker is given up."""


class Executions:
    """The executions sent to each worker, and the room that each has."""

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}
        self._hosts: dict[str, str] = {}
        self._seen: dict[str, float] = {}
        """When a worker of each machine was last heard."""
        self._now = 0.0
        self._began = 0.0
        """When the first heartbeat was read: machines that a new leader has not heard of yet may be live."""
        self._watched: dict[bytes, tuple[str, str]] = {}
        """By execution in flight, its queue and the worker that it was sent to."""
        self._load: Counter[str] = Counter()
        self.outstanding: Counter[str] = Counter()
        """By queue, how many are in flight."""
        self._placing: Counter[str] = Counter()
        self._lines: dict[tuple[str, ...], list[tuple[int, str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._watched)

    # -- the fleet

    def heard(self, beat: Heartbeat, now: float) -> None:
        """Take in a worker that takes tasks."""
        self._began = self._began or now
        self._now = now
        self._limits[beat.worker] = beat.executions
        self._hosts[beat.worker] = beat.host
        self._seen[beat.host] = now

    def keep(self, members: Collection[str]) -> None:
        """Forget all workers but these."""
        if len(self._limits) > len(members):
            self._limits = {worker: limit for worker, limit in self._limits.items() if worker in members}
            self._hosts = {worker: host for worker, host in self._hosts.items() if worker in members}
        self._seen = {host: at for host, at in self._seen.items() if self._now - at < _MACHINE_IS_BACK}

    # -- places

    def room(self, workers: Iterable[str]) -> int:
        """Return how many executions these workers can still be given."""
        return sum(max(0, self._free(worker)) for worker in workers)

    def begin(self) -> None:
        self._placing.clear()
        self._lines = {}

    def place(self, workers: Sequence[str], host: str = "") -> str | None:
        """Return the one of these workers that has most room, and count the execution; None if all are full."""
        some = tuple(worker for worker in workers if self._hosts.get(worker) == host) if host else tuple(workers)
        line = self._lines.get(some)
        if line is None:
            line = self._lines[some] = [(-self._free(worker), worker) for worker in some]
            heapify(line)
        while line:
            believed, worker = line[0]
            free = self._free(worker) - self._placing[worker]
            if free <= 0:
                heappop(line)
            elif believed != -free:
                heapreplace(line, (-free, worker))
            else:
                self._placing[worker] += 1
                return worker
        return None

    def is_on(self, worker: str, host: str) -> bool:
        """Say whether a worker is on a machine."""
        return self._hosts.get(worker) == host

    def waits_for(self, host: str, workers: Iterable[str]) -> bool:
        """Say whether an execution on that machine waits until a worker comes back there."""
        if any(self._hosts.get(worker) == host for worker in workers):
            return False
        return self._now - self._seen.get(host, self._began) < _MACHINE_IS_BACK

    def _free(self, worker: str) -> int:
        return self._limits.get(worker, 0) - self._load[worker]

    # -- what is in flight

    def watcher(self, task: bytes) -> str | None:
        """Return the worker that an execution was sent to."""
        found = self._watched.get(task)
        return None if found is None else found[1]

    def among(self, tasks: Iterable[bytes]) -> Counter[str]:
        """Return, by queue, how many of these tasks are executions in flight."""
        return Counter(self._watched[task][0] for task in tasks if task in self._watched)

    def committed(self, placed: Mapping[bytes, tuple[str, str]], over: Iterable[bytes]) -> None:
        """Remember what was placed, by queue and worker, and forget what is no longer in flight."""
        for task in over:
            self._drop(task)
        for task, (queue, worker) in placed.items():
            self._drop(task)
            self._watched[task] = queue, worker
            self._load[worker] += 1
            self.outstanding[queue] += 1

    def _drop(self, task: bytes) -> None:
        found = self._watched.pop(task, None)
        if found is not None:
            self._load[found[1]] -= 1
            self.outstanding[found[0]] -= 1

    def recount(self, in_flight: Mapping[bytes, tuple[str, str | None]]) -> None:
        """Start from what Postgres says is in flight: the queue of each, and the worker that has started it, if any."""
        self._watched = {
            task: (queue, worker or self.watcher(task) or "") for task, (queue, worker) in in_flight.items()
        }
        self._load = Counter(worker for _, worker in self._watched.values())
        self.outstanding = Counter(queue for queue, _ in self._watched.values())
