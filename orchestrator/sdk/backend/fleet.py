"""Workers: draining."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.domain.fleet.announced import FleetProcess, workers_meant
from orchestrator.errors import NotFound, OrchestratorError, WrongState
from orchestrator.sdk.backend.part import Part
from orchestrator.sdk.calls.fleet import Drained, FleetCalls
from orchestrator.store import fleet, insights


class FleetBackend(Part, FleetCalls):
    """Calls about workers."""

    def drain(self, worker: str) -> Drained:
        with self._connections.changing(f"the request to drain worker {worker!r} was stored") as connection:
            listed = [
                FleetProcess(id=one.id, host=one.host, state=one.state, parent=one.parent)
                for one in insights.list_workers(connection)
            ]
            processes = _only(listed, worker)
            first = processes[0]
            if first.parent is None:
                number = first.worker.rpartition("-")[2]
                raise WrongState(
                    f"Worker {first.worker} cannot be told to drain: it, or the scheduler that leads, is of an earlier "
                    f"release. Send SIGTERM to process {number} on {first.host} instead."
                )
            fleet.ask_drain(connection, first.parent.bytes)
            ids = tuple(one.id for one in processes if not one.is_over)
            self._connections.record(connection, "drain", "worker", first.worker, processes=list(ids))
        return Drained(worker=first.worker, processes=ids, is_heard=any(one.is_heard for one in processes))


def _only(listed: Sequence[FleetProcess], wanted: str) -> list[FleetProcess]:
    """Return the processes of the one worker that is meant, or say why that is none."""
    found = workers_meant(listed, wanted)
    if not found:
        names = sorted({one.worker for one in listed if one.is_heard})
        known = f"There are {', '.join(names[:10])}" if names else "There is none"
        raise NotFound(
            f"No worker is called {wanted!r:.300}, runs on such a host or has such a process. {known}"
            f"{' and more' if len(names) > 10 else ''}: see `orchestrator workers`."
        )
    if len(found) > 1:
        names = sorted(processes[0].id for processes in found)
        raise OrchestratorError(
            f"{wanted!r:.300} may be {len(found)} workers. Give the id of a process of the one that is meant: "
            f"{', '.join(names[:10])}{' and more' if len(names) > 10 else ''}."
        )
    if all(one.is_over for one in found[0]):
        raise WrongState(f"Worker {found[0][0].worker} has drained and ended already.")
    return found[0]
