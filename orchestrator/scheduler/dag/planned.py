"""A run of a DAG as the leader holds it in memory: its definition, what it was started with, and its plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from orchestrator.domain import timezones
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.placement import of_step
from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.steps import StepProgram


class Compiled:
    """A definition with everything that can be worked out once."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.graph = Graph(definition)
        self.programs = [StepProgram(self.graph, place) for place in range(len(self.graph.steps))]
        self.placements = [of_step(step, definition.queue) for step in self.graph.steps]
        self.dear: set[tuple[str, int]] = set()
        """Kinds of expressions, and places of the steps, that took long to evaluate for one run or another."""

    @cached_property
    def begun(self) -> tuple[Plan, bytes] | None:
        """The plan of a run that has begun, and what it remembers, if its only step is one task whatever it is given.

        All such runs share it, so it is not to be changed.
        """
        if len(self.programs) != 1 or not self.programs[0].is_single or self.graph.steps[0].workflow is not None:
            return None
        plan = Plan(self.graph)
        plan.begin()
        plan.open_single(plan.next_candidate() or 0)
        return plan, timezones.encode(plan.state())


@dataclass
class DagRun:
    """One run in flight."""

    id: bytes
    compiled: Compiled
    params: dict[str, Any]
    info: dict[str, Any]
    plan: Plan
    depth: int = 0
    root: bytes = b""
    """The first of the runs that started each other, and at last this one."""
    params_size: int = 0
    """Bytes of its parameters, as they are stored."""
