"""Promises that are settled before the code waits for them.

A client can settle a promise without knowing how far the code has come. The first answer to a name is stored, and given
to the code as soon as it creates the promise. A second answer is refused. So is an answer after a promise of that name
was settled or given up, unless another one is open. An answer that arrives after the code has given up the promise, but
before the leader knows, counts for the next promise of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.history import PromiseSettled
from orchestrator.domain.tasks.task import TaskError


class Resolution(NamedTuple):
    """The answer to a promise by name: a value or an error."""

    name: str
    value: bytes | None = None
    error: TaskError | None = None

    def of(self, promise: bytes) -> PromiseSettled:
        """Return the event for the code. `promise` is the id by which the code knows the promise."""
        if self.error is not None:
            return history.PromiseRejected(promise, self.error)
        return history.PromiseResolved(promise, self.value or b"\xc0")


def resolutions(settled: Sequence[PromiseSettled], created: Iterable[history.PromiseCreated]) -> list[Resolution]:
    """Return settled promises by name, given their creation records. Outcomes of signals are left out."""
    names = {promise.id: promise.name for promise in created}
    return [
        Resolution(names[fact.id], fact.value)
        if isinstance(fact, history.PromiseResolved)
        else Resolution(names[fact.id], error=fact.error)
        for fact in settled
        if fact.id in names
    ]


def mismatch(
    created: Iterable[history.PromiseCreated], waiting: Collection[bytes], name: str, value: Any
) -> str | None:
    """Return why a value does not match the type of the oldest open promise of this name, or None."""
    promise = next((record for record in created if record.name == name and record.id in waiting), None)
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
"""By JSON Schema type, its description and a check. `string` also allows times, which are encoded as text."""
_FREE = frozenset(("format", "contentEncoding"))
"""Schema keywords for types with special formats, which the code checks itself."""


def _misfit(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> str | None:
    """Return where a value does not match a schema. Lengths, ranges and formats are left to the code."""
    if "$ref" in schema:
        return _misfit(value, definitions[schema["$ref"].rpartition("/")[2]], definitions, path)
    suffix = f"{f' at {path!r}' if path else ''}, found {value!r:.100}"
    if "anyOf" in schema:
        reasons = [_misfit(value, subschema, definitions, path) for subschema in schema["anyOf"]]
        return None if None in reasons else ", or ".join(dict.fromkeys(map(str, reasons)))
    if "enum" in schema:
        return None if value in schema["enum"] else f"expected one of {str(schema['enum'])[1:-1]:.300}{suffix}"
    description, fits = _TYPES.get(schema.get("type", ""), ("", lambda _: True))
    if not fits(value) and not _FREE & schema.keys():
        return f"expected {description}{suffix}"
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        missing = next((name for name in schema.get("required", ()) if name not in value), None)
        if missing is not None:
            return f"expected a field {missing!r}{suffix}"
        fields, other_fields = schema.get("properties", {}), schema.get("additionalProperties")
        parts = [(name, fields.get(name, other_fields)) for name in value]
    elif isinstance(value, (list, tuple)):
        parts = [(index, schema.get("items")) for index in range(len(value))]
    inner = (
        _misfit(value[part], subschema, definitions, f"{path}.{part}" if path else str(part))
        for part, subschema in parts
        if isinstance(subschema, dict)
    )
    return next((reason for reason in inner if reason is not None), None)
