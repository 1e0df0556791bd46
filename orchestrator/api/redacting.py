"""Redacts every answer: what `redact` names is hidden, whichever route has made the answer.

A type with values of users in it says here, or where it is declared (`@hides`), how they are hidden. A test refuses
routes whose answers have a field for any value and do not say so. True values are for programs: a route that returns
them is declared with `true_values`, and callers whose key can only read are shown what everybody is shown.
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
    """Declare how values of users are hidden in answers of a type."""

    def declare(hide: F) -> F:
        _HIDE[kind] = hide
        return hide

    return declare


def hides_answer(kind: type) -> Callable[[HideAnswer], HideAnswer]:
    """Declare how values of users are hidden in answers of a type, by what was asked."""

    def declare(hide: HideAnswer) -> HideAnswer:
        _HIDE_ANSWER[kind] = hide
        return hide

    return declare


def shown(api: Api, found: Any, asked: Any = None) -> Any:
    """Return an answer without what the settings, or a task's options, say is not to be shown; `asked` is the body."""
    if (hide_answer := _HIDE_ANSWER.get(type(found))) is not None:
        return hide_answer(api, found, asked)
    if type(found) in (list, tuple):
        return type(found)(shown(api, one) for one in found)
    if type(found) is dict:
        return {name: shown(api, one) for name, one in found.items()}
    hide = _HIDE.get(type(found))
    if hide is not None:
        return hide(api, found)
    kind: Any = type(found)
    if not (names := _holders(kind)):
        return found
    changed = {name: shown(api, getattr(found, name)) for name in names}
    if isinstance(found, msgspec.Struct):
        return msgspec.structs.replace(found, **changed)
    return found._replace(**changed) if hasattr(kind, "_replace") else dataclasses.replace(found, **changed)


def is_hidden(kind: Any) -> bool:
    """Say whether a type says how values in it are hidden."""
    return kind in _HIDE or kind in _HIDE_ANSWER


def fields_of(kind: Any) -> Mapping[str, Any]:
    """Return the types of the fields of a structure, by name; nothing of anything else."""
    if not isinstance(kind, type):
        return {}
    names: Any = getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", None)
    if names is None and dataclasses.is_dataclass(kind):
        names = [one.name for one in dataclasses.fields(kind)]
    hints = get_type_hints(kind) if names else {}
    return {name: hints[name] for name in names or () if name in hints}


@lru_cache(maxsize=1_000)
def _holders(kind: type) -> tuple[str, ...]:
    """Return the fields in which, at some depth, there may be something to hide."""
    return tuple(name for name, hint in fields_of(kind).items() if _is_held(hint, {kind}))


def _is_held(hint: Any, seen: set[Any]) -> bool:
    for one in parts_of(hint):
        if is_hidden(one) or isinstance(one, TypeVar):
            return True
        if one not in seen:
            seen.add(one)
            if any(_is_held(inner, seen) for inner in fields_of(one).values()):
                return True
    return False


def parts_of(hint: Any) -> Iterator[Any]:
    """Yield the types that a type is made of: of `list[Page[T]] | None`, these three."""
    arguments = [one for one in get_args(hint) if one is not Ellipsis and not isinstance(one, list)]
    if not arguments:
        yield hint
        return
    if (origin := get_origin(hint)) is not None and fields_of(origin):
        yield origin
    for one in arguments:
        yield from parts_of(one)


@hides(TaskDetail)
def _task(api: Api, found: TaskDetail) -> TaskDetail:
    if not (hidden := api.redaction_of_task(found)):
        return found
    return dataclasses.replace(
        found,
        payload=_call(hidden, found.payload),
        result=value_shown(hidden, found.result),
        error=error_shown(hidden, found.error),
        attempts=attempts_shown(hidden, found.attempts),
    )


@hides(FlowRunView)
def _flow_run(api: Api, found: FlowRunView) -> FlowRunView:
    hidden = api.redaction_of_run(found.id) if found.redact or api.redaction else api.redaction
    return found._replace(params=hidden.shown(found.params), shared=hidden.shown(found.shared))


@hides(NodeRunView)
def _node_run(api: Api, found: NodeRunView) -> NodeRunView:
    hidden = api.redaction if found.run is None else api.redaction_of_run(found.run)
    return found._replace(input=hidden.shown(found.input), output=hidden.shown(found.output))


@hides(RunDetail)
def _run(api: Api, found: RunDetail) -> RunDetail:
    if not found.params and not found.attributes:
        return found
    hidden = api.redaction_of_run(found.id)
    return dataclasses.replace(found, params=hidden.shown(found.params), attributes=hidden.shown(found.attributes))


@hides(CodeView)
def _code(api: Api, found: CodeView) -> CodeView:
    if not (hidden := api.redaction if found.run is None else api.redaction_of_run(found.run)):
        return found
    payload, result = _call(hidden, found.payload), value_shown(hidden, found.result)
    state = hidden.shown({name: stored_value(value) for name, value in found.state.items()})
    encoded = {name: timezones.encode(value) for name, value in state.items()}
    return dataclasses.replace(found, payload=payload, result=result, state=encoded)


@hides(AuditEntry)
def _audit_entry(api: Api, found: AuditEntry) -> AuditEntry:
    if found.kind != "run" or found.detail.keys().isdisjoint(("value", "reason", "why")):
        return found
    return dataclasses.replace(found, detail=api.redaction_of_run(UUID(found.target)).shown(found.detail))


@hides(Schedule)
def _schedule(api: Api, found: Schedule) -> Schedule:
    return msgspec.structs.replace(found, params=api.redaction.shown(found.params)) if found.params else found


@hides(StoredSchedule)
def _stored_schedule(api: Api, found: StoredSchedule) -> StoredSchedule:
    if not found.schedule.params:
        return found
    params = api.redaction_of_workflow(found.workflow).shown(found.schedule.params)
    return dataclasses.replace(found, schedule=msgspec.structs.replace(found.schedule, params=params))


def _call(hidden: Redaction, payload: bytes) -> bytes:
    """Return a call without what is secret; a sealed one as it is, because this server cannot open it."""
    return timezones.encode(hidden.call_shown(*call_of(payload))) if hidden and not is_sealed(payload) else payload


def error_shown(hidden: Redaction, error: ErrorView | None) -> ErrorView | None:
    """Return an error whose texts hold nothing that is secret."""
    if error is None:
        return None
    message, traceback = hidden.text(error.message), hidden.text(error.traceback)
    return dataclasses.replace(error, message=message, traceback=traceback, data=hidden.shown(error.data))


def attempts_shown(hidden: Redaction, attempts: Iterable[AttemptView]) -> tuple[AttemptView, ...]:
    """Return attempts whose errors hold nothing that is secret."""
    return tuple(dataclasses.replace(one, error=error_shown(hidden, one.error)) for one in attempts)


def value_shown(hidden: Redaction, result: bytes | None) -> bytes | None:
    """Return an encoded value without what is secret; one that is sealed as it is."""
    if not hidden or result is None or is_sealed(result):
        return result
    return timezones.encode(hidden.shown(stored_value(result)))
