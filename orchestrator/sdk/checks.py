"""Checks of arguments: names, labels, durations, rates and keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from orchestrator.domain.durations import parse_duration
from orchestrator.domain.limits.buckets import Rate, bucket_size, parse_rate
from orchestrator.domain.limits.lane_limits import MAX_KEY_LENGTH, key_text
from orchestrator.errors import InvalidTask, InvalidWorkflow, UnknownOption, did_you_mean
from orchestrator.settings import MIN_RETENTION

SECONDS = "a number of seconds or a timedelta, up to a hundred years"
_NAME = re.compile(r"[\w.:/-]{1,128}")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_CENTURY = 100 * 365 * 86_400
_MAX_LABEL_LENGTH = 500
_MAX_TAGS = 100
_MAX_REASON_LENGTH = 10_000


def check_options(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse an option that does not exist, and suggest the nearest."""
    for name in given:
        if name not in known:
            raise UnknownOption(
                f"Unknown {what} option {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."
            )


def check_name(what: str, name: object) -> str:
    """Refuse a name that cannot be typed, logged or used as a key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        article = "An" if what[0] in "aeio" else "A"
        expected = f"{article} {what} name has 1 to 128 letters, digits, or any of _ . : / -"
        raise InvalidTask(f"{expected}; found {for_message(name)}.")
    return name


def check_tags(tags: object) -> tuple[str, ...]:
    """Refuse tags that cannot be stored and searched."""
    if isinstance(tags, (str, bytes)) or not isinstance(tags, Sequence) or len(tags) > _MAX_TAGS:
        found = (
            for_message(tags) if isinstance(tags, (str, bytes)) or not isinstance(tags, Sequence) else f"{len(tags):,}"
        )
        raise InvalidWorkflow(f"Option tags: expected a list of at most {_MAX_TAGS} strings, found {found}.")
    return tuple(check_label("tag", tag) for tag in tags)


def check_label(what: str, text: object) -> str:
    """Refuse a key or tag that cannot be stored, searched and displayed. Any other text is allowed."""
    if not isinstance(text, str) or not 1 <= len(text) <= _MAX_LABEL_LENGTH or not text.isprintable():
        raise InvalidWorkflow(
            f"A {what} is a string of 1 to {_MAX_LABEL_LENGTH} printable characters, on one line and without "
            f"control characters; found {for_message(text)}."
        )
    return text


def check_text(what: str, text: object, longest: int | None = None) -> str:
    """Refuse a text that cannot be sent or stored, or is too long. It may have several lines."""
    if not isinstance(text, str) or _UNSTORABLE.search(text) or (longest is not None and len(text) > longest):
        limit = "" if longest is None else f" of at most {longest:,} characters"
        raise InvalidWorkflow(
            f"{what}: expected a text{limit}, without NUL or halves of surrogate pairs; found {for_message(text)}."
        )
    return text


def check_message(what: str, name: object) -> str:
    """Refuse the name of a signal, query or update that cannot be sent. Its handler may have any other name."""
    return check_text(f"The name of the {what}", name, _MAX_LABEL_LENGTH)


def check_reason(text: object) -> str:
    """Refuse a reason for rejecting a promise that would be too long for an error message."""
    return check_text("The reason for rejecting a promise", text, _MAX_REASON_LENGTH)


def check_event_number(value: object) -> int:
    """Refuse what cannot be the number of an event."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidWorkflow(f"Expected the number of an event of the history, found {for_message(value)}.")
    return value


def for_message(value: object) -> str:
    """Return a value as text for an error message; only its type, if the text could be very long."""
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 10**20):
        return repr(value)
    if isinstance(value, str):
        return ascii(value[:100]) + (f"… ({len(value):,} characters)" if len(value) > 100 else "")
    return f"a value of type {type(value).__qualname__}"


def check_seconds(name: str, value: object) -> float:
    """Return a duration in seconds. Refuse anything but a number or a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) <= _CENTURY:
        raise InvalidTask(f"Option {name}: expected {SECONDS}, found {value!r}.{in_seconds(value)}")
    return float(seconds)


def in_seconds(value: object) -> str:
    """Return a hint with the number to write instead of a duration as text, such as `5m`; empty if there is none."""
    if not isinstance(value, str):
        return ""
    try:
        seconds = float(value)
    except ValueError:
        found = parse_duration(value)
        return "" if found is None else f" Write {found:g}."
    return f" Write {seconds:g}." if math.isfinite(seconds) else ""


def check_retention(name: str, value: object) -> float | None:
    """Return a retention of ended tasks in seconds, or None. Refuse a retention that is too short."""
    if value is None:
        return None
    seconds = check_seconds(name, value)
    if seconds != 0 and seconds < MIN_RETENTION:
        raise InvalidTask(
            f"Option {name}: expected {MIN_RETENTION:g} seconds or more, or 0 to keep forever, found {value!r}."
        )
    return seconds


def check_rate(name: str, value: object) -> Rate | None:
    """Return a rate that is given as `Rate(...)` or as text such as `10/s`. Refuse anything else."""
    if value is None:
        return None
    rate = parse_rate(value) if isinstance(value, str) else value
    if not isinstance(rate, Rate) or not _is_possible(rate):
        raise InvalidTask(
            f"Option {name}: expected a rate like '10/s', '100/minute' or Rate(10, per=60), found {value!r}."
        )
    return rate


def _is_possible(rate: Rate) -> bool:
    try:
        msgspec.convert(msgspec.structs.astuple(rate), Rate)  # a struct does not check its arguments
    except msgspec.ValidationError:
        return False
    return 0 < rate.count < 1e9 and 0 < rate.per < 1e9 and bucket_size(rate) < 1e9


def check_key(name: str, value: object) -> str:
    """Return a key as text. Refuse a key that cannot be stored, compared and displayed."""
    if (text := key_text(value)) is not None:
        return text
    raise InvalidTask(
        f"Option {name}: expected printable text of 1 to {MAX_KEY_LENGTH} characters, a whole number or a UUID, "
        f"found {value!r:.200}."
    )


def check_weight(value: object) -> float:
    """Return the weight of a concurrency key. Refuse one out of range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 1000:
        raise InvalidTask(f"Option weight: expected a number from 0.001 to 1000, found {value!r}.")
    return float(value)


def check_timezone(name: str, value: object) -> None:
    """Refuse a datetime without a time zone."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidTask(
            f"Option {name}: expected a datetime with a time zone, e.g. datetime.now(UTC), found {value!r}."
        )
    try:
        year = value.astimezone(UTC).year
    except OverflowError:  # of the years 1 and 9999, in another zone
        year = 0
    if not 1 <= year <= _LAST_YEAR:
        raise InvalidTask(f"Option {name}: expected a time before the year {_LAST_YEAR + 1} in UTC, found {value!r}.")


_LAST_YEAR = 9_998
"""Python's datetimes end with the year 9999. One year of margin covers clocks that differ."""
