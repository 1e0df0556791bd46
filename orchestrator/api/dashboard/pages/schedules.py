"""Schedules: when they fire next, a calendar of past fires, and backfills, with a preview of their fires."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from itertools import islice, pairwise
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import LARGEST, Api
from orchestrator.api.dashboard.pages.workflows import squares
from orchestrator.api.dashboard.rendering import page, pages
from orchestrator.api.key_scope import WITHIN, WORKFLOW
from orchestrator.api.routes.schedules import SchedulesQuery
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.schedules.schedule import Schedule, delay_of, fires, key_of
from orchestrator.errors import InvalidWorkflow, NotFound
from orchestrator.store.insights import LastRun
from orchestrator.store.schedules.backfills import BackfillView, FireRun, runs_of_fires
from orchestrator.store.schedules.definitions import StoredSchedule

routes = pages("/ui/schedules")

_AHEAD = timedelta(hours=24)
_MOST_FIRES = 52
"""Marks on one strip; what fires more often than every half hour is drawn as a line."""
_LAST = 14


@dataclass(frozen=True)
class Shown:
    """A schedule with what is drawn beside it."""

    stored: StoredSchedule
    marks: list[float]
    """Where on the strip it fires, in hundredths of the next day."""
    is_steady: bool
    """It fires more often than could be drawn."""
    runs: list[LastRun]


@routes.get("", about=WITHIN)
def list_schedules(api: Api, query: SchedulesQuery, key_scope: KeyScope) -> Response:
    """Show schedules, in order of their names."""
    now = datetime.now(UTC)
    found, after = api.backend.schedules.page(limit=query.limit, after=query.cursor, within=key_scope.workflows)
    backfills = [one for one in api.backend.schedules.list_backfills(20) if key_scope.has_workflow(one.workflow)]
    hours = [now + timedelta(hours=12 * half_days) for half_days in range(3)]
    last = squares(api, [stored.workflow for stored in found], _LAST)
    return page(
        "schedules.html",
        schedules=[_shown(stored, now, last[stored.workflow]) for stored in found],
        next=after,
        backfills=[(one, *_days(api, one)) for one in backfills],
        hours=hours,
    )


@lru_cache(maxsize=2_000)
def _from(written: bytes, hour: datetime) -> tuple[tuple[datetime, ...], bool]:
    """Return the fires from an hour on for a day and an hour, and whether they are too many to be drawn.

    To find one takes a tenth of a millisecond, and they do not change.
    """
    schedule = msgspec.json.decode(written, type=Schedule)
    found = tuple(islice(fires(schedule, hour, hour + _AHEAD + timedelta(hours=1)), _MOST_FIRES + 1))
    return found, len(found) > _MOST_FIRES


def _shown(stored: StoredSchedule, now: datetime, runs: list[LastRun]) -> Shown:
    hour = now.replace(minute=0, second=0, microsecond=0)
    written = msgspec.json.encode(msgspec.structs.replace(stored.schedule, params={}))
    found, is_steady = ((), False) if stored.paused else _from(written, hour)
    marks = [round(100 * (fire - now) / _AHEAD, 2) for fire in found if now <= fire < now + _AHEAD]
    return Shown(stored, marks, is_steady, runs)


def _days(api: Api, backfill: BackfillView) -> tuple[datetime, datetime]:
    """Return the range of a backfill in the zone of its schedule, in which its days were given."""
    zone: tzinfo = UTC
    with suppress(NotFound):  # it may be deleted by now
        zone = api.backend.schedules.find(key_of(backfill.workflow, backfill.name)).schedule.zone
    return backfill.start_at.astimezone(zone), backfill.end_at.astimezone(zone)


_WINDOWS = tuple(timedelta(hours=hours) for hours in (28 * 24, 7 * 24, 24, 6, 1))
_MOST_PAST = 400
"""Fires of a calendar: a schedule that fires more often has a shorter one."""
_LATE = timedelta(minutes=1)
"""A run that begins later than this is late; so is one that begins later than the next fire."""


class Fire(NamedTuple):
    """A past fire."""

    at: datetime
    """In the zone of its schedule."""
    state: str
    """The state of its run, `skipped`, `missed`, or nothing if its run may be deleted."""
    run: FireRun | None
    late: float
    """Seconds by which its run began too late; 0 if it was in time."""


@routes.get("/{workflow}/{name}", about=WORKFLOW)
def show_schedule(api: Api, workflow: str, name: str) -> Response:
    """Show the past fires of a schedule as a calendar."""
    stored = api.backend.schedules.find(f"{workflow}/{name}")
    now = datetime.now(UTC)
    window, past = _past(stored.schedule, now)
    runs = api.read(runs_of_fires, stored.workflow, stored.name, past)
    kept = api.settings.retention_success
    begin = min(
        (*runs, stored.created_at or now)
    )  # a run may be older: of a backfill, or of a schedule of the same name
    since = max(begin, now - timedelta(seconds=kept) if kept else now - window)
    most = min((_LATE, *(later - fire for fire, later in pairwise(past))))
    shown = [_fire(stored, fire, runs, since, now, most) for fire in past if fire >= begin]
    days: dict[date, list[Fire]] = {}
    for one in shown:
        days.setdefault(one.at.date(), []).append(one)
    first, last = ((one.astimezone(stored.schedule.zone)).date() for one in (now - window, now))
    wide = 1
    if window == _WINDOWS[0]:
        wide, first = 7, first - timedelta(days=first.weekday())
    dates = [first + timedelta(days=day) for day in range((last - first).days + 1)]
    weeks = [dates[start : start + wide] for start in range(0, len(dates), wide)]
    counts = Counter("late" if one.late else one.state for one in shown)
    return page(
        "schedule.html",
        stored=stored,
        weeks=weeks,
        days=days,
        counts=counts,
        total=len(shown),
        window=min(window, now - begin),
    )


def _past(schedule: Schedule, now: datetime) -> tuple[timedelta, list[datetime]]:
    """Return the fires of the last weeks, of the last days or hours if there are too many, or the newest ones."""
    for window in _WINDOWS:
        found = [*islice(fires(schedule, now - window, now), _MOST_PAST + 1)]
        if len(found) <= _MOST_PAST:
            return window, found
    newest = [*deque(fires(schedule, now - window, now), _MOST_PAST)]
    return now - newest[0], newest


def _fire(
    stored: StoredSchedule,
    fire: datetime,
    runs: dict[datetime, FireRun],
    since: datetime,
    now: datetime,
    most: timedelta,
) -> Fire:
    local, run = fire.astimezone(stored.schedule.zone), runs.get(fire)
    if run is not None:
        late = (run.started_at or now) - fire - delay_of(stored.schedule, stored.key)
        return Fire(local, run.status, run, late.total_seconds() if late > most else 0.0)
    if fire < since:
        return Fire(local, "", None, 0.0)
    is_skipped = stored.schedule.overlap == "skip" and _was_open(stored.key, fire, runs, now, most)
    return Fire(local, "skipped" if is_skipped else "missed", None, 0.0)


def _was_open(key: str, fire: datetime, runs: dict[datetime, FireRun], now: datetime, most: timedelta) -> bool:
    """Say whether the run of an earlier fire was open at this one; backfills skip nothing.

    If it was still open when a later fire got a run, no scheduler led, and the work may have ended long before.
    """
    own = [at for at, run in runs.items() if run.schedule == key]
    before = max((at for at in own if at < fire), default=None)
    if before is None:
        return False
    ended = runs[before].ended_at or now
    return ended >= fire and not any(fire < at < ended - most for at in own)


_MOST_SHOWN = 10
"""Fires from each end of the range."""


class BackfillQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The range, and how it would be filled in."""

    start: str | None = None
    end: str | None = None
    concurrency: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A preview of a backfill."""

    first: list[tuple[datetime, bool]]
    """Fires, in the zone of their schedule, and of each whether it would get a run."""
    left_out: int
    last: list[tuple[datetime, bool]]
    total: int
    missing: int
    """Fires that would get a run."""
    concurrency: int


@routes.get("/{workflow}/{name}/backfills", about=WORKFLOW, scope=Scope.OPERATE)
def preview_backfill(api: Api, workflow: str, name: str, query: BackfillQuery) -> Response:
    """Say which runs would be started, before they are."""
    stored = api.backend.schedules.find(f"{workflow}/{name}")
    found, wrong = None, ""
    if query.start is not None:
        try:
            found = _preview(api, stored.key, query)
        except InvalidWorkflow as error:
            wrong = str(error)
    return page("backfill.html", 422 if wrong else 200, stored=stored, query=query, found=found, wrong=wrong)


def _preview(api: Api, key: str, query: BackfillQuery) -> Preview:
    asked = query.start or "", query.end, query.concurrency, query.again
    new, fires = api.backend.schedules.preview_backfill(key, *asked)
    shown = [*fires[:_MOST_SHOWN], *fires[_MOST_SHOWN:][-_MOST_SHOWN:]]
    local = [(fire.astimezone(new.schedule.zone), is_missing) for fire, is_missing in shown]
    return Preview(
        first=local[:_MOST_SHOWN],
        left_out=len(fires) - len(shown),
        last=local[_MOST_SHOWN:],
        total=len(fires),
        missing=sum(is_missing for _, is_missing in fires),
        concurrency=new.concurrency,
    )
