"""Queries and answers that have the fields of a filter or a view of the store, under a name of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")
_ONE_BY_ONE = {"statuses": "status", "tags": "tag", "attributes": "attribute"}
"""Fields that are given once for each value: `?status=failed&status=cancelled`."""


def view_fields(view: type, *without: str) -> Any:
    """Return a base class for answers with the fields of a view; a view may be a tuple, and an answer is an object."""
    fields = [(name, kind) for name, kind in get_type_hints(view).items() if name not in without]
    return msgspec.defstruct(f"{view.__name__}Fields", fields, frozen=True, kw_only=True)


def filter_fields(wanted: Any, *without: str) -> Any:
    """Return a base class for queries with the fields of a filter, of which none must be given."""
    kinds = get_type_hints(wanted, include_extras=True)
    known = dataclasses.fields(wanted) if dataclasses.is_dataclass(wanted) else msgspec.structs.fields(wanted)
    return msgspec.defstruct(
        f"{wanted.__name__}Fields",
        [(one.name, kinds[one.name], one.default) for one in known if one.name not in without],
        rename=_ONE_BY_ONE,
        frozen=True,
        forbid_unknown_fields=True,
    )


def made_from(kind: Callable[..., T], source: Any, **more: Any) -> T:
    """Return a structure with what a source has of its fields, and more."""
    names: Any = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", ())
    return kind(**{name: getattr(source, name) for name in names if name not in more and hasattr(source, name)} | more)
