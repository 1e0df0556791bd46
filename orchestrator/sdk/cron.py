"""Whether a cron expression can be understood and, where not, which of its fields is wrong."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from croniter import CroniterBadDateError, CroniterError, croniter

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
_NICKNAMES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_SOME_DAY = datetime(2024, 1, 1, tzinfo=UTC)


def cron_problem(expression: str) -> str | None:
    """Return what is wrong with a cron expression of 5 fields, or 6 with seconds first; None if nothing is."""
    if expression.startswith("@"):
        return None if expression in _NICKNAMES else f"expected one of {', '.join(_NICKNAMES)}, found {expression!r}."
    parts = expression.split()
    if len(parts) not in (5, 6):
        return (
            f"expected 5 fields (minute, hour, day of month, month, day of week), or 6 with seconds first, "
            f"found {len(parts)} in {expression!r}."
        )
    for place, (part, (name, expected, letters)) in enumerate(zip(parts, _FIELDS[-len(parts) :], strict=True)):
        alone = [part if other == place else "*" for other in range(len(parts))]
        if not letters.fullmatch(part) or not _is_understood(" ".join(alone)):
            return f"{name} {part!r} of {expression!r}: expected {expected}; also *, lists, ranges and steps."
    try:
        croniter(expression, _SOME_DAY, second_at_beginning=True).get_next()
    except CroniterBadDateError:
        return f"{expression!r} never comes: there is no such date."
    except (CroniterError, ValueError, KeyError, IndexError) as error:
        return f"{expression!r}: {error}."
    return None


def _is_understood(expression: str) -> bool:
    try:
        croniter(expression, _SOME_DAY, second_at_beginning=True)
    except (CroniterError, ValueError, KeyError, IndexError):
        return False
    return True
