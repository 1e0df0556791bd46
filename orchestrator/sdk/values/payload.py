"""Encoding of arguments and results: MessagePack, never pickle.

`conversion.py` and msgspec encode the values; the worker converts them back to the types in the task's signature.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, time, timedelta
from typing import IO, Any, get_args, get_origin

import msgspec

from orchestrator import references
from orchestrator.domain import timezones
from orchestrator.domain.plain import MAX_LEVELS, REFUSALS, is_too_deep
from orchestrator.errors import PayloadError
from orchestrator.payloads.keeping import open_bytes, read_encoded
from orchestrator.references import BYTES, Reference, read_reference, whole_reference
from orchestrator.sdk.values.conversion import convert, encode_other
from orchestrator.sdk.values.sorting import sorted_sets
from orchestrator.sealing import CALL, CODE, VALUE, open_data, open_extension

__all__ = [
    "convert",
    "decode_call",
    "decode_shown",
    "decode_unread",
    "decode_value",
    "decode_within",
    "digest_call",
    "encode_call",
    "encode_other",
    "encode_value",
]

_CONTAINER_BYTES = frozenset([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
"""The first bytes of maps and arrays in MessagePack."""

_OTHER_BYTES = bytes(set(range(256)) - _CONTAINER_BYTES)
_MIN_LEVELS = MAX_LEVELS - 8
"""Below this number of remaining levels, `_is_surely_shallow` no longer inspects parts one by one."""

_SHORT = MAX_LEVELS
"""Bytes of data that cannot be nested too deeply, because each level takes a byte."""

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)
_sorting_encoder = msgspec.msgpack.Encoder(enc_hook=encode_other, order="deterministic")


def _decoder_with(read: Callable[[Reference], Any]) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder that decrypts sealed values, and replaces a reference with the result of `read`."""

    def restore(code: int, data: memoryview) -> Any:
        if code == references.CODE:
            return read(read_reference(bytes(data)))
        return decoder.decode(open_extension(bytes(data), VALUE)) if code == CODE else timezones.restore(code, data)

    decoder = msgspec.msgpack.Decoder(ext_hook=restore)
    return decoder


class _Counter:
    number = 0


_lazy_payloads = _Counter()
"""A counter of the `Payload` objects that this process has created in place of stored values."""


def _load(reference: Reference) -> Any:
    return _decoder.decode(read_encoded(reference))


def _lazy_payload(reference: Reference) -> Payload:
    _lazy_payloads.number += 1
    return Payload(reference=reference, decode=_decoder.decode)


_decoder = _decoder_with(_load)
_lazy_decoder = _decoder_with(_lazy_payload)
_describing_decoder = _decoder_with(str)
_TIMESTAMP_BYTE = b"\xff"
"""A byte in every encoded timestamp, and rarely in other data."""
_WITH_TIMES = (bytes, bytearray, datetime)
_time_of_day = re.compile(rb":(?<=[\xa8\xa9\xae-\xb0\xb5]\d\d:)\d\d:\d\d").search
"""The encoding of a time of day. A text may look the same, but data without a match has no time."""
_parts = msgspec.msgpack.Decoder(list[msgspec.Raw] | dict[str, msgspec.Raw])


def decode_call(data: bytes) -> Any:
    """Decode the arguments of a call: positional, by keyword and, for a step of a workflow, its origin."""
    return _decoder.decode(_call(data))


def decode_unread(data: bytes) -> tuple[Any, bool]:
    """Decode the arguments of a call, with a `Payload` for each stored value. Return whether there is any, too."""
    before = _lazy_payloads.number
    call = data if data and data[0] in _CONTAINER_BYTES else _call(data)
    return _lazy_decoder.decode(call), _lazy_payloads.number != before


def _call(data: bytes) -> bytes:
    """Return an encoded call: load it from the payload store if necessary, and decrypt it."""
    stored = whole_reference(data)
    return open_data(data if stored is None else read_encoded(stored), CALL)


def encode_call(
    name: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    limit: int,
    what: str = "task",
    *,
    is_compared: bool = False,
) -> bytes:
    """Encode the arguments of a call of a task, workflow or query. An error names the argument at fault.

    If the call is compared with repetitions of it, sets are encoded in the same order in every process.
    """
    try:
        if is_compared:
            arguments, keywords = sorted_sets((arguments, keywords))
        data = _encoder.encode((arguments, keywords))
        if _TIMESTAMP_BYTE in data:
            data = _with_zones(data, (arguments, keywords))
        if b":" in data:
            _refuse_lost_zones(data, (arguments, keywords))
    except REFUSALS:
        for position, value in [*enumerate(arguments, 1), *keywords.items()]:
            encode_value(value, f"Argument {position} of {what} {name!r}", limit)
        return encode_value((arguments, keywords), f"The arguments of {what} {name!r}", limit)  # a keyword is at fault
    return data if len(data) <= _SHORT <= limit else _checked(data, f"The arguments of {what} {name!r}", limit)


def digest_call(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Return a digest of arguments that is the same in every process, whatever the order of sets and mappings.

    The digest is empty for arguments that cannot be sorted: a set of objects, or a mapping whose keys are not text.
    """
    try:
        data = _sorting_encoder.encode((arguments, keywords))
    except Exception:  # noqa: BLE001  # any error of comparing the parts with each other
        return ""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def encode_value(value: Any, what: str, limit: int) -> bytes:
    """Encode a value. Raise PayloadError if it cannot be encoded or is too large; `what` names it in the message."""
    try:
        data = _encoder.encode(value)
        if _TIMESTAMP_BYTE in data:
            data = _with_zones(data, value)
        if b":" in data:
            _refuse_lost_zones(data, value)
    except REFUSALS as error:
        raise PayloadError(
            f"{what} cannot be serialised: {error}. Pass plain data: JSON types, bytes, datetime, UUID, Decimal, "
            f"dataclasses, msgspec or pydantic models."
        ) from error
    return data if len(data) <= _SHORT <= limit else _checked(data, what, limit)


def _with_zones(data: bytes, value: Any) -> bytes:
    if not timezones.may_hold_times(data):
        return data
    plain = msgspec.to_builtins(value, builtin_types=_WITH_TIMES, enc_hook=encode_other)
    return _encoder.encode(timezones.with_zones(plain))


def _refuse_lost_zones(data: bytes, value: Any) -> None:
    """Refuse a time of day whose zone would be lost: a named one, which has no offset without a date, or seconds."""
    if not _time_of_day(data):
        return
    try:
        pending = [msgspec.to_builtins(value, builtin_types=(*_WITH_TIMES, time), enc_hook=encode_other)]
    except REFUSALS:  # only the encoder supports it: a mapping with tuples as keys, for example
        return
    while pending:
        item = pending.pop()
        if isinstance(item, time) and item.tzinfo is not None:
            if (offset := item.utcoffset()) is None:
                raise ValueError(
                    f"the time {item.isoformat()} has the zone {item.tzinfo}, which has no offset without a date "
                    "and would be lost; pass a datetime, or the time without its zone and the name of the zone "
                    "separately"
                )
            if offset % timedelta(minutes=1):
                raise ValueError(
                    f"the time {item.isoformat()} has an offset with seconds, which would be lost; pass a datetime, or "
                    f"an offset of whole minutes"
                )
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            pending += item


def _checked(data: bytes, what: str, limit: int) -> bytes:
    if len(data) > limit:
        raise PayloadError(
            f"{what}: {len(data):,} bytes, and at most {limit:,} are allowed here. Pass a reference to the data "
            f"instead. The settings max_payload and payload_store say how much is kept inline, and how much elsewhere."
        )
    if len(data) > _SHORT and (problem := _unreadable(data)):
        raise PayloadError(f"{what} could not be decoded again: {problem}.")
    return data


def _unreadable(data: bytes) -> str | None:
    """Return why an encoded value cannot be decoded, perhaps only because the decoder has a smaller stack."""
    try:
        if _is_surely_shallow(data, MAX_LEVELS) or not is_too_deep(_decoder.decode(data)):
            return None
    except REFUSALS as error:
        return str(error)
    return f"it is nested more than {MAX_LEVELS} levels deep"


def _is_surely_shallow(data: bytes, levels: int) -> bool:
    """Return whether data certainly has no more than `levels` levels, without decoding it.

    Data has at most as many levels as it has bytes with which a container may begin.
    """
    if data[0] not in _CONTAINER_BYTES or len(data.translate(None, _OTHER_BYTES)) < levels:
        return True
    if levels <= _MIN_LEVELS:
        return False
    try:
        container = _parts.decode(data)
    except msgspec.ValidationError:
        return False  # a map with keys other than text
    parts = container.values() if isinstance(container, dict) else container
    return all(len(part) < levels - 1 or _is_surely_shallow(bytes(part), levels - 1) for part in parts)


def decode_shown(data: bytes) -> Any:
    """Decode a value for display, with a text in place of each value in the payload store, which is not read."""
    return _describing_decoder.decode(data)


def decode_within(data: bytes, takes: Callable[[Reference], bool]) -> Any:
    """Decode a value. Load a stored value only if `takes` returns true for its reference; otherwise it is None."""

    def read(reference: Reference) -> Any:
        return decoder.decode(read_encoded(reference)) if takes(reference) else None

    decoder = _decoder_with(read)
    return decoder.decode(data)


def decode_value(data: bytes, kind: Any = Any) -> Any:
    return convert(_decoder.decode(data), kind)


Decode = Callable[[bytes], Any]


class Payload:
    """A value that is loaded on demand. Annotate a parameter with `Payload` to receive large data without loading it.

    Callers of such a task pass the value itself, or `Payload(value)`, which type checkers prefer.
    """

    __slots__ = ("_decode", "_reference", "_value")

    def __init__(self, value: Any = None, *, reference: Reference | None = None, decode: Decode | None = None) -> None:
        self._value = value
        self._reference = reference
        self._decode = decode

    def __repr__(self) -> str:
        return f"<Payload {'here' if self._reference is None else self._reference}>"

    @property
    def is_here(self) -> bool:
        """Whether the value is in memory rather than in the payload store."""
        return self._reference is None

    @property
    def size(self) -> int:
        """The size of the value in bytes; 0 if it is in memory and neither bytes nor text."""
        if self._reference is not None:
            return self._reference.size
        return len(self._value) if isinstance(self._value, (bytes, str)) else 0

    def open(self) -> IO[bytes]:
        """Return the bytes as a file, which buffers about a megabyte in memory."""
        if self._reference is not None and self._reference.form == BYTES and self._reference.item is None:
            return open_bytes(self._reference)
        value = self.load()
        if not isinstance(value, (bytes, bytearray)):
            raise PayloadError(
                f"A payload can be opened as a file if it is bytes, such as ctx.open_output() writes, found a value of "
                f"type {type(value).__name__}. Call load(), or leave the annotation Payload out."
            )
        return io.BytesIO(value)

    def load(self) -> Any:
        """Load and return the whole value."""
        if self._reference is None or self._decode is None:
            return self._value
        return self._decode(read_encoded(self._reference))


def is_payload(kind: Any) -> bool:
    """Return whether an annotation is `Payload`, or a union with it such as `Payload | None`."""
    return kind is Payload or (get_origin(kind) is not None and Payload in get_args(kind))


def loaded(value: Any) -> Any:
    """Return a value with all `Payload` objects in it loaded."""
    if isinstance(value, Payload):
        return value.load()
    if isinstance(value, list):
        return [loaded(item) for item in value]
    if isinstance(value, dict):
        return {key: loaded(item) for key, item in value.items()}
    return value
