"""Schedules: at which moments they fire.

A *fire* is a moment at which a run is due, in UTC and whole microseconds; it names the run. Clocks that are turned:

- A cron expression with fixed hours (`30 2 * * *`) follows the wall clock. A time that comes twice fires the first
  time; one that is left out fires at the moment at which the clock passes it over. Several of those are one fire.
- An expression whose hour is `*` or `*/n` follows elapsed time: it fires whenever the wall clock matches, so twice in
  an hour that comes twice, and not in one that is left out.
- `every` knows no wall clock. It counts from the beginning of 1970 in UTC, so that `10m` is :00, :10, :20 whenever it
  was set, and setting it again does not shift it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from orchestrator.domain.durations import format_duration
from orchestrator.domain.problems import Key
from orchestrator.domain.schedules import cron
from orchestrator.domain.schedules.cron import moment_of, next_turn, offset, wall

Overlap = Literal["skip", "queue", "allow", "cancel_previous"]
"""What becomes of a fire while a run of the same schedule is open."""

DEFAULT_NAME = "default"
MOST_CAUGHT_UP = 1_000
"""The largest limit of `catch_up: all(limit)`."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_INSTANT = timedelta(microseconds=1)
_LAST_YEAR = 9_000
_CATCH_UP = re.compile(r"(none|latest|all)(?:\(([1-9][0-9]{0,8})\))?")


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """When runs of a workflow start by themselves. Exactly one of cron, every and at is set; they have been checked."""

    name: Annotated[str, Key("label")] = DEFAULT_NAME
    cron: Annotated[
        str | None,
        Key("cron", "Five fields (minute, hour, day of month, month, day of week), or six with seconds first."),
    ] = None
    every: Annotated[float | None, Key("interval")] = None
    """Seconds."""
    at: Annotated[str | None, Key("moment", "Once, such as 2024-01-31T09:30:00.")] = None
    """As ISO 8601; in the schedule's time zone unless it has an offset. A date is its first moment."""
    start: Annotated[str | None, Key("moment", "Not before this moment, such as 2024-02-01.")] = None
    end: Annotated[str | None, Key("moment", "Only before this moment, such as 2024-07-01.")] = None
    timezone: Annotated[str, Key("timezone", "Such as Europe/Berlin.")] = "UTC"
    overlap: Annotated[Overlap, Key("choice", "What happens when the previous run has not ended.")] = "skip"
    catch_up: Annotated[
        str, Key("catch_up", "What happens to times that passed unseen: none, latest, all, or all(limit).")
    ] = "latest"
    jitter: Annotated[float, Key("jitter")] = 0.0
    """Seconds by which schedules with the same times are kept apart, at most."""
    params: Annotated[dict[str, Any], Key("object")] = {}
    """A template over `run.fire_time` for the parameters of a run."""
    paused: Annotated[bool, Key("boolean")] = False

    @property
    def zone(self) -> ZoneInfo:
        """The wall clock that it follows."""
        return ZoneInfo(self.timezone)

    @property
    def caught_up(self) -> int | None:
        """How many missed fires are made up for; None: all of them."""
        kind, limit = catch_up_parts(self.catch_up) or ("latest", None)
        return {"none": 0, "latest": 1, "all": limit}[kind]

    def words(self) -> str:
        """Return when it fires, as it was written."""
        times = f"every {format_duration(self.every)}" if self.every is not None else self.cron or f"once at {self.at}"
        since = f", from {self.start}" if self.start is not None else ""
        return f"{times}{since}{f', before {self.end}' if self.end is not None else ''}"


@functools.lru_cache(maxsize=64)
def catch_up_parts(text: str) -> tuple[str, int | None] | None:
    """Return kind and limit of a catch-up policy, or None if this is none."""
    found = _CATCH_UP.fullmatch(text)
    if found is None or (found[2] and found[1] != "all"):
        return None
    return found[1], int(found[2]) if found[2] else None


def from_data(data: dict[str, Any]) -> Schedule:
    """Return the schedule that a checked definition holds."""
    return msgspec.convert(data, Schedule)


def key_of(workflow: str, name: str) -> str:
    """Return what a schedule is called, and what its runs bear."""
    return f"{workflow}/{name}"


@functools.lru_cache(maxsize=64)  # thousands of schedules are due at the same moment
def fire_text(fire: datetime) -> str:
    """Return a fire as text, in UTC."""
    return fire.astimezone(UTC).isoformat()


def fire_key(schedule: str, fire: datetime) -> str:
    """Return the idempotency key of the run of one fire: there is one run per fire."""
    return f"schedule {schedule} {fire_text(fire)}"


def delay_of(schedule: Schedule, key: str) -> timedelta:
    """Return how much later than its fires a schedule starts its runs: the same for all of them, up to its jitter.

    It hangs on the schedule's name alone, so that the runs of one schedule keep their distance from each other.
    """
    if not schedule.jitter:
        return timedelta()
    share = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    return timedelta(seconds=round(share * schedule.jitter))


# -- when it fires


def next_fire(schedule: Schedule, after: datetime) -> datetime | None:
    """Return the first fire later than `after`, or None if there is none any more."""
    if schedule.start is not None:
        after = max(after, moment(schedule.start, schedule.zone) - _INSTANT)
    fire = _next_fire(schedule, after)
    if fire is not None and schedule.end is not None and fire >= moment(schedule.end, schedule.zone):
        return None
    return fire


def _next_fire(schedule: Schedule, after: datetime) -> datetime | None:
    if after.year > _LAST_YEAR:
        return None
    if schedule.every is not None:
        interval = timedelta(seconds=schedule.every)
        return _EPOCH + ((after - _EPOCH) // interval + 1) * interval
    if schedule.at is not None:
        fire = moment(schedule.at, schedule.zone)
        return fire if fire > after else None
    assert schedule.cron is not None
    return _next_of_cron(schedule.cron, schedule.timezone, after.replace(microsecond=0) if after.microsecond else after)


@functools.lru_cache(maxsize=4096)  # thousands of schedules are due at the same moment
def _next_of_cron(expression: str, timezone: str, after: datetime) -> datetime | None:
    next_one = _next_on_the_clock if cron.has_fixed_hour(expression) else _next_elapsed
    return next_one(expression, ZoneInfo(timezone), after)


def fires(schedule: Schedule, start: datetime, end: datetime) -> Iterator[datetime]:
    """Yield the fires from `start` on and before `end`."""
    if schedule.end is not None:
        end = min(end, moment(schedule.end, schedule.zone))
    fire = next_fire(schedule, start - _INSTANT)
    while fire is not None and fire < end:
        yield fire
        for later in _later_that_day(schedule, fire):
            if later >= end:
                return
            yield later
            fire = later
        fire = next_fire(schedule, fire)


def _later_that_day(schedule: Schedule, fire: datetime) -> Iterator[datetime]:
    """Yield the fires of a cron expression after one up to midnight, where that is simple; `next_fire` knows the rest.

    It is not where the clock is turned meanwhile, nor after a fire that stands for a time that was left out.
    """
    zone, expression = schedule.zone, schedule.cron
    if expression is None:
        return
    local = wall(fire, zone)
    times = cron.later_that_day(expression, local)
    first = next(times, None)
    midnight = local.replace(hour=0, minute=0, second=0) + _DAY
    if first is None or next_turn(zone, fire, fire + (midnight - local)) is not None:
        return
    if cron.next_local(expression, local - _SECOND) != local:
        return
    ahead = offset(fire, zone)
    for time in itertools.chain([first], times):
        yield (time - ahead).replace(tzinfo=UTC)


def moment(text: str, zone: ZoneInfo) -> datetime:
    """Return the moment that a text names, by the clock of a zone unless it has an offset."""
    found = datetime.fromisoformat(text)
    return moment_of(found, zone) if found.tzinfo is None else found.astimezone(UTC)


def _next_on_the_clock(expression: str, zone: ZoneInfo, after: datetime) -> datetime | None:
    local: datetime | None = wall(after, zone)
    while local is not None and (local := cron.next_local(expression, local)) is not None:
        fire = moment_of(local, zone)
        if fire > after:  # else the clock shows this time for the second time
            return fire
    return None


def _next_elapsed(expression: str, zone: ZoneInfo, after: datetime) -> datetime | None:
    """Go from one turn of the clock to the next; between two, the wall clock runs like any other."""
    since, ahead, local_start = after, offset(after, zone), wall(after, zone)
    while (local := cron.next_local(expression, local_start)) is not None:
        fire = (local - ahead).replace(tzinfo=UTC)
        turn = next_turn(zone, since, fire)
        if turn is None:
            return fire
        since, ahead, local_start = turn, offset(turn, zone), wall(turn, zone) - _SECOND  # the turn may be a fire
    return None


# -- which fires of a schedule start a run, when the scheduler comes to look at it.
#
# Mostly that is one, a moment ago. After an outage more may be due, and the schedule's `catch_up` decides. A pure
# function of what is in the schedule's row and of the time, so a leader that takes over decides the same.

PUNCTUAL = timedelta(seconds=60)
"""A fire this late is not missed yet: a failover, or ten thousand others before it, takes a while, too."""


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
