"""A second implementation of cron, by brute force: it checks the clock minute by minute, without croniter.

Valid for whole minutes, in years in which time zones differ from UTC by whole minutes.
"""

from __future__ import annotations

import calendar
import functools
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
MONTHS = ("", "JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


def number(word: str, names: tuple[str, ...]) -> int:
    return names.index(word) if word in names else int(word)


@functools.cache
def values(field: str, low: int, high: int, names: tuple[str, ...]) -> frozenset[int]:
    """Return the values that a cron field of lists, ranges and steps allows."""
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        if span == "*":
            first, last = low, high
        elif "-" in span:
            first, last = (number(word, names) for word in span.split("-"))
        else:
            first = number(span, names)
            last = high if step else first
        found.update(range(first, last + 1, int(step or 1)))
    return frozenset(found)


def day_of_month_matches(field: str, day: date) -> bool:
    if field == "L":
        return day.day == calendar.monthrange(day.year, day.month)[1]
    return day.day in values(field, 1, 31, ())


def day_of_week_matches(field: str, day: date) -> bool:
    weekday = day.isoweekday() % 7
    if "#" in field:
        name, _, occurrence = field.partition("#")
        return weekday == number(name, DAYS) % 7 and (day.day - 1) // 7 + 1 == int(occurrence)
    if field.startswith("L"):
        last = calendar.monthrange(day.year, day.month)[1]
        return weekday == int(field[1:]) % 7 and day.day > last - 7
    return weekday in {value % 7 for value in values(field, 0, 6, DAYS)}


@functools.cache
def day_matches(expression: str, day: date) -> bool:
    _, _, of_month, month, of_week = expression.split()
    if day.month not in values(month, 1, 12, MONTHS):
        return False
    if of_month == "*" or of_week == "*":
        return day_of_month_matches(of_month, day) and day_of_week_matches(of_week, day)
    return day_of_month_matches(of_month, day) or day_of_week_matches(of_week, day)


def matches(expression: str, local: datetime) -> bool:
    minute, hour = expression.split()[:2]
    return (
        local.minute in values(minute, 0, 59, ())
        and local.hour in values(hour, 0, 23, ())
        and day_matches(expression, local.date())
    )


def minutes(start: datetime, end: datetime) -> Iterator[datetime]:
    while start < end:
        yield start
        start += MINUTE


def brute_fires(expression: str, zone: ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """Return the fires from `start` up to but excluding `end`, both in UTC and in whole minutes."""
    margin = timedelta(hours=30)  # more than any clock change
    clock = [(moment, moment.astimezone(zone).replace(tzinfo=None)) for moment in minutes(start - margin, end + margin)]
    if expression.split()[1].startswith("*"):
        return [moment for moment, local in clock if start <= moment < end and matches(expression, local)]
    first_shown: dict[datetime, datetime] = {}
    for moment, local in clock:
        first_shown.setdefault(local.replace(fold=0), moment)
    fires: set[datetime] = set()
    for shown_minute in minutes(clock[0][1], max(local for _, local in clock)):
        if matches(expression, shown_minute):
            fire = first_shown.get(shown_minute) or next(moment for moment, local in clock if local > shown_minute)
            fires.add(fire.astimezone(UTC))
    return sorted(fire for fire in fires if start <= fire < end)
