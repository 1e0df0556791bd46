"""Expressions of choices: twelve operators over paths and constants, as data.

    {"and": [{"gt": ["$shared.total", 100]}, {"in": ["$params.country", ["DE", "FR"]]}]}

Numbers are compared with numbers, texts with texts, lists with lists; true is no number. What cannot be compared is
neither greater nor less, and two things of different kinds are never equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.domain.flow.paths import Names, find, parse
from orchestrator.domain.problems import shown
from orchestrator.errors import ExpressionError, did_you_mean

OPERATORS = ("and", "or", "not", "eq", "ne", "gt", "lt", "ge", "le", "exists", "in", "contains")
_DEEPEST = 50


def same(one: Any, other: Any) -> bool:
    """Say whether two values are equal; 1 is 1.0, and true is neither."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return one == other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)


def _kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return "number"
    return type(value).__name__ if isinstance(value, (str, list)) or hasattr(value, "isoformat") else None


def _ordered(holds: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(one: Any, other: Any) -> bool:
        kind = _kind(one)
        if kind is None or kind != _kind(other):
            return False
        try:
            return bool(holds(one, other))
        except TypeError:  # lists of things that cannot be compared, times with and without a zone
            return False

    return compare


def _is_in(item: Any, container: Any) -> bool:
    if isinstance(container, str):
        return isinstance(item, str) and item in container
    if isinstance(container, dict):
        return isinstance(item, str) and item in container
    return isinstance(container, list) and any(same(item, other) for other in container)


_OF_TWO: dict[str, Callable[[Any, Any], bool]] = {
    "eq": same,
    "ne": lambda one, other: not same(one, other),
    "gt": _ordered(lambda one, other: one > other),
    "lt": _ordered(lambda one, other: one < other),
    "ge": _ordered(lambda one, other: one >= other),
    "le": _ordered(lambda one, other: one <= other),
    "in": _is_in,
    "contains": lambda container, item: _is_in(item, container),
}


def evaluate(expr: Any, names: Names) -> bool:
    """Say whether an expression holds."""
    if not isinstance(expr, dict):
        return same(_operand(expr, names), True)
    ((operator, given),) = expr.items()
    if operator == "and":
        return all(evaluate(one, names) for one in given)
    if operator == "or":
        return any(evaluate(one, names) for one in given)
    if operator == "not":
        return not evaluate(_only(given), names)
    if operator == "exists":
        return _operand(_only(given), names) is not None
    one, other = (_operand(part, names) for part in given)
    return _OF_TWO[operator](one, other)


def _only(given: Any) -> Any:
    return given[0] if isinstance(given, list) and len(given) == 1 else given


def _operand(value: Any, names: Names) -> Any:
    return find(value, names) if is_path(value) else value


def is_path(value: Any) -> bool:
    """Say whether an operand is looked up, and not taken as it stands."""
    return isinstance(value, str) and value.startswith("$")


def problems(expr: Any, depth: int = 0) -> Iterator[str]:
    """Yield what is wrong with an expression."""
    if depth > _DEEPEST:
        yield f"an expression is nested at most {_DEEPEST} levels deep."
    elif isinstance(expr, bool) or is_path(expr):
        yield from _problems_of(expr)
    elif not isinstance(expr, dict) or len(expr) != 1:
        yield (
            f"an expression is a mapping of one operator, such as {{eq: [$params.path, B]}}; "
            f"found {shown(expr)}. Operators: {', '.join(OPERATORS)}."
        )
    else:
        ((operator, given),) = expr.items()
        yield from _problems_with(str(operator), given, depth)


def _problems_with(operator: str, given: Any, depth: int) -> Iterator[str]:
    if operator not in OPERATORS:
        hint = did_you_mean(operator, OPERATORS)
        yield f"there is no operator {operator!r}.{hint} Operators: {', '.join(OPERATORS)}."
    elif operator in ("and", "or"):
        if not isinstance(given, list) or not given:
            yield f"{operator} takes a list of expressions; found {shown(given)}."
        else:
            for one in given:
                yield from problems(one, depth + 1)
    elif operator == "not":
        yield from problems(_only(given), depth + 1)
    elif operator == "exists":
        if not is_path(_only(given)):
            yield f"exists takes a path, such as $shared.name; found {shown(given)}."
        yield from _problems_of(_only(given))
    elif not isinstance(given, list) or len(given) != 2:
        yield f"{operator} takes a list of two; found {shown(given)}."
    else:
        for part in given:
            yield from _problems_of(part)


def _problems_of(value: Any) -> Iterator[str]:
    if is_path(value):
        try:
            parse(value)
        except ExpressionError as error:
            yield str(error)
