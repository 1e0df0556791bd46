"""Bodies are bounded before objects are built from them: values, lists and objects, levels, wherever a slice ends."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest

from orchestrator.api import bodies
from orchestrator.api.bodies import check_shape
from orchestrator.api.problems import Refused
from orchestrator.api.routes.client import PARTS
from orchestrator.sdk.calls.declaring import declared


def _count(value: Any, level: int = 1) -> tuple[int, int, int]:
    """Return how many commas, lists and objects, and levels there are."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 0, 0, level - 1
    found = [_count(one, level + 1) for one in inner]
    commas = max(0, len(found) - 1) + sum(one[0] for one in found)
    return commas, 1 + sum(one[1] for one in found), max([level, *(one[2] for one in found)])


def _any(source: random.Random, level: int) -> Any:
    if level == 0 or source.random() < 0.3:
        return source.choice([1, None, "", '[[,{"', "\\", '\\"', "é\\\\", "a" * source.randrange(9), -1.5])
    if source.random() < 0.5:
        return [_any(source, level - 1) for _ in range(source.randrange(5))]
    return {f'"{i}\\,[': _any(source, level - 1) for i in range(source.randrange(5))}


def _is_refused(data: bytes) -> bool:
    try:
        check_shape(data)
    except Refused:
        return True
    return False


def test_the_bounds_are_exact_wherever_a_slice_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(150):
        source = random.Random(seed)
        value = [_any(source, 5) for _ in range(4)]
        commas, containers, levels = _count(value)
        data = json.dumps(value, ensure_ascii=source.random() < 0.5).encode()
        monkeypatch.setattr(bodies, "_SLICE", source.randrange(1, 40))
        bounds = {"MOST_VALUES": commas + 1, "MOST_CONTAINERS": containers, "MOST_LEVELS": levels}
        for name, bound in bounds.items():
            monkeypatch.setattr(bodies, name, bound)
        assert not _is_refused(data), data
        for name, bound in bounds.items():
            monkeypatch.setattr(bodies, name, bound - 1)
            assert _is_refused(data), (name, data)
            monkeypatch.setattr(bodies, name, bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "is_fine"),
    [
        (b"[" + b"[]," * 10_000_000 + b"[]]", False),
        (b"[" * 31_000_000, False),
        (b'"' + b"\\\\" * 15_000_000 + b'"', True),
        (b'"' + b",[{" * 10_000_000 + b'"', True),
    ],
    ids=["lists", "levels", "escapes", "text"],
)
def test_the_largest_bodies_are_counted_without_building_anything(data: bytes, is_fine: bool) -> None:
    began = time.thread_time()
    assert _is_refused(data) is not is_fine
    assert time.thread_time() - began < 5


def _numbers(kind: Any) -> Iterator[Any]:
    """Yield the types of whole numbers that a type has, with their bounds."""
    if kind is int or (get_origin(kind) is Annotated and get_args(kind)[0] is int):
        yield kind
    elif get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _numbers(one)


def test_every_number_of_a_call_has_a_bound() -> None:
    calls = [call for name, part in PARTS.items() for call in declared(name, part).values()]
    found = [
        (f"{call.part}.{call.name}", field.name, number)
        for call in calls
        for field in msgspec.structs.fields(call.request)
        for number in _numbers(field.type)
    ]
    assert len(found) > 10
    for where, name, number in found:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(2**70, number)
            pytest.fail(f"{where}: {name} takes any number")
