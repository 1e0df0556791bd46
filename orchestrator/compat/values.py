"""Values that JSON lacks, tagged as in Celery's messages: `{"__type__": "date", "__value__": "…"}`.

Plain data stays unchanged; only its types are checked. Bytes and aware datetimes need no tag here.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import NoneType
from typing import Any, ClassVar
from uuid import UUID

from orchestrator.errors import PayloadError

PLAIN = frozenset((str, int, float, bool, NoneType, bytes))
TYPE, _VALUE = "__type__", "__value__"


class Values:
    """Converts values to tagged data and back, as Celery's JSON does."""

    error: ClassVar[type[PayloadError]] = PayloadError
    """The exception for a value that is refused."""
    read: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "datetime": datetime.fromisoformat,
        "date": lambda text: datetime.fromisoformat(text).date(),
        "time": time.fromisoformat,
        "decimal": Decimal,
        "uuid": lambda fields: UUID(hex=fields["hex"]),
        "bytes": str.encode,
        "base64": b64decode,
    }
    """Decoders by type tag."""

    def tagged(self, value: Any) -> Any:
        """Return a value as data. Raise `error` for a value that Celery's JSON refuses, unless it is plain data."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, dict):
            if type(value) is dict and PLAIN.issuperset(map(type, value.values())):
                return value
            return {key: self.tagged(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return value if PLAIN.issuperset(map(type, value)) else [self.tagged(item) for item in value]
        if isinstance(value, datetime):
            return value if value.tzinfo is not None else tag("datetime", value.isoformat())
        if isinstance(value, (date, time)):
            return tag("date" if isinstance(value, date) else "time", value.isoformat())
        if isinstance(value, Decimal):
            return tag("decimal", str(value))
        if isinstance(value, UUID):
            return tag("uuid", {"hex": value.hex})
        if isinstance(value, (set, frozenset, timedelta)):
            raise self.error(f"Object of type {type(value).__name__} is not JSON serializable")
        reducer = getattr(value, "__json__", None)
        return value if reducer is None else self.tagged(reducer())

    def tagged_call(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        if not PLAIN.issuperset(map(type, args)):
            args = [self.tagged(item) for item in args]
        if kwargs and not PLAIN.issuperset(map(type, kwargs.values())):
            kwargs = {name: self.tagged(item) for name, item in kwargs.items()}
        return args, kwargs

    def untagged(self, value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            if len(value) == 2 and _VALUE in value and (read := self.read.get(value.get(TYPE))) is not None:
                return read(self.untagged(value[_VALUE]))
            if not PLAIN.issuperset(map(type, value.values())):
                return {key: self.untagged(item) for key, item in value.items()}
        elif (kind is list or kind is tuple) and not PLAIN.issuperset(map(type, value)):
            return kind(map(self.untagged, value))
        return value


def tag(kind: str, value: Any) -> dict[str, Any]:
    """Return data with a type tag, which `untagged` decodes."""
    return {TYPE: kind, _VALUE: value}
