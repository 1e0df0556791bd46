"""The state of a DAG run: its steps, and the progress of its fan-outs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain.dag.definition import Trigger
from orchestrator.domain.dag.graph import Graph


class StepState(IntEnum):
    """The state of a step, stored as one byte."""

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
    """The progress of a fan-out."""

    total: int
    created: int = 0
    success: int = 0
    failed: int = 0
    cancelled: int = 0
    skipped: int = 0
    held: int = 0
    """Unsuccessful tasks to reopen when there is room."""

    @property
    def ended(self) -> int:
        return self.success + self.failed + self.cancelled + self.skipped


class DagState(msgspec.Struct, array_like=True):
    """The stored state of a run between two ticks."""

    steps: bytes
    fans: dict[int, Fan] = {}
    reasons: dict[int, str] = {}
    """Why steps were skipped, or failed without a task."""
    stopping: bool = False
    """No further steps start: the run is being cancelled or has timed out."""
    retried: int = 0
    """The number of retries of the run."""
    retried_at: float = 0.0
    """The time of the last retry, in Unix seconds."""

    @property
    def successes(self) -> list[int]:
        """The successful steps."""
        return [index for index, state in enumerate(self.steps) if state == StepState.SUCCESS]


@dataclass
class Delta:
    """Changes to the counters of a run."""

    total: int = 0
    opened: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def end(self, state: StepState, number: int = 1) -> None:
        self.opened -= number
        name = COUNTER_OF[state]
        self.counts[name] = self.counts.get(name, 0) + number


def kept_state(graph: Graph, state: DagState, from_step: str) -> DagState:
    """Return the initial state of a run that starts over from a step: successful steps not below it are kept."""
    start = graph.index[from_step]
    below = {start, *graph.below([start])}
    steps = bytes(
        StepState.SUCCESS if step_state == StepState.SUCCESS and index not in below else StepState.WAITING
        for index, step_state in enumerate(state.steps)
    )
    return DagState(steps, {index: fan for index, fan in state.fans.items() if steps[index]})


def step_output(
    state: int, fan: Fan | None, results: Iterable[tuple[int, bytes | None]], decode: Callable[[bytes], Any]
) -> Any:
    """Return the output of a step from the results of its tasks, by position.

    For a fan-out it is a list with None for each unsuccessful task. For an unsuccessful step it is None.
    """
    if fan is not None:
        values: list[Any] = [None] * fan.total
        for position, result in results:
            values[position] = None if result is None else decode(result)
        return values
    if state != StepState.SUCCESS:
        return None
    return next((decode(result) for _, result in results if result is not None), None)


# -- triggers: whether a step starts, from the outcomes of the steps above it


def decide(trigger: Trigger, parents: int, tally: Mapping[int, int] | list[int]) -> bool | None:
    """Return whether a trigger fires (True), can no longer fire (False), or is not certain yet (None)."""
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


# -- the steps that a retry of a failed run repeats, decided from the top of the graph to its end
#
# - Successful steps stay as they are.
# - Failed and cancelled steps are retried. Without a retried step above, they resume with their previous input: in a
#   fan-out only the unsuccessful tasks run again, and a child run is retried itself.
# - With a retried step above, they start over when all of these have ended: trigger, condition, fan-out and input are
#   evaluated as if the step had never run. The same holds for skipped steps below a retried step.
# - Steps that a user has reopened already continue. In a fan-out, the other unsuccessful tasks run again, too.


class Retry(NamedTuple):
    """The steps of a run that a retry repeats."""

    resumed: list[int]
    """Steps that resume with the input that they had."""
    restarted: list[int]
    """Steps that start over as if they had never run."""


def to_retry(graph: Graph, steps: bytes | bytearray, resumable: Container[int]) -> Retry:
    """Return the steps to retry in an ended run. `resumable` are the steps that can resume."""
    again: list[int] = []
    anew: list[int] = []
    affected = bytearray(len(graph.steps))
    """Steps that are retried, or below one that is."""
    for index in graph.order:
        is_below = any(affected[parent] for parent in graph.upstream[index])
        state = steps[index]
        if state in (StepState.FAILED, StepState.CANCELLED) or (state == StepState.SKIPPED and is_below):
            (again if index in resumable and not is_below else anew).append(index)
            is_below = True
        elif state in (StepState.OPEN, StepState.WAITING):
            if index in resumable and not is_below:
                again.append(index)
            is_below = True
        affected[index] = is_below
    return Retry(again, anew)
