"""The definitions of compositions: one shape for all arguments, and as few steps as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import Composition, InvalidWorkflow, Orchestrator, Settings, chain, chord, group
from orchestrator.domain.dag import composed
from orchestrator.domain.dag.definition import Definition
from orchestrator.sdk.dag.composing import _Shape
from orchestrator.sdk.dag.definitions import checked

app = Orchestrator()


@app.task(name="shop.add")
def add(one: int, two: int = 0) -> int:
    return one + two


@app.task(name="shop.total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="shop.run")
def run(value: Any = None) -> Any:
    return value


def definitions(part: Composition[Any]) -> list[Definition]:
    """Return the definitions that a composition stores, its own last."""
    shape = _Shape(app._client, "it")
    found = shape.definition(shape.add(part, None), is_fed=False)
    return [*shape.children.values(), found]


def shape(part: Composition[Any]) -> str:
    return definitions(part)[-1].name


def test_the_shape_does_not_depend_on_arguments_or_item_counts() -> None:
    assert shape(chain(add.s(1), add.s(2))) == shape(chain(add.s(3), add.s(4)))
    assert shape(group(add.s(n) for n in range(2))) == shape(group(add.s(n) for n in range(9)))
    nested = [shape(group(chain(add.s(n), add.s(1)) for n in range(size))) for size in (1, 5)]
    assert nested[0] == nested[1]


@pytest.mark.parametrize(
    "other",
    [
        chain(add.s(1), add.s()),
        chain(add.s(1), add.s(two=2)),
        chain(add.s(1), add.si(2)),
        chain(add.s(1), add.options(priority=1).s(2)),
        chain(add.s(1), add.s(2), add.s(3)),
        chain(add.s(1), group(add.s(2))),
    ],
)
def test_other_differences_change_the_shape(other: Composition[Any]) -> None:
    assert shape(other) != shape(chain(add.s(1), add.s(2)))


@pytest.mark.parametrize(
    ("part", "steps", "children"),
    [
        (add.s(1), 1, 0),
        (chain(add.s(1), add.s(2), chain(add.s(3), add.s(4))), 4, 0),
        (group(add.s(n) for n in range(100)), 1, 0),
        (group(add.s(1), add.s(two=1)), 2, 0),
        (chord(add.map(range(9)), total.s()), 2, 0),
        (group(group(add.s(n) for n in range(3)) for _ in range(3)), 1, 1),
        (group(chain(add.s(n), group(chain(add.s(m), add.s()) for m in range(2))) for n in range(3)), 1, 2),
        (chain(run.s(), run.s(), run.s()), 3, 0),  # `run` has another meaning in expressions
    ],
)
def test_a_composition_has_as_few_steps_as_possible(part: Composition[Any], steps: int, children: int) -> None:
    found = definitions(part)
    assert len(found[-1].steps) == steps
    assert len(found) == children + 1
    for definition in found:
        checked(definition)
        composed.check_composed(definition)


def test_a_definition_names_the_input_of_each_step() -> None:
    found = definitions(chain(add.s(1), group(add.s(2), run.s()), total.s()))[-1]
    assert [(step.name, step.depends_on, step.input) for step in found.steps] == [
        ("add", (), {"*": ["${params.args[0][0]}"]}),
        ("add-2", ("add",), {"*": ["${`add`}", "${params.args[1][0]}"]}),
        ("run-2", ("add",), {"*": ["${`add`}"]}),
        ("total", ("add-2", "run-2"), {"*": [["${`add-2`}", "${`run-2`}"]]}),
    ]
    assert found.params[composed.RESULT].default == "${`total`}"


def nested(levels: int, around: Callable[[Composition[Any]], Composition[Any]]) -> Composition[Any]:
    part: Composition[Any] = add.s(1)
    for _ in range(levels):
        part = around(part)
    return part


@pytest.mark.parametrize("levels", [101, 5_000])
def test_compositions_nested_too_deeply_are_rejected(levels: int) -> None:
    for around in (group, lambda part: group(part, add.s(1)), lambda part: chord(group(part), run.s())):
        part = nested(levels, around)
        with pytest.raises(InvalidWorkflow, match=r"chains and groups within each other, and at most 100 are allowed"):
            part.start()


def test_compositions_nested_up_to_the_limit_are_accepted() -> None:
    assert len(definitions(nested(100, group))) == 100
    assert len(definitions(nested(100, lambda part: group(part, add.s(1))))) == 1
    assert len(definitions(nested(50, lambda part: group(chain(add.s(1), part))))) == 51


def test_tasks_of_two_applications_are_rejected() -> None:
    other = Orchestrator(Settings()).task(name="other.add")(lambda one: one)
    for part in (chain(add.s(1), other.s()), group(add.s(1), other.map([1]))):
        with pytest.raises(InvalidWorkflow, match=r"<Task other.add> belongs to a different one from <Task \S*add>"):
            part.start()


def test_tags_must_be_a_list() -> None:
    for wrong in ("abc", {"a": 1}):
        tags: Any = wrong
        with pytest.raises(InvalidWorkflow, match="Option tags: expected a list"):
            add.s(1).start(tags=tags)
        with pytest.raises(InvalidWorkflow, match="Option tags: expected a list"):
            app.workflows["nightly"].options(tags=tags)


def test_too_many_steps_are_rejected() -> None:
    with pytest.raises(InvalidWorkflow, match=r"has 10,001 steps, and at most 10,000 are allowed"):
        definitions(chain([add.s(1)] * 10_001))
