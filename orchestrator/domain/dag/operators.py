"""The operators and functions of expressions, and their error messages.

They work as in Python, with exceptions: only numbers are multiplied, only values of the same type are ordered, no
result may be larger than `MAX_LENGTH`, and work on long values is charged to a budget in advance.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from enum import IntEnum
from typing import Any

import msgspec

from orchestrator import sealing
from orchestrator.domain.dag.scope import EvaluationBudget, Scope
from orchestrator.errors import did_you_mean
from orchestrator.references import as_reference

MAX_LENGTH = 1_000_000
"""The largest result of an expression, in characters of a string or items of a list."""

KEYWORDS = frozenset({"and", "or", "not", "in", "true", "false", "null"})

Names = Mapping[str, Any]
Evaluate = Callable[[Scope], Any]
Operation = Callable[[Any, Any, EvaluationBudget], Any]
Links = list[tuple[Operation, Evaluate]]
"""Operators of one level, each with its right operand."""


class Level(IntEnum):
    """Precedence levels of operators."""

    OR = 0
    AND = 1
    NOT = 2
    COMPARE = 3
    ADD = 4
    MULTIPLY = 5
    SIGN = 6


class Fault(Exception):
    """An operand is invalid. The expression adds its own text to the message."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if text.endswith("?") else f"{text}."


class Missing(Fault):
    """A value is missing, which the function `default` catches. The message is built only when needed."""

    def __init__(self, message: Callable[[], str]) -> None:
        self._message = message
        super().__init__()

    def __str__(self) -> str:
        self.args = (self._message(),)
        return super().__str__()


def look_up(name: str, names: Scope) -> Any:
    try:
        return names[name]
    except KeyError:
        hint = ". A minus needs spaces around it" if "-" in name else ""
        raise Missing(lambda: f"there is no {name!r} here. Known names: {listed(names)}{hint}") from None


def follow(base: Evaluate, accesses: list[tuple[str | Evaluate, str]]) -> Evaluate:
    """Return a function that evaluates a path. Each access is a field or index, with the text before it."""

    def value_at_end(names: Scope) -> Any:
        value = base(names)
        for key, prefix in accesses:
            value = _pick(value, key if isinstance(key, str) else key(names), prefix)
        return value

    return value_at_end


def _pick(value: Any, key: Any, prefix: str) -> Any:
    if value is None:
        raise Missing(lambda: f"{prefix} is null, which has no {_field(key)}")
    if isinstance(value, Mapping) and isinstance(key, str):
        try:
            return value[key]
        except KeyError:
            raise Missing(lambda: _no_field(value, key, prefix)) from None
    if isinstance(value, (list, tuple)) and isinstance(key, int) and not isinstance(key, bool):
        try:
            return value[key]
        except IndexError:
            raise Missing(lambda: f"{prefix} has no {_field(key)}; found {describe(value)}") from None
    raise Fault(f"{prefix} has no {_field(key)}; found {describe(value)}")


def _no_field(value: Mapping[str, Any], key: str, prefix: str) -> str:
    near = did_you_mean(key, (name for name in value if isinstance(name, str)))
    return f"{prefix} has no {_field(key)}; found {describe(value)}{near and '.'}{near}"


def _field(key: Any) -> str:
    if isinstance(key, str):
        return f"field {shortened(key, 60)}"
    return f"item {key!r:.40}" if isinstance(key, (int, float)) else f"item that is {describe(key)}"


def chain(level: Level, first: Evaluate, links: Links) -> Evaluate:
    """Return a function that applies operators of one level in a loop, so that long chains need no recursion."""

    def value_of_all(names: Scope) -> Any:
        value = first(names)
        for operation, operand in links:
            if (level is Level.OR and value) or (level is Level.AND and not value):
                break
            value = operation(value, operand(names), names.budget)
        return value

    return value_of_all


def _second(_: Any, value: Any, __: EvaluationBudget) -> Any:
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def fits(number: int | float) -> bool:
    """Return whether a number can be encoded in a message: 64 bits, and finite."""
    return -(2**63) <= number < 2**64 if isinstance(number, int) else math.isfinite(number)


def _arithmetic(verb: str, operation: Callable[[Any, Any], Any]) -> Operation:
    def calculate(left: Any, right: Any, _: EvaluationBudget) -> Any:
        if not _is_number(left) or not _is_number(right):
            raise Fault(f"cannot {verb} {describe(left)} and {describe(right)}: expected two numbers")
        try:
            result = operation(left, right)
        except ZeroDivisionError:
            raise Fault(f"cannot {verb} {describe(left)} by zero") from None
        except OverflowError:
            result = math.inf
        if not fits(result):
            raise Fault(f"cannot {verb} {describe(left)} and {describe(right)}: the result is too large")
        return result

    return calculate


_add_numbers = _arithmetic("add", operator.add)


def _add(left: Any, right: Any, budget: EvaluationBudget) -> Any:
    if _is_number(left) and _is_number(right):
        return _add_numbers(left, right, budget)
    if type(left) is not type(right) or not isinstance(left, (str, list)):
        raise Fault(
            f"cannot add {describe(left)} and {describe(right)}: expected two numbers, two strings or two lists"
        )
    if len(left) + len(right) > MAX_LENGTH:
        raise Fault(f"cannot add {describe(left)} and {describe(right)}: the result is longer than {MAX_LENGTH:,}")
    budget.copy(len(left) + len(right))
    return left + right


def negate(value: Any) -> Any:
    """Return a number with its sign changed."""
    if not _is_number(value):
        raise Fault(f"cannot negate {describe(value)}: expected a number")
    if not fits(-value):
        raise Fault(f"cannot negate {describe(value)}: the result is too large")
    return -value


def _equal(left: Any, right: Any, budget: EvaluationBudget) -> bool:
    budget.compare(left, right)
    return bool(left == right)


def _not_equal(left: Any, right: Any, budget: EvaluationBudget) -> bool:
    return not _equal(left, right, budget)


def _ordering(operation: Callable[[Any, Any], Any]) -> Operation:
    def compare(left: Any, right: Any, budget: EvaluationBudget) -> Any:
        alike = type(left) is type(right) and isinstance(left, (str, date, datetime))
        if not alike and not (_is_number(left) and _is_number(right)):
            raise Fault(f"cannot order {describe(left)} and {describe(right)}: expected two numbers or two strings")
        budget.compare(left, right)
        try:
            return operation(left, right)
        except TypeError as error:  # one datetime has a time zone and the other has none
            raise Fault(str(error)) from None

    return compare


def _in(left: Any, right: Any, budget: EvaluationBudget) -> bool:
    if isinstance(right, str) and not isinstance(left, str):
        raise Fault(f"cannot look for {describe(left)} in {describe(right)}: expected a string")
    if not isinstance(right, (str, list, tuple, Mapping)):
        raise Fault(f"cannot look in {describe(right)}: expected a list, a string or an object")
    if isinstance(right, Mapping) and not isinstance(left, str):
        return False
    if isinstance(right, str):
        budget.copy(len(right))
    elif isinstance(right, (list, tuple)):
        if not isinstance(left, (list, tuple, Mapping)):
            return left in budget.members(right)
        budget.spend(1 + budget.weight(right))
    return left in right


def not_in(left: Any, right: Any, budget: EvaluationBudget) -> bool:
    """Return whether a value is not in a container."""
    return not _in(left, right, budget)


def _len(argument: Evaluate) -> Evaluate:
    def length(names: Scope) -> int:
        value = argument(names)
        if not isinstance(value, (str, list, tuple, Mapping)):
            raise Fault(f"len takes a list, a string or an object, found {describe(value)}")
        return len(value)

    return length


def _on_string(name: str, change: Callable[[str], str]) -> Callable[[Evaluate], Evaluate]:
    def function(argument: Evaluate) -> Evaluate:
        def changed(names: Scope) -> str:
            value = argument(names)
            if not isinstance(value, str):
                raise Fault(f"{name} takes a string, found {describe(value)}")
            names.budget.copy(len(value))
            return change(value)

        return changed

    return function


def _default(argument: Evaluate, otherwise: Evaluate) -> Evaluate:
    def default(names: Scope) -> Any:
        try:
            value = argument(names)
        except Missing:
            value = None
        return otherwise(names) if value is None else value

    return default


LITERALS = {"true": True, "false": False, "null": None}
OPERATORS: dict[str, tuple[Level, Operation]] = {
    "or": (Level.OR, _second),
    "and": (Level.AND, _second),
    "==": (Level.COMPARE, _equal),
    "!=": (Level.COMPARE, _not_equal),
    "<": (Level.COMPARE, _ordering(operator.lt)),
    "<=": (Level.COMPARE, _ordering(operator.le)),
    ">": (Level.COMPARE, _ordering(operator.gt)),
    ">=": (Level.COMPARE, _ordering(operator.ge)),
    "in": (Level.COMPARE, _in),
    "+": (Level.ADD, _add),
    "-": (Level.ADD, _arithmetic("subtract", operator.sub)),
    "*": (Level.MULTIPLY, _arithmetic("multiply", operator.mul)),
    "/": (Level.MULTIPLY, _arithmetic("divide", operator.truediv)),
    "%": (Level.MULTIPLY, _arithmetic("divide", operator.mod)),
}
FUNCTIONS: dict[str, tuple[int, Callable[..., Evaluate]]] = {
    "len": (1, _len),
    "lower": (1, _on_string("lower", str.lower)),
    "upper": (1, _on_string("upper", str.upper)),
    "default": (2, _default),
}


# -- descriptions for messages


def describe(value: Any) -> str:
    """Return a description of a value for messages."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return f"the number {value!r:.40}" if not isinstance(value, int) or fits(value) else "a huge number"
    if isinstance(value, str):
        return f"the string {shortened(value, 60)}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value):,}" if value else "an empty list"
    if isinstance(value, Mapping):
        return f"an object with {listed(value)}" if value else "an empty object"
    if isinstance(value, msgspec.msgpack.Ext) and value.code == sealing.CODE:
        return "a sealed value for which the scheduler has no data key (setting data_keys)"
    if (stored := as_reference(value)) is not None:
        return f"a value of {stored.size:,} bytes in the payload store, which the scheduler does not read"
    return f"a {type(value).__name__}"


def listed(names: Iterable[Any]) -> str:
    """Return the first few names, for messages."""
    names = list(names)
    text = ", ".join(f"{name!s:.40}" for name in names[:10])
    return (f"{text} and {len(names) - 10:,} more" if len(names) > 10 else text) or "nothing"


def shortened(text: str, limit: int = 200) -> str:
    """Return a text in quotes, shortened if long."""
    return repr(text if len(text) <= limit else text[:limit] + "…")
