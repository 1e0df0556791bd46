"""Calls about workers, queues and quarantined messages."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.domain.fleet.announced import FleetProcess, matching_workers
from orchestrator.domain.limits.buckets import Rate
from orchestrator.errors import NotFound, OrchestratorError, WrongState
from orchestrator.sdk.backend.part import Part, reading
from orchestrator.sdk.calls.fleet import Drained, FleetCalls, QuarantineCalls, QueueCalls
from orchestrator.store import fleet, insights
from orchestrator.store.limits import queues
from orchestrator.transport import quarantine
from orchestrator.transport.quarantine import SetAside


class FleetBackend(Part, FleetCalls):
    """Calls about workers."""

    def drain(self, worker: str) -> Drained:
        with self._connections.changing(f"the request to drain worker {worker!r} was stored") as connection:
            listed = [
                FleetProcess(id=process.id, host=process.host, state=process.state, parent=process.parent)
                for process in insights.list_workers(connection)
            ]
            processes = _only(listed, worker)
            first = processes[0]
            if first.parent is None:
                number = first.worker.rpartition("-")[2]
                raise WrongState(
                    f"Worker {first.worker} cannot be drained by a command: the worker or the leading scheduler "
                    f"is of an earlier release. Send SIGTERM to process {number} on {first.host} instead."
                )
            fleet.request_drain(connection, first.parent.bytes)
            ids = tuple(process.id for process in processes if not process.is_over)
            self._connections.record(connection, "drain", "worker", first.worker, processes=list(ids))
        return Drained(worker=first.worker, processes=ids, is_heard=any(process.is_heard for process in processes))


def _only(listed: Sequence[FleetProcess], worker: str) -> list[FleetProcess]:
    """Return the processes of the worker with this name, host or process. Refuse none, several, and an ended one."""
    matches = matching_workers(listed, worker)
    if not matches:
        names = sorted({process.worker for process in listed if process.is_heard})
        available = f"There are {', '.join(names[:10])}" if names else "There are none"
        raise NotFound(
            f"No worker has the name, host or process {worker!r:.300}. "
            f"{available}{' and more' if len(names) > 10 else ''}: see `orchestrator workers`."
        )
    if len(matches) > 1:
        names = sorted(processes[0].id for processes in matches)
        raise OrchestratorError(
            f"{worker!r:.300} matches {len(matches)} workers. Give the id of a process of one of them: "
            f"{', '.join(names[:10])}{' and more' if len(names) > 10 else ''}."
        )
    if all(process.is_over for process in matches[0]):
        raise WrongState(f"Worker {matches[0][0].worker} has drained and ended already.")
    return matches[0]


class QuarantineBackend(Part, QuarantineCalls):
    """Calls about quarantined messages."""

    def newest(self, limit: int) -> list[SetAside]:
        return quarantine.newest(self._connections.redis, self._connections.keys, limit)

    def find(self, entry: str) -> SetAside | None:
        return quarantine.find(self._connections.redis, self._connections.keys, entry)

    def clear(self) -> int:
        with self._connections.changing("the quarantine was cleared", nudge=False) as connection:
            self._connections.record(connection, "clear", "quarantine", "")
            return quarantine.clear(self._connections.redis, self._connections.keys)


class QueueBackend(Part, QueueCalls):
    """Calls about queues, by name."""

    named = reading(queues.named)
    open_tasks = reading(queues.open_tasks)
    delayed = reading(queues.delayed)

    def pause(self, name: str, paused: bool) -> None:
        with self._connections.changing(f"queue {name!r} was paused or resumed") as connection:
            if queues.set_paused(connection, name, paused):
                self._connections.record(connection, "pause" if paused else "resume", "queue", name)

    def limit(self, name: str, concurrency: int | None, rate: Rate | None) -> None:
        with self._connections.changing(f"queue {name!r} was limited") as connection:
            queues.set_limits(connection, name, concurrency, rate)
            per_second = rate.count / rate.per if rate else None
            self._connections.record(connection, "limit", "queue", name, concurrency=concurrency, rate=per_second)

    def retain(self, name: str, success: float | None, failed: float | None) -> None:
        with self._connections.changing(f"the retention of queue {name!r} was stored", nudge=False) as connection:
            queues.set_retention(connection, name, success, failed)
            self._connections.record(connection, "retain", "queue", name, success=success, failed=failed)

    def purge(self, name: str) -> None:
        with self._connections.changing(f"the request to purge queue {name!r} was stored") as connection:
            queues.request_purge(connection, name)
            self._connections.record(connection, "purge", "queue", name)
