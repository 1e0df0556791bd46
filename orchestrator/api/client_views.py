"""What people see, with what is secret hidden before it leaves the server."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from orchestrator.api.context import Api
from orchestrator.domain import zoned
from orchestrator.domain.redaction import Redaction
from orchestrator.sdk.values.shown import call_of, stored_value
from orchestrator.sealing import is_sealed
from orchestrator.store.flow.reads import FlowRunView, NodeRunView
from orchestrator.store.insights import CodeView, RunDetail, TaskDetail
from orchestrator.store.schedules.definitions import StoredSchedule


def hide(api: Api, found: Any) -> Any:
    """Return what was found without what the settings, or a task's options, say is not to be shown."""
    if isinstance(found, list):
        return [hide(api, one) for one in found]
    if isinstance(found, TaskDetail):
        hidden = api.redaction_of(found.options)
        payload, result = _call(hidden, found.payload), _value(hidden, found.result)
        return dataclasses.replace(found, payload=payload, result=result) if hidden else found
    if isinstance(found, FlowRunView):
        hidden = api.redaction_of({"redact": found.redact})
        return found._replace(params=hidden.shown(found.params), shared=hidden.shown(found.shared))
    if isinstance(found, NodeRunView):
        hidden = api.redaction_of({"redact": found.redact})
        return found._replace(input=hidden.shown(found.input), output=hidden.shown(found.output))
    if not api.redaction:
        return found
    if isinstance(found, RunDetail):
        return dataclasses.replace(found, params=api.redaction.shown(found.params))
    if isinstance(found, CodeView):
        payload, result = _call(api.redaction, found.payload), _value(api.redaction, found.result)
        state = api.redaction.shown({name: stored_value(value) for name, value in found.state.items()})
        encoded = {name: zoned.encode(value) for name, value in state.items()}
        return dataclasses.replace(found, payload=payload, result=result, state=encoded)
    if isinstance(found, StoredSchedule):
        params = api.redaction.shown(found.schedule.params)
        return dataclasses.replace(found, schedule=msgspec.structs.replace(found.schedule, params=params))
    return found


def _call(hidden: Redaction, payload: bytes) -> bytes:
    """Return a call without what is secret; one that is sealed is for who has the key, and that is not this server."""
    return zoned.encode(hidden.call_shown(*call_of(payload))) if hidden and not is_sealed(payload) else payload


def _value(hidden: Redaction, result: bytes | None) -> bytes | None:
    if not hidden or result is None or is_sealed(result):
        return result
    return zoned.encode(hidden.shown(stored_value(result)))
