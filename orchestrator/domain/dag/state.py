"""The state of a run of a DAG: its steps, and how far its fan-outs have come."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain.dag.definition import Trigger
from orchestrator.domain.dag.graph import Graph


class StepState(IntEnum):
    """Where a step of a run stands; one byte of the run's state."""

    WAITING = 0
    OPEN = 1
    SUCCESS = 2
    FAILED = 3
    SKIPPED = 4
    CANCELLED = 5


ENDED = (StepState.SUCCESS, StepState.FAILED, StepState.SKIPPED, StepState.CANCELLED)
COUNTER_OF = {
    StepState.SUCCESS: "success",
    StepState.FAILED: "failed",
    StepState.SKIPPED: "skipped",
    StepState.CANCELLED: "cancelled",
}
STATE_OF_TASK = {name: state for state, name in COUNTER_OF.items()}


class Fan(msgspec.Struct, array_like=True):
    """How far a fan-out has come."""

    total: int
    created: int = 0
    success: int = 0
    failed: int = 0
    cancelled: int = 0
    skipped: int = 0
    held: int = 0
    """Tasks that did not succeed and are to be opened again, as soon as there is room."""

    @property
    def ended(self) -> int:
        return self.success + self.failed + self.cancelled + self.skipped


class DagState(msgspec.Struct, array_like=True):
    """All that is remembered of a run between two ticks."""

    steps: bytes
    fans: dict[int, Fan] = {}
    reasons: dict[int, str] = {}
    """Why steps were skipped, or failed without a task."""
    stopping: bool = False
    """Nothing new is started: the run is being cancelled or has timed out."""
    retried: int = 0
    """How often it was tried again."""
    retried_at: float = 0.0
    """When that was the last time, in seconds since 1970."""

    @property
    def successes(self) -> list[int]:
        """The steps that have succeeded."""
        return [place for place, state in enumerate(self.steps) if state == StepState.SUCCESS]


@dataclass
class Delta:
    """Changes of a plan to the counters of its run."""

    total: int = 0
    opened: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def end(self, state: StepState, number: int = 1) -> None:
        self.opened -= number
        name = COUNTER_OF[state]
        self.counts[name] = self.counts.get(name, 0) + number


def kept_state(graph: Graph, state: DagState, from_step: str) -> DagState:
    """Return the state with which a run is started over from a step: all that succeeded and is not below it stays."""
    start = graph.index[from_step]
    below = {start, *graph.below([start])}
    steps = bytes(
        StepState.SUCCESS if now == StepState.SUCCESS and place not in below else StepState.WAITING
        for place, now in enumerate(state.steps)
    )
    return DagState(steps, {place: fan for place, fan in state.fans.items() if steps[place]})


def step_output(
    state: int, fan: Fan | None, results: Iterable[tuple[int, bytes | None]], decode: Callable[[bytes], Any]
) -> Any:
    """Return a step's output from the results of its tasks, by position.

    Of a fan-out that is the ordered list, with None for what did not succeed; of a step that did not succeed, None.
    """
    if fan is not None:
        values: list[Any] = [None] * fan.total
        for position, result in results:
            values[position] = None if result is None else decode(result)
        return values
    if state != StepState.SUCCESS:
        return None
    return next((decode(result) for _, result in results if result is not None), None)


# -- when the trigger of a step fires, from how the steps above it have ended


def decide(trigger: Trigger, parents: int, tally: Mapping[int, int] | list[int]) -> bool | None:
    """Say whether a trigger fires (True), can no longer fire (False), or is not certain yet (None)."""
    success = tally[StepState.SUCCESS]
    failed = tally[StepState.FAILED] + tally[StepState.CANCELLED]
    skipped = tally[StepState.SKIPPED]
    complete = success + failed + skipped == parents
    if not parents:
        return True
    if trigger == "all_success":
        return False if failed or skipped else complete or None
    if trigger == "none_failed":
        return False if failed else complete or None
    if trigger == "any_success":
        return True if success else (False if complete else None)
    if trigger == "any_failed":
        return True if failed else (False if complete else None)
    return complete or None


# -- what a retry of a failed run tries again: one rule, from the top of the graph to its end
#
# - What succeeded stays as it is.
# - What failed or was cancelled is tried again. If nothing above it is tried again, it has the input that it had: of a
#   fan-out only the tasks that did not succeed run again, and a child run is retried in its turn.
# - Else it is considered anew, when all that is tried again above it has ended: its trigger, condition, fan-out and
#   input are evaluated as if it had never run. So is what was skipped, if something above it is tried again.
# - What a person has opened already goes on. Of a fan-out the other tasks that did not succeed run again, too.


class Retry(NamedTuple):
    """The steps of a run that are tried again."""

    again: list[int]
    """Fan-outs and child workflows that go on with the input that they had."""
    anew: list[int]
    """Steps that are considered as if they had never run."""


def to_retry(graph: Graph, steps: bytes | bytearray, resumable: Container[int]) -> Retry:
    """Return what is tried again of a run that had ended; `resumable` are the steps that can go on where they are."""
    again: list[int] = []
    anew: list[int] = []
    tried = bytearray(len(graph.steps))
    """Steps that are tried again, or stand below one."""
    for place in graph.order:
        below = any(tried[parent] for parent in graph.upstream[place])
        state = steps[place]
        if state in (StepState.FAILED, StepState.CANCELLED) or (state == StepState.SKIPPED and below):
            (again if place in resumable and not below else anew).append(place)
            below = True
        elif state in (StepState.OPEN, StepState.WAITING):
            if place in resumable and not below:
                again.append(place)
            below = True
        tried[place] = below
    return Retry(again, anew)
