"""Arguments and results as data: MessagePack, never pickle.

Values go in as `conversion.py` and msgspec know them; the worker gets them back in the types that the task's signature
names.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, time
from typing import IO, Any, get_args, get_origin

import msgspec

from orchestrator import references
from orchestrator.domain import timezones
from orchestrator.domain.plain import MOST_LEVELS, REFUSALS, is_too_deep
from orchestrator.errors import PayloadError
from orchestrator.payloads.keeping import open_bytes, read_encoded
from orchestrator.references import BYTES, Reference, read_reference, whole_reference
from orchestrator.sdk.values.conversion import convert, encode_other
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

_NEST = frozenset([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
"""The bytes with which a map or an array of MessagePack begins."""

_NO_NEST = bytes(set(range(256)) - _NEST)
_FEWEST_LEVELS = MOST_LEVELS - 8
"""So far down, parts are no longer looked at one by one."""

_SHORT = MOST_LEVELS
"""Data of so few bytes cannot be nested too deeply."""

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)
_orderly = msgspec.msgpack.Encoder(enc_hook=encode_other, order="deterministic")


def _decoder_with(read: Callable[[Reference], Any]) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder that opens what is sealed, and puts what `read` returns in the place of a reference."""

    def restore(code: int, data: memoryview) -> Any:
        if code == references.CODE:
            return read(read_reference(bytes(data)))
        return decoder.decode(open_extension(bytes(data), VALUE)) if code == CODE else timezones.restore(code, data)

    decoder = msgspec.msgpack.Decoder(ext_hook=restore)
    return decoder


class _Unread:
    number = 0


_unread = _Unread()
"""How many stored values were not read so far."""


def _load(reference: Reference) -> Any:
    return _decoder.decode(read_encoded(reference))


def _postpone(reference: Reference) -> Payload:
    _unread.number += 1
    return Payload(reference=reference, decode=_decoder.decode)


_decoder = _decoder_with(_load)
_postponing = _decoder_with(_postpone)
_telling = _decoder_with(str)
_IN_TIMES = b"\xff"
"""A byte that stands in every timestamp, and rarely in anything else."""
_WITH_TIMES = (bytes, bytearray, datetime)
_bare_time = re.compile(rb"\xa8\d\d:\d\d:\d\d").search
_bare_microseconds = re.compile(rb"\xaf\d\d:\d\d:\d\d\.\d{6}").search
"""How a time of day without an offset is written. So may be a text; but without one of these there is no such time."""
_parts = msgspec.msgpack.Decoder(list[msgspec.Raw] | dict[str, msgspec.Raw])


def decode_call(data: bytes) -> Any:
    """Decode the arguments of a call: positional, by name and, for a step of a workflow, what it knows of itself."""
    return _decoder.decode(_call(data))


def decode_unread(data: bytes) -> tuple[Any, bool]:
    """Decode the arguments of a call, of which what is stored elsewhere is a `Payload`; say whether there is one."""
    before = _unread.number
    call = data if data and data[0] in _NEST else _call(data)
    return _postponing.decode(call), _unread.number != before


def _call(data: bytes) -> bytes:
    """Return an encoded call, wherever it is stored, opened if it is sealed."""
    stored = whole_reference(data)
    return open_data(data if stored is None else read_encoded(stored), CALL)


def encode_call(
    name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], limit: int, what: str = "task"
) -> bytes:
    """Encode the arguments of a call of a task, workflow, query …, or say which of them cannot be."""
    try:
        data = _encoder.encode((arguments, keywords))
        if _IN_TIMES in data:
            data = _with_zones(data, (arguments, keywords))
        if b":" in data:
            _refuse_lost_zones(data, (arguments, keywords))
    except REFUSALS:
        for place, value in [*enumerate(arguments, 1), *keywords.items()]:
            encode_value(value, f"Argument {place} of {what} {name!r}", limit)
        return encode_value((arguments, keywords), f"The arguments of {what} {name!r}", limit)  # a keyword is at fault
    return data if len(data) <= _SHORT <= limit else _checked(data, f"The arguments of {what} {name!r}", limit)


def digest_call(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Return a digest of arguments that is the same in every process, whatever the order of sets and mappings.

    It is empty where there is no such order: in a set of objects, say, or a mapping whose keys are no text.
    """
    try:
        data = _orderly.encode((arguments, keywords))
    except Exception:  # noqa: BLE001  # whatever keeps their parts from being compared with each other
        return ""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def encode_value(value: Any, what: str, limit: int) -> bytes:
    """Encode one value, or say why it cannot be."""
    try:
        data = _encoder.encode(value)
        if _IN_TIMES in data:
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
    """Refuse a time of day whose zone would be lost: without a date, one with a name has no offset to be written."""
    if not _bare_time(data) and not _bare_microseconds(data):
        return
    try:
        left = [msgspec.to_builtins(value, builtin_types=(*_WITH_TIMES, time), enc_hook=encode_other)]
    except REFUSALS:  # it can be encoded all the same: a mapping by tuples, for example
        return
    while left:
        item = left.pop()
        if isinstance(item, time) and item.tzinfo is not None and item.utcoffset() is None:
            raise ValueError(
                f"the time {item.isoformat()} has the zone {item.tzinfo}, which has no offset without a date and would "
                f"be lost; pass a datetime, or the time without its zone and the name of the zone beside it"
            )
        if isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            left += item


def _checked(data: bytes, what: str, limit: int) -> bytes:
    if len(data) > limit:
        raise PayloadError(
            f"{what}: {len(data):,} bytes, and at most {limit:,} are allowed here. Pass a reference to the data "
            f"instead. The settings max_payload and payload_store say how much is kept inline, and how much elsewhere."
        )
    if len(data) > _SHORT and (problem := _unreadable(data)):
        raise PayloadError(f"{what} could not be read again: {problem}.")
    return data


def _unreadable(data: bytes) -> str | None:
    """Return why an encoded value cannot be read, or not by a reader with less stack than its writer."""
    try:
        if _is_surely_shallow(data, MOST_LEVELS) or not is_too_deep(_decoder.decode(data)):
            return None
    except REFUSALS as error:
        return str(error)
    return f"it is nested more than {MOST_LEVELS} levels deep"


def _is_surely_shallow(data: bytes, levels: int) -> bool:
    """Say whether it is plain, without reading it, that data has no more than so many levels.

    There are no more than bytes with which one may begin, here or in the largest part.
    """
    if data[0] not in _NEST or len(data.translate(None, _NO_NEST)) < levels:
        return True
    if levels <= _FEWEST_LEVELS:
        return False
    try:
        found = _parts.decode(data)
    except msgspec.ValidationError:
        return False  # a map whose keys may be anything
    parts = found.values() if isinstance(found, dict) else found
    return all(len(part) < levels - 1 or _is_surely_shallow(bytes(part), levels - 1) for part in parts)


def decode_shown(data: bytes) -> Any:
    """Decode a value to show it: a text stands for a value in the payload store, which is not read."""
    return _telling.decode(data)


def decode_within(data: bytes, takes: Callable[[Reference], bool]) -> Any:
    """Decode a value; of what is stored elsewhere only that is read which `takes` says yes to, and the rest is None."""

    def read(reference: Reference) -> Any:
        return decoder.decode(read_encoded(reference)) if takes(reference) else None

    decoder = _decoder_with(read)
    return decoder.decode(data)


def decode_value(data: bytes, kind: Any = Any) -> Any:
    return convert(_decoder.decode(data), kind)


Decode = Callable[[bytes], Any]


class Payload:
    """A value that was not read yet. Annotate a parameter with it to get large data unread.

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
        """Say whether the value is in this program, and not in the store."""
        return self._reference is None

    @property
    def size(self) -> int:
        """How many bytes it has."""
        if self._reference is not None:
            return self._reference.size
        return len(self._value) if isinstance(self._value, (bytes, str)) else 0

    def open(self) -> IO[bytes]:
        """Return its bytes as a file, of which about a megabyte is in memory at a time."""
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
        """Return the whole value."""
        if self._reference is None or self._decode is None:
            return self._value
        return self._decode(read_encoded(self._reference))


def is_payload(kind: Any) -> bool:
    """Say whether an annotation asks for a value that is not read: plainly, or as one that may be None."""
    return kind is Payload or (get_origin(kind) is not None and Payload in get_args(kind))


def loaded(value: Any) -> Any:
    """Return a value in which everything has been read."""
    if isinstance(value, Payload):
        return value.load()
    if isinstance(value, list):
        return [loaded(item) for item in value]
    if isinstance(value, dict):
        return {key: loaded(item) for key, item in value.items()}
    return value
