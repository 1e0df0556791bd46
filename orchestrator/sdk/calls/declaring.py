"""Declarations of calls: typed methods from which requests, answers, HTTP routes and remote methods are made."""

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
"""The name of a parameter that marks a retry: an earlier request may have been executed."""
_RULES = "_rules_of_call"
_Whole = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""An integer of 32 bits, as in Postgres."""


class Kind(StrEnum):
    """The subject of a call, which is checked for API keys that are restricted to some queues and workflows."""

    TASK = "task"
    """A task by id. Its queue is checked, or the workflow of its run."""
    RUN = "run"
    """A run by id. Its workflow is checked."""
    TASK_OR_RUN = "task or run"
    """A task or run by id. For lists, the argument `kind` tells which."""
    QUEUE = "queue"
    """A queue by name."""
    WORKFLOW = "workflow"
    """A workflow by name."""
    SCHEDULE = "schedule"
    """A schedule by key. Its workflow is checked."""
    BACKFILL = "backfill"
    """A backfill by number. Its workflow is checked."""
    NEW_TASKS = "new tasks"
    """One or several new tasks with callbacks. Their queues are checked."""
    DEFINITION = "definition"
    """A new workflow definition. Its name and all names in it are checked."""
    FLOW = "flow"
    """A new flow. Its name and all names in its graph are checked."""
    LINEAGE = "lineage"
    """The lineage of a task. Each relative is checked."""


class Body(StrEnum):
    """The content of a request, which determines the size limit."""

    VALUE = "value"
    VALUES = "values"
    """Many values, or a definition."""


class Wrapped(NamedTuple):
    """The type of an answer whose only field is the result of the call."""

    name: str
    field: str
    description: str


class Rest(NamedTuple):
    """A REST route for a call about one object, which the path names, or for a list."""

    route: str
    """Method and path: `POST /runs/{id}/cancel`."""
    done: str = ""
    """The action that the answer names; empty if the answer is the result."""
    status: int = 200
    name: str = ""
    """The operation name in the OpenAPI document; by default, made from the names of the call and its subject."""
    tag: str = ""
    """The tag in the OpenAPI document; by default, the subject of the call."""
    answer: Wrapped | None = None
    """The type of the answer; None if the answer is the result itself."""
    summary: str = ""
    """The summary in the OpenAPI document; by default, that of the call."""


About = Mapping[Kind, str]
"""The argument that names the subject, by kind. A dot selects a field; a space separates several arguments."""
SYSTEM: About = {}
"""The whole system as a subject. Restricted API keys have no access."""


@dataclass(frozen=True)
class Rules:
    """A decorator that declares a method as a call with rules. The API applies these rules."""

    scope: Scope = Scope.READ
    """The scope that an API key needs at least."""
    _: KW_ONLY
    about: About | None = None
    """The subject; None for a list, which `within`, `keeps` or `bound_result` filter for restricted API keys."""
    within: Mapping[str, Kind] = field(default_factory=dict)
    """Arguments of the backend that limit the result to the queues or workflows of a restricted API key."""
    keeps: About = field(default_factory=dict)
    """The field by which the answer is filtered for a restricted API key; empty if the items themselves are names."""
    bound_result: Any = None
    """The constant result for restricted API keys."""
    repeatable: bool | None = None
    """Whether the client may retry the call if the answer was lost. By default, only reads may be retried."""
    assume_repeated: bool = False
    """Treat every request as a possible retry. It contains the ids of its tasks, and a proxy may have sent it twice."""
    expensive: bool = False
    """Whether the call takes long. Such calls have request slots of their own."""
    body: Body | None = None
    """The content of the request; by default, nothing for a read, and one value for other calls."""
    for_programs: bool = False
    """Whether the answer has unredacted values. API keys with the scope `read` get redacted values."""
    redacts: str = ""
    """The argument that names the run whose redaction rules apply to the result."""
    rest: Rest | None = None
    """A REST route that serves the call, too."""

    def __call__(self, method: F) -> F:
        if self.about is None and not self.within and not self.keeps and self.bound_result is None:
            raise TypeError(f"Call {method.__qualname__}: say what it is about, or what a bound key gets of the list.")
        setattr(method, _RULES, self)
        return method


call = Rules


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A declared call."""

    part: str
    name: str
    rules: Rules
    knows_repeats: bool
    """Whether the call has the parameter `repeated`."""
    waits: bool
    """Whether the call waits for an answer of a run."""
    summary: str
    signature: inspect.Signature
    arguments: Mapping[str, Any]
    """The types of the parameters, by name."""
    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    """A struct with one field, `result`."""

    @property
    def is_repeatable(self) -> bool:
        """Whether the client may retry the call if the answer was lost."""
        return self.rules.scope is Scope.READ if self.rules.repeatable is None else self.rules.repeatable

    @property
    def path(self) -> str:
        """The HTTP path."""
        return f"/api/v1/client/{self.part}/{self.name}"

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Encode a request. Leave out arguments with default values, which an older server might not know."""
        arguments = self.signature.bind(None, *args, **kwargs).arguments
        return msgspec.json.encode(
            self.request(**{name: _for_request(value) for name, value in list(arguments.items())[1:]})
        )


@cache
def declared(part: str, protocol: type) -> dict[str, Declared]:
    """Return the calls of a protocol, by name."""
    methods = inspect.getmembers(protocol, lambda member: hasattr(member, _RULES))
    return {name: _declared(part, name, method) for name, method in methods}


def _declared(part: str, name: str, method: Callable[..., Any]) -> Declared:
    rules: Rules = getattr(method, _RULES)
    signature = inspect.signature(method)
    arguments = {word.partition(".")[0] for text in (rules.about or {}).values() for word in text.split()}
    if unknown := {*arguments, rules.redacts or "self"} - {*signature.parameters}:
        raise TypeError(f"Call {part}.{name}: its rules name {sorted(unknown)}, which is not an argument of it.")
    hints = get_type_hints(method, include_extras=True)
    return_type = hints.pop("return")
    waits = get_origin(return_type) is Generator
    fields = [
        (p.name, _wire(hints[p.name])) if p.default is p.empty else (p.name, _wire(hints[p.name]), p.default)
        for p in list(signature.parameters.values())[1:]
    ]
    type_name = f"{part.title()}{name.title().replace('_', '')}"
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
            f"{type_name}Request", fields, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
        ),
        answer=msgspec.defstruct(
            f"{type_name}Answer", [("result", get_args(return_type)[2] if waits else return_type)], frozen=True
        ),
    )


def _wire(kind: Any) -> Any:
    """Return the type of a parameter in the request.

    An iterable becomes a list, a time or text becomes a text, and an integer without bounds gets bounds.
    """
    if kind is int:
        return _Whole
    if get_origin(kind) is Annotated and not any(isinstance(part, msgspec.Meta) for part in get_args(kind)):
        return _wire(get_args(kind)[0])
    if get_origin(kind) is Iterable:
        return list[get_args(kind)]  # type: ignore[misc]  # it has one type argument
    if get_origin(kind) in (Union, UnionType) and {datetime, str} <= {*get_args(kind)}:
        return reduce(or_, (part for part in get_args(kind) if part is not datetime))
    if get_origin(kind) in (Union, UnionType) and int in get_args(kind):
        return Union[tuple(_wire(part) for part in get_args(kind))]  # noqa: UP007  # any number of types
    return kind


def _for_request(value: Any) -> Any:
    if isinstance(value, datetime) or not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        return value
    return list(value) if not hasattr(value, "__len__") else value
