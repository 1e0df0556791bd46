"""When a periodic task is called: crontabs and intervals."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from orchestrator.compat.celery.exceptions import NotCovered

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class ParseException(Exception):
    """A crontab cannot be read."""


class BaseSchedule:
    """When something is called."""

    def times(self) -> dict[str, Any]:
        raise NotImplementedError


class schedule(BaseSchedule):  # Celery's name
    """Every so many seconds."""

    def __init__(self, run_every: float | timedelta | None = None, relative: bool = False, **_: Any) -> None:
        self.run_every = run_every if isinstance(run_every, timedelta) else timedelta(seconds=run_every or 0)
        self.relative = relative
        if self.run_every.total_seconds() <= 0:
            raise ValueError(f"schedule: expected more than zero seconds, found {run_every!r}")

    @property
    def seconds(self) -> float:
        return max(self.run_every.total_seconds(), 0.0)

    def times(self) -> dict[str, Any]:
        return {"every": self.seconds}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, schedule) and self.run_every == other.run_every

    def __hash__(self) -> int:
        return hash(self.run_every)

    def __repr__(self) -> str:
        return f"<freq: {self.seconds:g} seconds>"


class crontab(BaseSchedule):  # Celery's name
    """At the minutes that a crontab names."""

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
                "Celery calls when both fit, a cron expression when one does: give one of them, and let the task "
                "look at the date.",
            )

    @classmethod
    def from_string(cls, text: str) -> crontab:
        """Read `minute hour day_of_month month_of_year day_of_week`."""
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
    """Return a field of a crontab as a text: numbers, texts, or many of them."""
    if isinstance(field, str):
        return ",".join(_day(part) for part in field.replace(" ", "").lower().split(","))
    if isinstance(field, Iterable):
        return ",".join(str(part) for part in sorted(field))
    return str(field)


def _day(part: str) -> str:
    """Return a part with the days of the week as cron has them: three letters."""
    for name in ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday"):
        part = part.replace(name, name[:3])
    return part


class solar(BaseSchedule):  # Celery's name
    """At sunrise and the like, which is refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotCovered(
            "schedules.solar", "Compute the moment in a task that runs every night, and enqueue with eta=…."
        )


def maybe_schedule(given: Any, **_: Any) -> BaseSchedule:
    """Return a schedule: of seconds, of a timedelta, or the one that it is."""
    if isinstance(given, (int, float, timedelta)):
        return schedule(given)
    if isinstance(given, BaseSchedule):
        return given
    raise NotCovered(f"a schedule of the type {type(given).__name__}", "Use crontab(…) or seconds.")
