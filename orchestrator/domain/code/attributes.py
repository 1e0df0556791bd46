"""Attributes of runs: named scalars that code sets and lists filter by.

They are part of the run's state in its history, and also stored unsealed in one column of its row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.history import HistoryItem
from orchestrator.errors import InvalidWorkflow

Scalar = str | int | float | bool
MAX_ATTRIBUTES = 32
"""Attributes of one run, at most."""
MAX_TEXT_LENGTH = 255
"""Characters of a text, at most."""
MAX_INTEGER = 2**53
"""Integers must stay below this value, for JSON."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FILTER = re.compile(rf" *({_NAME.pattern}) *(!=|<=|>=|=|<|>) *(.*?) *")
_QUOTED = "=<>!~\"'[{"
"""Characters with which only a quoted text may start. An unquoted one is more likely a mistake."""
_TYPOS = {"==": "=", "=>": ">=", "=<": "<=", "<>": "!=", "=!": "!="}
_PYTHON = {"True": "true", "False": "false"}


def checked(attributes: Mapping[str, object]) -> dict[str, Scalar]:
    """Return attributes as stored, with datetimes as UTC text. Raises InvalidWorkflow for invalid values."""
    if len(attributes) > MAX_ATTRIBUTES:
        raise InvalidWorkflow(f"Attributes: a run has at most {MAX_ATTRIBUTES}, found {len(attributes)}.")
    return {_name(name): _scalar(name, value) for name, value in attributes.items()}


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidWorkflow(f"An attribute name has 1 to 64 letters, digits, or any of _ . -; found {name!r:.100}.")
    return name


def _scalar(name: str, value: object) -> Scalar:
    match value:
        case datetime(tzinfo=zone) if zone is not None:
            return value.astimezone(UTC).isoformat()
        case str() if len(value) <= MAX_TEXT_LENGTH and value.isprintable():
            return value
        case int() if abs(value) < MAX_INTEGER:  # and a bool
            return value
        case float() if math.isfinite(value):
            return value
    raise InvalidWorkflow(
        f"Attribute {name!r}: expected a string of at most {MAX_TEXT_LENGTH} printable characters, a number (a whole "
        f"one below 2**53), true or false, or a datetime with a time zone; found {value!r:.100}."
    )


def as_json(value: Scalar) -> str:
    """Return an attribute as stored in the column."""
    return msgspec.json.encode(value).decode()


def stored(text: str) -> dict[str, Scalar]:
    """Return the attributes of `RunStarted`. Empty if the text is invalid."""
    try:
        return msgspec.json.decode(text, type=dict[str, Scalar]) if text else {}
    except msgspec.MsgspecError:
        return {}


def attributes_of(events: Iterable[HistoryItem]) -> dict[str, Scalar]:
    """Return the attributes of a run from its history."""
    attributes: dict[str, Scalar] = {}
    for what in events:
        match what:
            case history.RunStarted(attributes=text):
                attributes |= stored(text)
            case history.StateSet(key=key, attribute=text) if text:
                attributes[key] = msgspec.json.decode(text)
            case history.StateCleared(key=key, is_attribute=True):
                attributes.pop(key, None)
    return attributes


def parse_filters(filters: Iterable[str]) -> dict[str, Scalar]:
    """Return the attributes that filters such as `stage=paid` require. Quotes make a text of a number or a boolean."""
    required: dict[str, Scalar] = {}
    for name, operator, value in map(_parse_filter, filters):
        if operator == "=" and required.setdefault(name, value) != value:
            raise InvalidWorkflow(
                f"Attribute {name!r}: a run has one value, found {required[name]!r:.100} and {value!r:.100}."
            )
    return required


def ranges(filters: Iterable[str]) -> str | None:
    """Return the jsonpath for filters such as `total>=100` and `stage!=paid`, or None if there are none.

    Numbers compare with numbers, and texts (also datetimes) with texts. Datetimes with a time zone are compared in UTC.
    Runs without the attribute do not match.
    """
    return " && ".join(_path(*comparison) for comparison in map(_parse_filter, filters) if comparison[1] != "=") or None


def text_ranges(filters: Iterable[str]) -> list[tuple[str, str]]:
    """Return filters such as `total>=abc`, with their attributes: a text that is not a date never matches numbers."""
    comparisons = ((text, *_parse_filter(text)) for text in filters)
    return [
        (text, name)
        for text, name, operator, value in comparisons
        if operator[0] in "<>" and isinstance(value, str) and not value[:1].isdigit()
    ]


def _path(name: str, operator: str, value: Scalar) -> str:
    data = as_json(_in_utc(value))
    if operator == "!=":  # the jsonpath operator != does not match values of other types
        return f'exists($."{name}") && !exists($."{name}" ? (@ == {data}))'
    return f'$."{name}" {operator} {data}'


def _parse_filter(text: str) -> tuple[str, str, Scalar]:
    match = _FILTER.fullmatch(text) if text.isprintable() else None
    if match is None:
        raise _malformed(text)
    name, operator, value = match.groups()
    try:
        scalar = _scalar(name, msgspec.json.decode(value, type=Scalar))
    except msgspec.MsgspecError:
        scalar = value
        if (corrected := _TYPOS.get(operator + value[:1])) is not None:
            raise _malformed(text, f"{name}{corrected}{value[1:]}") from None
        if value in _PYTHON:
            raise _malformed(text, f"{name}{operator}{_PYTHON[value]}") from None
        if not value or value[0] in _QUOTED:
            bare = value.strip("\"'") if value[:1] in ("'", '"') else as_json(value)
            raise _malformed(text, f"{name}{operator}{bare}") from None
    if isinstance(scalar, bool) and operator not in ("=", "!="):
        raise _malformed(text, f"{name}={value}")
    return name, operator, scalar


def _malformed(text: str, suggestion: str = "") -> InvalidWorkflow:
    return InvalidWorkflow(
        f"Attribute: expected NAME=VALUE, NAME!=VALUE or a range with < <= > or >=, such as stage=paid, stage!=paid or "
        f"total>=100; found {text!r:.100}.{f' Did you mean {suggestion!r:.100}?' if suggestion else ''}"
    )


def _in_utc(value: Scalar) -> Scalar:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return value
    return value if moment is None or moment.tzinfo is None else moment.astimezone(UTC).isoformat()
