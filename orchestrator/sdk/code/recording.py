"""The history of a run as JSON, for reading and for replay tests."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args
from uuid import UUID

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.code import history
from orchestrator.domain.code.history import Event
from orchestrator.domain.ids import to_text
from orchestrator.domain.redaction import Redaction
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import InvalidWorkflow, did_you_mean
from orchestrator.references import as_reference
from orchestrator.sealing import described, is_sealed_text

_FORMAT = 1
_NOTHING = Redaction()
_CREATED = (history.PromiseCreated, history.UpdateRequested)
"""Events whose answers name only their id."""
_OF_LEADER = "otherwise"
"""The outcome of a signal that is not shown to the code, and not part of the history."""
ID_FIELDS = ("id", "parent", "continued_from", "origin", "first", "run")
"""Fields that hold an id. All other fields with bytes hold an encoded value."""
_ATTRIBUTES = ("attribute", "attributes")
"""Fields that hold values as JSON."""
_KINDS = {
    kind.__struct_config__.tag: kind
    for kind in (*get_args(history.Fact), *get_args(history.Record), *get_args(history.Marker))
}
_encode = timezones.encode
_decode = timezones.decode


@dataclass(frozen=True)
class Recording:
    """The complete history of a run."""

    run_id: bytes
    """The id of the run, as 16 bytes."""
    events: list[Event]
    """The events, in order."""

    def to_json(self, hidden: Redaction | None = None, **about: object) -> str:
        """Return the history as JSON. Values matched by `hidden` are redacted; a redacted history may fail to replay.

        `about` adds fields beside the events, for programs that read the file.
        """
        hidden = hidden or _NOTHING
        names = (
            {item.what.id: item.what.name for item in self.events if isinstance(item.what, _CREATED)} if hidden else {}
        )
        plain = {
            "format": _FORMAT,
            "run_id": to_text(self.run_id),
            **about,
            "events": [_event_to_plain(item, hidden, names) for item in self.events],
        }
        return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()

    @classmethod
    def from_json(cls, source: str | bytes | Path) -> Recording:
        """Read the output of `to_json` from a string or a file."""
        if isinstance(source, str) and not source.lstrip().startswith(("{", "[")):
            source = Path(source)
        try:
            text = source.read_bytes() if isinstance(source, Path) else source
        except (OSError, ValueError) as error:
            raise InvalidWorkflow(f"History: expected JSON or the path of a file that has it, found {error}.") from None
        try:
            plain = msgspec.json.decode(text)
            if plain["format"] != _FORMAT:
                raise InvalidWorkflow(f"History: expected format {_FORMAT}, found {plain['format']!r}.")
            return cls(UUID(plain["run_id"]).bytes, [_event_from_plain(event) for event in plain["events"]])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidWorkflow(
                f"History: expected what `Recording.to_json` writes, found something else: {error!r}."
            ) from None


def _event_to_plain(event: Event, hidden: Redaction, names: Mapping[bytes, str]) -> dict[str, Any]:
    kind, what = type(event.what), event.what
    field_names = (name for name in kind.__struct_fields__ if name != _OF_LEADER)
    # The name of a signal, update, promise or state key decides whether its value is redacted.
    value_name = getattr(what, "name", None) or getattr(what, "key", None) or names.get(getattr(what, "id", b""), "")
    fields = {name: _field_to_plain(name, getattr(what, name), hidden, value_name) for name in field_names}
    at = datetime.fromtimestamp(event.at, UTC).isoformat()
    return {"number": event.number, "at": at, "type": kind.__struct_config__.tag, **fields}


def _event_from_plain(plain: dict[str, Any]) -> Event:
    number, at, tag = plain.pop("number"), plain.pop("at"), plain.pop("type")
    kind: Any = _KINDS.get(tag)
    if kind is None:
        raise InvalidWorkflow(f"History, event {number}: no event is called {tag!r}.{did_you_mean(tag, _KINDS)}")
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    what = kind(**{name: _field_from_plain(name, types[name], value) for name, value in plain.items()})
    return Event(number, datetime.fromisoformat(at).timestamp(), what)


def _field_to_plain(name: str, value: Any, hidden: Redaction, value_name: str) -> Any:
    if isinstance(value, TaskError):
        data_json = "" if is_sealed_text(value.data) else value.data
        data = {"data": hidden.redacted(msgspec.json.decode(data_json))} if data_json else {}
        texts = {"message": hidden.text(value.message), "traceback": hidden.text(value.traceback)}
        phase = {"phase": value.phase} if value.phase else {}
        return {"kind": value.kind, **texts, **data, **phase}
    if name in _ATTRIBUTES and value and hidden:
        plain = msgspec.json.decode(value)
        redacted = hidden.named(value_name, plain) if name == "attribute" else hidden.redacted(plain)
        return msgspec.json.encode(redacted).decode()
    if isinstance(value, bytes):
        return to_text(value) if name in ID_FIELDS else {"value": _to_plain(hidden.named(value_name, _decode(value)))}
    return value


def _field_from_plain(name: str, kind: Any, value: Any) -> Any:
    options = (kind, *get_args(kind))
    if TaskError in options and value is not None:
        data = {"data": msgspec.json.encode(value["data"]).decode()} if value.get("data") else {}
        return TaskError(**value | data)
    if bytes in options and value is not None:
        return UUID(value).bytes if name in ID_FIELDS else _encode(_from_plain(value["value"]))
    return value


def _to_plain(value: Any) -> Any:
    """Convert a value to JSON without loss. A type that JSON lacks becomes a mapping with one `$` key."""
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, datetime):
        return {"$time": timezones.to_text(value)}
    if (stored := as_reference(value)) is not None:
        return str(stored)
    if isinstance(value, msgspec.msgpack.Ext):  # encrypted with a key that is not here
        return described(bytes(value.data))
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _to_plain(item) for key, item in value.items()}
        return {"$pairs": [[_to_plain(key), _to_plain(item)] for key, item in value.items()]}
    return value


def _from_plain(value: Any) -> Any:
    match value:
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$time": text}:
            return timezones.from_text(text)
        case {"$pairs": pairs}:
            return {_from_plain(key): _from_plain(item) for key, item in pairs}
        case dict():
            return {key: _from_plain(item) for key, item in value.items()}
        case list():
            return [_from_plain(item) for item in value]
        case _:
            return value
