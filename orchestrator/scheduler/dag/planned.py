"""A run of a DAG as the leader holds it in memory: its definition, what it was started with, and its plan."""

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
    """A definition with everything that can be worked out once."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.graph = Graph(definition)
        self.programs = [StepProgram(self.graph, place) for place in range(len(self.graph.steps))]
        self.result = result_template(definition)
        """What a run of a composition comes to; None if it is a run of another definition."""
        self.last = self.graph.leaves
        """The steps whose outputs a run gives to its parent."""
        if self.result is not None:
            self.last = [self.graph.index[name] for name in sorted(self.result.roots)]
        self.placements = [of_step(step, definition.queue) for step in self.graph.steps]
        self.expensive: set[tuple[str, int]] = set()
        """Kinds of expressions, and places of the steps, that took long to evaluate for one run or another."""

    def output(self, names: Mapping[str, Any]) -> Any:
        """Return what a run gives to its parent, by the outputs of its last steps."""
        ends = {name: names.get(name) for name in (self.graph.steps[place].name for place in self.last)}
        return ends if self.result is None else self.result.render(ends)

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

    def open(self, place: int, names: Scope, said: Callable[[Exception], str] = str) -> bool:
        """Decide what a candidate becomes; True if that is a single task."""
        try:
            decision = self.compiled.programs[place].decide(names)
        except InvalidWorkflow as error:
            self.plan.fail(place, said(error))
            return False
        if isinstance(decision, Skip):
            self.plan.skip(place, decision.reason)
        elif isinstance(decision, FanOut):
            self.plan.open_fan(place, decision.total)
        else:
            self.plan.open_single(place)
            return True
        return False


_EXPENSIVE = 20_000
"""The cost from which on an evaluation is expensive, in the units of `Work`: some milliseconds."""
_A_WHILE = 10 * _EXPENSIVE
"""The cost that may be evaluated at once when the time is over."""


class Evaluating:
    """Evaluates one kind of expressions of many steps, as far as there is time.

    The cost of an expression is known only after its evaluation, and depends on the load of the machine. So the leader
    looks at its clock before each. When the time of the tick is over, cheap expressions continue for a little while, so
    that they do not wait for expensive ones; of those that were expensive before, one is evaluated for the runs whose
    turn it is, and the rest waits.
    """

    def __init__(self, budget: TickBudget, kind: str) -> None:
        self._budget = budget
        self._kind = kind
        self._work = Work()
        self._spent = 0

    @contextmanager
    def on(self, run: DagRun, place: int, names: Scope) -> Iterator[bool]:
        """Do something for a step, if there is room and time for it, and remember whether it was expensive."""
        before = names.budget.spent
        self._budget.step = f"the {self._kind} of step {run.compiled.graph.steps[place].name!r}"
        yield self._work.has_room(names.budget) and not self._waits(run, place)
        self._budget.step = None  # it is left standing if that fails
        cost = names.budget.spent - before
        self._work.count(cost)
        self._spent += cost
        if cost > _EXPENSIVE:
            run.compiled.expensive.add((self._kind, place))
            self._budget.evaluated.add(self._kind)

    def _waits(self, run: DagRun, place: int) -> bool:
        is_expensive = (self._kind, place) in run.compiled.expensive
        if self._spent <= _A_WHILE and not (is_expensive and self._kind in self._budget.evaluated):
            return False
        return self._budget.is_spent
