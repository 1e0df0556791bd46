"""Stand-ins: classes that replace types that msgspec does not fully support while it converts.

An enum with values other than texts or integers is encoded by value, like every enum, and its stand-in looks up the
member. A mapping whose keys are paths, and a class with such a field, are converted part by part.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

Convert = Callable[[Any, Any], Any]


class _Accepting(type):
    """The metaclass of stand-ins. Any value counts as an instance, so that msgspec accepts the converted value."""

    def __instancecheck__(cls, _: object) -> bool:
        return True


class StandIn(metaclass=_Accepting):
    """Replaces a type while msgspec converts."""

    make: Callable[[Any, Convert], Any]
    """Convert plain data to the type. The second argument converts the parts."""
    model: Any
    """The pydantic model that validates the converted value; None for other types."""


class Unsupported(TypeError):
    """Raised if data cannot be converted to a type; the message says why."""


def is_stand_in(kind: Any) -> bool:
    """Return whether a type is a stand-in."""
    return type(kind) is _Accepting


@lru_cache(maxsize=4096)
def with_stand_ins(kind: Any, encode: Callable[[Any], bytes]) -> Any:
    """Replace unsupported types in an annotation with stand-ins. Return None if msgspec supports the annotation."""
    return _replaced(kind, encode) if _needs_stand_in(kind, set()) else None


def is_made_of_data(kind: Any) -> bool:
    """Return whether a type or one of its parts is an enum or a class with fields."""
    if isinstance(kind, type) and get_origin(kind) is None:
        return issubclass(kind, enum.Enum) or bool(_fields(kind)) or hasattr(kind, "__attrs_attrs__")
    return any(is_made_of_data(part) for part in _parts(kind))


# -- which types need a stand-in


def _needs_stand_in(kind: Any, seen: set[Any]) -> bool:
    if kind in seen:
        return False
    if isinstance(kind, type) and get_origin(kind) is None:
        seen.add(kind)
        if issubclass(kind, enum.Enum):
            return _is_unsupported_enum(kind)
        if (problem := _problem(kind)) is not None:
            raise problem
        return any(_needs_stand_in(part, seen) for part in _fields(kind).values())
    return _has_unsupported_keys(kind) or any(_needs_stand_in(part, seen) for part in _parts(kind))


def _is_unsupported_enum(kind: type[enum.Enum]) -> bool:
    try:
        msgspec.convert(None, kind)
    except msgspec.ValidationError:
        return False
    except (TypeError, NotImplementedError):
        return True
    return True


def _has_unsupported_keys(kind: Any) -> bool:
    """Return whether a mapping has keys that are encoded as text and that msgspec does not convert back."""
    if get_origin(kind) not in (dict, Mapping) or len(get_args(kind)) != 2:
        return False
    key = get_args(kind)[0]
    keys = get_args(key) if get_origin(key) in (Union, UnionType) else (key,)
    return any(isinstance(part, type) and _is_unsupported_key(part) for part in keys)


def _is_unsupported_key(kind: type) -> bool:
    if issubclass(kind, enum.Enum):
        return _is_unsupported_enum(kind)
    return isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)


def _parts(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is typing.Literal:
        return ()
    parts = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    return tuple(part for part in parts if isinstance(part, type) or get_origin(part) is not None)


def _problem(kind: type) -> Unsupported | None:
    if not dataclasses.is_dataclass(kind):
        return None
    stored = {field.name for field in dataclasses.fields(kind)}
    init_only = [
        name for name, hint in _hints(kind).items() if type(hint) is dataclasses.InitVar and name not in stored
    ]
    if not init_only:
        return None
    return Unsupported(
        f"dataclass {kind.__qualname__} has an InitVar, {init_only[0]!r}: its value is not stored, so it cannot "
        "be sent. Make it a field"
    )


def _fields(kind: type) -> dict[str, Any]:
    """Return the fields of a class and their types; none for other types."""
    if dataclasses.is_dataclass(kind):
        return {field.name: _hints(kind).get(field.name, Any) for field in dataclasses.fields(kind)}
    if hasattr(kind, "model_fields"):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if issubclass(kind, msgspec.Struct) or hasattr(kind, "_field_defaults") or typing.is_typeddict(kind):
        return _hints(kind)
    return {}


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


# -- stand-ins


def _replaced(kind: Any, encode: Callable[[Any], bytes]) -> Any:
    if not _needs_stand_in(kind, set()):
        return kind
    if isinstance(kind, type) and get_origin(kind) is None:
        return _stand_in(kind.__qualname__, _maker(kind, encode), kind if hasattr(kind, "model_fields") else None)
    if _has_unsupported_keys(kind):
        return _stand_in(str(kind), _mapping_maker(*get_args(kind)))
    parts = tuple(_replaced(part, encode) if part in _parts(kind) else part for part in get_args(kind))
    if get_origin(kind) is Annotated:
        return Annotated[(parts[0], *kind.__metadata__)]
    if get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            if type(None) in parts and _is_enum_with_none(part):
                raise Unsupported(f"None is ambiguous: it is also a member of enum {part.__qualname__}")
        if sum(part is not type(None) for part in parts) > 1:
            raise Unsupported(f"the members of {kind} cannot be told apart by their data")
        return Union[parts]  # noqa: UP007  # the parts are known only at run time
    return (get_origin(kind) or kind)[parts if len(parts) > 1 else parts[0]]


def _is_enum_with_none(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum) and any(member.value is None for member in kind)


def _stand_in(name: str, make: Callable[[Any, Convert], Any], model: Any = None) -> Any:
    return _Accepting(name, (StandIn,), {"make": staticmethod(make), "model": model})


def _maker(kind: type, encode: Callable[[Any], bytes]) -> Callable[[Any, Convert], Any]:
    if issubclass(kind, enum.Enum):
        return _enum_maker(kind, encode)
    fields = _fields(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_maker(kind, fields)
    if hasattr(kind, "model_fields"):
        return _model_maker(kind, fields)
    if typing.is_typeddict(kind):
        return _typed_dict_maker(kind, fields)
    if hasattr(kind, "_field_defaults"):
        return _named_tuple_maker(kind, fields)
    unsupported = next(name for name, part in fields.items() if _needs_stand_in(part, {kind}))
    raise Unsupported(f"field {unsupported!r} of {kind.__qualname__} has a type that msgspec does not support")


def _enum_maker(kind: type[enum.Enum], encode: Callable[[Any], bytes]) -> Callable[[Any, Convert], Any]:
    members: dict[bytes, enum.Enum] = {}
    for member in kind:
        try:
            data = encode(member.value)
        except Exception as error:
            raise Unsupported(f"the value of {member} is not plain data, so it cannot be sent: {error}") from error
        if data in members:
            raise Unsupported(f"{members[data]} and {member} are encoded as the same data, and cannot be told apart")
        members[data] = member

    def make(value: Any, _: Convert) -> Any:
        match = members.get(encode(value))
        if match is None and (match := kind._missing_(value)) is None:
            raise ValueError(f"Invalid enum value {value!r:.100}, expected one of {kind.__qualname__}")
        return match

    return make


def _mapping_maker(key: Any, item: Any) -> Callable[[Any, Convert], Any]:
    def make(value: Any, convert: Convert) -> Any:
        return {convert(name, key): convert(part, item) for name, part in convert(value, dict).items()}

    return make


def _part(value: Any, kind: Any, where: str, convert: Convert) -> Any:
    try:
        return convert(value, kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} - at `$.{where}`") from error


def _converted_fields(value: Any, fields: Mapping[str, Any], convert: Convert) -> dict[str, Any]:
    data = convert(value, dict)
    return {name: _part(data[name], kind, name, convert) for name, kind in fields.items() if name in data}


def _dataclass_maker(kind: Any, fields: Mapping[str, Any]) -> Callable[[Any, Convert], Any]:
    init_fields = {field.name for field in dataclasses.fields(kind) if field.init}
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def make(value: Any, convert: Convert) -> Any:
        values = _converted_fields(value, fields, convert)
        _refuse_missing(required, values)
        made = kind(**{name: part for name, part in values.items() if name in init_fields})
        for name in values.keys() - init_fields:
            object.__setattr__(made, name, values[name])  # frozen or not
        return made

    return make


def _typed_dict_maker(kind: Any, fields: Mapping[str, Any]) -> Callable[[Any, Convert], Any]:
    def make(value: Any, convert: Convert) -> Any:
        values = _converted_fields(value, fields, convert)
        _refuse_missing(kind.__required_keys__, values)
        return values

    return make


def _named_tuple_maker(kind: Any, fields: Mapping[str, Any]) -> Callable[[Any, Convert], Any]:
    def make(value: Any, convert: Convert) -> Any:
        values = dict(zip(kind._fields, convert(value, list), strict=False))
        _refuse_missing(set(kind._fields) - set(kind._field_defaults), values)
        return kind(*(_part(part, fields[name], name, convert) for name, part in values.items()))

    return make


def _model_maker(kind: Any, fields: Mapping[str, Any]) -> Callable[[Any, Convert], Any]:
    """Convert the fields of a pydantic model that need stand-ins. pydantic converts the others."""
    unsupported = {name: part for name, part in fields.items() if _needs_stand_in(part, {kind})}

    def make(value: Any, convert: Convert) -> Any:
        data = value if isinstance(value, dict) else {}
        converted = {name: _part(data[name], part, name, convert) for name, part in unsupported.items() if name in data}
        return {**data, **converted} if converted else value

    return make


def _refuse_missing(required: set[str] | frozenset[str], values: Mapping[str, Any]) -> None:
    for name in sorted(required - values.keys()):
        raise ValueError(f"Object missing required field `{name}`")
