"""Which worker watches which execution, and which workers have room for more.

Executions need no task slots. Each is sent to the private stream of one worker, up to the worker's limit. An execution
that only workers of its machine can watch goes to one of those. If none lives, it waits: a restarted worker would find
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace

from orchestrator.transport.codec import Heartbeat

_MACHINE_TIMEOUT = 60.0
"""Seconds, of time in which workers could be heard, after which the machine of a silent worker is given up."""


class Executions:
    """The executions sent to each worker, and the worker's remaining room."""

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}
        self._hosts: dict[str, str] = {}
        self._seen: dict[str, float] = {}
        """When a worker of each machine was last heard."""
        self._now = 0.0
        self._began = 0.0
        """When the first heartbeat was read. Machines that a new leader has not heard from yet may be live."""
        self._watched: dict[bytes, tuple[str, str]] = {}
        """The queue and worker of each execution in flight."""
        self._load: Counter[str] = Counter()
        self.outstanding: Counter[str] = Counter()
        """The number of executions in flight, by queue."""
        self._placing: Counter[str] = Counter()
        self._heaps: dict[tuple[str, ...], list[tuple[int, str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._watched)

    # -- the fleet

    def heard(self, beat: Heartbeat, now: float) -> None:
        """Record the heartbeat of a worker that takes tasks."""
        self._began = self._began or now
        self._now = now
        self._limits[beat.worker] = beat.executions
        self._hosts[beat.worker] = beat.host
        self._seen[beat.host] = now

    def keep(self, members: Collection[str]) -> None:
        """Forget all other workers."""
        if len(self._limits) > len(members):
            self._limits = {worker: limit for worker, limit in self._limits.items() if worker in members}
            self._hosts = {worker: host for worker, host in self._hosts.items() if worker in members}
        self._seen = {host: at for host, at in self._seen.items() if self._now - at < _MACHINE_TIMEOUT}

    # -- places

    def room(self, workers: Iterable[str]) -> int:
        """Return how many more executions these workers can take."""
        return sum(max(0, self._free(worker)) for worker in workers)

    def begin(self) -> None:
        self._placing.clear()
        self._heaps = {}

    def place(self, workers: Sequence[str], host: str = "") -> str | None:
        """Return the worker with the most room, and count the execution; None if all are full."""
        candidates = tuple(worker for worker in workers if self._hosts.get(worker) == host) if host else tuple(workers)
        heap = self._heaps.get(candidates)
        if heap is None:
            heap = self._heaps[candidates] = [(-self._free(worker), worker) for worker in candidates]
            heapify(heap)
        while heap:
            cached, worker = heap[0]
            free = self._free(worker) - self._placing[worker]
            if free <= 0:
                heappop(heap)
            elif cached != -free:
                heapreplace(heap, (-free, worker))
            else:
                self._placing[worker] += 1
                return worker
        return None

    def is_on(self, worker: str, host: str) -> bool:
        """Return whether a worker runs on a machine."""
        return self._hosts.get(worker) == host

    def waits_for(self, host: str, workers: Iterable[str]) -> bool:
        """Return whether an execution should wait until a worker reappears on its machine."""
        if any(self._hosts.get(worker) == host for worker in workers):
            return False
        return self._now - self._seen.get(host, self._began) < _MACHINE_TIMEOUT

    def _free(self, worker: str) -> int:
        return self._limits.get(worker, 0) - self._load[worker]

    # -- what is in flight

    def watcher(self, task: bytes) -> str | None:
        """Return the worker that an execution was sent to."""
        watched = self._watched.get(task)
        return None if watched is None else watched[1]

    def among(self, tasks: Iterable[bytes]) -> Counter[str]:
        """Count by queue how many of these tasks are executions in flight."""
        return Counter(self._watched[task][0] for task in tasks if task in self._watched)

    def committed(self, placed: Mapping[bytes, tuple[str, str]], over: Iterable[bytes]) -> None:
        """Remember placed executions, and forget those that are no longer in flight."""
        for task in over:
            self._drop(task)
        for task, (queue, worker) in placed.items():
            self._drop(task)
            self._watched[task] = queue, worker
            self._load[worker] += 1
            self.outstanding[queue] += 1

    def _drop(self, task: bytes) -> None:
        watched = self._watched.pop(task, None)
        if watched is not None:
            self._load[watched[1]] -= 1
            self.outstanding[watched[0]] -= 1

    def recount(self, in_flight: Mapping[bytes, tuple[str, str | None]]) -> None:
        """Recount the executions in flight from Postgres, with their queues and the workers that started them."""
        self._watched = {
            task: (queue, worker or self.watcher(task) or "") for task, (queue, worker) in in_flight.items()
        }
        self._load = Counter(worker for _, worker in self._watched.values())
        self.outstanding = Counter(queue for queue, _ in self._watched.values())
