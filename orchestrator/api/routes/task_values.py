"""What a task was given and what it returned, as a whole: also where that stands in the payload store."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from typing import Any
from uuid import UUID

import msgspec
from starlette.responses import Response, StreamingResponse

from orchestrator.api.context import Api
from orchestrator.api.endpoints import JSON, Routes
from orchestrator.api.key_scope import TASK
from orchestrator.domain.redaction import Redaction
from orchestrator.domain.states import TaskState
from orchestrator.errors import NotFound, PayloadError, WrongState
from orchestrator.payloads.objects import Reading
from orchestrator.payloads.stores import Store
from orchestrator.references import BYTES, ITEMS, Reference, whole_reference
from orchestrator.sdk.values.display import as_json
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.store.insights import TaskDetail

routes = Routes("tasks", "/api/v1/tasks")

_LARGEST_WHOLE = 16_000_000
"""Bytes of a value that is made JSON of in one piece; lists and bytes are read chunk by chunk."""


class Arguments(msgspec.Struct, frozen=True):
    """What a task was given."""

    args: list[Any]
    kwargs: dict[str, Any]


@routes.get("/{id}/result", about=TASK, is_expensive=True)
def task_result(api: Api, id: UUID) -> Response:
    """Return the value that a task, or a run of code, has returned, as JSON, however large; bytes in base 64."""
    task = _found(api, id)
    if task.status != TaskState.SUCCESS:
        raise WrongState(f"Task {id} is {task.status}: only a task that has succeeded has a result.")
    data, hidden = task.result or b"\xc0", api.redaction_of_task(task)
    stored = whole_reference(data)
    if stored is None or stored.item is not None or stored.form not in (BYTES, ITEMS):
        _check_size(id, stored)
        return Response(_json(hidden.shown(decode_value(data))), media_type=JSON)
    parts = _parts(_store(api, id), stored, hidden)
    first = next(parts)  # what cannot be read is refused before anything is sent
    return StreamingResponse(chain([first], parts), media_type=JSON)


@routes.get("/{id}/arguments", about=TASK, is_expensive=True)
def task_arguments(api: Api, id: UUID) -> Arguments:
    """Return the arguments that a task, or a run of code, was given, also where they are in the payload store."""
    task = _found(api, id)
    payload = task.payload or _of_run(api, id)
    _check_size(id, whole_reference(payload))
    arguments, keywords, *_ = decode_call(payload) if payload else ([], {})
    shown, named = api.redaction_of_task(task).call_shown(arguments, keywords)
    return Arguments(as_json(shown), as_json(named))


def _found(api: Api, id: UUID) -> TaskDetail:
    found = api.backend.insights.show_task(id)
    if found is None:
        raise NotFound.by_id("task", str(id))
    return found


def _of_run(api: Api, id: UUID) -> bytes:
    """Return what a run of code was given: its turn task, which has its id, is given nothing of its own."""
    code = api.backend.insights.show_code(id)
    return b"" if code is None else code.payload


def _store(api: Api, id: UUID) -> Store:
    payloads = api.backend.connections.payloads
    if payloads is None:
        raise PayloadError(
            f"A payload of task {id} is stored outside, and this process has no payload store. See the setting "
            f"payload_store."
        )
    return payloads.store


def _check_size(id: UUID, stored: Reference | None) -> None:
    if stored is not None and stored.size > _LARGEST_WHOLE:
        raise PayloadError(
            f"A payload of task {id} has {stored.size:,} bytes, and one that is no list and no bytes is answered up to "
            f"{_LARGEST_WHOLE:,}. Read it with a Python client, or let the task return a list."
        )


def _parts(store: Store, stored: Reference, hidden: Redaction) -> Iterator[bytes]:
    """Yield a stored list, or stored bytes, as JSON, chunk by chunk."""
    with closing(Reading(store, stored)) as reading:
        yield from _list(reading, hidden) if stored.form == ITEMS else _text(reading)


def _list(reading: Reading, hidden: Redaction) -> Iterator[bytes]:
    before = b"["
    for chunk in reading.each():
        if items := _json(hidden.shown(decode_value(chunk)))[1:-1]:
            yield before + items
            before = b","
    yield b"[]" if before == b"[" else b"]"


def _text(reading: Reading) -> Iterator[bytes]:
    before, left = b'"', b""
    for chunk in reading.each():
        data = left + chunk
        whole = len(data) - len(data) % 3
        yield before + b64encode(data[:whole])
        before, left = b"", data[whole:]
    yield before + b64encode(left) + b'"'


def _json(value: Any) -> bytes:
    return msgspec.json.encode(as_json(value))
