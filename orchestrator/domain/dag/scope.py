"""The names in expressions of one run, and the cost of evaluating them.

Expressions come from people, and their values come from tasks: a comparison of two long lists in each of ten thousand
items is quickly written. So everything that takes time or makes data is charged here before it is done, and an
evaluation that costs too much fails its step, not the leader that evaluates it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from orchestrator.errors import ExpressionError, InvalidWorkflow

MOST_WORK = 5_000_000
"""The most that one evaluation may cost; a unit is a simple comparison, some tens of nanoseconds."""
ENOUGH_WORK = MOST_WORK // 5
"""After so much of it, a run goes on in the next tick."""
_MOST_AT_ONCE = 2 * MOST_WORK
"""After so much of it, all others go on in the next tick."""
_INDEXED = 32
"""Items from which on it pays to look into a list through an index."""
_COPIED_AT_ONCE = 16
"""Characters or items that are copied or searched in the time of a unit."""
_COMPARED_AT_ONCE = 32
"""Characters of two texts that are compared in the time of a unit."""
_A_NUMBER = 4
"""Bytes that a number may take, on average."""
_LONG = (str, list, tuple, dict)
"""Types that may be long: plain data has no other."""


class TooMuch(Exception):
    """Evaluating costs more than a run may cost the leader."""


class EvaluationBudget:
    """The cost of evaluating so far."""

    __slots__ = ("_began", "_members", "_weights", "most_data", "spent")

    def __init__(self, most_data: int | None = None) -> None:
        self.most_data = most_data
        """Bytes that one value may be made of; None: any."""
        self.spent = 0
        self._began = 0
        self._weights: dict[int, tuple[int, Any]] = {}
        self._members: dict[int, tuple[frozenset[Any] | None, Any]] = {}

    def begin(self) -> None:
        """Begin another evaluation, which may cost as much as each."""
        self._began = self.spent

    def spend(self, units: int) -> None:
        """Charge work before it is done."""
        self.spent += units
        if self.spent - self._began > MOST_WORK:
            raise TooMuch("it takes too much work: it goes through too many values, or through some too often")

    def copy(self, length: int) -> None:
        """Charge the copying, or the searching, of so many characters or items."""
        self.spend(1 + length // _COPIED_AT_ONCE)

    def compare(self, left: Any, right: Any) -> None:
        """Charge a comparison, which may go through the smaller of two values."""
        if isinstance(left, str) and isinstance(right, str):
            self.spend(1 + min(len(left), len(right)) // _COMPARED_AT_ONCE)
        elif isinstance(left, _LONG) and isinstance(right, _LONG):
            self.spend(1 + min(self.weight(left), self.weight(right)) // _A_NUMBER)

    def weight(self, value: Any) -> int:
        """Return about how many bytes a value takes. What several values share is looked at, and charged, once."""
        if isinstance(value, str):
            return len(value) + 2
        if not isinstance(value, _LONG):
            return _A_NUMBER
        known = self._weights.get(id(value))
        if known is None:
            self.spend(len(value))
            total = 2
            if isinstance(value, dict):
                total += sum(len(key) if isinstance(key, str) else _A_NUMBER for key in value)
            for item in value.values() if isinstance(value, dict) else value:
                total += self.weight(item)
            known = self._weights[id(value)] = total, value  # kept, so that nothing else gets this id
        return known[0]

    def members(self, items: list[Any] | tuple[Any, ...]) -> frozenset[Any] | list[Any] | tuple[Any, ...]:
        """Return where to look for a simple value among items: an index, if the list is long and has one."""
        if len(items) < _INDEXED:
            self.spend(len(items))
            return items
        known = self._members.get(id(items))
        if known is None:
            self.spend(2 * len(items))
            try:
                known = frozenset(items), items
            except TypeError:  # a list or an object among them
                known = None, items
            self._members[id(items)] = known
        if known[0] is None:
            self.spend(len(items))
        return items if known[0] is None else known[0]


class Work:
    """The cost of evaluating for many runs. A step that finds the budget of its run, or of all, used up has to wait."""

    def __init__(self) -> None:
        self._spent = 0

    def has_room(self, budget: EvaluationBudget) -> bool:
        """Say whether something may be evaluated for a step."""
        return budget.spent <= ENOUGH_WORK and self._spent <= _MOST_AT_ONCE

    def count(self, cost: int) -> None:
        self._spent += cost


class Scope(dict[str, Any]):
    """Names for expressions. An output that cannot be read fails only the expressions that name it."""

    def __init__(
        self,
        names: Mapping[str, Any],
        budget: EvaluationBudget | None = None,
        unreadable: dict[str, str] | None = None,
        sealed: set[str] | None = None,
        stored: set[str] | None = None,
    ) -> None:
        super().__init__(names)
        self.sealed = set() if sealed is None else sealed
        """Names whose values are sealed, and this process has no key: they can be copied, and not looked at."""
        self.stored = set() if stored is None else stored
        """Names whose values, or parts of them, are in the payload store: they can be copied, and not looked at."""
        self.budget = budget or EvaluationBudget()
        self.unreadable = {} if unreadable is None else unreadable

    def __missing__(self, name: str) -> Any:
        if name in self.unreadable:
            raise InvalidWorkflow(f"The output of task {name!r} cannot be read: {self.unreadable[name]}.")
        raise KeyError(name)

    def check_readable(self, roots: Set[str], what: str) -> None:
        """Refuse to compute with sealed values, for which there is no key, and with stored ones, which are not read."""
        if self.stored and not self.stored.isdisjoint(roots):
            raise ExpressionError(
                f"{what}: {', '.join(sorted(self.stored & roots))} is large and in the payload store, which the "
                f"scheduler does not read. Pass the value on as a whole, let a step make what is asked here a result "
                f"of its own, or raise the setting inline_payload."
            )
        if self.sealed and not self.sealed.isdisjoint(roots):
            raise ExpressionError(
                f"{what}: {', '.join(sorted(self.sealed & roots))} is sealed, and the scheduler has no data key to "
                f"look into it. Give it the setting data_keys, or only pass the value on as a whole."
            )

    def extended(self, more: Mapping[str, Any]) -> Scope:
        """Return a scope that knows more names, at the same expense."""
        wider = Scope(self, self.budget, self.unreadable, self.sealed, self.stored)
        wider.update(more)
        return wider


def scope_of(names: Mapping[str, Any]) -> Scope:
    """Return names as a scope, with a budget of its own if they have none."""
    return names if isinstance(names, Scope) else Scope(names)
