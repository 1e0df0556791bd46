"""When a run ends, and how."""

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


# -- pending changes of a run: what its counters, its plan or its code have not seen yet.
#
# Mostly a run is notified in the tick in which something happens. If it is stuck, or the tick has no time left, the
# change waits in Postgres, in order, and nothing that comes later overtakes it.


class TurnTaskEnd(NamedTuple):
    """The end of the turn task of a run of a workflow as code, which ends the run."""

    id: bytes
    state: str
    result: bytes | None
    error: TaskError | None
    inline: bytes | None = None
    """The result, if it is small enough for the message to waiting clients."""


Steps = dict[tuple[str, str], int]
"""By step and state, how many of its tasks or child runs."""


class RunChanges(msgspec.Struct, array_like=True):
    """The changes of one run, in one tick. Its plan applies them in the order of the fields, but for `closed`."""

    delta: dict[str, int] = msgspec.field(default_factory=Counter)
    """How much each counter changes by what moved."""
    begun: bool = False
    ended: Steps = {}
    stopped: bool = False
    """It was cancelled, or has timed out, while it was stuck."""
    is_retried: bool = False
    """A person retries it, and it has begun again."""
    reopened: Steps = {}
    """Tasks that a person retries, with the states that these had."""
    is_expanding: bool = False
    """More of its tasks are to be created."""
    facts: list[Fact] = []
    """Events for its code, if it has any."""
    turn_task_end: TurnTaskEnd | None = None
    continuing: ContinueRun | None = None
    closed: bool = False
    """It had ended, and its open tasks were cancelled with it. The plan gets this before a retry."""
    of_flow: bool = False
    """It is a run of a flow, and the facts are for its planner."""
    heard: int | None = None
    """The last event that its code was shown before it ended, if more has happened."""

    def count_end(self, state: str) -> None:
        """Count a task or a child run that has ended."""
        self.delta[state] += 1
        self.delta["opened"] -= 1

    def count_reopened(self, step: str | None, before: str) -> None:
        """Count a task that a person retries."""
        self.delta[before] -= 1
        self.delta["opened"] += 1
        if step is not None:
            self.reopened[step, before] += 1

    def add(self, other: RunChanges) -> None:
        """Add what else was counted in the same tick."""
        for name, number in other.delta.items():
            self.delta[name] += number
        for mine, more in ((self.ended, other.ended), (self.reopened, other.reopened)):
            for step, number in more.items():
                mine[step] += number
        self.facts += other.facts
        self.of_flow |= other.of_flow

    @property
    def facts_for_code(self) -> list[Fact]:
        """Return what its code learns, if it has any."""
        return [] if self.of_flow else self.facts

    @property
    def is_for_plan(self) -> bool:
        """Say whether a plan must be notified, if the run has one."""
        return bool(self.ended) or self.of_flow or self.is_for_all_steps

    @property
    def is_for_all_steps(self) -> bool:
        """Say whether a plan has to look at every step."""
        return self.begun or self.stopped or self.is_retried or bool(self.reopened) or self.is_expanding


def total(some: Iterable[RunChanges]) -> Counter[str]:
    """Return how much each counter changes by all of these."""
    delta: Counter[str] = Counter()
    for changes in some:
        for name, number in changes.delta.items():
            delta[name] += number
    return delta
