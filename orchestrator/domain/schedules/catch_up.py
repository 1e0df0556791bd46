"""Which fires of a schedule start a run, when the scheduler comes to look at it.

Mostly that is one, a moment ago. After an outage more may be due, and the schedule's `catch_up` decides. A pure
function of what is in the schedule's row and of the time, so a leader that takes over decides the same.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime, timedelta
from typing import NamedTuple

from orchestrator.domain.schedules.schedule import Schedule, fires, next_fire

PUNCTUAL = timedelta(seconds=60)
"""A fire this late is not missed yet: a failover, or ten thousand others before it, takes a while, too."""
_INSTANT = timedelta(microseconds=1)


class Decision(NamedTuple):
    """The result of a look at a schedule."""

    fires: list[datetime]
    """Those that start a run, oldest first."""
    next_fire: datetime | None
    """The one to look at next; it may be due already, where there was no room for more."""


def decide(schedule: Schedule, due: datetime, now: datetime, room: int) -> Decision:
    """Decide about `due`, the next fire so far, and those after it that have come by `now`; start `room` at most."""
    if due > now:
        return Decision([], due)
    following = next_fire(schedule, due)
    wanted = schedule.caught_up
    if following is None or following > now:
        is_wanted = wanted != 0 or now - due <= PUNCTUAL
        return Decision([due] if is_wanted else [], following)
    if wanted is None:
        return _all_from(schedule, due, now, room)
    newest = _newest(schedule, due, now)
    if wanted == 0:
        chosen = [newest] if now - newest <= PUNCTUAL else []
    else:
        chosen = _last(schedule, due, newest, wanted, following - due)
    if len(chosen) > room:
        return Decision(chosen[:room], chosen[room])
    return Decision(chosen, next_fire(schedule, now))


def _all_from(schedule: Schedule, due: datetime, now: datetime, room: int) -> Decision:
    chosen: list[datetime] = []
    following: datetime | None = due
    while following is not None and following <= now and len(chosen) < room:
        chosen.append(following)
        following = next_fire(schedule, following)
    return Decision(chosen, following)


def _newest(schedule: Schedule, first: datetime, now: datetime) -> datetime:
    """Return the newest fire up to `now`, by bisection: a year of seconds is thirty steps, not thirty million."""
    newest, nothing_after = first, now
    while (following := next_fire(schedule, newest)) is not None and following <= nothing_after:
        newest = following
        middle = newest + (nothing_after - newest) / 2
        found = next_fire(schedule, middle)
        if found is not None and found <= nothing_after:
            newest = found
        else:
            nothing_after = middle
    return newest


def _last(schedule: Schedule, first: datetime, newest: datetime, count: int, gap: timedelta) -> list[datetime]:
    """Return the last `count` fires from `first` to `newest`, looking further and further back."""
    span = gap * count
    while True:
        start = max(first, newest - span) if span < newest - first else first
        found = deque(fires(schedule, start, newest + _INSTANT), maxlen=count)
        if len(found) == count or start == first:
            return list(found)
        span *= 2
