"""Datetimes that keep their time zones in MessagePack, whose timestamps have none.

A UTC datetime is encoded as MessagePack's own timestamp, a naive one as text. Any other becomes an extension with RFC
9557 text: `2026-11-15T12:00:00+01:00[Europe/Berlin]`.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import msgspec

from orchestrator import references, sealing

_CODE = 1
_SHORT, _MEDIUM, _LONG = b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff"
"""The first bytes of encoded timestamps. Other data may contain them, too, but no timestamp lacks them."""
_TEXT = re.compile(r"([^\[]+)(?:\[([\w+/-]+)\])?", re.ASCII)
_MAX_LENGTH = 100


def may_hold_times(data: bytes) -> bool:
    """Return whether encoded data may contain a timestamp."""
    return _SHORT in data or _MEDIUM in data or _LONG in data


def with_zones(plain: Any) -> Any:
    """Return plain data with all datetimes outside UTC replaced by extensions."""
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
"""Counters of sealed values that could not be decrypted and of stored values that were not read.

Callers compare them before and after decoding to learn whether the data held any.
"""


def restore(code: int, data: memoryview) -> Any:
    """Decode an extension. A sealed value stays sealed if this process cannot decrypt it."""
    if code == _CODE:
        return from_text(bytes(data).decode())
    if code == sealing.CODE and sealing.can_open(sealed := bytes(data)):
        return decode(sealing.open_extension(sealed, sealing.VALUE))
    if code == sealing.CODE:
        unopened.number += 1
    elif code == references.CODE:
        unopened.stored += 1
    else:
        raise ValueError(f"an extension of type {code}, which this release does not know")
    return msgspec.msgpack.Ext(code, bytes(data))


def to_text(time: datetime) -> str:
    """Return a datetime as text, with the name of its zone if it has a named one."""
    zone = getattr(time.tzinfo, "key", None)
    return f"{time.isoformat()}[{zone}]" if zone else time.isoformat()


def from_text(text: str) -> datetime:
    """Parse a datetime. If this machine does not know the named zone, the datetime keeps its offset."""
    if len(text) > _MAX_LENGTH or not (match := _TEXT.fullmatch(text)):
        raise ValueError("expected a time, optionally with a time zone")
    time = datetime.fromisoformat(match[1])
    if not match[2]:
        return time
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # imported late: most programs never need it

    try:
        return time.astimezone(ZoneInfo(match[2]))
    except ZoneInfoNotFoundError:
        return time


_decoder = msgspec.msgpack.Decoder(ext_hook=restore)
decode = _decoder.decode


def encode(plain: Any) -> bytes:
    """Encode plain data. Datetimes keep their zones."""
    data = msgspec.msgpack.encode(plain)
    return msgspec.msgpack.encode(with_zones(plain)) if may_hold_times(data) else data
