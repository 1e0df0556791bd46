"""Values of types that MessagePack has no word for: what they travel as, and how they are made from it again.

msgspec knows the types of the standard library that are made of fields and items; here stand those that it leaves to
us. pydantic is asked about its own types and constraints, and only where the application uses it.
"""

from __future__ import annotations

import collections
import ipaddress
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path, PurePath
from types import GenericAlias, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin
from uuid import UUID

import msgspec

from orchestrator.errors import InvalidTask
from orchestrator.sdk.values.stand_ins import Unsupported, is_made_of_data, is_stand_in, understood

_NATIVE = (bytes, bytearray)
"""Types that MessagePack carries as they are. UUIDs, decimals and naive times travel as text, and are made from it."""

_LARGEST_SCHEMA = 4_000
"""Characters of the schema of a type; it is in the history with each promise."""
_ADDRESSES = (
    *(ipaddress.IPv4Address, ipaddress.IPv4Network, ipaddress.IPv4Interface),
    *(ipaddress.IPv6Address, ipaddress.IPv6Network, ipaddress.IPv6Interface),
)
_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types", "pydantic_extra_types")


# -- types of the application


class _Codec(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_codecs: dict[type, _Codec] = {}


def register_type(kind: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Let values of a class travel as what `encode` returns, from which `decode` makes them again."""
    if not isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType):
        raise InvalidTask(
            f"app.register_type: {kind.__qualname__} travels by itself, so it needs no encode and decode."
        )
    _codecs[kind] = _Codec(encode, decode)


# -- what they travel as


def encode_other(value: Any) -> Any:
    """Return what MessagePack and JSON have no word for as what they have."""
    kind = type(value)
    if _codecs and (known := next((base for base in kind.__mro__ if base in _codecs), None)) is not None:
        return _codecs[known].encode(value)
    if kind.__name__ == "Payload" and hasattr(value, "load"):
        if value.is_here:
            return value.load()
        raise TypeError("a Payload belongs to the task that was given it: open() or load() it, and pass that on")
    if hasattr(kind, "model_dump"):  # pydantic; what it computes from other fields is no input
        return value.model_dump(round_trip=True)
    if isinstance(value, (deque, range, KeysView, ValuesView, ItemsView)):
        return list(value)
    if isinstance(value, (PurePath, *_ADDRESSES)):
        return str(value)
    if hasattr(value, "get_secret_value"):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return dict(value)
    if kind.__module__.partition(".")[0] in _PYDANTIC and hasattr(value, "unicode_string"):  # a URL
        return str(value)
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not plain data")


_encode_value = msgspec.msgpack.Encoder(enc_hook=encode_other, order="deterministic").encode


# -- how they are made again


def convert(value: Any, kind: Any) -> Any:
    """Turn plain data into the annotated type."""
    if kind is Any or kind is None:
        return value
    known = _understood(kind)
    if known is None and _is_pydantics(kind) and (validate := _validator(kind)):
        return validate(value)
    return msgspec.convert(value, kind if known is None else known, builtin_types=_NATIVE, dec_hook=_decode_other)


def _understood(kind: Any) -> Any:
    try:
        return understood(kind, _encode_value)
    except Unsupported:
        if _is_pydantics(kind) and _validator(kind) is not None:
            return None
        raise
    except TypeError:  # an annotation that cannot be hashed
        return None


def why_not(kind: Any) -> str | None:
    """Return why a type that is made of data cannot be made of it again; None for all others.

    Nobody expects a dictionary where the annotation says a dataclass.
    """
    if can_convert(kind) or not is_made_of_data(kind):
        return None
    try:
        convert(None, kind)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None


def schema_of(kind: Any) -> str:
    """Return the JSON Schema of a type; empty for what may be anything, and for types that have none or a large one."""
    if kind is Any or _is_pydantics(kind):  # which is lenient
        return ""
    try:
        return _schema(kind)
    except (TypeError, ValueError, NotImplementedError):
        return ""


@lru_cache(maxsize=1024)
def _schema(kind: Any) -> str:
    schema = msgspec.json.encode(msgspec.json.schema(kind)).decode()
    return schema if len(schema) <= _LARGEST_SCHEMA else ""


def can_convert(kind: Any) -> bool:
    """Say whether data can be turned into this type; `str | bytes`, say, cannot, and stays as it came."""
    if kind is Any:
        return False
    if isinstance(kind, type) and kind in _codecs:
        return True
    if _is_pydantics(kind) and _validator(kind) is not None:
        return True
    try:
        convert(None, kind)
    except msgspec.ValidationError:
        return True  # None is not one of them, but the type is understood
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


_SURE: dict[Any, frozenset[type]] = {
    kind: frozenset({kind})
    for kind in (*(bool, int, str, bytes, type(None), list, dict), *(datetime, date, timedelta, UUID, Decimal))
}
_SURE[float] = frozenset({float, int})


def sure_types(kind: Any) -> frozenset[type]:
    """Return the types whose values fit an annotation for certain, without a look at what they hold."""
    if get_origin(kind) in (Union, UnionType):
        return frozenset().union(*map(sure_types, get_args(kind)))
    try:
        return _SURE.get(kind, frozenset())
    except TypeError:  # an annotation that cannot be hashed
        return frozenset()


_PLAIN = (bool, int, float, str, bytes, type(None), list, dict)


def same_types(kind: Any) -> frozenset[type]:
    """Return the types of plain data that an annotation leaves as it is: those that it names, if it names no others."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return frozenset(kinds) if all(any(one is plain for plain in _PLAIN) for one in kinds) else frozenset()


def _decode_other(kind: Any, value: Any) -> Any:
    if is_stand_in(kind):
        made = kind.make(value, convert)
        finish = _validator(kind.model) if kind.model is not None else None
        return finish(made) if finish is not None else made
    if kind in _codecs:
        return value if isinstance(value, kind) else _codecs[kind].decode(value)
    origin = get_origin(kind) or kind
    validate = _validator(kind) if _is_pydantics(origin) else None
    if validate is not None:
        return validate(value)
    if origin in _MAKERS:
        return _MAKERS[origin](value, get_args(kind))
    if isinstance(origin, type) and issubclass(origin, (PurePath, *_ADDRESSES)):
        return origin(convert(value, str))
    if isinstance(value, origin):
        return value
    raise TypeError(f"cannot make a {getattr(origin, '__qualname__', origin)} of {type(value).__qualname__}")


def _items(value: Any, kinds: tuple[Any, ...]) -> list[Any]:
    items: list[Any] = convert(value, GenericAlias(list, kinds) if kinds else list)
    return items


def _pairs(value: Any, kinds: tuple[Any, ...]) -> dict[Any, Any]:
    pairs: dict[Any, Any] = convert(value, GenericAlias(dict, kinds) if kinds else dict)
    return pairs


def _defaults(value: Any, kinds: tuple[Any, ...]) -> defaultdict[Any, Any]:
    """Return a mapping whose missing values are empty ones of the kind that the annotation names."""
    made = get_origin(kinds[1]) or kinds[1] if kinds else None
    return defaultdict(made if made in (list, dict, set, int, float, str) else None, _pairs(value, kinds))


_MAKERS: dict[Any, Callable[[Any, tuple[Any, ...]], Any]] = {
    Iterable: _items,
    deque: lambda value, kinds: deque(_items(value, kinds)),
    OrderedDict: lambda value, kinds: OrderedDict(_pairs(value, kinds)),
    Counter: lambda value, kinds: Counter(_pairs(value, (kinds[0], int) if kinds else ())),
    defaultdict: _defaults,
    collections.abc.Mapping: _pairs,
    PurePath: lambda value, _: PurePath(convert(value, str)),
    Path: lambda value, _: Path(convert(value, str)),
}


# -- pydantic


def _is_pydantics(kind: Any) -> bool:
    """Say whether a type, or one that it is made of, is pydantic's business."""
    if "pydantic" not in sys.modules:
        return False
    try:
        return _names_pydantic(kind)
    except TypeError:  # an annotation that cannot be hashed
        return False


@lru_cache(maxsize=4096)
def _names_pydantic(kind: Any) -> bool:
    if isinstance(kind, type) and (hasattr(kind, "model_validate") or hasattr(kind, "__get_pydantic_core_schema__")):
        return True
    if get_origin(kind) is Annotated:
        marks = get_args(kind)[1:]
        if any(type(mark).__module__.partition(".")[0] in _PYDANTIC for mark in marks):
            return True
    return any(_names_pydantic(part) for part in get_args(kind) if not isinstance(part, (str, int, bytes, list)))


@lru_cache(maxsize=4096)
def _validator(kind: Any) -> Callable[[Any], Any] | None:
    """Return pydantic's way to make such a value; None where it cannot either.

    It is lenient, whatever the model says: a time or a tuple has been text or a list on its way, and the caller's value
    was as strict as the model when it was made.
    """
    import pydantic  # it is loaded already

    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(kind)
    except (pydantic.errors.PydanticUserError, TypeError, NameError):
        return None
    if _version(pydantic.VERSION) >= (2, 11):
        return lambda value: adapter.validate_python(value, strict=False, by_alias=True, by_name=True)
    if _wants_alias(adapter.core_schema):  # its fields travel by their names, and would get their defaults
        raise InvalidTask(
            f"{getattr(kind, '__qualname__', kind)} has fields with an alias. These need pydantic 2.11 or newer, found "
            f"{pydantic.VERSION}: update pydantic, or set populate_by_name=True in the config of the model."
        )
    return lambda value: adapter.validate_python(value, strict=False)


def _wants_alias(schema: Any, by_name: bool = False) -> bool:
    """Say whether a model in pydantic's schema of a type finds a field by its alias and not by its name."""
    if isinstance(schema, (list, tuple)):
        return any(_wants_alias(part, by_name) for part in schema)
    if not isinstance(schema, dict):
        return False
    if isinstance(config := schema.get("config"), dict):
        by_name = bool(config.get("populate_by_name") or config.get("validate_by_name"))
    if "validation_alias" in schema and not by_name:
        return True
    return any(_wants_alias(part, by_name) for name, part in schema.items() if name != "metadata")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
