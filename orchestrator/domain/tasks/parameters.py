"""Parameters of tasks and code workflows, as announced by workers and used to check calls by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

_Name = Annotated[str, Meta(max_length=300, pattern=r"^[^\x00]*$")]
_P = inspect.Parameter
_KINDS = {
    kind.description: kind
    for kind in (_P.POSITIONAL_ONLY, _P.POSITIONAL_OR_KEYWORD, _P.VAR_POSITIONAL, _P.KEYWORD_ONLY, _P.VAR_KEYWORD)
}
_POSITIONAL = (_P.POSITIONAL_ONLY, _P.POSITIONAL_OR_KEYWORD)


class Parameter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: _Name
    kind: Annotated[str, Meta(max_length=30)] = _P.POSITIONAL_OR_KEYWORD.description
    """The kind, in Python's words: `keyword-only`, `variadic positional`."""
    type: _Name = ""
    """The annotation, as text."""
    optional: bool = False
    """Whether the parameter has a default."""
    default: _Name | int | float | bool | UnsetType | None = UNSET
    """The default, if it is short, plain and not secret."""


Parameters = Annotated[list[Parameter], Meta(max_length=1_000)]


class Mismatch(Exception):
    """Arguments do not fit a function. `field` is the argument list at fault: `args` or `kwargs`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def signature_of(parameters: Sequence[Parameter]) -> inspect.Signature:
    """Return the signature with these parameters. Raises ValueError if Python allows no such function."""
    return inspect.Signature(
        [
            inspect.Parameter(
                parameter.name,
                _KINDS.get(parameter.kind, _P.POSITIONAL_OR_KEYWORD),
                default=_P.empty if not parameter.optional else _Default(parameter.default),
                annotation=_Text(parameter.type) if parameter.type else _P.empty,
            )
            for parameter in parameters
        ]
    )


def check_call(parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise Mismatch if the function cannot be called with these arguments."""
    try:
        signature = signature_of(parameters)
    except ValueError:  # announced by a worker in another language, or of a Python release with other rules
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        positional = sum(signature.parameters[name].kind in _POSITIONAL for name in signature.parameters)
        is_about_keywords = len(args) <= positional and not any(
            parameter.name not in kwargs and parameter.default is _P.empty and parameter.kind in _POSITIONAL
            for parameter in [*signature.parameters.values()][len(args) :]
        )
        raise Mismatch("kwargs" if is_about_keywords else "args", f"{error}. Expected {signature}") from None


def by_name(parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call by name, or None if they do not fit."""
    try:
        bound = signature_of(parameters).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    variadic = next((p.name for p in bound.signature.parameters.values() if p.kind is _P.VAR_KEYWORD), None)
    arguments = dict(bound.arguments)
    return arguments | arguments.pop(variadic, {}) if variadic is not None else arguments


def as_call(
    parameters: Sequence[Parameter], values: Mapping[str, Any], positional: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return a call from arguments by name, the first `positional` of them by position. The opposite of `by_name`."""
    args: list[Any] = []
    remaining = dict(values)
    for parameter in parameters:
        kind = _KINDS.get(parameter.kind, _P.POSITIONAL_OR_KEYWORD)
        if kind is _P.VAR_POSITIONAL and isinstance(remaining.get(parameter.name), (list, tuple)):
            args += remaining.pop(parameter.name)
        elif kind is _P.POSITIONAL_ONLY or (kind is _P.POSITIONAL_OR_KEYWORD and len(args) < positional):
            if parameter.name not in remaining:
                break
            args.append(remaining.pop(parameter.name))
    return args, remaining


class _Text(str):
    """A text that a signature displays without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Default:
    """A default as a signature displays it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "…" if self._value is UNSET else repr(self._value)
