"""Schedules of periodic tasks: crontabs and intervals."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from orchestrator.compat.celery.exceptions import NotCovered

_SHORTEST = 1.0
"""Seconds between two fires, at least."""
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class ParseException(Exception):
    """A crontab is invalid."""


class BaseSchedule:
    """Base of schedules."""

    def times(self) -> dict[str, Any]:
        raise NotImplementedError


class schedule(BaseSchedule):  # Celery's name
    """A fixed interval."""

    def __init__(self, run_every: float | timedelta | None = None, relative: bool = False, **_: Any) -> None:
        self.run_every = run_every if isinstance(run_every, timedelta) else timedelta(seconds=run_every or 0)
        self.relative = relative
        if self.run_every.total_seconds() <= 0:
            raise ValueError(f"schedule: expected more than zero seconds, found {run_every!r}")

    @property
    def seconds(self) -> float:
        return max(self.run_every.total_seconds(), 0.0)

    def times(self) -> dict[str, Any]:
        if self.seconds < _SHORTEST:
            warnings.warn(
                f"A schedule every {self.seconds:g} s fires every second, the shortest interval.", stacklevel=2
            )
        return {"every": max(self.seconds, _SHORTEST)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, schedule) and self.run_every == other.run_every

    def __hash__(self) -> int:
        return hash(self.run_every)

    def __repr__(self) -> str:
        return f"<freq: {self.seconds:g} seconds>"


class crontab(BaseSchedule):  # Celery's name
    """A crontab."""

    def __init__(
        self,
        minute: Any = "*",
        hour: Any = "*",
        day_of_week: Any = "*",
        day_of_month: Any = "*",
        month_of_year: Any = "*",
        **_: Any,
    ) -> None:
        self._fields = tuple(map(_text, (minute, hour, day_of_month, month_of_year, day_of_week)))
        self._orig_minute, self._orig_hour, self._orig_day_of_month = minute, hour, day_of_month
        self._orig_month_of_year, self._orig_day_of_week = month_of_year, day_of_week
        if self._fields[2] != "*" and self._fields[4] != "*":
            raise NotCovered(
                f"{self!r} with day_of_month and day_of_week",
                "Celery fires when both match, a cron expression when either does: set one of them, and check "
                "the date in the task.",
            )

    @classmethod
    def from_string(cls, text: str) -> crontab:
        """Parse `minute hour day_of_month month_of_year day_of_week`."""
        minute, hour, day, month, weekday = text.split()
        return cls(minute, hour, weekday, day, month)

    def times(self) -> dict[str, Any]:
        return {"cron": " ".join(self._fields)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, crontab) and self._fields == other._fields

    def __hash__(self) -> int:
        return hash(self._fields)

    def __repr__(self) -> str:
        return f"<crontab: {' '.join(self._fields)} (m/h/dM/MY/d)>"


def _text(field: Any) -> str:
    """Return a crontab field as text, from a number, a text or several of them."""
    if isinstance(field, str):
        return ",".join(_day(part) for part in field.replace(" ", "").lower().split(","))
    if isinstance(field, Iterable):
        return ",".join(str(part) for part in sorted(field))
    return str(field)


def _day(part: str) -> str:
    """Abbreviate the days of the week to three letters, as cron needs them."""
    for name in ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday"):
        part = part.replace(name, name[:3])
    return part


class solar(BaseSchedule):  # Celery's name
    """A schedule by the sun, which is refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotCovered(
            "schedules.solar", "Compute the moment in a task that runs every night, and enqueue with eta=…."
        )


def maybe_schedule(value: Any, **_: Any) -> BaseSchedule:
    """Return a schedule from seconds, a timedelta or a schedule."""
    if isinstance(value, (int, float, timedelta)):
        return schedule(value)
    if isinstance(value, BaseSchedule):
        return value
    raise NotCovered(f"a schedule of the type {type(value).__name__}", "Use crontab(…) or seconds.")
