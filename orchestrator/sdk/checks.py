"""Checks of arguments: names, labels, lengths of time, rates and keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from orchestrator.domain.durations import parse_duration
from orchestrator.domain.limits.buckets import Rate, bucket_size, parse_rate
from orchestrator.domain.limits.lane_limits import LONGEST_KEY, key_text
from orchestrator.errors import InvalidTask, InvalidWorkflow, UnknownOption, did_you_mean
from orchestrator.settings import SHORTEST_RETENTION

SECONDS = "a number of seconds or a timedelta, up to a hundred years"
_NAME = re.compile(r"[\w.:/-]{1,128}")
_CENTURY = 100 * 365 * 86_400
_LONGEST_LABEL = 500
_MOST_TAGS = 100


def check_options(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse an option that does not exist, and suggest the nearest."""
    for name in given:
        if name not in known:
            raise UnknownOption(
                f"Unknown {what} option {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."
            )


def check_name(what: str, name: object) -> str:
    """Refuse a name that could not be typed, logged or used as a key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        article = "An" if what[0] in "aeio" else "A"
        expected = f"{article} {what} name has 1 to 128 letters, digits, or any of _ . : / -"
        raise InvalidTask(f"{expected}; found {shown(name)}.")
    return name


def check_tags(tags: object) -> tuple[str, ...]:
    """Refuse tags that could not be stored and looked for."""
    if isinstance(tags, (str, bytes)) or not isinstance(tags, Sequence) or len(tags) > _MOST_TAGS:
        found = shown(tags) if isinstance(tags, (str, bytes)) or not isinstance(tags, Sequence) else f"{len(tags):,}"
        raise InvalidWorkflow(f"Option tags: expected a list of at most {_MOST_TAGS} texts, found {found}.")
    return tuple(check_label("tag", tag) for tag in tags)


def check_label(what: str, text: object) -> str:
    """Refuse a key or tag that could not be stored, looked for and shown; any other text will do."""
    if not isinstance(text, str) or not 1 <= len(text) <= _LONGEST_LABEL or not text.isprintable():
        raise InvalidWorkflow(
            f"A {what} is a text of 1 to {_LONGEST_LABEL} printable characters, in one line and without controls; "
            f"found {shown(text)}."
        )
    return text


def shown(value: object) -> str:
    """Return a value for a message; of what may be endless, only the type."""
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 10**20):
        return repr(value)
    if isinstance(value, str):
        return ascii(value[:100]) + (f"… ({len(value):,} characters)" if len(value) > 100 else "")
    return f"a value of type {type(value).__qualname__}"


def check_seconds(name: str, value: object) -> float:
    """Return a length of time in seconds, or refuse it."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) <= _CENTURY:
        raise InvalidTask(f"Option {name}: expected {SECONDS}, found {value!r}.{in_seconds(value)}")
    return float(seconds)


def in_seconds(value: object) -> str:
    """Return what to write instead of a length of time that is given as text, or nothing."""
    if not isinstance(value, str):
        return ""
    try:
        seconds = float(value)
    except ValueError:
        found = parse_duration(value)
        return "" if found is None else f" Write {found:g}."
    return f" Write {seconds:g}." if math.isfinite(seconds) else ""


def check_retention(name: str, value: object) -> float | None:
    """Return for how many seconds ended tasks are kept, or refuse it."""
    if value is None:
        return None
    seconds = check_seconds(name, value)
    if seconds != 0 and seconds < SHORTEST_RETENTION:
        raise InvalidTask(
            f"Option {name}: expected {SHORTEST_RETENTION:g} seconds or more, or 0 to keep for ever, found {value!r}."
        )
    return seconds


def check_rate(name: str, value: object) -> Rate | None:
    """Return a rate given as `Rate(...)` or as text like `10/s`, or refuse it."""
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
    """Return a key as text that can be stored, compared and shown."""
    if (text := key_text(value)) is not None:
        return text
    raise InvalidTask(
        f"Option {name}: expected printable text of 1 to {LONGEST_KEY} characters, a whole number or a UUID, "
        f"found {value!r:.200}."
    )


def check_weight(value: object) -> float:
    """Return how much of a share a key has, or refuse it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 1000:
        raise InvalidTask(f"Option weight: expected a number from 0.001 to 1000, found {value!r}.")
    return float(value)


def check_timezone(name: str, value: object) -> None:
    """Refuse a time that is not the same everywhere."""
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
"""Python's times end with the year 9999, and what is counted from another clock may come to a little later."""
