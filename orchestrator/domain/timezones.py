"""Times that keep their zones in MessagePack, which knows only moments.

A time in UTC travels as MessagePack's own timestamp, and one without a zone as text. Any other is an extension whose
text is that of RFC 9557: `2026-11-15T12:00:00+01:00[Europe/Berlin]`.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import msgspec

from orchestrator import references, sealing

_CODE = 1
_SHORT, _MEDIUM, _LONG = b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff"
"""With which a timestamp begins; they may stand for something else, but without them there is none."""
_TEXT = re.compile(r"([^\[]+)(?:\[([\w+/-]+)\])?", re.ASCII)
_LONGEST = 100


def may_hold_times(data: bytes) -> bool:
    """Say whether there may be a timestamp in data."""
    return _SHORT in data or _MEDIUM in data or _LONG in data


def with_zones(plain: Any) -> Any:
    """Return plain data in which times of other zones than UTC are such extensions."""
    if isinstance(plain, datetime):
        return _extension(plain)
    if isinstance(plain, dict):
        return {key: with_zones(value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple, set, frozenset)):
        return [with_zones(item) for item in plain]
    return plain


def _extension(time: datetime) -> Any:
    zone = getattr(time.tzinfo, "key", None)
    if time.tzinfo is None or (time.utcoffset() == timedelta(0) and zone in (None, "UTC")):
        return time
    return msgspec.msgpack.Ext(_CODE, to_text(time).encode())


class _Unopened:
    number = 0
    stored = 0


unopened = _Unopened()
"""How many sealed values could not be opened, and how many stored ones were not read, so far.

A decoder sees by it whether there was one.
"""


def restore(code: int, data: memoryview) -> Any:
    """Return what an extension stands for; a sealed value stays one where this process cannot open it."""
    if code == _CODE:
        return from_text(bytes(data).decode())
    if code == sealing.CODE and sealing.can_open(sealed := bytes(data)):
        return decode(sealing.open_extension(sealed, sealing.VALUE))
    if code == sealing.CODE:
        unopened.number += 1
    if code == references.CODE:
        unopened.stored += 1
    return msgspec.msgpack.Ext(code, bytes(data))


def to_text(time: datetime) -> str:
    """Return a time as text, with the name of its zone if that has one."""
    zone = getattr(time.tzinfo, "key", None)
    return f"{time.isoformat()}[{zone}]" if zone else time.isoformat()


def from_text(text: str) -> datetime:
    """Return the time of a text. A zone that is unknown here leaves the offset that it had."""
    if len(text) > _LONGEST or not (match := _TEXT.fullmatch(text)):
        raise ValueError("a time, perhaps with its zone, was expected")
    time = datetime.fromisoformat(match[1])
    if not match[2]:
        return time
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # which most programs do without

    try:
        return time.astimezone(ZoneInfo(match[2]))
    except ZoneInfoNotFoundError:
        return time


_decoder = msgspec.msgpack.Decoder(ext_hook=restore)
decode = _decoder.decode


def encode(plain: Any) -> bytes:
    """Encode plain data, times with their zones."""
    data = msgspec.msgpack.encode(plain)
    return msgspec.msgpack.encode(with_zones(plain)) if may_hold_times(data) else data
