"""The parameters of an application's tasks and workflows as code, for callers that know only their names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from orchestrator.domain.redaction import Redaction
from orchestrator.domain.tasks.parameters import Parameter
from orchestrator.sdk.tasks.signature import Signature

_LONGEST_TEXT = 200
"""Characters of an annotation or a default that is announced."""
_MOST_BYTES = 100_000
"""Bytes of all parameters that one worker announces."""


def announced_parameters(found: Iterable[tuple[str, Signature, Iterable[str]]]) -> dict[str, list[Parameter]]:
    """Return parameters by name of the task or workflow, as many as fit; `found` has what each does not want shown."""
    announced: dict[str, list[Parameter]] = {}
    left = _MOST_BYTES
    for name, signature, hidden in found:
        parameters = [*_parameters(signature, Redaction(hidden))]
        left -= len(msgspec.msgpack.encode(parameters)) + len(name)
        if left < 0:
            break
        announced[name] = parameters
    return announced


def _parameters(signature: Signature, hidden: Redaction) -> Iterator[Parameter]:
    defaults = signature.plain_defaults()
    for one in signature._signature.parameters.values():
        default = defaults.get(one.name, UNSET)
        yield Parameter(
            name=one.name,
            kind=one.kind.description,
            type="" if one.annotation is one.empty else _text(one.annotation),
            optional=one.default is not one.empty,
            default=default if _is_short(default) and hidden.named(one.name, default) == default else UNSET,
        )


def _text(annotation: Any) -> str:
    """Return an annotation as it stands in the code; nothing if that is long."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text if len(text) <= _LONGEST_TEXT and text.isprintable() else ""


def _is_short(default: object) -> bool:
    """Say whether a default can be announced: a short text that can be stored, or a number that JSON has."""
    if isinstance(default, str):
        return len(default) <= _LONGEST_TEXT and default.isprintable()
    return not isinstance(default, (int, float)) or -(2**53) < default < 2**53
