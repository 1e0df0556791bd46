"""A run of a DAG in the leader's memory: its definition, parameters and plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from orchestrator.domain import timezones
from orchestrator.domain.dag.composed import result_template
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.placement import of_step
from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.scope import Scope, Work
from orchestrator.domain.dag.steps import FanOut, Skip, StepProgram
from orchestrator.errors import InvalidWorkflow
from orchestrator.scheduler.budget import TickBudget


class Compiled:
    """A definition with everything derived from it alone."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.graph = Graph(definition)
        self.programs = [StepProgram(self.graph, step_index) for step_index in range(len(self.graph.steps))]
        self.result = result_template(definition)
        """The template of the result, for a composition; otherwise None."""
        self.last = self.graph.leaves
        """The steps whose outputs the run returns to its parent."""
        if self.result is not None:
            self.last = [self.graph.index[name] for name in sorted(self.result.roots)]
        self.placements = [of_step(step, definition.queue) for step in self.graph.steps]
        self.expensive: set[tuple[str, int]] = set()
        """Kinds of expressions, and indexes of steps, that were expensive to evaluate in some run."""

    def output(self, names: Mapping[str, Any]) -> Any:
        """Return the result of a run for its parent, from the outputs of its last steps."""
        ends = {name: names.get(name) for name in (self.graph.steps[step_index].name for step_index in self.last)}
        return ends if self.result is None else self.result.render(ends)

    @cached_property
    def begun(self) -> tuple[Plan, bytes] | None:
        """The plan of a run that has begun, and its encoded state, if the definition is a single unconditional task.

        All such runs share the plan, so it must not be changed.
        """
        if len(self.programs) != 1 or not self.programs[0].is_single or self.graph.steps[0].workflow is not None:
            return None
        plan = Plan(self.graph)
        plan.begin()
        plan.open_single(plan.next_candidate() or 0)
        return plan, timezones.encode(plan.state())


@dataclass
class DagRun:
    id: bytes
    compiled: Compiled
    params: dict[str, Any]
    info: dict[str, Any]
    plan: Plan
    depth: int = 0
    root: bytes = b""
    """The topmost run of the tree of parents and children."""
    params_size: int = 0
    """Bytes of the stored parameters."""

    def open(self, step_index: int, names: Scope, describe: Callable[[Exception], str] = str) -> bool:
        """Decide what to do with a candidate step. Return True if it becomes a single task."""
        try:
            decision = self.compiled.programs[step_index].decide(names)
        except InvalidWorkflow as error:
            self.plan.fail(step_index, describe(error))
            return False
        if isinstance(decision, Skip):
            self.plan.skip(step_index, decision.reason)
        elif isinstance(decision, FanOut):
            self.plan.open_fan(step_index, decision.total)
        else:
            self.plan.open_single(step_index)
            return True
        return False


_EXPENSIVE = 20_000
"""The cost of an expensive evaluation, in units of `Work`: some milliseconds."""
_OVERTIME = 10 * _EXPENSIVE
"""The cost of evaluations allowed after the time of the tick is over."""


class Evaluating:
    """Evaluates one kind of expression for many steps, while there is time.

    The cost of an expression is known only afterwards, and depends on the load of the machine, so the clock is checked
    before each. When the tick's time is over, cheap expressions continue for a moment ahead of expensive ones. Of the
    expressions known to be expensive, one in each part of a tick is evaluated, and the rest waits.
    """

    def __init__(self, budget: TickBudget, kind: str) -> None:
        self._budget = budget
        self._kind = kind
        self._work = Work()
        self._spent = 0

    @contextmanager
    def on(self, run: DagRun, step_index: int, names: Scope) -> Iterator[bool]:
        """Yield whether a step may be evaluated now, and record whether that was expensive."""
        before = names.budget.spent
        self._budget.step = f"the {self._kind} of step {run.compiled.graph.steps[step_index].name!r}"
        yield self._work.has_room(names.budget) and not self._waits(run, step_index)
        self._budget.step = None  # remains set if the evaluation fails
        cost = names.budget.spent - before
        self._work.count(cost)
        self._spent += cost
        if cost > _EXPENSIVE:
            run.compiled.expensive.add((self._kind, step_index))
            self._budget.evaluated.add(self._kind)

    def _waits(self, run: DagRun, step_index: int) -> bool:
        is_expensive = (self._kind, step_index) in run.compiled.expensive
        if self._spent <= _OVERTIME and not (is_expensive and self._kind in self._budget.evaluated):
            return False
        return self._budget.is_spent
