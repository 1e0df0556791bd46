"""Schedules, and the moments at which they fire.

A *fire* is a moment at which a run is due, in UTC and whole microseconds. It identifies the run. If clocks change:

- A cron expression with fixed hours (`30 2 * * *`) follows the local time. A time that occurs twice fires only once, at
  its first occurrence. A skipped time fires at the moment of the clock change; several skipped times fire once.
- An expression whose hour is `*` or `*/n` fires whenever the local time matches, as in other crons: twice in a repeated
  hour, and not in a skipped hour. So `0 * * * *` fires every sixty minutes.
- `every` ignores the local time. It counts from 1970 in UTC, so that `10m` means :00, :10, :20 whenever it was set, and
  setting it again does not shift it.
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
from orchestrator.domain.schedules.cron import moment_of, next_clock_change, offset, wall

Overlap = Literal["skip", "queue", "allow", "cancel_previous"]
"""The handling of a fire while a run of the same schedule is open."""

DEFAULT_NAME = "default"
MAX_CAUGHT_UP = 1_000
"""The largest allowed limit of `catch_up: all(limit)`."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_INSTANT = timedelta(microseconds=1)
_LAST_YEAR = 9_000
_CATCH_UP = re.compile(r"(none|latest|all)(?:\(([1-9][0-9]{0,8})\))?")


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """When runs of a workflow start automatically. Exactly one of cron, every and at is set. All fields are valid."""

    name: Annotated[str, Key("label")] = DEFAULT_NAME
    cron: Annotated[
        str | None,
        Key("cron", "Five fields (minute, hour, day of month, month, day of week), or six with seconds first."),
    ] = None
    every: Annotated[float | None, Key("interval")] = None
    """The interval, in seconds."""
    at: Annotated[str | None, Key("moment", "Once, such as 2024-01-31T09:30:00.")] = None
    """ISO 8601, in the schedule's time zone unless it has an offset. A date means its first moment."""
    start: Annotated[str | None, Key("moment", "Not before this moment, such as 2024-02-01.")] = None
    end: Annotated[str | None, Key("moment", "Only before this moment, such as 2024-07-01.")] = None
    timezone: Annotated[str, Key("timezone", "Such as Europe/Berlin.")] = "UTC"
    overlap: Annotated[Overlap, Key("choice", "What happens when the previous run has not ended.")] = "skip"
    catch_up: Annotated[
        str, Key("catch_up", "What happens to times that passed unseen: none, latest, all, or all(limit).")
    ] = "latest"
    jitter: Annotated[float, Key("jitter")] = 0.0
    """Seconds by which schedules with equal times are spread, at most."""
    params: Annotated[dict[str, Any], Key("object")] = {}
    """A template for the parameters of a run. It may use `run.fire_time`."""
    paused: Annotated[bool, Key("boolean")] = False

    @property
    def zone(self) -> ZoneInfo:
        """The schedule's time zone."""
        return ZoneInfo(self.timezone)

    @property
    def caught_up(self) -> int | None:
        """How many missed fires are started later. None for all."""
        kind, limit = catch_up_parts(self.catch_up) or ("latest", None)
        return {"none": 0, "latest": 1, "all": limit}[kind]

    def description(self) -> str:
        """Return a description of the schedule's times, as the user wrote them."""
        times = f"every {format_duration(self.every)}" if self.every is not None else self.cron or f"once at {self.at}"
        since = f", from {self.start}" if self.start is not None else ""
        return f"{times}{since}{f', before {self.end}' if self.end is not None else ''}"


@functools.lru_cache(maxsize=64)
def catch_up_parts(text: str) -> tuple[str, int | None] | None:
    """Return the kind and the limit of a catch-up policy, or None if the text is invalid."""
    match = _CATCH_UP.fullmatch(text)
    if match is None or (match[2] and match[1] != "all"):
        return None
    return match[1], int(match[2]) if match[2] else None


def from_data(data: dict[str, Any]) -> Schedule:
    """Return the schedule in a validated definition."""
    return msgspec.convert(data, Schedule)


def key_of(workflow: str, name: str) -> str:
    """Return the full name of a schedule, which its runs refer to."""
    return f"{workflow}/{name}"


@functools.lru_cache(maxsize=64)  # thousands of schedules are due at the same moment
def fire_text(fire: datetime) -> str:
    """Return a fire as text, in UTC."""
    return fire.astimezone(UTC).isoformat()


def fire_key(schedule: str, fire: datetime) -> str:
    """Return the idempotency key of a fire's run, so that each fire has one run."""
    return f"schedule {schedule} {fire_text(fire)}"


def delay_of(schedule: Schedule, key: str) -> timedelta:
    """Return the delay between the fires of a schedule and the starts of their runs, up to its jitter.

    It depends on the schedule's name only, so that the runs of one schedule keep their distance.
    """
    if not schedule.jitter:
        return timedelta()
    share = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    return timedelta(seconds=round(share * schedule.jitter))


# -- computing fires


def next_fire(schedule: Schedule, after: datetime) -> datetime | None:
    """Return the first fire after `after`, or None if there is none."""
    if schedule.start is not None:
        after = max(after, parse_moment(schedule.start, schedule.zone) - _INSTANT)
    fire = _next_fire(schedule, after)
    if fire is not None and schedule.end is not None and fire >= parse_moment(schedule.end, schedule.zone):
        return None
    return fire


def _next_fire(schedule: Schedule, after: datetime) -> datetime | None:
    if after.year > _LAST_YEAR:
        return None
    if schedule.every is not None:
        interval = timedelta(seconds=schedule.every)
        return _EPOCH + ((after - _EPOCH) // interval + 1) * interval
    if schedule.at is not None:
        fire = parse_moment(schedule.at, schedule.zone)
        return fire if fire > after else None
    assert schedule.cron is not None
    return _next_of_cron(schedule.cron, schedule.timezone, after.replace(microsecond=0) if after.microsecond else after)


@functools.lru_cache(maxsize=4096)  # thousands of schedules are due at the same moment
def _next_of_cron(expression: str, timezone: str, after: datetime) -> datetime | None:
    find_next = _next_local_match if cron.has_fixed_hour(expression) else _next_elapsed_match
    return find_next(expression, ZoneInfo(timezone), after)


def fires(schedule: Schedule, start: datetime, end: datetime) -> Iterator[datetime]:
    """Yield the fires from `start` until before `end`."""
    if schedule.end is not None:
        end = min(end, parse_moment(schedule.end, schedule.zone))
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
    """Yield a cron schedule's later fires until midnight, if that is simple. `next_fire` computes the others.

    It is not simple if the clock changes before midnight, or if the fire stands for a skipped time.
    """
    zone, expression = schedule.zone, schedule.cron
    if expression is None:
        return
    local = wall(fire, zone)
    times = cron.later_that_day(expression, local)
    first = next(times, None)
    midnight = local.replace(hour=0, minute=0, second=0) + _DAY
    if first is None or next_clock_change(zone, fire, fire + (midnight - local)) is not None:
        return
    if cron.next_local(expression, local - _SECOND) != local:
        return
    utc_offset = offset(fire, zone)
    for time in itertools.chain([first], times):
        yield (time - utc_offset).replace(tzinfo=UTC)


def parse_moment(text: str, zone: ZoneInfo) -> datetime:
    """Parse a moment, in the given zone unless the text has an offset."""
    parsed = datetime.fromisoformat(text)
    return moment_of(parsed, zone) if parsed.tzinfo is None else parsed.astimezone(UTC)


def _next_local_match(expression: str, zone: ZoneInfo, after: datetime) -> datetime | None:
    local: datetime | None = wall(after, zone)
    while local is not None and (local := cron.next_local(expression, local)) is not None:
        fire = moment_of(local, zone)
        if fire > after:  # otherwise this local time occurs for the second time
            return fire
    return None


def _next_elapsed_match(expression: str, zone: ZoneInfo, after: datetime) -> datetime | None:
    """Return the next match, stepping from one clock change to the next: between them the offset is constant."""
    since, utc_offset, local_start = after, offset(after, zone), wall(after, zone)
    while (local := cron.next_local(expression, local_start)) is not None:
        fire = (local - utc_offset).replace(tzinfo=UTC)
        change = next_clock_change(zone, since, fire)
        if change is None:
            return fire
        # the change itself may be a fire
        since, utc_offset, local_start = change, offset(change, zone), wall(change, zone) - _SECOND
    return None


# -- which due fires of a schedule start a run.
#
# Normally one fire is due. After an outage there may be more, and the schedule's `catch_up` decides. The decision is a
# pure function of the schedule's row and the time, so a new leader decides the same.

PUNCTUAL = timedelta(seconds=60)
"""A fire this late does not count as missed: a failover, or ten thousand other fires, may cause the delay."""


class Decision(NamedTuple):
    """The result of evaluating a schedule."""

    fires: list[datetime]
    """The fires that start a run, oldest first."""
    next_fire: datetime | None
    """The next fire to evaluate. It may be due already if there was no room for more."""


def decide(schedule: Schedule, due: datetime, now: datetime, room: int) -> Decision:
    """Decide about `due`, the stored next fire, and all fires after it up to `now`. Start `room` runs at most."""
    if due > now:
        return Decision([], due)
    following_fire = next_fire(schedule, due)
    catch_up = schedule.caught_up
    if following_fire is None or following_fire > now:
        is_started = catch_up != 0 or now - due <= PUNCTUAL
        return Decision([due] if is_started else [], following_fire)
    if catch_up is None:
        return _all_from(schedule, due, now, room)
    newest = _newest(schedule, due, now)
    if catch_up == 0:
        chosen = [newest] if now - newest <= PUNCTUAL else []
    else:
        chosen = _last(schedule, due, newest, catch_up, following_fire - due)
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
    """Return the newest fire up to `now`, by bisection: a year of seconds takes thirty steps, not thirty million."""
    newest, nothing_after = first, now
    while (following := next_fire(schedule, newest)) is not None and following <= nothing_after:
        newest = following
        middle = newest + (nothing_after - newest) / 2
        candidate = next_fire(schedule, middle)
        if candidate is not None and candidate <= nothing_after:
            newest = candidate
        else:
            nothing_after = middle
    return newest


def _last(schedule: Schedule, first: datetime, newest: datetime, count: int, gap: timedelta) -> list[datetime]:
    """Return the last `count` fires from `first` to `newest`, searching further and further back."""
    span = gap * count
    while True:
        start = max(first, newest - span) if span < newest - first else first
        latest = deque(fires(schedule, start, newest + _INSTANT), maxlen=count)
        if len(latest) == count or start == first:
            return list(latest)
        span *= 2
