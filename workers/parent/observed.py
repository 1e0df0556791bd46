"""Metrics of a worker: the parent exports them for all its processes."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from orchestrator.monitoring.exposition import Family, counter, gauge, own_metrics
from orchestrator.monitoring.listener import Listener
from orchestrator.settings import Settings
from orchestrator.telemetry import Outage, get_logger
from orchestrator.workers.parent.child import Child
from orchestrator.workers.parent.scaling import ChildState

log = get_logger("worker")


class ObservedWorker:
    """Metrics of a worker's processes. Counts rare events, and reads all other values on request."""

    def __init__(self, settings: Settings, slots: int, redis: Outage) -> None:
        self._slots = slots
        self._redis = redis
        self._ttl = settings.worker_ttl
        self._listener = Listener(settings.metrics, self, log) if settings.metrics else None
        self.children: Collection[Child] | None = None
        """The worker's processes; None while the worker waits for Redis."""
        self.heard_at: float | None = None
        """When the last heartbeat was sent (monotonic clock)."""
        self.deaths = self.replaced = self.handed_back = 0

    # -- requests

    def served_by_thread(self) -> AbstractContextManager[None]:
        """Return a context in which a thread answers requests, for the time before the supervisor's loop runs."""
        return nullcontext() if self._listener is None else self._listener.in_thread()

    def waits_for(self) -> list[socket.socket]:
        return [] if self._listener is None else self._listener.waits_for()

    def serve(self, ready: Iterable[object]) -> None:
        """Answer requests on these sockets."""
        if self._listener is not None:
            self._listener.serve(ready)

    def close_in_fork(self) -> None:
        """Close the parent's sockets in a forked process."""
        if self._listener is not None:
            self._listener.close()

    # -- metrics

    def metrics(self) -> Iterator[Family]:
        yield from own_metrics("worker", redis=self._redis)
        children = list(self.children or ())
        ready = [child for child in children if child.names is not None]
        states = Counter(child.state for child in children)
        yield gauge(
            "orchestrator_worker_processes",
            "Processes of this worker by state: loading, working, worn (replaced soon) or draining.",
            *(({"state": state.name.lower()}, states[state]) for state in ChildState),
        )
        working = [child for child in ready if child.state in (ChildState.WORKING, ChildState.WORN)]
        slots = self._slots * len(working)
        yield gauge("orchestrator_worker_slots", "Slots of this worker.", ({}, slots))
        running = sum(child.held.snapshot()[1] for child in ready)
        yield gauge("orchestrator_worker_slots_used", "Tasks that this worker runs now.", ({}, running))
        held = sum(len(child.held.unended()) for child in ready)
        yield gauge(
            "orchestrator_worker_attempts_held",
            "Attempts that the worker runs, will run, or has reports of.",
            ({}, held),
        )
        load = sum(child.held.pulse()[1] for child in working) / len(working) if working else 0.0
        yield gauge("orchestrator_worker_load_ratio", "Recent load of its processes.", ({}, load))
        still = sum(child.is_stalled for child in ready)
        yield gauge(
            "orchestrator_worker_still_processes", "Processes that are unresponsive: a task blocks them.", ({}, still)
        )
        died = "Processes that died with their tasks."
        yield counter("orchestrator_worker_process_deaths_total", died, ({}, self.deaths))
        yield counter("orchestrator_worker_process_replacements_total", "Processes replaced.", ({}, self.replaced))
        yield counter(
            "orchestrator_worker_attempts_returned_total", "Attempts returned to the scheduler.", ({}, self.handed_back)
        )
        if self.heard_at is not None:
            age = time.monotonic() - self.heard_at
            yield gauge("orchestrator_worker_heartbeat_age_seconds", "Time since its last heartbeat.", ({}, age))

    def obstacles(self) -> dict[str, str]:
        """Return the reasons why the worker cannot run tasks, by component."""
        if self.children is None:
            return {"redis": "waiting for Redis"}
        problems = {}
        if self._redis.is_down:
            problems["redis"] = self._redis.reason
        states = Counter(child.state for child in self.children)
        if not states[ChildState.WORKING] and not states[ChildState.WORN]:
            counts = ", ".join(f"{number} {state.name.lower()}" for state, number in states.items())
            problems["processes"] = f"none takes tasks ({counts or 'there is none'})"
        elif self.heard_at is None or time.monotonic() - self.heard_at > self._ttl:
            problems["heartbeat"] = "no heartbeat of this worker was sent yet, or for too long"
        return problems
