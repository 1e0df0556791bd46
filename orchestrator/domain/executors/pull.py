"""Options of tasks for programs that poll for work: behind a firewall, in any language."""

from __future__ import annotations

from typing import Any, ClassVar

from orchestrator.domain.executors.execution import Execution
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.services import service_problem

LARGEST_BODY = 64_000_000
"""Most bytes of JSON that a program gets, where the input stands in the payload store."""


class Pull(ExecutorOptions, frozen=True, kw_only=True):
    """Work that is offered, and leased to a program that asks for it with `POST /queue/poll`."""

    executor: ClassVar[str] = "pull"

    service: str = ""
    """The service; default: the name of the task."""
    params: dict[str, Any] = {}
    """Given beside the input."""
    lease: float = 60.0
    """Seconds of silence after which the work is offered again; heartbeats begin them anew."""
    max_leases: int = 3
    """How many may have it and fall silent, one after another, before it fails."""

    def problems(self) -> list[tuple[str, str]]:
        """Return what types cannot say."""
        found = []
        if self.service and (problem := service_problem(self.service)):
            found.append(("service", problem))
        if not 1 <= self.lease <= 86_400:
            found.append(("lease", f"expected seconds, 1 to 86,400, found {self.lease:g}"))
        if not 1 <= self.max_leases <= 1_000:
            found.append(("max_leases", f"expected 1 to 1000, found {self.max_leases}"))
        return found


def service_of(execution: Execution, options: Pull) -> str:
    """Return under which name it is offered."""
    return options.service or execution.task
