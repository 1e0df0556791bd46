"""Wall clocks: what they show, when they show a time, and when they are turned."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

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
