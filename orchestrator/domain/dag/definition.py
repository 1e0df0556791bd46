"""A workflow as data: its steps, parameters and triggers. Whether they make sense together is for `checks`.

Files and the Python builder are two ways to write a `Definition`. It is immutable, and its JSON is what the database
keeps and the content hash covers: an option left out of the JSON has its default, so a new option with a default
changes no hash.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from datetime import UTC, date, datetime
from itertools import islice
from typing import Any, Literal
from zoneinfo import ZoneInfo

import msgspec
from msgspec import UNSET

from orchestrator.domain.dag.operators import describe, fits, listed
from orchestrator.domain.plain import unstorable
from orchestrator.errors import InvalidWorkflow, did_you_mean

Trigger = Literal["all_success", "all_ended", "any_success", "any_failed", "none_failed"]
"""Which ends of its upstreams let a step start."""
ParamType = Literal["string", "integer", "number", "boolean", "date", "datetime", "list", "object", "any"]


class _Data(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What all parts of a definition share: compact JSON, and back."""


class Param(_Data, frozen=True, kw_only=True):
    """A value that a run is started with."""

    type: ParamType = "any"
    default: Any = UNSET
    """What a run gets that does not say; UNSET: it must. A date may be `today`, a datetime `now`, any of them None."""
    description: str = ""

    @property
    def required(self) -> bool:
        """Say whether a run must be given this value."""
        return self.default is UNSET


class Registered(_Data, frozen=True, kw_only=True):
    """What a registered task says of itself, taken over when the workflow is applied; what a step says goes before it.

    The scheduler knows no functions: what `@app.task` says is known to it from here.
    """

    options: dict[str, Any] = {}
    """TaskOptions: retries, timeouts, isolation, limits."""
    queue: str | None = None
    """Its own queue, or that of the application's routes; None: the workflow's."""
    priority: int = 0
    delay: float | None = None
    expires: float | None = None
    key: str | None = None
    """Its concurrency_key."""
    callbacks: str | None = None
    """What follows it, as JSON."""
    ignored: tuple[str, ...] = ()
    """What its step would be given and it has no parameter for: outputs of other steps, and `item`."""


class Step(_Data, frozen=True, kw_only=True):
    """One node of the graph: a task, or a fan-out of tasks. Exactly one of task and workflow is set."""

    name: str
    task: str | None = None
    """A registered task, `module:function` or `file.py:function`."""
    workflow: str | None = None
    """A workflow to start as a child run."""
    executor: str | None = None
    """What older releases took in this place. Nothing runs it, so `checks` refuses it, and files cannot say it."""
    depends_on: tuple[str, ...] = ()
    input: dict[str, Any] = {}
    """A template: constants, and `${...}` over params, run and upstream outputs; in a fan-out item, index, count."""
    foreach: str | None = None
    """An expression, without `${}`, that gives the list of items."""
    parallel: int | str | None = None
    """How many copies, or an expression, without `${}`, that says so."""
    concurrency: int | None = None
    """How many tasks of the fan-out run at once."""
    trigger: Trigger = "all_success"
    when: str | None = None
    """An expression, without `${}`: the step is skipped where it is false. Evaluated once, before any fan-out."""
    retries: int | None = None
    """Tries after the first; this and the next three are None where the task decides."""
    timeout: float | None = None
    """Seconds that one attempt may run."""
    queue: str | None = None
    """Where it runs."""
    priority: int | None = None
    concurrency_key: str | None = None
    """A template, as in `input`: whom a task is for, in the place of its own concurrency_key."""
    registered: Registered | None = None
    """What its task says; None where that is nothing, or it was not registered when the workflow was applied."""


class Concurrency(_Data, frozen=True, kw_only=True):
    """How many runs of the workflow, or of the same key, run at once."""

    limit: int
    key: str | None = None
    """A template over params, such as `${params.customer}`."""


class EventTrigger(_Data, frozen=True, kw_only=True):
    """Starts a run when another workflow's run ends, or when an event is posted."""

    workflow: str | None = None
    state: Literal["success", "failed", "ended"] = "success"
    event: str | None = None
    filter: str | None = None
    """An expression, without `${}`, over `event`: what was posted, or the run that ended."""
    params: dict[str, Any] = {}
    """A template over `event` for the parameters of the run that it starts."""


class Hook(_Data, frozen=True, kw_only=True):
    """What happens when a run ends. Exactly one is set."""

    task: str | None = None
    webhook: str | None = None
    registered: Registered | None = None
    """What its task says; None as in a step."""


class Definition(_Data, frozen=True, kw_only=True):
    """A workflow."""

    name: str
    version: int | None = None
    """None: a new version whenever the content hash changes."""
    description: str = ""
    params: dict[str, Param] = {}
    schedule: dict[str, Any] | None = None
    """Checked plain data; `every` and `jitter` are seconds."""
    timeout: float | None = None
    """Seconds that a run may take."""
    concurrency: Concurrency | None = None
    tags: tuple[str, ...] = ()
    on: tuple[EventTrigger, ...] = ()
    on_failure: tuple[Hook, ...] = ()
    on_success: tuple[Hook, ...] = ()
    queue: str = "default"
    steps: tuple[Step, ...] = ()
    """In the order of the file."""


def content_hash(definition: Definition) -> str:
    """Return a SHA-256 of everything but the version."""
    body = msgspec.structs.replace(definition, version=None)
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()


def named_queues(definition: Definition) -> set[str]:
    """Return the queues that the tasks of a workflow may wait in."""
    own = {step.queue for step in definition.steps}
    parts: tuple[Step | Hook, ...] = (*definition.steps, *definition.on_failure, *definition.on_success)
    own |= {part.registered.queue for part in parts if part.registered is not None}
    return {definition.queue} | {queue for queue in own if queue is not None}


def queueing_problem(definition: Definition) -> str | None:
    """Return why runs of a schedule cannot queue up behind each other, or None where they can."""
    own = definition.concurrency
    if own is None or (own.limit == 1 and own.key is None):
        return None
    return (
        "overlap: queue is a limit of one run at a time, and the workflow has another one: leave out its concurrency."
    )


# -- parameters

_MOST_UNKNOWN = 20
"""Unknown parameters that are told at once."""


def resolve_params(definition: Definition, given: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the parameters of a run as plain data: what was given, and defaults.

    `now` is when the run is started or, for a schedule, due. `today` is its date in the schedule's time zone, if any.
    """
    unknown = (name for name in given if name not in definition.params)
    problems = [unknown_param(name, definition.params) for name in islice(unknown, _MOST_UNKNOWN)]
    resolved: dict[str, Any] = {}
    for name, param in definition.params.items():
        value = given.get(name, param.default)
        if value is UNSET:
            problems.append(f"parameter {name!r} ({param.type}) is missing, and has no default.")
        elif value is None and param.default is None:
            resolved[name] = None
        elif problem := misfit(param.type, value):
            problems.append(f"parameter {name!r}: {problem}.")
        else:
            resolved[name] = _plain(param.type, value, now, (definition.schedule or {}).get("timezone"))
    if problems:
        raise InvalidWorkflow("\n".join(f"Workflow {definition.name!r}: {problem}" for problem in problems))
    return resolved


def check_size(params: str, what: str, limit: int) -> None:
    """Refuse the parameters of a run, as JSON, if they are too large."""
    if len(params.encode()) > limit:
        raise InvalidWorkflow(
            f"{what}: {len(params.encode()):,} bytes, and at most {limit:,} are allowed. Pass a reference to the data "
            f"instead, or raise the setting max_payload."
        )


_PLAIN_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a string"),
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "list": ((list, tuple), "a list"),
    "object": ((Mapping,), "an object"),
}


def unknown_param(name: str, params: Mapping[str, Param]) -> str:
    """Return what to say of a parameter that does not exist."""
    known = f" Known: {listed(params)}." if params else " The workflow has none."
    return f"unknown parameter {name!r}.{did_you_mean(name, params) or known}"


def misfit(kind: ParamType, value: Any) -> str | None:
    """Return why a value is not of a type, or None where it is."""
    if kind == "date":
        expected = "a date such as 2024-01-31, or today"
        fits_type = value == "today" or _read_time(date, value) is not None
    elif kind == "datetime":
        expected = "a time such as 2024-01-31T09:30:00Z, or now"
        fits_type = value == "now" or _read_time(datetime, value) is not None
    elif kind == "any":
        expected, fits_type = "plain data", True
    else:
        types, expected = _PLAIN_TYPES[kind]
        fits_type = isinstance(value, types) and (kind == "boolean" or not isinstance(value, bool))
    if not fits_type:
        return f"expected {expected}, found {describe(value)}"
    if isinstance(value, (int, float)) and not fits(value):
        is_too_large = isinstance(value, int) or math.isfinite(value)
        return "the number is too large" if is_too_large else f"expected a finite number, found {value}"
    problem = unstorable(value)
    return f"expected plain data: {problem}" if problem else None


def _read_time(kind: type[date], value: Any) -> date | None:
    if isinstance(value, str):
        try:
            return kind.fromisoformat(value)
        except ValueError:
            return None
    return value if type(value) is kind else None


def _plain(kind: ParamType, value: Any, now: datetime, timezone: str | None) -> Any:
    if kind == "date":
        today = now.astimezone(ZoneInfo(timezone)) if timezone else now
        return (today.date() if value == "today" else _read_time(date, value) or value).isoformat()
    if kind == "datetime":
        moment = now if value == "now" else _read_time(datetime, value)
        assert isinstance(moment, datetime)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()
    return msgspec.json.decode(msgspec.json.encode(value))
