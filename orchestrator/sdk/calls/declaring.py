"""A call as a declaration: a method with types, from which its request, answer, route and remote method are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from orchestrator.domain.access import Scope

F = TypeVar("F", bound=Callable[..., Any])

REPEATED = "repeated"
"""A parameter that says: this was asked before, and may have been done."""
_MARK = "_declared_call"
_Whole = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""As Postgres keeps it."""


@dataclass(frozen=True)
class _Mark:
    scope: Scope
    repeatable: bool


def call(scope: Scope = Scope.READ, *, repeatable: bool | None = None) -> Callable[[F], F]:
    """Declare a method that can be asked for from elsewhere; what only looks may be repeated."""

    def declare(method: F) -> F:
        setattr(method, _MARK, _Mark(scope, scope is Scope.READ if repeatable is None else repeatable))
        return method

    return declare


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One call."""

    part: str
    """The subject."""
    name: str
    scope: Scope
    repeatable: bool
    """If its answer was lost, it may be made again."""
    knows_repeats: bool
    """It is to be told so then."""
    waits: bool
    """It may take as long as somebody else takes to answer."""
    summary: str
    signature: inspect.Signature
    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    """A structure of one field, `result`."""

    @property
    def path(self) -> str:
        """Where it is served."""
        return f"/api/v1/client/{self.part}/{self.name}"

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Return the request; what is as usual is left out, so that an older server need not know it."""
        given = self.signature.bind(None, *args, **kwargs).arguments
        return msgspec.json.encode(self.request(**{name: _sent(value) for name, value in list(given.items())[1:]}))


def declared(part: str, protocol: type) -> dict[str, Declared]:
    """Return the calls of a protocol, by name."""
    methods = inspect.getmembers(protocol, lambda member: hasattr(member, _MARK))
    return {name: _declared(part, name, method) for name, method in methods}


def _declared(part: str, name: str, method: Callable[..., Any]) -> Declared:
    mark: _Mark = getattr(method, _MARK)
    signature = inspect.signature(method)
    hints = get_type_hints(method, include_extras=True)
    returned = hints.pop("return")
    waits = get_origin(returned) is Generator
    fields = [
        (one.name, _wire(hints[one.name]))
        if one.default is one.empty
        else (one.name, _wire(hints[one.name]), one.default)
        for one in list(signature.parameters.values())[1:]
    ]
    called = f"{part.title()}{name.title().replace('_', '')}"
    return Declared(
        part=part,
        name=name,
        scope=mark.scope,
        repeatable=mark.repeatable,
        knows_repeats=REPEATED in signature.parameters,
        waits=waits,
        summary=(inspect.getdoc(method) or "").partition("\n")[0].rstrip("."),
        signature=signature,
        request=msgspec.defstruct(
            f"{called}Request", fields, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
        ),
        answer=msgspec.defstruct(
            f"{called}Answer", [("result", get_args(returned)[2] if waits else returned)], frozen=True
        ),
    )


def _wire(kind: Any) -> Any:
    """Return the type in which a parameter travels.

    That is a list for what is walked through, text for a time or text, and a bounded number where no bound is given.
    """
    if kind is int:
        return _Whole
    if get_origin(kind) is Iterable:
        return list[get_args(kind)]  # type: ignore[misc]  # which is of one thing
    if get_origin(kind) in (Union, UnionType) and {datetime, str} <= {*get_args(kind)}:
        return reduce(or_, (one for one in get_args(kind) if one is not datetime))
    if get_origin(kind) in (Union, UnionType) and int in get_args(kind):
        return Union[tuple(_wire(one) for one in get_args(kind))]  # noqa: UP007  # of as many as there are
    return kind


def _sent(value: Any) -> Any:
    """Return a value as its field has it."""
    if isinstance(value, datetime) or not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        return value
    return list(value) if not hasattr(value, "__len__") else value
