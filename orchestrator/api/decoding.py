"""JSON of requests, decoded into types: one large body at a time, and the items of a long list one by one.

msgspec holds Python's global lock until a call returns, tens of milliseconds for the worst body. Other requests get it
between two items, and in a pause after each large body.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, get_args, get_origin

import msgspec

from orchestrator.api.bodies import SMALL, check_shape

_REST = 2.0
"""Seconds of pause for each second that decoding a large body took."""
_large = threading.Lock()


class Decoder:
    """Decodes bodies of one type."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._whole = msgspec.json.Decoder(kind)
        self._name, item = _list_in(kind)
        if self._name:
            self._outer = msgspec.json.Decoder(_with_raw_items(kind, self._name))
            self._item = msgspec.json.Decoder(item)

    def decode(self, data: bytes) -> Any:
        """Return a body in its type."""
        if len(data) <= SMALL:
            return self._whole.decode(data)
        with _large:
            check_shape(data)
            began = time.thread_time()
            try:
                return self._decode_large(data)
            finally:
                time.sleep(_REST * (time.thread_time() - began))

    def _decode_large(self, data: bytes) -> Any:
        if not self._name:
            return self._whole.decode(data)
        given = msgspec.structs.asdict(self._outer.decode(data))
        given[self._name] = [self._one(number, raw) for number, raw in enumerate(given[self._name])]
        return self._kind(**given)

    def _one(self, number: int, raw: msgspec.Raw) -> Any:
        try:
            return self._item.decode(raw)
        except msgspec.ValidationError as error:
            place = f"$.{self._name}[{number}]"
            message, has_place, inner = str(error).partition(" - at `$")
            raise msgspec.ValidationError(f"{message} - at `{place}{inner if has_place else '`'}") from None


@lru_cache(None)
def decoder(kind: Any) -> Decoder:
    """Return what decodes bodies of a type."""
    return Decoder(kind)


def _list_in(kind: Any) -> tuple[str, Any]:
    """Return the first field that is a list of structures, and their type; no name where there is none."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            found = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
            item = get_args(found)[0] if get_origin(found) in (list, Sequence) else None
            if isinstance(item, type) and issubclass(item, msgspec.Struct) and field.name == field.encode_name:
                return field.name, item
    return "", None


def _with_raw_items(kind: type[msgspec.Struct], name: str) -> type[msgspec.Struct]:
    """Return a type like another, in which the items of one list are left as they were sent."""
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        bounds = getattr(field.type, "__metadata__", ())
        found = list[msgspec.Raw] if field.name == name else field.type
        annotated = Annotated[(found, *bounds)] if bounds and field.name == name else found
        given = {"default": field.default, "default_factory": field.default_factory, "name": field.encode_name}
        fields.append((field.name, annotated, msgspec.field(**given)))
    is_strict = kind.__struct_config__.forbid_unknown_fields
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, forbid_unknown_fields=is_strict)
