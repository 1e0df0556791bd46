"""Types that msgspec refuses, or half understands, and the classes that stand for them while it converts.

An enum whose values are not all text or all whole numbers travels as its value, as every enum does, and is found again
by it. A mapping whose keys are paths, and whatever has such fields, are made part by part.
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
    """The class of stand-ins: what was made for one is taken for its instance."""

    def __instancecheck__(cls, _: object) -> bool:
        return True


class StandIn(metaclass=_Accepting):
    """Stands for a type while msgspec converts."""

    make: Callable[[Any, Convert], Any]
    """Make a value of the type from plain data, its parts with the given conversion."""
    model: Any
    """The pydantic model that makes a value of what was made so far; None for all else."""


class Unsupported(TypeError):
    """Says why a type cannot be made from data."""


def is_stand_in(kind: Any) -> bool:
    """Say whether a type only stands for another."""
    return type(kind) is _Accepting


@lru_cache(maxsize=4096)
def understood(kind: Any, encode: Callable[[Any], bytes]) -> Any:
    """Return an annotation in which stand-ins have the place of what msgspec cannot make; None if it can make all."""
    return _replaced(kind, encode) if _is_odd(kind, set()) else None


def is_made_of_data(kind: Any) -> bool:
    """Say whether a type, or one that it is made of, is an enum or a class of fields."""
    if isinstance(kind, type) and get_origin(kind) is None:
        return issubclass(kind, enum.Enum) or bool(_fields(kind)) or hasattr(kind, "__attrs_attrs__")
    return any(is_made_of_data(part) for part in _parts(kind))


# -- what is odd


def _is_odd(kind: Any, seen: set[Any]) -> bool:
    """Say whether a type, or one that it is made of, needs a stand-in."""
    if kind in seen:
        return False
    if isinstance(kind, type) and get_origin(kind) is None:
        seen.add(kind)
        if issubclass(kind, enum.Enum):
            return _is_odd_enum(kind)
        if (problem := _problem(kind)) is not None:
            raise problem
        return any(_is_odd(part, seen) for part in _fields(kind).values())
    return _has_odd_keys(kind) or any(_is_odd(part, seen) for part in _parts(kind))


def _is_odd_enum(kind: type[enum.Enum]) -> bool:
    try:
        msgspec.convert(None, kind)
    except msgspec.ValidationError:
        return False
    except (TypeError, NotImplementedError):
        return True
    return True


def _has_odd_keys(kind: Any) -> bool:
    """Say whether these are keys that travel as text, which msgspec leaves as they came."""
    if get_origin(kind) not in (dict, Mapping) or len(get_args(kind)) != 2:
        return False
    key = get_args(kind)[0]
    keys = get_args(key) if get_origin(key) in (Union, UnionType) else (key,)
    return any(isinstance(part, type) and _needs_us(part) for part in keys)


def _needs_us(kind: type) -> bool:
    if issubclass(kind, enum.Enum):
        return _is_odd_enum(kind)
    return isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)


def _parts(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is typing.Literal:
        return ()
    parts = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    return tuple(part for part in parts if isinstance(part, type) or get_origin(part) is not None)


def _problem(kind: type) -> Unsupported | None:
    if not dataclasses.is_dataclass(kind):
        return None
    kept = {field.name for field in dataclasses.fields(kind)}
    passed = [name for name, hint in _hints(kind).items() if type(hint) is dataclasses.InitVar and name not in kept]
    if not passed:
        return None
    return Unsupported(
        f"dataclass {kind.__qualname__} has an InitVar, {passed[0]!r}: it is not kept, and so cannot travel. "
        f"Make it a field"
    )


def _fields(kind: type) -> dict[str, Any]:
    """Return the fields of a class that is made of such, with their types."""
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


# -- what stands for it


def _replaced(kind: Any, encode: Callable[[Any], bytes]) -> Any:
    if not _is_odd(kind, set()):
        return kind
    if isinstance(kind, type) and get_origin(kind) is None:
        return _stand_in(kind.__qualname__, _maker(kind, encode), kind if hasattr(kind, "model_fields") else None)
    if _has_odd_keys(kind):
        return _stand_in(str(kind), _mapping_maker(*get_args(kind)))
    parts = tuple(_replaced(part, encode) if part in _parts(kind) else part for part in get_args(kind))
    if get_origin(kind) is Annotated:
        return Annotated[(parts[0], *kind.__metadata__)]
    if get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            if type(None) in parts and _is_enum_with_none(part):
                raise Unsupported(f"a None could be a member of enum {part.__qualname__}, or no member at all")
        if sum(part is not type(None) for part in parts) > 1:
            raise Unsupported(f"of the parts of {kind}, one cannot be told from the others by its data")
        return Union[parts]  # noqa: UP007  # of parts that are known only now
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
    odd = next(name for name, part in fields.items() if _is_odd(part, {kind}))
    raise Unsupported(f"field {odd!r} of {kind.__qualname__} is of a type that msgspec has no support for")


def _enum_maker(kind: type[enum.Enum], encode: Callable[[Any], bytes]) -> Callable[[Any, Convert], Any]:
    members: dict[bytes, enum.Enum] = {}
    for member in kind:
        try:
            data = encode(member.value)
        except Exception as error:
            raise Unsupported(f"the value of {member} is no data, and so cannot travel: {error}") from error
        if data in members:
            raise Unsupported(f"{members[data]} and {member} travel as the same data, and could not be told apart")
        members[data] = member

    def make(value: Any, _: Convert) -> Any:
        found = members.get(encode(value))
        if found is None and (found := kind._missing_(value)) is None:
            raise ValueError(f"Invalid enum value {value!r:.100}, expected one of {kind.__qualname__}")
        return found

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


def _known(value: Any, fields: Mapping[str, Any], convert: Convert) -> dict[str, Any]:
    given = convert(value, dict)
    return {name: _part(given[name], kind, name, convert) for name, kind in fields.items() if name in given}


def _dataclass_maker(kind: Any, fields: Mapping[str, Any]) -> Callable[[Any, Convert], Any]:
    taken = {field.name for field in dataclasses.fields(kind) if field.init}
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def make(value: Any, convert: Convert) -> Any:
        known = _known(value, fields, convert)
        _refuse_missing(required, known)
        made = kind(**{name: part for name, part in known.items() if name in taken})
        for name in known.keys() - taken:
            object.__setattr__(made, name, known[name])  # frozen or not
        return made

    return make


def _typed_dict_maker(kind: Any, fields: Mapping[str, Any]) -> Callable[[Any, Convert], Any]:
    def make(value: Any, convert: Convert) -> Any:
        known = _known(value, fields, convert)
        _refuse_missing(kind.__required_keys__, known)
        return known

    return make


def _named_tuple_maker(kind: Any, fields: Mapping[str, Any]) -> Callable[[Any, Convert], Any]:
    def make(value: Any, convert: Convert) -> Any:
        known = dict(zip(kind._fields, convert(value, list), strict=False))
        _refuse_missing(set(kind._fields) - set(kind._field_defaults), known)
        return kind(*(_part(part, fields[name], name, convert) for name, part in known.items()))

    return make


def _model_maker(kind: Any, fields: Mapping[str, Any]) -> Callable[[Any, Convert], Any]:
    """Make the fields of a pydantic model that it would not know again, and leave all else to it."""
    odd = {name: part for name, part in fields.items() if _is_odd(part, {kind})}

    def make(value: Any, convert: Convert) -> Any:
        given = value if isinstance(value, dict) else {}
        made = {name: _part(given[name], part, name, convert) for name, part in odd.items() if name in given}
        return {**given, **made} if made else value

    return make


def _refuse_missing(required: set[str] | frozenset[str], known: Mapping[str, Any]) -> None:
    for name in sorted(required - known.keys()):
        raise ValueError(f"Object missing required field `{name}`")
