"""The names in expressions of one run, and the cost of evaluating them.

Users write the expressions, and tasks return the values, so an expensive expression is easily written: a comparison of
two long lists for each of ten thousand items. So all work is charged to a budget in advance. An evaluation that exceeds
it fails its step and does not block the leader.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from orchestrator.errors import ExpressionError, InvalidWorkflow

MAX_WORK = 5_000_000
"""The maximum cost of one evaluation. A unit is a simple comparison, some tens of nanoseconds."""
WORK_PER_TICK = MAX_WORK // 5
"""The cost after which a run continues in the next tick."""
_MAX_PER_TICK = 2 * MAX_WORK
"""The total cost after which all other runs wait for the next tick."""
_MIN_INDEXED = 32
"""The length from which an index pays for lookups in a list."""
_COPIED_PER_UNIT = 16
"""Characters or items copied or searched per unit of cost."""
_COMPARED_PER_UNIT = 32
"""Characters of two strings compared per unit of cost."""
_NUMBER_SIZE = 4
"""Average bytes of a number."""
_CONTAINERS = (str, list, tuple, dict)
"""Types of plain data that may be long."""


class TooMuch(Exception):
    """An evaluation exceeds its budget."""


class EvaluationBudget:
    """The cost of evaluations so far."""

    __slots__ = ("_began", "_members", "_weights", "most_data", "spent")

    def __init__(self, most_data: int | None = None) -> None:
        self.most_data = most_data
        """Bytes of one rendered template, at most. None for no limit."""
        self.spent = 0
        self._began = 0
        self._weights: dict[int, tuple[int, Any]] = {}
        self._members: dict[int, tuple[frozenset[Any] | None, Any]] = {}

    def begin(self) -> None:
        """Begin another evaluation with the full budget."""
        self._began = self.spent

    def spend(self, units: int) -> None:
        """Charge work in advance."""
        self.spent += units
        if self.spent - self._began > MAX_WORK:
            raise TooMuch("it takes too much work: it reads too many values, or some values too often")

    def copy(self, length: int) -> None:
        """Charge copying or searching `length` characters or items."""
        self.spend(1 + length // _COPIED_PER_UNIT)

    def compare(self, left: Any, right: Any) -> None:
        """Charge a comparison, which may traverse the smaller value."""
        if isinstance(left, str) and isinstance(right, str):
            self.spend(1 + min(len(left), len(right)) // _COMPARED_PER_UNIT)
        elif isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS):
            self.spend(1 + min(self.weight(left), self.weight(right)) // _NUMBER_SIZE)

    def weight(self, value: Any) -> int:
        """Return the approximate size of a value in bytes. Shared parts are measured and charged once."""
        if isinstance(value, str):
            return len(value) + 2
        if not isinstance(value, _CONTAINERS):
            return _NUMBER_SIZE
        cached = self._weights.get(id(value))
        if cached is None:
            self.spend(len(value))
            total = 2
            if isinstance(value, dict):
                total += sum(len(key) if isinstance(key, str) else _NUMBER_SIZE for key in value)
            for item in value.values() if isinstance(value, dict) else value:
                total += self.weight(item)
            cached = self._weights[id(value)] = total, value  # keep a reference, so that the id is not reused
        return cached[0]

    def members(self, items: list[Any] | tuple[Any, ...]) -> frozenset[Any] | list[Any] | tuple[Any, ...]:
        """Return a container for looking up a simple value among items: a frozenset if the list is long."""
        if len(items) < _MIN_INDEXED:
            self.spend(len(items))
            return items
        cached = self._members.get(id(items))
        if cached is None:
            self.spend(2 * len(items))
            try:
                cached = frozenset(items), items
            except TypeError:  # unhashable items
                cached = None, items
            self._members[id(items)] = cached
        if cached[0] is None:
            self.spend(len(items))
        return items if cached[0] is None else cached[0]


class Work:
    """The cost of evaluations for all runs in one tick. Steps wait when the share of their run, or the total, is used
    up."""

    def __init__(self) -> None:
        self._spent = 0

    def has_room(self, budget: EvaluationBudget) -> bool:
        """Return whether another step may be evaluated."""
        return budget.spent <= WORK_PER_TICK and self._spent <= _MAX_PER_TICK

    def count(self, cost: int) -> None:
        self._spent += cost


class Scope(dict[str, Any]):
    """Names for expressions. An unreadable output fails only expressions that use it."""

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
        """Names with sealed values that this process cannot decrypt: they can be copied but not read."""
        self.stored = set() if stored is None else stored
        """Names with values in the payload store: they can be copied but not read."""
        self.budget = budget or EvaluationBudget()
        self.unreadable = {} if unreadable is None else unreadable

    def __missing__(self, name: str) -> Any:
        if name in self.unreadable:
            raise InvalidWorkflow(f"The output of task {name!r} cannot be read: {self.unreadable[name]}.")
        raise KeyError(name)

    def check_readable(self, roots: Set[str], what: str) -> None:
        """Raise ExpressionError if sealed or stored values would have to be read."""
        if self.stored and not self.stored.isdisjoint(roots):
            raise ExpressionError(
                f"{what}: {', '.join(sorted(self.stored & roots))} is large and in the payload store, which the "
                f"scheduler does not read. Pass the value on unchanged, have a step return the needed part as its own "
                f"result, or raise the setting inline_payload."
            )
        if self.sealed and not self.sealed.isdisjoint(roots):
            raise ExpressionError(
                f"{what}: {', '.join(sorted(self.sealed & roots))} is sealed, and the scheduler has no data key to "
                f"read it. Set data_keys for the scheduler, or only pass the value on unchanged."
            )

    def extended(self, more: Mapping[str, Any]) -> Scope:
        """Return a scope with more names and the same budget."""
        wider = Scope(self, self.budget, self.unreadable, self.sealed, self.stored)
        wider.update(more)
        return wider


def scope_of(names: Mapping[str, Any]) -> Scope:
    """Return names as a scope, with a new budget if they have none."""
    return names if isinstance(names, Scope) else Scope(names)
