"""Attributes of runs: names and scalars that code sets, and that lists are filtered by.

They are part of the run's state in its history, and stand in one column of its row as well, unsealed.
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
MOST = 32
"""Attributes of one run."""
LONGEST = 255
"""Characters of a text."""
LARGEST = 2**53
"""Whole numbers stay below it, in JSON."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FILTER = re.compile(rf" *({_NAME.pattern}) *(!=|<=|>=|=|<|>) *(.*?) *")
_QUOTED = "=<>!~\"'[{"
"""A text that begins with one of these stands in double quotes: more likely, the filter is not what was meant."""
_MEANT = {"==": "=", "=>": ">=", "=<": "<=", "<>": "!=", "=!": "!="}
_PYTHON = {"True": "true", "False": "false"}


def checked(given: Mapping[str, object]) -> dict[str, Scalar]:
    """Return attributes as they are stored, times as text in UTC; InvalidWorkflow if one is no scalar, or too large."""
    if len(given) > MOST:
        raise InvalidWorkflow(f"Attributes: a run has at most {MOST}, found {len(given)}.")
    return {_name(name): _scalar(name, value) for name, value in given.items()}


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidWorkflow(f"An attribute name has 1 to 64 letters, digits, or any of _ . -; found {name!r:.100}.")
    return name


def _scalar(name: str, value: object) -> Scalar:
    match value:
        case datetime(tzinfo=zone) if zone is not None:
            return value.astimezone(UTC).isoformat()
        case str() if len(value) <= LONGEST and value.isprintable():
            return value
        case int() if abs(value) < LARGEST:  # and a bool
            return value
        case float() if math.isfinite(value):
            return value
    raise InvalidWorkflow(
        f"Attribute {name!r}: expected a text of at most {LONGEST} printable characters, a number (a whole one "
        f"below 2**53), true or false, or a datetime with a time zone; found {value!r:.100}."
    )


def as_json(value: Scalar) -> str:
    """Return an attribute as the column has it."""
    return msgspec.json.encode(value).decode()


def stored(text: str) -> dict[str, Scalar]:
    """Return attributes as `RunStarted` has them; none of a text that is no such thing."""
    try:
        return msgspec.json.decode(text, type=dict[str, Scalar]) if text else {}
    except msgspec.MsgspecError:
        return {}


def attributes_of(events: Iterable[HistoryItem]) -> dict[str, Scalar]:
    """Return the attributes of a run with this history."""
    found: dict[str, Scalar] = {}
    for what in events:
        match what:
            case history.RunStarted(attributes=text):
                found |= stored(text)
            case history.StateSet(key=key, attribute=text) if text:
                found[key] = msgspec.json.decode(text)
            case history.StateCleared(key=key, is_attribute=True):
                found.pop(key, None)
    return found


def wanted(filters: Iterable[str]) -> dict[str, Scalar]:
    """Return what runs must have: `stage=paid`. A value that reads as a number, true or false is one, unless quoted."""
    found: dict[str, Scalar] = {}
    for name, operator, value in map(_compared, filters):
        if operator == "=" and found.setdefault(name, value) != value:
            raise InvalidWorkflow(
                f"Attribute {name!r}: a run has one value, found {found[name]!r:.100} and {value!r:.100}."
            )
    return found


def ranges(filters: Iterable[str]) -> str | None:
    """Return the path by which Postgres finds what `total>=100` and `stage!=paid` ask for; None if nothing does.

    Numbers compare with numbers and texts with texts, which times are; one with a time zone is compared in UTC. A run
    without the attribute fits neither.
    """
    return " && ".join(_path(*one) for one in map(_compared, filters) if one[1] != "=") or None


def text_ranges(filters: Iterable[str]) -> list[tuple[str, str]]:
    """Return ranges such as `total>=abc`, with their attributes: by a text that is no time, which no number fits."""
    found = ((text, *_compared(text)) for text in filters)
    return [
        (text, name)
        for text, name, operator, value in found
        if operator[0] in "<>" and isinstance(value, str) and not value[:1].isdigit()
    ]


def _path(name: str, operator: str, value: Scalar) -> str:
    data = as_json(_in_utc(value))
    if operator == "!=":  # as jsonpath has it, one of another type would not fit
        return f'exists($."{name}") && !exists($."{name}" ? (@ == {data}))'
    return f'$."{name}" {operator} {data}'


def _compared(text: str) -> tuple[str, str, Scalar]:
    """Return the name, the operator and the value of a filter."""
    found = _FILTER.fullmatch(text) if text.isprintable() else None
    if found is None:
        raise _malformed(text)
    name, operator, value = found.groups()
    try:
        scalar = _scalar(name, msgspec.json.decode(value, type=Scalar))
    except msgspec.MsgspecError:
        scalar = value
        if (turned := _MEANT.get(operator + value[:1])) is not None:
            raise _malformed(text, f"{name}{turned}{value[1:]}") from None
        if value in _PYTHON:
            raise _malformed(text, f"{name}{operator}{_PYTHON[value]}") from None
        if not value or value[0] in _QUOTED:
            bare = value.strip("\"'") if value[:1] in ("'", '"') else as_json(value)
            raise _malformed(text, f"{name}{operator}{bare}") from None
    if isinstance(scalar, bool) and operator not in ("=", "!="):
        raise _malformed(text, f"{name}={value}")
    return name, operator, scalar


def _malformed(text: str, meant: str = "") -> InvalidWorkflow:
    return InvalidWorkflow(
        f"Attribute: expected NAME=VALUE, NAME!=VALUE or a range with < <= > or >=, such as stage=paid, stage!=paid or "
        f"total>=100; found {text!r:.100}.{f' Did you mean {meant!r:.100}?' if meant else ''}"
    )


def _in_utc(value: Scalar) -> Scalar:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return value
    return value if moment is None or moment.tzinfo is None else moment.astimezone(UTC).isoformat()
