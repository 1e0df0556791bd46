"""Sealed values of old keys, sealed with the key in use; what was stored plain, before there were keys, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from orchestrator.domain.code.history import HistoryItem
from orchestrator.domain.sealed import changed, seal_error
from orchestrator.domain.tasks.task import TaskError
from orchestrator.sealing import CODE, Vault, as_data, as_text, extension_of, is_sealed, is_sealed_text, key_of

_items = msgspec.msgpack.Decoder(HistoryItem)
_keep: Callable[[int, memoryview], Any] = lambda code, data: Ext(code, bytes(data))  # noqa: E731
_plain = msgspec.msgpack.Decoder(ext_hook=_keep)
_lines = msgspec.msgpack.Decoder(list[list[Any]])
_TEXT = 3
"""Where the text of a line stands (`transport.codec.LogLine`)."""


def renewed_value(vault: Vault, kind: bytes, data: bytes) -> bytes:
    """Return an encoded value, and all that is sealed inside of it, sealed with the key in use."""
    if not data or (is_sealed(data) and key_of(extension_of(data)) == vault.key):
        return data
    content = vault.opened(kind, data)
    return vault.seal(kind, renewed_inside(vault, content))


def renewed_inside(vault: Vault, data: bytes) -> bytes:
    """Return encoded data with what is sealed in it sealed with the key in use."""
    if not any(key.encode() in data for key in vault.other_keys()):
        return data
    plain = _plain.decode(data)
    new = renewed_json(vault, plain)
    return data if new == plain else msgspec.msgpack.encode(new)


def renewed_event(vault: Vault, data: bytes) -> bytes:
    """Return an event of a history, as it is stored, with its values sealed with the key in use."""
    what = _items.decode(data)
    new = changed(what, partial(renewed_value, vault), partial(renewed_error, vault))
    return data if new == what else msgspec.msgpack.encode(new)


def renewed_lines(vault: Vault, data: bytes) -> bytes:
    """Return encoded lines of a task with their texts sealed with the key in use."""
    try:
        plain = _lines.decode(data)
    except msgspec.DecodeError:
        return data  # not ours, and unreadable
    new = [[*line[:_TEXT], vault.seal_text(renewed_json(vault, line[_TEXT])), *line[_TEXT + 1 :]] for line in plain]
    return data if new == plain else msgspec.msgpack.encode(new)


def renewed_error(vault: Vault, error: TaskError) -> TaskError:
    """Return an error, sealed with the key in use."""
    texts = [renewed_json(vault, text) for text in (error.message, error.traceback, error.data)]
    return seal_error(TaskError(error.kind, *texts), vault)


def renewed_json(vault: Vault, plain: Any) -> Any:
    """Return decoded JSON with what is sealed in it sealed with the key in use."""
    if isinstance(plain, dict):
        return {key: renewed_json(vault, value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [renewed_json(vault, item) for item in plain]
    if isinstance(plain, bytes):
        return renewed_value(vault, kind_of(extension_of(plain)), plain) if is_sealed(plain) else plain
    if isinstance(plain, Ext) and plain.code == CODE:
        whole = msgspec.msgpack.encode(plain)
        return Ext(CODE, extension_of(renewed_value(vault, kind_of(bytes(plain.data)), whole)))
    if isinstance(plain, str) and is_sealed_text(plain):
        data = as_data(plain)
        return as_text(renewed_value(vault, kind_of(extension_of(data)), data))
    return plain


def kind_of(data: bytes) -> bytes:
    """Return the kind of what the data of an extension holds."""
    return data[:1]
