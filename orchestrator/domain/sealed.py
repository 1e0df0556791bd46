"""Encryption of errors, reports and events. Values are sealed; kinds, names, ids and numbers stay plain.

Fields with values have the same names everywhere: `payload` is a call, `result`, `value` and `details` are values, and
`error` is an error. The caller seals the calls of tasks that an item describes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.msgpack import Ext

from orchestrator.domain.code.activation import Activated, Activation, Violation
from orchestrator.domain.code.history import Event, HistoryItem
from orchestrator.domain.executors.record import is_record
from orchestrator.domain.tasks.task import Noted, TaskError
from orchestrator.sealing import (
    CALL,
    CODE,
    VALUE,
    Vault,
    as_data,
    as_text,
    extension_of,
    is_sealed,
    is_sealed_text,
    key_of,
    open_data,
    open_text,
    reveal,
    reveal_text,
)

S = TypeVar("S", bound=msgspec.Struct)
_KINDS = {"payload": CALL, "result": VALUE, "value": VALUE, "details": VALUE}
_Change = Callable[[bytes, bytes], bytes]


def seal_error(error: TaskError, vault: Vault) -> TaskError:
    """Return an error with everything sealed but its kind and phase."""
    data = vault.seal_value_text(error.attributes) if error.data and not is_sealed_text(error.data) else error.data
    return TaskError(error.kind, vault.seal_text(error.message), vault.seal_text(error.traceback), data, error.phase)


def open_error(error: TaskError) -> TaskError:
    """Return a decrypted error. A text that cannot be decrypted is replaced by a note that names its key."""
    if not _has_sealed(error):
        return error
    data = reveal_text(error.data)
    message, traceback = open_text(error.message), open_text(error.traceback)
    return TaskError(error.kind, message, traceback, "" if is_sealed_text(data) else data, error.phase)


def reveal_error(error: TaskError) -> TaskError:
    """Return an error, decrypted if this process can. The rest stays sealed for an HTTP client that has the key."""
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
    """Return the reason why code is stuck, sealed: it quotes the exception of the code."""
    return msgspec.structs.replace(
        stuck, message=vault.seal_text(stuck.message), difference=vault.seal_text(stuck.difference)
    )


def open_activation(activation: Activation) -> Activation:
    """Return an activation with its events and queries decrypted, or raise `Sealed`."""
    return msgspec.structs.replace(
        activation,
        events=[open_event(event) for event in activation.events],
        queries=[changed(query, _opened, open_error) for query in activation.queries],
    )


def open_event(event: Event) -> Event:
    """Return an event with its values decrypted, or raise `Sealed`."""
    what = changed(event.what, _opened, open_error)
    return event if what is event.what else Event(event.number, event.at, what)


def reveal_event(event: Event) -> Event:
    """Return an event for display. Values that cannot be decrypted stay sealed."""
    what = changed(event.what, lambda kind, data: reveal(data, kind), reveal_error)
    return event if what is event.what else Event(event.number, event.at, what)


def _opened(kind: bytes, data: bytes) -> bytes:
    return open_data(data, kind)


def changed(item: S, change: _Change, change_error: Callable[[TaskError], TaskError]) -> S:
    """Return an item after applying `change` to each value and `change_error` to its error."""
    changes: dict[str, Any] = {}
    for name in item.__struct_fields__:
        if name in _KINDS:
            data = getattr(item, name)
            if data:
                changes[name] = change(_KINDS[name], data)
        elif name == "error" and (error := item.error) is not None:  # type: ignore[attr-defined]
            changes[name] = change_error(error)
    return msgspec.structs.replace(item, **changes) if changes else item


# -- key rotation: values sealed with old keys, or stored before there were keys, are sealed with the current key

_items = msgspec.msgpack.Decoder(HistoryItem)
_keep: Callable[[int, memoryview], Any] = lambda code, data: Ext(code, bytes(data))  # noqa: E731
_plain = msgspec.msgpack.Decoder(ext_hook=_keep)
_lines = msgspec.msgpack.Decoder(list[list[Any]])
_TEXT = 3
"""The index of the text in a log line (`transport.codec.LogLine`)."""


def renewed_value(vault: Vault, kind: bytes, data: bytes) -> bytes:
    """Return an encoded value, and all values sealed within it, sealed with the current key."""
    if not data or (is_sealed(data) and key_of(extension_of(data)) == vault.key):
        return data
    content = vault.opened(kind, data)
    return vault.seal(kind, renewed_inside(vault, content))


def renewed_inside(vault: Vault, data: bytes) -> bytes:
    """Return encoded data with the values sealed within it sealed with the current key."""
    if not any(key.encode() in data for key in vault.other_keys()):
        return data
    plain = _plain.decode(data)
    new = renewed_json(vault, plain)
    return data if new == plain else msgspec.msgpack.encode(new)


def renewed_event(vault: Vault, data: bytes) -> bytes:
    """Return a stored history event with its values sealed with the current key."""
    what = _items.decode(data)
    new = changed(what, partial(renewed_value, vault), partial(renewed_error, vault))
    return data if new == what else msgspec.msgpack.encode(new)


def renewed_lines(vault: Vault, data: bytes) -> bytes:
    """Return a task's encoded log lines with their texts sealed with the current key."""
    try:
        plain = _lines.decode(data)
    except msgspec.DecodeError:
        return data  # not written by this system, and unreadable
    new = [[*line[:_TEXT], vault.seal_text(renewed_json(vault, line[_TEXT])), *line[_TEXT + 1 :]] for line in plain]
    return data if new == plain else msgspec.msgpack.encode(new)


def renewed_error(vault: Vault, error: TaskError) -> TaskError:
    """Return an error sealed with the current key."""
    texts = [renewed_json(vault, text) for text in (error.message, error.traceback, error.data)]
    return seal_error(TaskError(error.kind, *texts), vault)


def renewed_json(vault: Vault, plain: Any) -> Any:
    """Return decoded JSON with the values sealed within it sealed with the current key."""
    if isinstance(plain, dict):
        return {key: renewed_json(vault, value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [renewed_json(vault, item) for item in plain]
    if isinstance(plain, bytes):
        return renewed_value(vault, kind_of(extension_of(plain)), plain) if is_sealed(plain) else plain
    if isinstance(plain, Ext) and plain.code == CODE:
        encoded = msgspec.msgpack.encode(plain)
        return Ext(CODE, extension_of(renewed_value(vault, kind_of(bytes(plain.data)), encoded)))
    if isinstance(plain, str) and is_sealed_text(plain):
        data = as_data(plain)
        return as_text(renewed_value(vault, kind_of(extension_of(data)), data))
    return plain


def kind_of(data: bytes) -> bytes:
    """Return the kind of value that the data of a sealed extension holds."""
    return data[:1]
