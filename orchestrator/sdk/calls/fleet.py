"""Workers: drain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.sdk.calls.declaring import SYSTEM, call

Name = Annotated[str, Meta(min_length=1, max_length=300)]


@dataclass(frozen=True, kw_only=True)
class Drained:
    """A worker that is being told to drain."""

    worker: str
    """Its name: the host and the number of its parent process."""
    processes: tuple[str, ...]
    """The ids of its processes, all of which end."""
    is_heard: bool
    """It has been heard of lately; else it is told when it is back."""


class FleetCalls(Protocol):
    """Calls about workers."""

    @call(Scope.OPERATE, about=SYSTEM, repeatable=True)
    def drain(self, worker: Name) -> Drained:
        """Have a worker take nothing more, finish what it runs, and end: by its name, its host or a process of it."""
