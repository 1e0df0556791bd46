"""Promises that are settled before the code waits for them.

A client that resolves or rejects a promise need not know how far the code has come. The first answer to a name that the
code has not waited for yet is kept, and reaches the code as soon as it makes the promise. A second answer is refused,
and so is one that comes when a promise of that name was settled or given up and no other is open. An answer that comes
when the code has given the promise up, before the leader knows, counts for the next promise of the name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.history import PromiseSettled
from orchestrator.domain.tasks.task import TaskError


class Resolution(NamedTuple):
    """The answer to a promise, by its name: a value or an error."""

    name: str
    value: bytes | None = None
    error: TaskError | None = None

    def of(self, promise: bytes) -> PromiseSettled:
        """Return what the code learns, by the id that it knows the promise by."""
        if self.error is not None:
            return history.PromiseRejected(promise, self.error)
        return history.PromiseResolved(promise, self.value or b"\xc0")


def resolutions(settled: Sequence[PromiseSettled], created: Iterable[history.PromiseCreated]) -> list[Resolution]:
    """Return by name what became of promises, given how they were created; what became of signals is none."""
    names = {promise.id: promise.name for promise in created}
    return [
        Resolution(names[fact.id], fact.value)
        if isinstance(fact, history.PromiseResolved)
        else Resolution(names[fact.id], error=fact.error)
        for fact in settled
        if fact.id in names
    ]


def misfit(created: Iterable[history.PromiseCreated], waiting: Collection[bytes], name: str, value: Any) -> str | None:
    """Say why a value is not of the type of the oldest promise of a name that is open; None if it may be."""
    promise = next((one for one in created if one.name == name and one.id in waiting), None)
    if promise is None or not promise.schema:
        return None
    schema = msgspec.json.decode(promise.schema)
    return _misfit(value, schema, schema.get("$defs", {}), "")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "null": ("null", lambda value: value is None),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "integer": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "number": ("a number", _is_number),
    "string": ("a text", lambda value: not isinstance(value, (bool, int, float, list, dict, type(None)))),
    "array": ("a list", lambda value: isinstance(value, (list, tuple))),
    "object": ("an object", lambda value: isinstance(value, dict)),
}
"""By types of JSON Schema, what they are called and which values have them; what travels as text may be a time here."""
_FREE = frozenset(("format", "contentEncoding"))
"""Keywords of a schema for types with a form of their own, which are left to the code."""


def _misfit(value: Any, schema: Mapping[str, Any], known: Mapping[str, Any], path: str) -> str | None:
    """Say where a value is not of the types of a schema; lengths, ranges and formats are left to the code."""
    if "$ref" in schema:
        return _misfit(value, known[schema["$ref"].rpartition("/")[2]], known, path)
    found = f"{f' at {path!r}' if path else ''}, found {value!r:.100}"
    if "anyOf" in schema:
        reasons = [_misfit(value, one, known, path) for one in schema["anyOf"]]
        return None if None in reasons else ", or ".join(dict.fromkeys(map(str, reasons)))
    if "enum" in schema:
        return None if value in schema["enum"] else f"expected one of {str(schema['enum'])[1:-1]:.300}{found}"
    words, fits = _TYPES.get(schema.get("type", ""), ("", lambda _: True))
    if not fits(value) and not _FREE & schema.keys():
        return f"expected {words}{found}"
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        missing = next((name for name in schema.get("required", ()) if name not in value), None)
        if missing is not None:
            return f"expected a field {missing!r}{found}"
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        parts = [(name, fields.get(name, others)) for name in value]
    elif isinstance(value, (list, tuple)):
        parts = [(place, schema.get("items")) for place in range(len(value))]
    inner = (
        _misfit(value[part], one, known, f"{path}.{part}" if path else str(part))
        for part, one in parts
        if isinstance(one, dict)
    )
    return next((reason for reason in inner if reason is not None), None)
