"""Cron expressions: what is wrong with one, and which times of a wall clock it names.

Five fields, or six with seconds first. croniter computes, on a clock that is never turned; `schedule` brings the time
zones in. Where day of month and day of week are both given, either of them is enough, as everywhere.
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
    """Return what a wall clock shows at a moment, without a zone."""
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


def offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    """Return how far a wall clock is ahead of UTC at a moment."""
    return moment.astimezone(zone).utcoffset() or timedelta()


def moment_of(local: datetime, zone: ZoneInfo) -> datetime:
    """Return when a wall clock first shows a time or, where it leaves it out, when it passes it over."""
    before, after = (local.replace(tzinfo=zone, fold=fold).utcoffset() or timedelta() for fold in (0, 1))
    moment = (local - before).replace(tzinfo=UTC)
    if wall(moment, zone) == local:
        return moment
    return next_turn(zone, (local - after).replace(tzinfo=UTC), moment) or moment


def next_turn(zone: ZoneInfo, after: datetime, until: datetime) -> datetime | None:
    """Return the first moment after `after` and up to `until` from which a wall clock is another time ahead of UTC."""
    for year in range(after.year, until.year + 1):
        for turn in _turns(zone, year):
            if turn > after:
                return turn if turn <= until else None
    return None


@functools.lru_cache(maxsize=4096)
def _turns(zone: ZoneInfo, year: int) -> tuple[datetime, ...]:
    """Return when the clocks of a zone are turned in a year of UTC; `zoneinfo` has it only in its data."""
    turns = []
    day = datetime(year, 1, 1, tzinfo=UTC) - _SECOND
    for _ in range(366):
        if offset(day, zone) != offset(day + _DAY, zone):
            turns.append(_turn_within(zone, day, day + _DAY))
        day += _DAY
    return tuple(turn for turn in turns if turn.year == year)


def _turn_within(zone: ZoneInfo, before: datetime, after: datetime) -> datetime:
    was = offset(before, zone)
    while after - before > _SECOND:
        middle = before + timedelta(seconds=(after - before) // _SECOND // 2)
        if offset(middle, zone) == was:
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
_NAMES = {name: place for place, name in enumerate(_DAYS.split("|"))}
_NAMES |= {name: place for place, name in enumerate(_MONTHS.split("|"), 1)}
_NAMED = re.compile(rf"(?<!@)\b(?:{_MONTHS}|{_DAYS})\b", re.IGNORECASE)
_RANGE_OF_ONE = re.compile(r"\b([0-9]+)-\1(?:/[0-9]+)?(?![0-9/])")
"""`3-3`, which croniter takes for all values there are."""
_STEPS = re.compile(r"([0-9]{1,4})/[1-9][0-9]*")
_LAST = ((59,), (59,), (23,), (31,), (12,), (6, 7))
"""The last value of each field; steps from it come to nothing else."""
_SIZES = (60, 60, 24, 31, 12, 7)
"""How many values each field has; a longer step would come to the first of them alone."""
_LONGER = {
    "second": "minute",
    "minute": "hour",
    "hour": "day",
    "day of month": "month",
    "month": "year",
    "day of week": "week",
}
"""Where the values of each field begin anew."""
_STEP = re.compile(r"/([0-9]+)")
_NICKNAMES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_SOME_DAY = datetime(2024, 1, 1)


def cron_problem(expression: str) -> str | None:
    """Return what is wrong with a cron expression, and with which field of it; None if nothing is."""
    if expression.startswith("@"):
        return None if expression in _NICKNAMES else f"expected one of {', '.join(_NICKNAMES)}, found {expression!r}."
    parts = expression.split()
    if len(parts) not in (5, 6):
        return (
            f"expected 5 fields (minute, hour, day of month, month, day of week), or 6 with seconds first, "
            f"found {len(parts)} in {expression!r}."
        )
    for place, (part, (name, expected, letters)) in enumerate(zip(parts, _FIELDS[-len(parts) :], strict=True)):
        size = _SIZES[place - len(parts)]
        if any(int(step) > size for step in _STEP.findall(part)):
            return (
                f"{name} {part!r} of {expression!r}: expected a step of at most {size}, because each {_LONGER[name]} "
                f"begins anew. For other intervals use `every`, such as every: 90m."
            )
        alone = [part if other == place else "*" for other in range(len(parts))]
        if not letters.fullmatch(part) or not _is_understood(" ".join(alone)):
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
    from croniter import croniter  # which a namespace without schedules does without

    return croniter(plain, _SOME_DAY, ret_type=datetime, second_at_beginning=True)


def _without_idle_steps(part: str, last: tuple[int, ...]) -> str:
    """Leave steps out that lead nowhere: `59/5` begins at the last minute, and croniter takes it for all of them."""
    items = (_STEPS.fullmatch(item) or item for item in part.split(","))
    return ",".join(item if isinstance(item, str) else item[1] if int(item[1]) in last else item[0] for item in items)


def next_local(expression: str, after: datetime) -> datetime | None:
    """Return the first time of a wall clock, later than `after`, that an expression names; None if none ever comes."""
    from croniter import CroniterBadDateError

    times = copy.copy(_parsed(expression))
    times.set_current(after, force=True)
    try:
        found: datetime = times.get_next()
    except CroniterBadDateError:
        return None
    return found


def later_that_day(expression: str, local: datetime) -> Iterator[datetime]:
    """Yield the times of a day after one that an expression names; croniter would look for each from the year down."""
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
    """Return the values of a field of the clock, in order."""
    return [*range(count)] if "*" in part else sorted(map(int, part))


def has_fixed_hour(expression: str) -> bool:
    """Say whether an expression names hours of the day, rather than running through all of them or every n-th."""
    if expression.startswith("@"):
        return expression != "@hourly"
    return not expression.split()[-4].startswith("*")
