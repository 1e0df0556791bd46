"""Parameters of tasks as workers announce them, and checks of calls by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from orchestrator.domain.tasks.parameters import Mismatch, Parameter, by_name, check_call, signature_of
from orchestrator.sdk.tasks import parameters as announcing
from orchestrator.sdk.tasks.context import TaskContext
from orchestrator.sdk.tasks.parameters import announced_parameters
from orchestrator.sdk.tasks.signature import Signature


def announced(function: Any, *hidden: str) -> list[Parameter]:
    found = announced_parameters([("job", Signature("job", function), hidden)])
    wire = msgspec.msgpack.encode(found)
    return msgspec.msgpack.decode(wire, type=dict[str, list[Parameter]])["job"]


def resize(
    ctx: TaskContext, path: str, /, width: int = 200, *, secret: str = "hunter2", mode: str | None = None
) -> None:
    """A task with parameters of each kind."""


def test_announced_parameters_omit_the_context_and_secret_defaults() -> None:
    assert str(signature_of(announced(resize, "secret"))) == (
        "(path: str, /, width: int = 200, *, secret: str = …, mode: str | None = None)"
    )


@pytest.mark.parametrize("default", ["a\0b", "\ud800", "x" * 1000, 2**70, (1, 2)])
def test_a_default_that_cannot_be_stored_is_omitted(default: Any) -> None:
    def job(value: Any = default) -> None: ...

    (found,) = announced(job)
    assert found.optional
    assert found.default is msgspec.UNSET
    msgspec.json.encode(found)


def test_announced_tasks_are_limited_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "_MAX_BYTES", 300)
    found = announced_parameters([(f"job{number}", Signature("job", resize), ()) for number in range(100)])
    assert 0 < len(found) < 10


@pytest.mark.parametrize(
    ("args", "kwargs", "field", "said"),
    [
        ([], {}, "args", "missing a required argument: 'path'"),
        (["a", 1, 2], {}, "args", "too many positional arguments"),
        (["a"], {"heigth": 1}, "kwargs", "got an unexpected keyword argument 'heigth'"),
        (["a", 1], {"width": 1}, "kwargs", "multiple values for argument 'width'"),
    ],
)
def test_mismatched_arguments_are_rejected_with_their_field(
    args: list[Any], kwargs: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(Mismatch, match=said) as refused:
        check_call(announced(resize), args, kwargs)
    assert refused.value.field == field
    assert "Expected (path: str, /, width: int = 200" in str(refused.value)
    check_call(announced(resize), ["a"], {"width": 3})


def test_positional_arguments_get_their_names() -> None:
    assert by_name(announced(resize), ["a.png", 3], {"mode": "RGB"}) == {"path": "a.png", "width": 3, "mode": "RGB"}
    assert by_name(announced(resize), [1, 2, 3, 4], {}) is None

    def job(first: int, *rest: int, **named: int) -> None: ...

    assert by_name(announced(job), [1, 2, 3], {"a": 4}) == {"first": 1, "rest": (2, 3), "a": 4}


def test_invalid_announced_parameters_check_nothing() -> None:
    odd = [Parameter(name="a b")]
    check_call(odd, [1, 2], {})
    assert by_name(odd, [1], {}) is None
