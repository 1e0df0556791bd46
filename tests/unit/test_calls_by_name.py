"""Calls of tasks by name alone: checked like other calls, also if the same options were checked before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask, UnknownOption
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.settings import Settings


def call(name: str = "shop.job", **options: Any) -> NewTask:
    return call_by_name(Settings(), name, [1], {"b": 2}, options=options, queue="default")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"priority": 1, "retries": [1, 2]},
        {"unique_key": "k", "unique_for": 60},
        {"concurrency_key": "k", "delay": 5, "queue": "other", "timeout": 3.0},
    ],
)
def test_a_repeated_call_differs_only_in_its_id(options: dict[str, Any]) -> None:
    first, second = call(**options), call(**options)
    assert second.id != first.id
    assert msgspec.structs.replace(second, id=first.id) == first


def test_each_call_has_its_own_idempotency_key() -> None:
    plain, first, second = (
        call(priority=3),
        call(priority=3, idempotency_key="a"),
        call(priority=3, idempotency_key="b"),
    )
    assert plain.unique is None
    assert first.unique is not None
    assert second.unique is not None
    assert (first.unique.key, second.unique.key) == ("once:shop.job:a", "once:shop.job:b")
    assert first.unique.same_call
    assert first.unique.period == Settings().idempotency_period
    assert (first.priority, first.options, first.lane) == (plain.priority, plain.options, plain.lane)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": True}, "Option priority"),
        ({"idempotency_key": "x" * 300}, "Option idempotency_key"),
        ({"idempotency_key": "a", "unique_key": "b"}, "give one of them"),
        ({"retries": -1}, "Option retries"),
    ],
)
def test_invalid_options_are_rejected_after_valid_calls(options: dict[str, Any], words: str) -> None:
    call(priority=1, retries=1)
    call(priority=1)
    for _ in range(2):
        with pytest.raises(InvalidTask, match=words):
            call(**options)


def test_unknown_options_and_invalid_names_are_rejected() -> None:
    with pytest.raises(UnknownOption, match="Did you mean 'priority'"):
        call(priorty=1)
    with pytest.raises(InvalidTask, match="A task name has"):
        call("no name!")
