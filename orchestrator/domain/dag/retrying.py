"""What a retry of a failed DAG run tries again: one rule, from the top of the graph to its end.

- What succeeded stays as it is.
- What failed or was cancelled is tried again. If nothing above it is tried again, it has the input that it had: of a
  fan-out only the tasks that did not succeed run again, and a child run is retried in its turn.
- Else it is considered anew, when all that is tried again above it has ended: its trigger, condition, fan-out and
  input are evaluated as if it had never run. So is what was skipped, if something above it is tried again.
- What a person has opened already goes on. Of a fan-out the other tasks that did not succeed run again, too.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.state import StepState


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
