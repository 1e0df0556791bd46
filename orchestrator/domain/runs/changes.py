"""Pending changes of a run: what its counters, its plan or its code have not seen yet.

Mostly a run is notified in the tick in which something happens. If it is stuck, or the tick has no time left, the
change waits in Postgres, in order, and nothing that comes later overtakes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from orchestrator.domain.code.commands import ContinueRun
from orchestrator.domain.code.history import Fact
from orchestrator.domain.tasks.task import TaskError


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
