"""Calls declare their rules: a call without rules is rejected at import, and the backend has what the rules name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Protocol, get_args

import msgspec
import pytest

from orchestrator.api.client_checks import check_new_task, check_of
from orchestrator.api.redacting import parts_of
from orchestrator.domain.code.history import RunStarted, SignalReceived, UpdateRequested
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.flow.definition import Flow
from orchestrator.domain.tasks.starts import CodeTarget
from orchestrator.domain.tasks.task import NewTask, TaskOptions
from orchestrator.errors import InvalidTask
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.calls.declaring import Declared, Kind, call, declared
from orchestrator.sdk.calls.interface import PARTS
from orchestrator.sdk.values.payload import encode_call
from orchestrator.settings import Settings

CALLS = [one for part, protocol in PARTS.items() for one in declared(part, protocol).values()]


def test_a_call_without_a_subject_is_rejected() -> None:
    with pytest.raises(TypeError, match="say what it is about"):

        @call()
        def listed(self: object) -> list[str]:
            """Return all of them."""
            return []


def test_rules_that_name_unknown_arguments_are_rejected() -> None:
    class Wrong(Protocol):
        @call(about={Kind.RUN: "task"})
        def shown(self, run: bytes) -> str:
            """Return a run."""

    with pytest.raises(TypeError, match=r"'task'.*not an argument"):
        declared("wrong", Wrong)


def test_every_part_has_calls() -> None:
    assert {one.part for one in CALLS} == {*PARTS}
    assert len(CALLS) > 100


def test_the_backend_has_each_call_with_all_its_arguments() -> None:
    backend = Backend(Settings(database_url="postgresql://nowhere/x", redis_url="redis://nowhere"))
    for one in CALLS:
        method = getattr(type(getattr(backend, one.part)), one.name)
        assert method is not getattr(PARTS[one.part], one.name), f"{one.part} {one.name} is declared, and not written"
        taken = inspect.signature(getattr(getattr(backend, one.part), one.name)).parameters
        confining = {name for name in one.rules.within if "." not in name}
        assert {*one.signature.parameters} - {"self"} | confining <= {*taken}, f"{one.part} {one.name}"


def _filters(kind: Any) -> Iterator[type]:
    """Yield the types of filters within the type of an argument."""
    if isinstance(kind, type) and kind.__name__.endswith("Filter"):
        yield kind
    for part in get_args(kind):
        yield from _filters(part)


def test_a_filter_rejects_an_unknown_condition() -> None:
    """A server that ignored a condition of a newer client would list, retry or cancel more than was requested."""
    found = {filter_ for one in CALLS for kind in one.arguments.values() for filter_ in _filters(kind)}
    assert len(found) >= 4
    for kind in found:
        assert msgspec.json.encode(kind()) == b"{}", f"{kind.__name__} sends conditions that are not set"
        with pytest.raises(msgspec.ValidationError, match="unknown field `newer`"):
            msgspec.convert({"newer": "x"}, kind)
            pytest.fail(f"{kind.__name__} ignores an unknown condition")


def test_a_number_option_out_of_range_is_rejected() -> None:
    settings = Settings(database_url="postgresql://nowhere/x", redis_url="redis://nowhere")
    task = NewTask(id=bytes(16), name="resize", queue="default", payload=encode_call("resize", (), {}, 1000))
    check_new_task(settings, task, {})
    numbers = [
        field.name
        for field in msgspec.structs.fields(TaskOptions)
        if {int, float} & {field.type, *get_args(field.type)}
    ]
    assert len(numbers) >= 6
    for name in numbers:
        for number in (-1, 0, 10**12):
            options = msgspec.json.encode({name: number}).decode()
            with pytest.raises(InvalidTask):
                check_new_task(settings, msgspec.structs.replace(task, options=options), {})
                pytest.fail(f"option {name} takes {number}")


BROUGHT = {NewTask, Definition, Flow, RunStarted, SignalReceived, UpdateRequested, CodeTarget}


@pytest.mark.parametrize("one", CALLS, ids=lambda one: f"{one.part} {one.name}")
def test_the_server_checks_tasks_definitions_keys_and_tags_again(one: Declared) -> None:
    """A client may send anything: its own checks run in its own process."""
    for name, hint in one.arguments.items():
        if {*parts_of(hint)} & BROUGHT or name == "tags":
            assert check_of(hint) is not None, name
