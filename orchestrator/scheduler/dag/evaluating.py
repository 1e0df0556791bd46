"""Which expressions are evaluated in this tick, and which in a later one.

What an expression costs is known only when it has been evaluated, and how long that takes depends on who else uses the
machine. So the leader looks at its clock before each. When the time of the tick is over, what is cheap goes on for a
little while, so that nobody waits for the expressions of others; of what was dear before, one is evaluated for those
whose turn it is, and the rest waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.domain.dag.scope import Scope, Work
from orchestrator.scheduler.budget import TickBudget
from orchestrator.scheduler.dag.planned import DagRun

_DEAR = 20_000
"""What an evaluation may cost that nobody notices, in the units of `Work`: some milliseconds."""
_A_WHILE = 10 * _DEAR
"""What may be evaluated at once when the time is over."""


class Evaluating:
    """Evaluates one kind of expressions of many steps, as far as there is time."""

    def __init__(self, budget: TickBudget, kind: str) -> None:
        self._budget = budget
        self._kind = kind
        self._work = Work()
        self._spent = 0

    @contextmanager
    def on(self, run: DagRun, place: int, names: Scope) -> Iterator[bool]:
        """Do something for a step, if there is room and time for it, and remember whether it was dear."""
        before = names.budget.spent
        self._budget.step = f"the {self._kind} of step {run.compiled.graph.steps[place].name!r}"
        with self._work.on(names.budget) as has_room:
            yield has_room and not self._waits(run, place)
        self._budget.step = None  # it is left standing if that fails
        cost = names.budget.spent - before
        self._spent += cost
        if cost > _DEAR:
            run.compiled.dear.add((self._kind, place))
            self._budget.evaluated.add(self._kind)

    def _waits(self, run: DagRun, place: int) -> bool:
        is_dear = (self._kind, place) in run.compiled.dear
        if self._spent <= _A_WHILE and not (is_dear and self._kind in self._budget.evaluated):
            return False
        return self._budget.is_spent
