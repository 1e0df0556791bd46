"""Conditions of choices: twelve operators over paths and constants, as data.

    {"and": [{"gt": ["$shared.total", 100]}, {"in": ["$params.country", ["DE", "FR"]]}]}

Numbers compare with numbers, texts with texts, lists with lists. Booleans are not numbers. Values that cannot be
compared are neither greater nor less, and values of different types are never equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.domain.flow.paths import Names, find, parse
from orchestrator.domain.problems import for_message
from orchestrator.errors import ExpressionError, did_you_mean

OPERATORS = ("and", "or", "not", "eq", "ne", "gt", "lt", "ge", "le", "exists", "in", "contains")
_DEEPEST = 50


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal. 1 equals 1.0, but neither equals true."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left == right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    return type(left) is type(right) and bool(left == right)


def _kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return "number"
    return type(value).__name__ if isinstance(value, (str, list)) or hasattr(value, "isoformat") else None


def _ordered(holds: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(left: Any, right: Any) -> bool:
        kind = _kind(left)
        if kind is None or kind != _kind(right):
            return False
        try:
            return bool(holds(left, right))
        except TypeError:  # lists of different types, times with and without a zone
            return False

    return compare


def _is_in(item: Any, container: Any) -> bool:
    if isinstance(container, str):
        return isinstance(item, str) and item in container
    if isinstance(container, dict):
        return isinstance(item, str) and item in container
    return isinstance(container, list) and any(same(item, right) for right in container)


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": same,
    "ne": lambda left, right: not same(left, right),
    "gt": _ordered(lambda left, right: left > right),
    "lt": _ordered(lambda left, right: left < right),
    "ge": _ordered(lambda left, right: left >= right),
    "le": _ordered(lambda left, right: left <= right),
    "in": _is_in,
    "contains": lambda container, item: _is_in(item, container),
}


def evaluate(expr: Any, names: Names) -> bool:
    """Return whether an expression holds."""
    if not isinstance(expr, dict):
        return same(_operand(expr, names), True)
    ((operator, operands),) = expr.items()
    if operator == "and":
        return all(evaluate(operand, names) for operand in operands)
    if operator == "or":
        return any(evaluate(operand, names) for operand in operands)
    if operator == "not":
        return not evaluate(_single(operands), names)
    if operator == "exists":
        return _operand(_single(operands), names) is not None
    left, right = (_operand(part, names) for part in operands)
    return _COMPARISONS[operator](left, right)


def _single(operands: Any) -> Any:
    return operands[0] if isinstance(operands, list) and len(operands) == 1 else operands


def _operand(value: Any, names: Names) -> Any:
    return find(value, names) if is_path(value) else value


def is_path(value: Any) -> bool:
    """Return whether an operand is a path rather than a constant."""
    return isinstance(value, str) and value.startswith("$")


def problems(expr: Any, depth: int = 0) -> Iterator[str]:
    """Yield the problems of an expression."""
    if depth > _DEEPEST:
        yield f"an expression is nested at most {_DEEPEST} levels deep."
    elif isinstance(expr, bool) or is_path(expr):
        yield from _problems_of(expr)
    elif not isinstance(expr, dict) or len(expr) != 1:
        yield (
            f"an expression is a mapping of one operator, such as {{eq: [$params.path, B]}}; "
            f"found {for_message(expr)}. Operators: {', '.join(OPERATORS)}."
        )
    else:
        ((operator, operands),) = expr.items()
        yield from _problems_with(str(operator), operands, depth)


def _problems_with(operator: str, operands: Any, depth: int) -> Iterator[str]:
    if operator not in OPERATORS:
        hint = did_you_mean(operator, OPERATORS)
        yield f"there is no operator {operator!r}.{hint} Operators: {', '.join(OPERATORS)}."
    elif operator in ("and", "or"):
        if not isinstance(operands, list) or not operands:
            yield f"{operator} takes a list of expressions; found {for_message(operands)}."
        else:
            for operand in operands:
                yield from problems(operand, depth + 1)
    elif operator == "not":
        yield from problems(_single(operands), depth + 1)
    elif operator == "exists":
        if not is_path(_single(operands)):
            yield f"exists takes a path, such as $shared.name; found {for_message(operands)}."
        yield from _problems_of(_single(operands))
    elif not isinstance(operands, list) or len(operands) != 2:
        yield f"{operator} takes a list of two; found {for_message(operands)}."
    else:
        for part in operands:
            yield from _problems_of(part)


def _problems_of(value: Any) -> Iterator[str]:
    if is_path(value):
        try:
            parse(value)
        except ExpressionError as error:
            yield str(error)
