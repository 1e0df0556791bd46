"""Which worker people mean by a name: a worker is one parent process, and people see its processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

_OVER = "stopped"
_SILENT = ("dead", _OVER)


@dataclass(frozen=True, kw_only=True)
class FleetProcess:
    """One process of a worker, as people see it."""

    id: str
    """The name of its worker, and something random."""
    host: str
    state: str
    parent: UUID | None
    """One life of its parent process; None if that cannot be told anything."""

    @property
    def worker(self) -> str:
        """The name of its worker: the host and the number of the parent process, which others may have later."""
        return self.id.rpartition("-")[0] or self.id

    @property
    def is_over(self) -> bool:
        """Say whether it has ended in good order, and so will not be heard of again."""
        return self.state == _OVER

    @property
    def is_heard(self) -> bool:
        """Say whether it has been heard of lately."""
        return self.state not in _SILENT


def workers_meant(processes: Sequence[FleetProcess], wanted: str) -> list[list[FleetProcess]]:
    """Return the workers, as lists of their processes, that somebody may mean by an id, a worker's name or a host.

    Who has been heard of comes before those that are silent: a worker that was restarted may have the name of before.
    """
    for way in ("id", "worker", "host"):
        found = [one for one in processes if getattr(one, way) == wanted]
        found = [one for one in found if one.is_heard] or [one for one in found if not one.is_over] or found
        if found:
            lives = dict.fromkeys(one.parent or one.worker for one in found)
            return [[one for one in processes if (one.parent or one.worker) == life] for life in lives]
    return []
