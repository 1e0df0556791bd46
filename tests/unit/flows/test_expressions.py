"""The operators of choices compared with Python's own, and paths."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.flow.expression import evaluate, problems
from orchestrator.domain.flow.paths import Names, find, parse, write
from orchestrator.errors import ExpressionError

NUMBERS = st.integers(-1_000, 1_000) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(alphabet="abc$ ", max_size=4)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "lt": operator.lt,
    "ge": operator.ge,
    "le": operator.le,
}


def names(one: Any, other: Any) -> Names:
    return Names({"a": one}, {"b": other})


@given(st.sampled_from(sorted(COMPARED)), st.one_of(st.tuples(NUMBERS, NUMBERS), st.tuples(TEXTS, TEXTS)))
def test_numbers_and_strings_are_compared_as_in_python(name: str, values: tuple[Any, Any]) -> None:
    assert evaluate({name: ["$params.a", "$shared.b"]}, names(*values)) is COMPARED[name](*values)


@given(PLAIN, st.lists(PLAIN, max_size=4))
def test_contains_is_in_with_swapped_operands(item: Any, items: list[Any]) -> None:
    both = names(item, items)
    found = evaluate({"in": ["$params.a", "$shared.b"]}, both)
    assert found is evaluate({"contains": ["$shared.b", "$params.a"]}, both)
    assert found is any(evaluate({"eq": ["$params.a", "$shared.b"]}, names(item, other)) for other in items)
    assert evaluate({"in": ["$params.a", "$shared.b"]}, names(item, [*items, item])) or item != item


@given(PLAIN, PLAIN)
def test_values_of_different_types_are_neither_equal_nor_ordered(one: Any, other: Any) -> None:
    kinds = [
        bool if isinstance(value, bool) else float if isinstance(value, int) else type(value) for value in (one, other)
    ]
    both = names(one, other)
    assert evaluate({"ne": ["$params.a", "$shared.b"]}, both) is not evaluate({"eq": ["$params.a", "$shared.b"]}, both)
    if kinds[0] is not kinds[1]:
        assert not any(evaluate({name: ["$params.a", "$shared.b"]}, both) for name in ("eq", "gt", "lt", "ge", "le"))


@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_and_or_and_not_combine_conditions(values: list[bool]) -> None:
    given = [{"eq": [value, True]} for value in values]
    nothing = Names({}, {})
    assert evaluate({"and": given}, nothing) is all(values)
    assert evaluate({"or": given}, nothing) is any(values)
    assert evaluate({"not": {"and": given}}, nothing) is not all(values)


def test_exists_is_true_for_any_value_except_null() -> None:
    here = Names({"a": None, "b": 0}, {}, "given")
    found = [evaluate({"exists": path}, here) for path in ("$params.a", "$params.b", "$shared.b", "$input")]
    assert found == [False, True, False, True]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("$params.a.b[0].c", 1),
        ("$params.a.b[1]", None),
        ("$params.a.b[0].c.d", None),
        ("$shared", {"x": [1, [2]]}),
        ("x[1][0]", 2),
        ("$input", 5),
        ("$input.x", None),
        ("a b", None),
    ],
)
def test_paths_resolve_to_values(path: str, value: Any) -> None:
    assert find(path, Names({"a": {"b": [{"c": 1}]}}, {"x": [1, [2]]}, 5)) == value


@pytest.mark.parametrize("path", ["", "$other.x", "$paramsx", "a..b", "a[x]", "a[-1]", "a]", "$", "a[0]b", "a."])
def test_invalid_paths_are_rejected(path: str) -> None:
    with pytest.raises(ExpressionError, match="Path"):
        parse(path)


def test_write_does_not_change_data_held_elsewhere() -> None:
    params = {"order": {"id": 1}}
    shared: dict[str, Any] = {"order": params["order"]}
    write(shared, "$shared.order.total", 5)
    write(shared, "new.deep", 1)
    shared["lines"] = lines = [{"n": 1}, 2]
    write(shared, "lines[1]", 9)
    write(shared, "lines[0].n", 8)
    assert (shared.pop("lines"), lines) == ([{"n": 8}, 9], [{"n": 1}, 2])
    for path, why in (("new.deep.er", "is a number, and no mapping"), ("new[0]", "is a mapping, and no list")):
        with pytest.raises(ExpressionError, match=why):
            write(shared, path, 1)
    with pytest.raises(ExpressionError, match="'list' has 1 items"):
        write({"list": [1]}, "list[1]", 1)
    assert (shared, params) == ({"order": {"id": 1, "total": 5}, "new": {"deep": 1}}, {"order": {"id": 1}})


@pytest.mark.parametrize(
    ("expr", "words"),
    [
        ({"equals": [1, 2]}, "there is no operator 'equals'"),
        ({"eq": [1]}, "eq takes a list of two"),
        ({"eq": ["$parms.x", 1]}, "begins with none of"),
        ({"and": []}, "and takes a list of expressions"),
        ({"exists": "x"}, "exists takes a path"),
        ({"eq": [1, 1], "ne": [1, 2]}, "a mapping of one operator"),
        ("yes", "a mapping of one operator"),
        ({"not": {"gt": 1}}, "gt takes a list of two"),
    ],
)
def test_invalid_expressions_name_the_problem(expr: Any, words: str) -> None:
    (found,) = problems(expr)
    assert words in found
