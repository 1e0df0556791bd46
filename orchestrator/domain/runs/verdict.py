"""When a run ends, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import TaskError

TIMED_OUT = "timed out"
"""The reason of a run that took longer than it may."""
CONTINUED = "continued"
"""The reason of a run of code that went on in another, with a history of its own."""
RESET = "reset"
"""The reason of a run of code that was open when it was reset, and went on in the run that repeats it."""
GOES_ON = (CONTINUED, RESET)
TERMINATED = "terminated"
"""The reason of a run of code that was ended without its code. Its state is `cancelled`, and people are shown this."""
WAS_TERMINATED = TaskError("RunTerminated", "The run was terminated: its code was not asked.")
"""Why such a run has no result."""
RAN_TOO_LONG = TaskError("RunTimedOut", "The run took longer than it may.")
"""Why a run of code has failed whose turn task was cancelled when its time was up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCounters:
    """How many of a run's tasks stand where; exact, and never recounted row by row."""

    total: int
    open: int
    success: int = 0
    failed: int = 0
    cancelled: int = 0
    skipped: int = 0

    @property
    def ended(self) -> int:
        """Tasks that have come to an end."""
        return self.total - self.open


def verdict(counters: RunCounters, cancelling: bool, timed_out: bool = False) -> RunState | None:
    """Return the state in which a run ends, or None while a task of it is open."""
    if counters.open:
        return None
    if timed_out:
        return RunState.FAILED
    if cancelling:
        return RunState.CANCELLED
    return RunState.FAILED if counters.failed or counters.cancelled else RunState.SUCCESS


# -- how far runs may start runs


class Nesting(NamedTuple):
    """The limits of a tree of runs that start each other."""

    depth: int = 100
    """Runs above a run."""
    descendants: int = 100_000
    """Runs below the first."""

    def too_deep(self, workflow: str, depth: int) -> str:
        """Say why a run of a workflow is not started."""
        return (
            f"A run of workflow {workflow!r} would be {depth:,} runs below the first, and at most {self.depth:,} are "
            f"allowed. Does it start itself without end? Else raise the setting max_depth."
        )

    def too_many(self, workflow: str) -> str:
        """Say why runs of a workflow are not started."""
        return (
            f"Runs of workflow {workflow!r} are not started: at most {self.descendants:,} are allowed below one run. "
            f"Does it start itself without end? Else raise the setting max_descendants."
        )
