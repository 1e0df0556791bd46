"""Parameters of tasks and workflows as code, as workers announce them. Calls by name are checked by them."""

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
    """As Python calls it: `keyword-only`, `variadic positional`."""
    type: _Name = ""
    """Its annotation, as text."""
    optional: bool = False
    """It has a default."""
    default: _Name | int | float | bool | UnsetType | None = UNSET
    """The default, if it is short, plain data that may be shown."""


Parameters = Annotated[list[Parameter], Meta(max_length=1_000)]


class Misfit(Exception):
    """Arguments do not fit a function; `field` says where to look: `args` or `kwargs`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def signature_of(parameters: Sequence[Parameter]) -> inspect.Signature:
    """Return the signature that the parameters are of; ValueError if there is no such function."""
    return inspect.Signature(
        [
            inspect.Parameter(
                one.name,
                _KINDS.get(one.kind, _P.POSITIONAL_OR_KEYWORD),
                default=_P.empty if not one.optional else _Default(one.default),
                annotation=_Text(one.type) if one.type else _P.empty,
            )
            for one in parameters
        ]
    )


def check_call(parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the function cannot take; raises Misfit."""
    try:
        signature = signature_of(parameters)
    except ValueError:  # of a language or a release with other rules
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = sum(signature.parameters[name].kind in _POSITIONAL for name in signature.parameters)
        by_name = len(args) <= takes and not any(
            one.name not in kwargs and one.default is _P.empty and one.kind in _POSITIONAL
            for one in [*signature.parameters.values()][len(args) :]
        )
        raise Misfit("kwargs" if by_name else "args", f"{error}. Expected {signature}") from None


def by_name(parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call by name; None if they do not fit."""
    try:
        given = signature_of(parameters).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    rest = next((one.name for one in given.signature.parameters.values() if one.kind is _P.VAR_KEYWORD), None)
    found = dict(given.arguments)
    return found | found.pop(rest, {}) if rest is not None else found


def as_call(
    parameters: Sequence[Parameter], values: Mapping[str, Any], positional: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return a call with arguments by name, of which the first so many go by position: the opposite of `by_name`."""
    args: list[Any] = []
    left = dict(values)
    for one in parameters:
        kind = _KINDS.get(one.kind, _P.POSITIONAL_OR_KEYWORD)
        if kind is _P.VAR_POSITIONAL and isinstance(left.get(one.name), (list, tuple)):
            args += left.pop(one.name)
        elif kind is _P.POSITIONAL_ONLY or (kind is _P.POSITIONAL_OR_KEYWORD and len(args) < positional):
            if one.name not in left:
                break
            args.append(left.pop(one.name))
    return args, left


class _Text(str):
    """A text that a signature shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Default:
    """A default in a signature, as it would be written there."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "…" if self._value is UNSET else repr(self._value)
