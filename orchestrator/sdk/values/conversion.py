"""Encoding and decoding of types that MessagePack does not support.

msgspec converts types of the standard library that consist of fields and items; this module converts the rest.
pydantic converts its own types and constraints, and only in applications that use pydantic.
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
from orchestrator.sdk.values.stand_ins import Unsupported, is_made_of_data, is_stand_in, with_stand_ins

_NATIVE = (bytes, bytearray)
"""Types that MessagePack encodes as they are. UUIDs, decimals and naive times are encoded as text."""

_MAX_SCHEMA_SIZE = 4_000
"""Characters in the JSON Schema of a type, at most. The history stores the schema with each promise."""
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
    """Register a class whose values are encoded with `encode` and decoded with `decode`."""
    if not isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType):
        raise InvalidTask(
            f"app.register_type: {kind.__qualname__} is supported already, so it needs no encode and decode."
        )
    _codecs[kind] = _Codec(encode, decode)


# -- encoding


def encode_other(value: Any) -> Any:
    """Return a value that MessagePack and JSON do not support as a value that they do."""
    kind = type(value)
    if _codecs and (codec_type := next((base for base in kind.__mro__ if base in _codecs), None)) is not None:
        return _codecs[codec_type].encode(value)
    if kind.__name__ == "Payload" and hasattr(value, "load"):
        if value.is_here:
            return value.load()
        raise TypeError("a Payload belongs to the task that received it: open() or load() it, and pass on the data")
    if hasattr(kind, "model_dump"):  # pydantic; without computed fields, which are no input
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


# -- decoding


def convert(value: Any, kind: Any) -> Any:
    """Convert plain data to the annotated type."""
    if kind is Any or kind is None:
        return value
    replaced = _cached_stand_ins(kind)
    if replaced is None and _is_pydantic(kind) and (validate := _validator(kind)):
        return validate(value)
    return msgspec.convert(value, kind if replaced is None else replaced, builtin_types=_NATIVE, dec_hook=_decode_other)


def _cached_stand_ins(kind: Any) -> Any:
    try:
        return with_stand_ins(kind, _encode_value)
    except Unsupported:
        if _is_pydantic(kind) and _validator(kind) is not None:
            return None
        raise
    except TypeError:  # an annotation that cannot be hashed
        return None


def conversion_problem(kind: Any) -> str | None:
    """Return why data cannot be converted to an enum or a class with fields; None for all other types.

    Such annotations are refused: nobody expects a dictionary where the annotation is a dataclass.
    """
    if can_convert(kind) or not is_made_of_data(kind):
        return None
    try:
        convert(None, kind)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None


def schema_of(kind: Any) -> str:
    """Return the JSON Schema of a type; empty for `Any`, and for types without a schema or with a large one."""
    if kind is Any or _is_pydantic(kind):  # pydantic is more lenient than a schema
        return ""
    try:
        return _schema(kind)
    except (TypeError, ValueError, NotImplementedError):
        return ""


@lru_cache(maxsize=1024)
def _schema(kind: Any) -> str:
    schema = msgspec.json.encode(msgspec.json.schema(kind)).decode()
    return schema if len(schema) <= _MAX_SCHEMA_SIZE else ""


def can_convert(kind: Any) -> bool:
    """Return whether data can be converted to a type. For example, `str | bytes` cannot, and stays plain data."""
    if kind is Any:
        return False
    if isinstance(kind, type) and kind in _codecs:
        return True
    if _is_pydantic(kind) and _validator(kind) is not None:
        return True
    try:
        convert(None, kind)
    except msgspec.ValidationError:
        return True  # None does not fit, but the type is supported
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


_ACCEPTED: dict[Any, frozenset[type]] = {
    kind: frozenset({kind})
    for kind in (*(bool, int, str, bytes, type(None), list, dict), *(datetime, date, timedelta, UUID, Decimal))
}
_ACCEPTED[float] = frozenset({float, int})


def accepted_types(kind: Any) -> frozenset[type]:
    """Return the types whose values always fit an annotation, whatever the values contain."""
    if get_origin(kind) in (Union, UnionType):
        return frozenset().union(*map(accepted_types, get_args(kind)))
    try:
        return _ACCEPTED.get(kind, frozenset())
    except TypeError:  # an annotation that cannot be hashed
        return frozenset()


_PLAIN = (bool, int, float, str, bytes, type(None), list, dict)


def unchanged_types(kind: Any) -> frozenset[type]:
    """Return the types of plain data that an annotation leaves unchanged; none if it names any type of other data."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return frozenset(kinds) if all(any(part is plain for plain in _PLAIN) for part in kinds) else frozenset()


def _decode_other(kind: Any, value: Any) -> Any:
    if is_stand_in(kind):
        made = kind.make(value, convert)
        finish = _validator(kind.model) if kind.model is not None else None
        return finish(made) if finish is not None else made
    if kind in _codecs:
        return value if isinstance(value, kind) else _codecs[kind].decode(value)
    origin = get_origin(kind) or kind
    validate = _validator(kind) if _is_pydantic(origin) else None
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
    """Return a `defaultdict` whose default factory is the value type in the annotation."""
    factory = get_origin(kinds[1]) or kinds[1] if kinds else None
    return defaultdict(factory if factory in (list, dict, set, int, float, str) else None, _pairs(value, kinds))


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


def _is_pydantic(kind: Any) -> bool:
    """Return whether a type or one of its parts belongs to pydantic."""
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
        metadata = get_args(kind)[1:]
        if any(type(constraint).__module__.partition(".")[0] in _PYDANTIC for constraint in metadata):
            return True
    return any(_names_pydantic(part) for part in get_args(kind) if not isinstance(part, (str, int, bytes, list)))


@lru_cache(maxsize=4096)
def _validator(kind: Any) -> Callable[[Any], Any] | None:
    """Return pydantic's validator of a type; None if pydantic does not support the type.

    Validation is never strict, whatever the model says: times and tuples arrive as text and lists. A strict model has
    validated the caller's value when it was created.
    """
    import pydantic  # the application has imported it

    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(kind)
    except (pydantic.errors.PydanticUserError, TypeError, NameError):
        return None
    if _version(pydantic.VERSION) >= (2, 11):
        return lambda value: adapter.validate_python(value, strict=False, by_alias=True, by_name=True)
    if _wants_alias(
        adapter.core_schema
    ):  # fields are encoded by name, so aliased fields would silently get their defaults
        raise InvalidTask(
            f"{getattr(kind, '__qualname__', kind)} has fields with an alias. These need pydantic 2.11 or newer, found "
            f"{pydantic.VERSION}: update pydantic, or set populate_by_name=True in the config of the model."
        )
    return lambda value: adapter.validate_python(value, strict=False)


def _wants_alias(schema: Any, by_name: bool = False) -> bool:
    """Return whether a model in pydantic's schema of a type accepts a field by alias only, not by name."""
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
