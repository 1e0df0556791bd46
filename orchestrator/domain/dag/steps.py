"""The evaluation of a step when it starts: its condition, its fan-out, and the input and keys of its tasks.

Names in expressions: `params`, `run`, every step above by name (its output: a list for a fan-out, None if it did not
succeed), and in a fan-out's input `item`, `index` and `count`.

The input of a task is one mapping: the outputs of the steps in `depends_on` by name, overridden by the step's own
`input`. The output from which a fan-out is made is not repeated in each of its tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.domain.dag.definition import Step
from orchestrator.domain.dag.expression import Expression, parse, parse_template
from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.operators import MAX_LENGTH, describe
from orchestrator.domain.dag.scope import WORK_PER_TICK, Scope
from orchestrator.domain.limits.lane_limits import MAX_KEY_LENGTH, key_text
from orchestrator.errors import ExpressionError
from orchestrator.references import stored_items

_OF_ITEM = frozenset({"item", "index", "count"})
_NOT_STEPS = _OF_ITEM | {"params", "run"}


@dataclass(frozen=True)
class Skip:
    """The condition is not met."""

    reason: str


@dataclass(frozen=True)
class Single:
    """The step is one task."""


@dataclass(frozen=True)
class FanOut:
    """The step has one task for each item, or a given number of tasks."""

    total: int


class Instance(NamedTuple):
    """The input of one task or child run of a step."""

    input: dict[str, Any]
    key: str | None


class StepProgram:
    """The parsed expressions of a step."""

    def __init__(self, graph: Graph, index: int) -> None:
        step = graph.steps[index]
        self.step: Step = step
        self._when = _expression(step.when)
        self._foreach = _expression(step.foreach)
        self._parallel = _expression(step.parallel) if isinstance(step.parallel, str) else None
        self._input = parse_template(step.input)
        self._key = parse_template(step.concurrency_key)
        self.is_single = self._when is None and self._foreach is None and step.parallel is None
        """The step is always one task, without a condition or a fan-out."""
        source = fan_out_sources(step)
        ignored = step.registered.ignored if step.registered is not None else ()
        self._merged = tuple(name for name in step.depends_on if name not in source and name not in ignored)
        self._with_item = step.foreach is not None and step.runs_task and "item" not in ignored
        self.decision_needs = tuple(
            graph.index[name] for name in sorted({*source, *(self._when.roots if self._when else ())} - _NOT_STEPS)
        )
        """The steps whose outputs are needed to decide condition and fan-out."""
        items = self._foreach.roots if self._foreach is not None else frozenset()
        roots = {*self._input.roots, *self._key.roots, *items} - _NOT_STEPS
        self.creation_needs = tuple(
            graph.index[name] for name in sorted({*roots, *(self._merged if step.runs_task else ())})
        )
        """The steps whose outputs are needed to create the tasks or child runs."""

    def decide(self, names: Scope) -> Skip | Single | FanOut:
        """Evaluate the condition and the fan-out."""
        names.budget.begin()
        if self._when is not None:
            names.check_readable(self._when.roots, f"when: {self.step.when}")
            if not self._when.evaluate(names):
                return Skip(f"when: {self.step.when}")
        if self._foreach is not None:
            return FanOut(len(self._items(names)))
        if isinstance(self.step.parallel, int):
            return FanOut(self.step.parallel)
        if self._parallel is not None:
            number = self._parallel.evaluate(names)
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_LENGTH:
                raise ExpressionError(
                    f"parallel: {self.step.parallel}: expected a whole number up to {MAX_LENGTH:,}, "
                    f"found {describe(number)}."
                )
            return FanOut(number)
        return Single()

    def instances(self, names: Scope, positions: Sequence[int], count: int | None) -> Iterator[Instance]:
        """Yield input and concurrency key of the tasks at these positions. `count` is the size of the fan-out.

        The iterator ends early when evaluating more would take too long for this tick.
        """
        budget = names.budget
        spent_before = budget.spent
        budget.begin()
        base = {name: names[name] for name in self._merged} if self.step.runs_task else {}
        if count is None:
            yield Instance(base | self._input.render(names), self._key_of(names))
            return
        items = self._items(names) if self._foreach is not None else None
        inputs_differ, keys_differ = bool(self._input.roots & _OF_ITEM), bool(self._key.roots & _OF_ITEM)
        own = {} if inputs_differ else self._input.render(names)
        key = None if keys_differ else self._key_of(names)
        scope = names
        for position in positions:
            if budget.spent - spent_before > WORK_PER_TICK and position != positions[0]:
                return
            budget.begin()
            if inputs_differ or keys_differ:
                scope = names.extended(_of_item(items, position, count))
            item = {"item": items[position]} if items is not None and self._with_item else {}
            task_input = self._input.render(scope) if inputs_differ else own
            yield Instance(base | item | task_input, self._key_of(scope) if keys_differ else key)

    def _key_of(self, names: Scope) -> str | None:
        if self.step.concurrency_key is None:
            return self.step.registered.key if self.step.registered is not None else None
        return self._checked_key(self._key.render(names))

    def _checked_key(self, value: Any) -> str | None:
        key = key_text(value)
        if key is None and value is not None:
            raise ExpressionError(
                f"concurrency_key: {self.step.concurrency_key}: expected printable text of 1 to {MAX_KEY_LENGTH} "
                f"characters, a whole number or null, found {describe(value)}."
            )
        return key

    def _items(self, names: Mapping[str, Any]) -> Sequence[Any]:
        assert self._foreach is not None
        items = self._foreach.evaluate(names)
        if (stored := stored_items(items)) is not None:
            return stored
        if not isinstance(items, list):
            raise ExpressionError(f"foreach: {self.step.foreach}: expected a list, found {describe(items)}.")
        return items


def fan_out_sources(step: Step) -> frozenset[str]:
    """Return the names from which a fan-out is made, which its tasks do not get as input."""
    fan_out = _expression(step.foreach) or (_expression(step.parallel) if isinstance(step.parallel, str) else None)
    return fan_out.roots if fan_out is not None else frozenset()


def _of_item(items: Sequence[Any] | None, position: int, count: int) -> dict[str, Any]:
    """Return the names for expressions of one task of a fan-out."""
    of_item: dict[str, Any] = {"index": position, "count": count}
    if items is not None:
        of_item["item"] = items[position]
    return of_item


def _expression(text: str | None) -> Expression | None:
    return None if text is None else parse(text)
