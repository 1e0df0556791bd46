"""Cron expressions: validation, and the local times that they match.

There are five fields, or six with seconds first. croniter computes on a local time without clock changes; `schedule`
handles time zones. If day of month and day of week are both given, either may match, as in other crons.
"""

from __future__ import annotations

import copy
import functools
import re
from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

if TYPE_CHECKING:
    from croniter import croniter

_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)


def wall(moment: datetime, zone: ZoneInfo) -> datetime:
    """Return the naive local time of a moment in a zone."""
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


def offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    """Return the UTC offset of a zone at a moment."""
    return moment.astimezone(zone).utcoffset() or timedelta()


def moment_of(local: datetime, zone: ZoneInfo) -> datetime:
    """Return the first moment with a local time. If clocks skip that time, return the moment at which they skip it."""
    before, after = (local.replace(tzinfo=zone, fold=fold).utcoffset() or timedelta() for fold in (0, 1))
    moment = (local - before).replace(tzinfo=UTC)
    if wall(moment, zone) == local:
        return moment
    return next_clock_change(zone, (local - after).replace(tzinfo=UTC), moment) or moment


def next_clock_change(zone: ZoneInfo, after: datetime, until: datetime) -> datetime | None:
    """Return the first moment after `after`, and up to `until`, at which the zone's UTC offset changes."""
    for year in range(after.year, until.year + 1):
        for change in _clock_changes(zone, year):
            if change > after:
                return change if change <= until else None
    return None


@functools.lru_cache(maxsize=4096)
def _clock_changes(zone: ZoneInfo, year: int) -> tuple[datetime, ...]:
    """Return the offset changes of a zone in a UTC year. `zoneinfo` has no API for them."""
    changes = []
    day = datetime(year, 1, 1, tzinfo=UTC) - _SECOND
    for _ in range(366):
        if offset(day, zone) != offset(day + _DAY, zone):
            changes.append(_clock_change_within(zone, day, day + _DAY))
        day += _DAY
    return tuple(change for change in changes if change.year == year)


def _clock_change_within(zone: ZoneInfo, before: datetime, after: datetime) -> datetime:
    old_offset = offset(before, zone)
    while after - before > _SECOND:
        middle = before + timedelta(seconds=(after - before) // _SECOND // 2)
        if offset(middle, zone) == old_offset:
            before = middle
        else:
            after = middle
    return after


_NUMBERS = r"[0-9*,/-]+"
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAYS = "sun|mon|tue|wed|thu|fri|sat"
_FIELDS = (
    ("second", "0 to 59", re.compile(_NUMBERS)),
    ("minute", "0 to 59", re.compile(_NUMBERS)),
    ("hour", "0 to 23", re.compile(_NUMBERS)),
    ("day of month", "1 to 31, or L for the last", re.compile(r"(?:[0-9*,/?LW-])+", re.IGNORECASE)),
    ("month", "1 to 12, or JAN to DEC", re.compile(rf"(?:[0-9*,/-]|{_MONTHS})+", re.IGNORECASE)),
    (
        "day of week",
        "0 to 7, where both are Sunday, or SUN to SAT; FRI#2 for the second, L5 for the last Friday",
        re.compile(rf"(?:[0-9*,/?#L-]|{_DAYS})+", re.IGNORECASE),
    ),
)
_NAMES = {name: number for number, name in enumerate(_DAYS.split("|"))}
_NAMES |= {name: number for number, name in enumerate(_MONTHS.split("|"), 1)}
_NAMED = re.compile(rf"(?<!@)\b(?:{_MONTHS}|{_DAYS})\b", re.IGNORECASE)
_RANGE_OF_ONE = re.compile(r"\b([0-9]+)-\1(?:/[0-9]+)?(?![0-9/])")
"""A range such as `3-3`, which croniter reads as `*`."""
_STEPS = re.compile(r"([0-9]{1,4})/[1-9][0-9]*")
_LAST = ((59,), (59,), (23,), (31,), (12,), (6, 7))
"""The last value of each field. Steps from it match nothing else."""
_SIZES = (60, 60, 24, 31, 12, 7)
"""The number of values of each field. A larger step would match only the first value."""
_CYCLE = {
    "second": "minute",
    "minute": "hour",
    "hour": "day",
    "day of month": "month",
    "month": "year",
    "day of week": "week",
}
"""The unit within which each field's values repeat."""
_STEP = re.compile(r"/([0-9]+)")
_NICKNAMES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_SOME_DAY = datetime(2024, 1, 1)


def cron_problem(expression: str) -> str | None:
    """Return what is wrong with a cron expression, and in which field, or None if it is valid."""
    if expression.startswith("@"):
        return None if expression in _NICKNAMES else f"expected one of {', '.join(_NICKNAMES)}, found {expression!r}."
    parts = expression.split()
    if len(parts) not in (5, 6):
        return (
            f"expected 5 fields (minute, hour, day of month, month, day of week), or 6 with seconds first, "
            f"found {len(parts)} in {expression!r}."
        )
    for index, (part, (name, expected, letters)) in enumerate(zip(parts, _FIELDS[-len(parts) :], strict=True)):
        size = _SIZES[index - len(parts)]
        if any(int(step) > size for step in _STEP.findall(part)):
            return (
                f"{name} {part!r} of {expression!r}: expected a step of at most {size}, because each {_CYCLE[name]} "
                f"begins anew. For other intervals use `every`, such as every: 90m."
            )
        isolated = [part if position == index else "*" for position in range(len(parts))]
        if not letters.fullmatch(part) or not _is_understood(" ".join(isolated)):
            return f"{name} {part!r} of {expression!r}: expected {expected}; also *, lists, ranges and steps."
    if re.search("[#l]", parts[-1], re.IGNORECASE) and parts[-3] not in ("*", "?"):
        return f"day of week {parts[-1]!r} of {expression!r}: # and L go with * as day of month, found {parts[-3]!r}."
    try:
        if next_local(expression, _SOME_DAY) is None:
            return f"{expression!r} never comes: there is no such date."
    except (ValueError, KeyError, IndexError) as error:
        return f"{expression!r}: {error}."
    return None


def _is_understood(expression: str) -> bool:
    try:
        _parsed(expression)
    except (ValueError, KeyError, IndexError):
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _parsed(expression: str) -> croniter:
    plain = _RANGE_OF_ONE.sub(r"\1", _NAMED.sub(lambda word: str(_NAMES[word[0].lower()]), expression))
    if not plain.startswith("@"):
        parts = plain.split()
        plain = " ".join(
            _without_idle_steps(part, last) for part, last in zip(parts, _LAST[-len(parts) :], strict=True)
        )
    from croniter import croniter  # imported late: a namespace without schedules does not need it

    return croniter(plain, _SOME_DAY, ret_type=datetime, second_at_beginning=True)


def _without_idle_steps(part: str, last: tuple[int, ...]) -> str:
    """Remove steps that match nothing further: croniter reads `59/5` as every minute instead of minute 59."""
    items = (_STEPS.fullmatch(item) or item for item in part.split(","))
    return ",".join(item if isinstance(item, str) else item[1] if int(item[1]) in last else item[0] for item in items)


def next_local(expression: str, after: datetime) -> datetime | None:
    """Return the first local time after `after` that an expression matches, or None if there is none."""
    from croniter import CroniterBadDateError

    times = copy.copy(_parsed(expression))
    times.set_current(after, force=True)
    try:
        found: datetime = times.get_next()
    except CroniterBadDateError:
        return None
    return found


def later_that_day(expression: str, local: datetime) -> Iterator[datetime]:
    """Yield the matching times later on the same day. This is faster than calling croniter for each."""
    fields = _parsed(expression).expanded  # minute, hour, day of month, month, day of week, and second if there is one
    hours, minutes = _numbers(fields[1], 24), _numbers(fields[0], 60)
    seconds = _numbers(fields[5], 60) if len(fields) > 5 else [0]
    for hour in hours[bisect_left(hours, local.hour) :]:
        for minute in minutes:
            for second in seconds if (hour, minute) >= (local.hour, local.minute) else ():
                time = local.replace(hour=hour, minute=minute, second=second)
                if time > local:
                    yield time


def _numbers(part: list[int | str], count: int) -> list[int]:
    return [*range(count)] if "*" in part else sorted(map(int, part))


def has_fixed_hour(expression: str) -> bool:
    """Return whether an expression names hours of the day, rather than all hours or every n-th."""
    if expression.startswith("@"):
        return expression != "@hourly"
    return not expression.split()[-4].startswith("*")
