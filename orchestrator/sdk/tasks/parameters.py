"""The parameters of tasks and workflows as code, which workers announce to callers without the application's code."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from orchestrator.domain.redaction import Redaction
from orchestrator.domain.tasks.parameters import Parameter
from orchestrator.sdk.tasks.signature import Signature

_MAX_TEXT_LENGTH = 200
"""Characters in an announced annotation or default, at most."""
_MAX_BYTES = 100_000
"""Bytes of all parameters that one worker announces, at most."""


def announced_parameters(callables: Iterable[tuple[str, Signature, Iterable[str]]]) -> dict[str, list[Parameter]]:
    """Return parameters by task or workflow name, up to the size limit. `callables` has redacted names last."""
    announced: dict[str, list[Parameter]] = {}
    remaining = _MAX_BYTES
    for name, signature, hidden in callables:
        parameters = [*_parameters(signature, Redaction(hidden))]
        remaining -= len(msgspec.msgpack.encode(parameters)) + len(name)
        if remaining < 0:
            break
        announced[name] = parameters
    return announced


def _parameters(signature: Signature, hidden: Redaction) -> Iterator[Parameter]:
    defaults = signature.plain_defaults()
    for parameter in signature._signature.parameters.values():
        default = defaults.get(parameter.name, UNSET)
        yield Parameter(
            name=parameter.name,
            kind=parameter.kind.description,
            type="" if parameter.annotation is parameter.empty else _text(parameter.annotation),
            optional=parameter.default is not parameter.empty,
            default=default if _is_short(default) and hidden.named(parameter.name, default) == default else UNSET,
        )


def _text(annotation: Any) -> str:
    """Return an annotation as source code; empty if the text is too long."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text if len(text) <= _MAX_TEXT_LENGTH and text.isprintable() else ""


def _is_short(default: object) -> bool:
    """Return whether a default can be announced: a short printable text, or a number that JSON represents exactly."""
    if isinstance(default, str):
        return len(default) <= _MAX_TEXT_LENGTH and default.isprintable()
    return not isinstance(default, (int, float)) or -(2**53) < default < 2**53
