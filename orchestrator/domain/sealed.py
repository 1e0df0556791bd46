"""What is sealed of errors, reports and events, and what stays plain: kinds, names, ids and numbers do.

The fields that hold values have the same names everywhere: `payload` is a call, `result`, `value` and `details` are
values, and `error` is an error. The caller seals tasks that it describes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from orchestrator.domain.code.activation import Activated, Activation, Violation
from orchestrator.domain.code.history import Event
from orchestrator.domain.executors.record import is_record
from orchestrator.domain.tasks.task import Noted, TaskError
from orchestrator.sealing import CALL, VALUE, Vault, is_sealed_text, open_data, open_text, reveal, reveal_text

S = TypeVar("S", bound=msgspec.Struct)
_KINDS = {"payload": CALL, "result": VALUE, "value": VALUE, "details": VALUE}
_Change = Callable[[bytes, bytes], bytes]


def seal_error(error: TaskError, vault: Vault) -> TaskError:
    """Return an error of which only the kind can be read."""
    data = vault.seal_value_text(error.attributes) if error.data and not is_sealed_text(error.data) else error.data
    return TaskError(error.kind, vault.seal_text(error.message), vault.seal_text(error.traceback), data, error.phase)


def open_error(error: TaskError) -> TaskError:
    """Return an error as it was; what cannot be opened says with which key it is sealed."""
    if not _has_sealed(error):
        return error
    data = reveal_text(error.data)
    message, traceback = open_text(error.message), open_text(error.traceback)
    return TaskError(error.kind, message, traceback, "" if is_sealed_text(data) else data, error.phase)


def reveal_error(error: TaskError) -> TaskError:
    """Return an error, opened where this process can: a client over HTTP may have the key."""
    if not _has_sealed(error):
        return error
    message, traceback, data = map(reveal_text, (error.message, error.traceback, error.data))
    return TaskError(error.kind, message, traceback, data, error.phase)


def _has_sealed(error: TaskError) -> bool:
    return any(map(is_sealed_text, (error.message, error.traceback, error.data)))


def seal_struct(item: S, vault: Vault) -> S:
    """Return a report, a command or an answer with its values sealed."""
    if isinstance(item, Activated):
        return msgspec.structs.replace(
            item,
            commands=[seal_struct(command, vault) for command in item.commands],
            answers=[seal_struct(answer, vault) for answer in item.answers],
            stuck=None if item.stuck is None else seal_violation(item.stuck, vault),
        )
    if isinstance(item, Noted) and is_record(item.details):
        return item
    return changed(item, vault.seal, lambda error: seal_error(error, vault))


def seal_violation(stuck: Violation, vault: Vault) -> Violation:
    """Return why code is stuck, which quotes what it raised, sealed."""
    return msgspec.structs.replace(
        stuck, message=vault.seal_text(stuck.message), difference=vault.seal_text(stuck.difference)
    )


def open_activation(activation: Activation) -> Activation:
    """Return an activation with its events and queries opened, or raise `Sealed`."""
    return msgspec.structs.replace(
        activation,
        events=[open_event(event) for event in activation.events],
        queries=[changed(query, _opened, open_error) for query in activation.queries],
    )


def open_event(event: Event) -> Event:
    """Return an event with its values opened, or raise `Sealed`."""
    what = changed(event.what, _opened, open_error)
    return event if what is event.what else Event(event.number, event.at, what)


def reveal_event(event: Event) -> Event:
    """Return an event for people: what cannot be opened stays sealed."""
    what = changed(event.what, lambda kind, data: reveal(data, kind), reveal_error)
    return event if what is event.what else Event(event.number, event.at, what)


def _opened(kind: bytes, data: bytes) -> bytes:
    return open_data(data, kind)


def changed(item: S, change: _Change, change_error: Callable[[TaskError], TaskError]) -> S:
    """Return an item in which each value, with its kind, and each error was changed."""
    changes: dict[str, Any] = {}
    for name in item.__struct_fields__:
        if name in _KINDS:
            data = getattr(item, name)
            if data:
                changes[name] = change(_KINDS[name], data)
        elif name == "error" and (error := item.error) is not None:  # type: ignore[attr-defined]
            changes[name] = change_error(error)
    return msgspec.structs.replace(item, **changes) if changes else item
