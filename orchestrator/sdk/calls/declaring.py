"""A call as a declaration: a method with types, from which its request, answer, route and remote method are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from orchestrator.domain.access import Scope

F = TypeVar("F", bound=Callable[..., Any])

REPEATED = "repeated"
"""A parameter that says: this was asked before, and may have been done."""
_RULES = "_rules_of_call"
_Whole = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""As Postgres keeps it."""


class Kind(StrEnum):
    """The subject of a call. A key that is bound to some queues and workflows is checked against it."""

    TASK = "task"
    """By id: its queue, or the workflow of its run."""
    RUN = "run"
    """By id: its workflow."""
    TASK_OR_RUN = "task or run"
    """By id; where a list is confined, as its argument `kind` says."""
    QUEUE = "queue"
    """By name."""
    WORKFLOW = "workflow"
    """By name."""
    SCHEDULE = "schedule"
    """By its key: its workflow."""
    BACKFILL = "backfill"
    """By number: its workflow."""
    NEW_TASKS = "new tasks"
    """One or more, with their follow-ups: their queues."""
    DEFINITION = "definition"
    """A new one: its name, and all that it names."""
    FLOW = "flow"
    """A new one: its name, and its graph with all that it names."""
    LINEAGE = "lineage"
    """Of a task: each of its relatives."""


class Body(StrEnum):
    """How much a request brings, which bounds its size."""

    VALUE = "value"
    VALUES = "values"
    """Many of them, or a definition."""


class Wrapped(NamedTuple):
    """The type of an answer that has the result of a call as its one field."""

    name: str
    field: str
    description: str


class Rest(NamedTuple):
    """A plain HTTP route of a call about one thing, which the path names, or of a list."""

    route: str
    """Method and path: `POST /runs/{id}/cancel`."""
    done: str = ""
    """Said in the answer; empty if the result is the answer."""
    status: int = 200
    name: str = ""
    """Of the operation in the OpenAPI document, if it is not made of those of the call and of what it is about."""
    tag: str = ""
    """There, too: the subject, if it is not that of the call."""
    answer: Wrapped | None = None
    """None if the result itself is the answer."""
    summary: str = ""
    """If it is not that of the call."""


About = Mapping[Kind, str]
"""Which argument names what a call is about: a field of it after a dot, several with a space between."""
SYSTEM: About = {}
"""The whole system. A bound key may not ask about it."""


@dataclass(frozen=True)
class Rules:
    """Declares a method as a call, and says what holds for it. The API applies these rules."""

    scope: Scope = Scope.READ
    """A key needs at least this scope."""
    _: KW_ONLY
    about: About | None = None
    """None for a list, of which a bound key gets its part: by `within`, `keeps` or `bound_result`."""
    within: Mapping[str, Kind] = field(default_factory=dict)
    """Arguments of the backend that confine a bound key to its queues or workflows."""
    keeps: About = field(default_factory=dict)
    """The field by which items of the answer are kept for a bound key; empty if an item is a name itself."""
    bound_result: Any = None
    """A bound key always gets this result."""
    repeatable: bool | None = None
    """The client may make the call again if its answer was lost. Reads are repeatable unless they say otherwise."""
    assume_repeated: bool = False
    """Every request may be a repeat: it brings the ids of its tasks, and a proxy may have sent it twice."""
    expensive: bool = False
    """It takes long, and has request slots of its own."""
    body: Body | None = None
    """None as usual: a read brings none, anything else one value."""
    for_programs: bool = False
    """The answer has true values; the scope read gets them redacted."""
    redacts: str = ""
    """The argument that names the run by whose rules the result is redacted."""
    rest: Rest | None = None
    """The API serves the call under this route, too."""

    def __call__(self, method: F) -> F:
        """Attach the rules to a method."""
        if self.about is None and not self.within and not self.keeps and self.bound_result is None:
            raise TypeError(f"Call {method.__qualname__}: say what it is about, or what a bound key gets of the list.")
        setattr(method, _RULES, self)
        return method


call = Rules


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One call."""

    part: str
    """The subject."""
    name: str
    rules: Rules
    knows_repeats: bool
    """It takes an argument that says that it is repeated."""
    waits: bool
    """It may take as long as the answer of a run takes."""
    summary: str
    signature: inspect.Signature
    arguments: Mapping[str, Any]
    """Their types, by name."""
    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    """A structure of one field, `result`."""

    @property
    def is_repeatable(self) -> bool:
        """Say whether it may be made again if its answer was lost."""
        return self.rules.scope is Scope.READ if self.rules.repeatable is None else self.rules.repeatable

    @property
    def path(self) -> str:
        """Where it is served."""
        return f"/api/v1/client/{self.part}/{self.name}"

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Return the request; what is as usual is left out, so that an older server need not know it."""
        given = self.signature.bind(None, *args, **kwargs).arguments
        return msgspec.json.encode(self.request(**{name: _sent(value) for name, value in list(given.items())[1:]}))


@cache
def declared(part: str, protocol: type) -> dict[str, Declared]:
    """Return the calls of a protocol, by name."""
    methods = inspect.getmembers(protocol, lambda member: hasattr(member, _RULES))
    return {name: _declared(part, name, method) for name, method in methods}


def _declared(part: str, name: str, method: Callable[..., Any]) -> Declared:
    rules: Rules = getattr(method, _RULES)
    signature = inspect.signature(method)
    named = {word.partition(".")[0] for text in (rules.about or {}).values() for word in text.split()}
    if unknown := {*named, rules.redacts or "self"} - {*signature.parameters}:
        raise TypeError(f"Call {part}.{name}: its rules name {sorted(unknown)}, which is no argument of it.")
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
        rules=rules,
        knows_repeats=REPEATED in signature.parameters,
        waits=waits,
        summary=(inspect.getdoc(method) or "").partition("\n")[0].rstrip("."),
        signature=signature,
        arguments=hints,
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
    if get_origin(kind) is Annotated and not any(isinstance(one, msgspec.Meta) for one in get_args(kind)):
        return _wire(get_args(kind)[0])
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
