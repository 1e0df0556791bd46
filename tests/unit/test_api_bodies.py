"""Request bodies are bounded before objects are built: values, containers and levels, wherever a slice ends."""

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
from orchestrator.api.bodies import Decoder, check_shape
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.problems import Refused
from orchestrator.api.routes import ROUTES
from orchestrator.domain.tasks.task import NewTask
from orchestrator.sdk.calls.declaring import declared
from orchestrator.sdk.calls.interface import PARTS
from orchestrator.sdk.ids import new_id


def _count(value: Any, level: int = 1) -> tuple[int, int, int]:
    """Return the numbers of commas, of lists and objects, and of levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 0, 0, level - 1
    found = [_count(one, level + 1) for one in inner]
    commas = max(0, len(found) - 1) + sum(one[0] for one in found)
    return commas, 1 + sum(one[1] for one in found), max([level, *(one[2] for one in found)])


def _random_value(source: random.Random, level: int) -> Any:
    if level == 0 or source.random() < 0.3:
        return source.choice([1, None, "", '[[,{"', "\\", '\\"', "é\\\\", "a" * source.randrange(9), -1.5])
    if source.random() < 0.5:
        return [_random_value(source, level - 1) for _ in range(source.randrange(5))]
    return {f'"{i}\\,[': _random_value(source, level - 1) for i in range(source.randrange(5))}


def _is_rejected(data: bytes) -> bool:
    try:
        check_shape(data)
    except Refused:
        return True
    return False


def test_the_bounds_are_exact_wherever_a_slice_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(150):
        source = random.Random(seed)
        value = [_random_value(source, 5) for _ in range(4)]
        commas, containers, levels = _count(value)
        data = json.dumps(value, ensure_ascii=source.random() < 0.5).encode()
        monkeypatch.setattr(bodies, "_SLICE", source.randrange(1, 40))
        bounds = {"MAX_VALUES": commas + 1, "MAX_CONTAINERS": containers, "MAX_LEVELS": levels}
        for name, bound in bounds.items():
            monkeypatch.setattr(bodies, name, bound)
        assert not _is_rejected(data), data
        for name, bound in bounds.items():
            monkeypatch.setattr(bodies, name, bound - 1)
            assert _is_rejected(data), (name, data)
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
    assert _is_rejected(data) is not is_fine
    assert time.thread_time() - began < 5


def test_the_size_limit_of_a_body_depends_on_its_route() -> None:
    assert bodies.max_body_size(bodies.MAX_SMALL_REQUEST, 10) == bodies.MAX_SMALL_REQUEST
    assert bodies.max_body_size(bodies.ONE_VALUE, 1_000_000) == 6_100_000
    assert bodies.max_body_size(bodies.ONE_VALUE, 10_000_000_000) == bodies.MAX_BODY
    brings_many = {one.path for one in ROUTES if one.body is not None and one.max_body == bodies.MAX_BODY}
    assert {path for path in brings_many if not path.startswith("/api/v1/client/")} == {
        "/api/v1/tasks/bulk",
        "/api/v1/workflows",
        "/api/v1/flows/{name}",
        "/workflows",
        "/flows/version",
    }


_MANY = [endpoint for endpoint in ROUTES if endpoint.path.endswith(("/tasks/bulk", "/tasks/enqueue_many"))]


def _tasks(endpoint: Endpoint, *last: Any) -> bytes:
    filler = NewTask(new_id(), "t.a", "a", b"a" * 60) if endpoint.is_for_sdk else {"name": "t.a", "args": ["a" * 60]}
    return msgspec.json.encode({"tasks": [filler] * 2_000 + list(last)})


@pytest.mark.parametrize("endpoint", _MANY, ids=lambda endpoint: endpoint.path)
def test_the_items_of_a_long_list_are_decoded_one_by_one(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _tasks(endpoint)
    assert endpoint.read_body(data)["body"] == msgspec.json.decode(data, type=endpoint.body)
    monkeypatch.setattr(bodies, "SMALL_BODY", len(data))
    monkeypatch.setattr(Decoder, "_decode_item", None)  # small bodies are not decoded item by item
    assert len(endpoint.read_body(data)["body"].tasks) == 2_000


@pytest.mark.parametrize("endpoint", _MANY, ids=lambda endpoint: endpoint.path)
@pytest.mark.parametrize("bad", [5, {"name": 1}, {"nonsense": 1}, {"name": "a", "queue": ["b"]}], ids=str)
def test_an_invalid_item_is_reported_alike_in_long_and_short_lists(
    endpoint: Endpoint, bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, told = _tasks(endpoint, bad), []
    for small in (0, len(data)):
        monkeypatch.setattr(bodies, "SMALL_BODY", small)
        with pytest.raises(Refused) as refused:
            endpoint.read_body(data)
        told.append(refused.value.problem)
    assert told[0] == told[1]
    assert "/tasks/2000" in told[0].detail


def test_large_bodies_are_decoded_one_at_a_time_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, paused = _MANY[0], []

    def sleep(seconds: float) -> None:
        assert bodies._large_lock.locked()
        paused.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    endpoint.read_body(_tasks(endpoint))
    with pytest.raises(Refused):
        endpoint.read_body(_tasks(endpoint, 5))
    assert (len(paused), min(paused) > 0, bodies._large_lock.locked()) == (2, True, False)
    endpoint.read_body(b'{"tasks": []}')
    assert len(paused) == 2


def _numbers(kind: Any) -> Iterator[Any]:
    """Yield the integer types within a type, with their bounds."""
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
