"""Redacts every response by the patterns in `redact`, whichever route has produced it.

A type that holds user values declares how to redact them, here or at its definition (`@hides`). A test rejects routes
whose responses have a field of any type and no such declaration. Programs need the true values: a route that returns
them is declared with `true_values`, and even there, keys that can only read get redacted values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec

from orchestrator.api.context import Api
from orchestrator.domain import timezones
from orchestrator.domain.redaction import Redaction
from orchestrator.domain.schedules.schedule import Schedule
from orchestrator.sdk.values.display import call_of, stored_value
from orchestrator.sealing import is_sealed
from orchestrator.store.audit import AuditEntry
from orchestrator.store.flow.reads import FlowRunView, NodeRunView
from orchestrator.store.insights import AttemptView, CodeView, ErrorView, RunDetail, TaskDetail
from orchestrator.store.schedules.definitions import StoredSchedule

Hide = Callable[[Api, Any], Any]
F = TypeVar("F", bound=Hide)
_HIDE: dict[type, Hide] = {}
HideAnswer = Callable[[Api, Any, Any], Any]
_HIDE_ANSWER: dict[type, HideAnswer] = {}


def hides(kind: type) -> Callable[[F], F]:
    """Declare how user values in a response type are redacted."""

    def declare(hide: F) -> F:
        _HIDE[kind] = hide
        return hide

    return declare


def hides_answer(kind: type) -> Callable[[HideAnswer], HideAnswer]:
    """Declare how user values in a response type are redacted, with the request body as a parameter."""

    def declare(hide: HideAnswer) -> HideAnswer:
        _HIDE_ANSWER[kind] = hide
        return hide

    return declare


def redacted(api: Api, found: Any, body: Any = None) -> Any:
    """Return a response with secrets of the settings and task options redacted. `body` is the request body."""
    if (hide_answer := _HIDE_ANSWER.get(type(found))) is not None:
        return hide_answer(api, found, body)
    if type(found) in (list, tuple):
        return type(found)(redacted(api, one) for one in found)
    if type(found) is dict:
        return {name: redacted(api, one) for name, one in found.items()}
    hide = _HIDE.get(type(found))
    if hide is not None:
        return hide(api, found)
    kind: Any = type(found)
    if not (names := _fields_to_redact(kind)):
        return found
    changed = {name: redacted(api, getattr(found, name)) for name in names}
    if isinstance(found, msgspec.Struct):
        return msgspec.structs.replace(found, **changed)
    return found._replace(**changed) if hasattr(kind, "_replace") else dataclasses.replace(found, **changed)


def is_hidden(kind: Any) -> bool:
    """Return whether a type declares its redaction."""
    return kind in _HIDE or kind in _HIDE_ANSWER


def fields_of(kind: Any) -> Mapping[str, Any]:
    """Return the types of a struct's fields, by name; empty for other types."""
    if not isinstance(kind, type):
        return {}
    names: Any = getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", None)
    if names is None and dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    hints = get_type_hints(kind) if names else {}
    return {name: hints[name] for name in names or () if name in hints}


@lru_cache(maxsize=1_000)
def _fields_to_redact(kind: type) -> tuple[str, ...]:
    """Return the fields that may hold values to redact, at any depth."""
    return tuple(name for name, hint in fields_of(kind).items() if _may_hide(hint, {kind}))


def _may_hide(hint: Any, seen: set[Any]) -> bool:
    for part in parts_of(hint):
        if is_hidden(part) or isinstance(part, TypeVar):
            return True
        if part not in seen:
            seen.add(part)
            if any(_may_hide(inner, seen) for inner in fields_of(part).values()):
                return True
    return False


def parts_of(hint: Any) -> Iterator[Any]:
    """Yield the types in a type: three of them for `list[Page[T]] | None`."""
    arguments = [arg for arg in get_args(hint) if arg is not Ellipsis and not isinstance(arg, list)]
    if not arguments:
        yield hint
        return
    if (origin := get_origin(hint)) is not None and fields_of(origin):
        yield origin
    for argument in arguments:
        yield from parts_of(argument)


@hides(TaskDetail)
def _task(api: Api, found: TaskDetail) -> TaskDetail:
    if not (hidden := api.redaction_of_task(found)):
        return found
    return dataclasses.replace(
        found,
        payload=_call(hidden, found.payload),
        result=redacted_value(hidden, found.result),
        error=redacted_error(hidden, found.error),
        attempts=redacted_attempts(hidden, found.attempts),
    )


@hides(FlowRunView)
def _flow_run(api: Api, found: FlowRunView) -> FlowRunView:
    hidden = api.redaction_of_run(found.id) if found.redact or api.redaction else api.redaction
    return found._replace(params=hidden.redacted(found.params), shared=hidden.redacted(found.shared))


@hides(NodeRunView)
def _node_run(api: Api, found: NodeRunView) -> NodeRunView:
    hidden = api.redaction if found.run is None else api.redaction_of_run(found.run)
    return found._replace(input=hidden.redacted(found.input), output=hidden.redacted(found.output))


@hides(RunDetail)
def _run(api: Api, found: RunDetail) -> RunDetail:
    if not found.params and not found.attributes:
        return found
    hidden = api.redaction_of_run(found.id)
    return dataclasses.replace(
        found, params=hidden.redacted(found.params), attributes=hidden.redacted(found.attributes)
    )


@hides(CodeView)
def _code(api: Api, found: CodeView) -> CodeView:
    if not (hidden := api.redaction if found.run is None else api.redaction_of_run(found.run)):
        return found
    payload, result = _call(hidden, found.payload), redacted_value(hidden, found.result)
    state = hidden.redacted({name: stored_value(value) for name, value in found.state.items()})
    encoded = {name: timezones.encode(value) for name, value in state.items()}
    return dataclasses.replace(found, payload=payload, result=result, state=encoded)


@hides(AuditEntry)
def _audit_entry(api: Api, found: AuditEntry) -> AuditEntry:
    if found.kind != "run" or found.detail.keys().isdisjoint(("value", "reason", "why")):
        return found
    return dataclasses.replace(found, detail=api.redaction_of_run(UUID(found.target)).redacted(found.detail))


@hides(Schedule)
def _schedule(api: Api, found: Schedule) -> Schedule:
    return msgspec.structs.replace(found, params=api.redaction.redacted(found.params)) if found.params else found


@hides(StoredSchedule)
def _stored_schedule(api: Api, found: StoredSchedule) -> StoredSchedule:
    if not found.schedule.params:
        return found
    params = api.redaction_of_workflow(found.workflow).redacted(found.schedule.params)
    return dataclasses.replace(found, schedule=msgspec.structs.replace(found.schedule, params=params))


def _call(hidden: Redaction, payload: bytes) -> bytes:
    """Return a redacted call. A sealed call stays as it is, because this server cannot open it."""
    return timezones.encode(hidden.redacted_call(*call_of(payload))) if hidden and not is_sealed(payload) else payload


def redacted_error(hidden: Redaction, error: ErrorView | None) -> ErrorView | None:
    """Return an error with redacted texts and data."""
    if error is None:
        return None
    message, traceback = hidden.text(error.message), hidden.text(error.traceback)
    return dataclasses.replace(error, message=message, traceback=traceback, data=hidden.redacted(error.data))


def redacted_attempts(hidden: Redaction, attempts: Iterable[AttemptView]) -> tuple[AttemptView, ...]:
    """Return attempts with redacted errors."""
    return tuple(dataclasses.replace(attempt, error=redacted_error(hidden, attempt.error)) for attempt in attempts)


def redacted_value(hidden: Redaction, result: bytes | None) -> bytes | None:
    """Return an encoded value, redacted. A sealed value stays as it is."""
    if not hidden or result is None or is_sealed(result):
        return result
    return timezones.encode(hidden.redacted(stored_value(result)))
