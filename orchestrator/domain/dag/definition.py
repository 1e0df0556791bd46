"""A workflow definition as data: steps, parameters and triggers. `checks` validates it.

Files and the Python builder both produce a `Definition`. It is immutable. Its JSON is stored in the database and
covered by the content hash. Default values are left out of the JSON, so a new option with a default changes no hash.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET

from orchestrator.domain.dag.operators import describe, fits, listed
from orchestrator.domain.plain import unstorable
from orchestrator.domain.problems import Key
from orchestrator.domain.redaction import inheritable_patterns
from orchestrator.errors import InvalidWorkflow, did_you_mean

Trigger = Literal["all_success", "all_ended", "any_success", "any_failed", "none_failed"]
"""The outcomes of its upstream steps with which a step starts."""
ParamType = Literal["string", "integer", "number", "boolean", "date", "datetime", "list", "object", "any"]


class _Data(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base class of all parts of a definition, which are encoded as compact JSON."""


class Param(_Data, frozen=True, kw_only=True):
    """A parameter of a run."""

    type: Annotated[ParamType, Key("choice")] = "any"
    default: Annotated[
        Any, Key("any", "Without a default, a run must pass a value. A date may be today, a datetime now.")
    ] = UNSET
    description: Annotated[str, Key("text")] = ""

    @property
    def required(self) -> bool:
        """Whether a run must be given a value."""
        return self.default is UNSET


class Registered(_Data, frozen=True, kw_only=True):
    """Options of a registered task, copied when the workflow is applied. The options of the step take precedence.

    The scheduler cannot import functions: it reads the options of `@app.task` here.
    """

    options: dict[str, Any] = {}
    """TaskOptions: retries, timeouts, isolation, limits."""
    queue: str | None = None
    """The queue of the task, or of the application's routes. None for the workflow's queue."""
    priority: int = 0
    delay: float | None = None
    expires: float | None = None
    key: str | None = None
    callbacks: str | None = None
    """The task's callbacks, as JSON."""
    ignored: tuple[str, ...] = ()
    """Inputs of the step without a parameter of the task: outputs of other steps, and `item`."""


class Step(_Data, frozen=True, kw_only=True):
    """A step of the graph: a task, or a fan-out of tasks. Exactly one of task, workflow and executor is set."""

    name: str
    task: Annotated[str | None, Key("name", "A registered task, module:function or file.py:function.")] = None
    workflow: Annotated[str | None, Key("name", "A workflow to start and wait for.")] = None
    executor: Annotated[str | None, Key("own", "The executor that does the work outside Python, such as process.")] = (
        None
    )
    with_: Annotated[dict[str, Any], Key("own", "Constant arguments for the executor.")] = msgspec.field(
        default={}, name="with"
    )
    depends_on: Annotated[tuple[str, ...], Key("texts", "Tasks that must have ended before.")] = ()
    input: Annotated[
        dict[str, Any],
        Key(
            "object",
            "Constants and ${...} over params, run and the outputs of tasks above; in a fan-out item, index and count.",
        ),
    ] = {}
    foreach: Annotated[str | None, Key("items", "One task per item of a list, such as discover.files.")] = None
    """Stored without `${}`, like all expressions."""
    parallel: Annotated[
        int | str | None,
        Key("copies", "The number of tasks: a number, or an expression such as discover.count.", minimum=1),
    ] = None
    concurrency: Annotated[int | None, Key("integer", "How many tasks of a fan-out run at once.", minimum=1)] = None
    trigger: Annotated[Trigger, Key("choice", "Which outcomes of its upstream tasks let it start.")] = "all_success"
    when: Annotated[str | None, Key("condition", "The task is skipped if this is false, such as report.ok.")] = None
    """Evaluated once, before any fan-out."""
    retries: Annotated[int | None, Key("integer", "Attempts after the first.", minimum=0, maximum=1_000_000)] = None
    """Retries, timeout, queue and priority are None if the task decides."""
    timeout: Annotated[float | None, Key("duration", "Timeout of one attempt.")] = None
    queue: Annotated[str | None, Key("name", "The queue of the task.")] = None
    priority: Annotated[int | None, Key("integer", "Higher goes first.", minimum=-100, maximum=100)] = None
    concurrency_key: Annotated[
        str | None,
        Key("text", "The key of the limits, such as ${item.customer}: each key has the task's limits of its own."),
    ] = None
    registered: Registered | None = None
    """The options of the task. None if it was not registered when the workflow was applied."""

    @property
    def runs_task(self) -> bool:
        """Whether the step consists of tasks rather than runs of another workflow."""
        return self.task is not None or self.executor is not None


class Concurrency(_Data, frozen=True, kw_only=True):
    """Concurrent runs of the workflow, or of one key of it, at most."""

    limit: Annotated[int, Key("integer", minimum=1)]
    key: Annotated[str | None, Key("text", "An expression, such as ${params.customer}.")] = None


class EventTrigger(_Data, frozen=True, kw_only=True):
    """Starts a run when a run of another workflow ends, or when an event is posted."""

    workflow: Annotated[str | None, Key("name", "A workflow whose runs start this one when they end.")] = None
    state: Annotated[Literal["success", "failed", "ended"], Key("choice")] = "success"
    event: Annotated[str | None, Key("name", "The name of a posted event.")] = None
    filter: Annotated[str | None, Key("condition", "An expression, such as event.kind == 'order'.")] = None
    """A condition over `event`: the posted event, or the run that ended."""
    params: Annotated[dict[str, Any], Key("object", "Parameters of the run, such as {day: ${event.day}}.")] = {}


class Hook(_Data, frozen=True, kw_only=True):
    """A task or webhook at the end of a run. Exactly one of task and webhook is set."""

    task: Annotated[str | None, Key("name")] = None
    webhook: Annotated[str | None, Key("text", pattern=r"^https?://[^/\s]")] = None
    registered: Registered | None = None
    """The options of the task. None if it was not registered."""


class Definition(_Data, frozen=True, kw_only=True):
    """A workflow definition."""

    name: Annotated[str, Key("name", "The name of the workflow.")]
    version: Annotated[
        int | None, Key("integer", "By default a new version whenever the content changes.", minimum=1)
    ] = None
    description: Annotated[str, Key("text")] = ""
    params: Annotated[dict[str, Param], Key("own", "Parameters of a run.")] = {}
    schedule: Annotated[dict[str, Any] | None, Key("own", "When runs start automatically.")] = None
    """Validated plain data. `every` and `jitter` are in seconds."""
    timeout: Annotated[float | None, Key("duration", "Timeout of a run.")] = None
    concurrency: Annotated[
        Concurrency | None, Key("own", "Maximum number of concurrent runs, in total or per key.")
    ] = None
    tags: Annotated[tuple[str, ...], Key("texts", "Labels to find runs by.")] = ()
    on: Annotated[tuple[EventTrigger, ...], Key("own", "Events and workflows that start a run.")] = ()
    on_failure: Annotated[tuple[Hook, ...], Key("own", "Tasks and webhooks to start when a run has failed.")] = ()
    on_success: Annotated[tuple[Hook, ...], Key("own", "Tasks and webhooks to start when a run has succeeded.")] = ()
    queue: Annotated[str, Key("name", "The queue of its tasks.")] = "default"
    steps: tuple[Step, ...] = ()
    """In the order of the file, where they are named `tasks`."""


def hooks_of(definition: Definition, state: str) -> tuple[Hook, ...]:
    """Return the hooks for runs that end in a state."""
    return {"success": definition.on_success, "failed": definition.on_failure}.get(state, ())


def hidden_by(tasks: Iterable[Registered | None]) -> tuple[str, ...]:
    """Return the redaction patterns of all these tasks, which apply to each of them."""
    stored = [options.options for options in tasks if options is not None]
    patterns = (pattern for name in ("redact", "inherited") for options in stored for pattern in options.get(name, ()))
    return tuple(dict.fromkeys(inheritable_patterns(patterns)))


def content_hash(definition: Definition) -> str:
    """Return the SHA-256 of everything except the version."""
    body = msgspec.structs.replace(definition, version=None)
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()


def named_queues(definition: Definition) -> set[str]:
    """Return the queues of a workflow's tasks."""
    tasks = [(step.queue, step.registered) for step in definition.steps if step.workflow is None]
    tasks += [(None, hook.registered) for hook in (*definition.on_failure, *definition.on_success)]
    return {own or (registered and registered.queue) or definition.queue for own, registered in tasks}


def queueing_problem(definition: Definition) -> str | None:
    """Return why a schedule's runs cannot use `overlap: queue`, or None if they can."""
    own = definition.concurrency
    if own is None or (own.limit == 1 and own.key is None):
        return None
    return (
        "overlap: queue is a limit of one run at a time, but the workflow sets a different one: remove its concurrency."
    )


# -- parameters

_MAX_UNKNOWN = 20
"""Unknown parameters named in one error, at most."""


def resolve_params(definition: Definition, given: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the parameters of a run as plain data, with defaults filled in.

    `now` is the time of the start or, for a schedule, of the fire. `today` is its date in the schedule's time zone, if
    any.
    """
    unknown = (name for name in given if name not in definition.params)
    problems = [unknown_param(name, definition.params) for name in islice(unknown, _MAX_UNKNOWN)]
    resolved: dict[str, Any] = {}
    for name, param in definition.params.items():
        value = given.get(name, param.default)
        if value is UNSET:
            problems.append(f"parameter {name!r} ({param.type}) is missing and has no default.")
        elif value is None and param.default is None:
            resolved[name] = None
        elif problem := mismatch(param.type, value):
            problems.append(f"parameter {name!r}: {problem}.")
        else:
            resolved[name] = _plain(param.type, value, now, (definition.schedule or {}).get("timezone"))
    if problems:
        raise InvalidWorkflow("\n".join(f"Workflow {definition.name!r}: {problem}" for problem in problems))
    return resolved


def check_size(params: str, what: str, limit: int) -> None:
    """Raise InvalidWorkflow if the parameters of a run are too large as JSON."""
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
    """Return the message that a parameter does not exist."""
    hint = f" Known: {listed(params)}." if params else " The workflow has none."
    return f"unknown parameter {name!r}.{did_you_mean(name, params) or hint}"


def mismatch(kind: ParamType, value: Any) -> str | None:
    """Return why a value does not match a type, or None if it does."""
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
        from zoneinfo import ZoneInfo  # imported late: most programs never need it

        today = now.astimezone(ZoneInfo(timezone)) if timezone else now
        return (today.date() if value == "today" else _read_time(date, value) or value).isoformat()
    if kind == "datetime":
        moment = now if value == "now" else _read_time(datetime, value)
        assert isinstance(moment, datetime)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()
    return msgspec.json.decode(msgspec.json.encode(value))


# -- conditions for storing a definition, as the hashes that its newest version may or may not have (If-Match)


ANY = "*"
"""Matches any hash."""


class Condition(NamedTuple):
    """A condition on the newest version, checked before a new version is stored."""

    one_of: frozenset[str] | None = None
    """The newest version must have one of these hashes."""
    none_of: frozenset[str] | None = None
    """The newest version must have none of these hashes."""

    def refusal(self, name: str, version: int | None, hash: str | None) -> str | None:
        """Return why the condition is not met, or None. Version and hash are None without a version."""
        actual = "there is no version" if hash is None else f"its version {version} has the hash {hash!r}"
        if self.one_of is not None and not _has(self.one_of, hash):
            if ANY in self.one_of:
                return f"Workflow {name!r} should exist already, but {actual}."
            expected = " or ".join(map(repr, sorted(self.one_of)))
            return (
                f"Workflow {name!r} was changed in the meantime: expected the hash {expected}, but {actual}. Read it "
                f"again, and apply your change to that version."
            )
        if self.none_of is not None and _has(self.none_of, hash):
            if ANY in self.none_of:
                return f"Workflow {name!r} should be new, but there is version {version}, with the hash {hash!r}."
            return f"Workflow {name!r} should no longer have this hash, but {actual}."
        return None


def _has(hashes: frozenset[str], hash: str | None) -> bool:
    return hash is not None and (ANY in hashes or hash in hashes)


ALWAYS = Condition()
