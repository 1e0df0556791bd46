"""Values that JSON does not have, as Celery's messages carry them: `{"__type__": "decimal", "__value__": "1.10"}`.

Plain data stays as it is, and costs a look at its types. Bytes and times with a zone are data here already.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import NoneType
from typing import Any
from uuid import UUID

from orchestrator.compat.celery.exceptions import EncodeError

_PLAIN = frozenset((str, int, float, bool, NoneType, bytes))
_TYPE, _VALUE = "__type__", "__value__"
_READ: dict[str, Callable[[Any], Any]] = {
    "datetime": datetime.fromisoformat,
    "date": lambda text: datetime.fromisoformat(text).date(),
    "time": time.fromisoformat,
    "decimal": Decimal,
    "uuid": lambda fields: UUID(hex=fields["hex"]),
    "bytes": str.encode,
    "base64": b64decode,
}
"""How a value is read again, by the name of its type."""


def tagged(value: Any) -> Any:
    """Return a value as data; what Celery's JSON refuses is refused, unless it is data here."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        if type(value) is dict and _PLAIN.issuperset(map(type, value.values())):
            return value
        return {key: tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return value if _PLAIN.issuperset(map(type, value)) else [tagged(item) for item in value]
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else _tag("datetime", value.isoformat())
    if isinstance(value, (date, time)):
        return _tag("date" if isinstance(value, date) else "time", value.isoformat())
    if isinstance(value, Decimal):
        return _tag("decimal", str(value))
    if isinstance(value, UUID):
        return _tag("uuid", {"hex": value.hex})
    if isinstance(value, (set, frozenset, timedelta)):
        raise EncodeError(f"Object of type {type(value).__name__} is not JSON serializable")
    reducer = getattr(value, "__json__", None)
    return value if reducer is None else tagged(reducer())


def _tag(kind: str, value: Any) -> dict[str, Any]:
    return {_TYPE: kind, _VALUE: value}


def tagged_call(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments of a call as data."""
    if not _PLAIN.issuperset(map(type, args)):
        args = tagged(args)
    if kwargs and not _PLAIN.issuperset(map(type, kwargs.values())):
        kwargs = tagged(kwargs)
    return args, kwargs


def untagged(value: Any) -> Any:
    """Return what was tagged."""
    kind = type(value)
    if kind is dict:
        if len(value) == 2 and _VALUE in value and (read := _READ.get(value.get(_TYPE))) is not None:
            return read(value[_VALUE])
        if not _PLAIN.issuperset(map(type, value.values())):
            return {key: untagged(item) for key, item in value.items()}
    elif (kind is list or kind is tuple) and not _PLAIN.issuperset(map(type, value)):
        return kind(map(untagged, value))
    return value
