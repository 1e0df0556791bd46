"""Sets in an order that is the same in every process, for values that are compared with stored ones.

A set of texts has another order in every process (`PYTHONHASHSEED`).
"""

from __future__ import annotations

import copy
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from orchestrator.domain.plain import REFUSALS
from orchestrator.sdk.values.conversion import encode_other

_SIMPLE = frozenset((str, int, float, bool, type(None), bytes, datetime, date, timedelta, Decimal, UUID))

_encode = msgspec.msgpack.Encoder(enc_hook=encode_other).encode


def sorted_sets(value: Any) -> Any:
    """Return a value with a list in place of each set, sorted by encodings; the same object if it holds no set."""
    try:
        return _sorted(value)
    except REFUSALS:
        return value  # the encoder says what is wrong with it


def _sorted(value: Any) -> Any:
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, (set, frozenset)):
        return sorted((_sorted(item) for item in value), key=_encode)
    if isinstance(value, dict):
        values = {key: _sorted(item) for key, item in value.items()}
        return values if any(values[key] is not item for key, item in value.items()) else value
    if isinstance(value, (list, tuple)):
        items = [_sorted(item) for item in value]
        return items if any(map(_is_other, items, value)) else value
    if (names := _field_names(type(value))) is not None:
        return _with_sorted_fields(value, names)
    try:
        plain = encode_other(value)
    except TypeError:  # a type that msgspec encodes, or that nobody can
        return value
    made = _sorted(plain)
    return value if made is plain else made


def _is_other(left: object, right: object) -> bool:
    return left is not right


def _field_names(kind: type) -> list[str] | None:
    """Return the names of the fields of a class of msgspec, dataclasses or attrs; None for any other."""
    if issubclass(kind, msgspec.Struct):
        return list(kind.__struct_fields__)
    if hasattr(kind, "__dataclass_fields__"):
        return list(kind.__dataclass_fields__)
    return [field.name for field in kind.__attrs_attrs__] if hasattr(kind, "__attrs_attrs__") else None


def _with_sorted_fields(value: Any, names: list[str]) -> Any:
    """Return an object, or a copy of it with sorted lists in the fields that hold sets."""
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    changed = {name: made for name, old in fields.items() if (made := _sorted(old)) is not old}
    if not changed:
        return value
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **changed)
    made = copy.copy(value)
    for name, field in changed.items():
        object.__setattr__(made, name, field)  # the class may be frozen
    return made
