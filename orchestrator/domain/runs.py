"""The end of a run: when it ends, and in which state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from orchestrator.domain.code.commands import ContinueRun
from orchestrator.domain.code.history import Fact
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import TaskError

TIMED_OUT = "timed out"
"""The reason of a run that ran longer than its timeout."""
CONTINUED = "continued"
"""The reason of a code run that continued as a new run, with a history of its own."""
RESET = "reset"
"""The reason of a code run that was reset while it was open. Its successor repeats it."""
CONTINUATION_REASONS = (CONTINUED, RESET)
TERMINATED = "terminated"
"""The reason of a code run ended without its code. Its state is `cancelled`, but displayed as `terminated`."""
WAS_TERMINATED = TaskError("RunTerminated", "The run was terminated: its code was not asked.")
"""The error of a terminated run."""
RAN_TOO_LONG = TaskError("RunTimedOut", "The run took longer than it may.")
"""The error of a code run whose turn task was cancelled because the run timed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCounters:
    """How many of a run's tasks are in each state. The counters are exact and never recounted from rows."""

    total: int
    open: int
    success: int = 0
    failed: int = 0
    cancelled: int = 0
    skipped: int = 0

    @property
    def ended(self) -> int:
        """Ended tasks."""
        return self.total - self.open


def verdict(counters: RunCounters, cancelling: bool, timed_out: bool = False) -> RunState | None:
    """Return the state in which a run ends, or None while it has open tasks."""
    if counters.open:
        return None
    if timed_out:
        return RunState.FAILED
    if cancelling:
        return RunState.CANCELLED
    return RunState.FAILED if counters.failed or counters.cancelled else RunState.SUCCESS


# -- limits of runs that start runs


class Nesting(NamedTuple):
    """Limits of a tree of runs that start each other."""

    depth: int = 100
    """Ancestors of a run, at most."""
    descendants: int = 100_000
    """Runs below the root, at most."""

    def too_deep(self, workflow: str, depth: int) -> str:
        """Return the error message for a run that would be nested too deeply."""
        return (
            f"A run of workflow {workflow!r} would be {depth:,} runs below the first, and at most {self.depth:,} are "
            f"allowed. Does it start itself without end? Else raise the setting max_depth."
        )

    def too_many(self, workflow: str) -> str:
        """Return the error message for runs that would exceed the limit of descendants."""
        return (
            f"Runs of workflow {workflow!r} are not started: at most {self.descendants:,} are allowed below one run. "
            f"Does it start itself without end? Else raise the setting max_descendants."
        )


# -- pending changes: changes of a run that its counters, its plan or its code have not seen yet.
#
# Most changes are applied in the tick in which they happen. If the run is stuck, or the tick has no time left, they
# wait in Postgres and are applied in order.


class TurnTaskEnd(NamedTuple):
    """The end of a code run's turn task, which ends the run."""

    id: bytes
    state: str
    result: bytes | None
    error: TaskError | None
    inline: bytes | None = None
    """The result, if it is small enough for the message to waiting clients."""


Steps = dict[tuple[str, str], int]
"""Number of tasks or child runs by step and state."""


class RunChanges(msgspec.Struct, array_like=True):
    """The changes of one run in one tick. The plan applies them in the order of the fields, except `closed`."""

    delta: dict[str, int] = msgspec.field(default_factory=Counter)
    """By counter, the difference to add."""
    begun: bool = False
    ended: Steps = {}
    stopped: bool = False
    """The run was cancelled or timed out while it was stuck."""
    is_retried: bool = False
    """A user retried the run, and it was started again."""
    reopened: Steps = {}
    """Tasks that a user retried, with their states before."""
    is_expanding: bool = False
    """More tasks of the run remain to be created."""
    facts: list[Fact] = []
    """Events for the run's code or flow planner."""
    turn_task_end: TurnTaskEnd | None = None
    continuing: ContinueRun | None = None
    closed: bool = False
    """The run had ended, and its open tasks were cancelled with it. The plan applies this before a retry."""
    of_flow: bool = False
    """The run is a flow, and the facts are for its planner."""
    last_seen: int | None = None
    """The number of the last event that the code saw before it ended, if later events exist."""
    withheld: list[str] = []
    """Steps that must not start."""

    def count_end(self, state: str) -> None:
        """Count an ended task or child run."""
        self.delta[state] += 1
        self.delta["opened"] -= 1

    def count_reopened(self, step: str | None, before: str) -> None:
        """Count a task that a user retries."""
        self.delta[before] -= 1
        self.delta["opened"] += 1
        if step is not None:
            self.reopened[step, before] += 1

    def add(self, other: RunChanges) -> None:
        """Add other changes of the same run and tick."""
        for name, number in other.delta.items():
            self.delta[name] += number
        for mine, more in ((self.ended, other.ended), (self.reopened, other.reopened)):
            for step, number in more.items():
                mine[step] += number
        self.facts += other.facts
        self.of_flow |= other.of_flow

    @property
    def facts_for_code(self) -> list[Fact]:
        """The events for the run's code. Empty for a flow."""
        return [] if self.of_flow else self.facts

    @property
    def is_for_plan(self) -> bool:
        """Whether the run's plan, if it has one, must be notified."""
        return bool(self.ended or self.withheld) or self.of_flow or self.is_for_all_steps

    @property
    def is_for_all_steps(self) -> bool:
        """Whether the plan must examine every step."""
        return self.begun or self.stopped or self.is_retried or bool(self.reopened) or self.is_expanding


def total(all_changes: Iterable[RunChanges]) -> Counter[str]:
    """Return the sum of all counter differences."""
    delta: Counter[str] = Counter()
    for changes in all_changes:
        for name, number in changes.delta.items():
            delta[name] += number
    return delta
