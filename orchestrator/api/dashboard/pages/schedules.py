"""Schedules: next fires, a calendar of past fires, and backfills with a preview."""

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

from orchestrator.api.context import MAX_INT, Api
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
_MAX_FIRES = 52
"""Fires that are marked on a strip; a schedule that fires more than twice an hour is drawn as a line."""
_LAST_RUNS = 14


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule and its drawing."""

    stored: StoredSchedule
    marks: list[float]
    """The positions of fires on the strip, as percentages of the next day."""
    is_steady: bool
    """Whether it fires too often to draw each fire."""
    runs: list[LastRun]


@routes.get("", about=WITHIN)
def list_schedules(api: Api, query: SchedulesQuery, key_scope: KeyScope) -> Response:
    """Show schedules, ordered by name."""
    now = datetime.now(UTC)
    found, after = api.backend.schedules.page(limit=query.limit, after=query.cursor, within=key_scope.workflows)
    backfills = [
        backfill for backfill in api.backend.schedules.list_backfills(20) if key_scope.has_workflow(backfill.workflow)
    ]
    hours = [now + timedelta(hours=12 * half_days) for half_days in range(3)]
    last = squares(api, [stored.workflow for stored in found], _LAST_RUNS)
    return page(
        "schedules.html",
        schedules=[_schedule_row(stored, now, last[stored.workflow]) for stored in found],
        next=after,
        backfills=[(backfill, *_days(api, backfill)) for backfill in backfills],
        hours=hours,
    )


@lru_cache(maxsize=2_000)
def _upcoming(encoded_schedule: bytes, hour: datetime) -> tuple[tuple[datetime, ...], bool]:
    """Return the fires of a day and an hour from `hour` on, and whether they are too many to draw.

    Computing one takes a tenth of a millisecond, so they are cached.
    """
    schedule = msgspec.json.decode(encoded_schedule, type=Schedule)
    upcoming = tuple(islice(fires(schedule, hour, hour + _AHEAD + timedelta(hours=1)), _MAX_FIRES + 1))
    return upcoming, len(upcoming) > _MAX_FIRES


def _schedule_row(stored: StoredSchedule, now: datetime, runs: list[LastRun]) -> ScheduleRow:
    hour = now.replace(minute=0, second=0, microsecond=0)
    encoded_schedule = msgspec.json.encode(msgspec.structs.replace(stored.schedule, params={}))
    upcoming, is_steady = ((), False) if stored.paused else _upcoming(encoded_schedule, hour)
    marks = [round(100 * (fire - now) / _AHEAD, 2) for fire in upcoming if now <= fire < now + _AHEAD]
    return ScheduleRow(stored, marks, is_steady, runs)


def _days(api: Api, backfill: BackfillView) -> tuple[datetime, datetime]:
    """Return the range of a backfill in the time zone of its schedule."""
    zone: tzinfo = UTC
    with suppress(NotFound):  # the schedule may be deleted
        zone = api.backend.schedules.find(key_of(backfill.workflow, backfill.name)).schedule.zone
    return backfill.start_at.astimezone(zone), backfill.end_at.astimezone(zone)


_WINDOWS = tuple(timedelta(hours=hours) for hours in (28 * 24, 7 * 24, 24, 6, 1))
_MAX_PAST = 400
"""Fires in a calendar; a schedule that fires often has a shorter calendar."""
_LATE = timedelta(minutes=1)
"""A run that begins later than this after its fire, or after the next fire, is late."""


class Fire(NamedTuple):
    at: datetime
    """The time in the schedule's time zone."""
    state: str
    """The state of the run, `skipped`, `missed`, or empty if the run may have been deleted."""
    run: FireRun | None
    late: float
    """Seconds by which the run was late; 0 if in time."""


@routes.get("/{workflow}/{name}", about=WORKFLOW)
def show_schedule(api: Api, workflow: str, name: str) -> Response:
    """Show the past fires of a schedule as a calendar."""
    stored = api.backend.schedules.find(f"{workflow}/{name}")
    now = datetime.now(UTC)
    window, past_fires = _past_fires(stored.schedule, now)
    runs = api.read(runs_of_fires, stored.workflow, stored.name, past_fires)
    kept = api.settings.retention_success
    begin = min(
        (*runs, stored.created_at or now)
    )  # a run may be older, from a backfill or an earlier schedule of this name
    since = max(begin, now - timedelta(seconds=kept) if kept else now - window)
    tolerance = min((_LATE, *(later - fire for fire, later in pairwise(past_fires))))
    calendar_fires = [_fire(stored, fire, runs, since, now, tolerance) for fire in past_fires if fire >= begin]
    days: dict[date, list[Fire]] = {}
    for calendar_fire in calendar_fires:
        days.setdefault(calendar_fire.at.date(), []).append(calendar_fire)
    first, last = ((calendar_fire.astimezone(stored.schedule.zone)).date() for calendar_fire in (now - window, now))
    days_per_row = 1
    if window == _WINDOWS[0]:
        days_per_row, first = 7, first - timedelta(days=first.weekday())
    dates = [first + timedelta(days=day) for day in range((last - first).days + 1)]
    weeks = [dates[start : start + days_per_row] for start in range(0, len(dates), days_per_row)]
    counts = Counter("late" if calendar_fire.late else calendar_fire.state for calendar_fire in calendar_fires)
    return page(
        "schedule.html",
        stored=stored,
        weeks=weeks,
        days=days,
        counts=counts,
        total=len(calendar_fires),
        window=min(window, now - begin),
    )


def _past_fires(schedule: Schedule, now: datetime) -> tuple[timedelta, list[datetime]]:
    """Return the fires of the longest window that has few enough of them, or otherwise the newest fires."""
    for window in _WINDOWS:
        found = [*islice(fires(schedule, now - window, now), _MAX_PAST + 1)]
        if len(found) <= _MAX_PAST:
            return window, found
    newest = [*deque(fires(schedule, now - window, now), _MAX_PAST)]
    return now - newest[0], newest


def _fire(
    stored: StoredSchedule,
    fire: datetime,
    runs: dict[datetime, FireRun],
    since: datetime,
    now: datetime,
    tolerance: timedelta,
) -> Fire:
    local, run = fire.astimezone(stored.schedule.zone), runs.get(fire)
    if run is not None:
        late = (run.started_at or now) - fire - delay_of(stored.schedule, stored.key)
        return Fire(local, run.status, run, late.total_seconds() if late > tolerance else 0.0)
    if fire < since:
        return Fire(local, "", None, 0.0)
    is_skipped = stored.schedule.overlap == "skip" and _was_open(stored.key, fire, runs, now, tolerance)
    return Fire(local, "skipped" if is_skipped else "missed", None, 0.0)


def _was_open(key: str, fire: datetime, runs: dict[datetime, FireRun], now: datetime, tolerance: timedelta) -> bool:
    """Return whether the run of an earlier fire was still open at this one. Backfills do not skip.

    If it was still open when a later fire got a run, no scheduler led, and the run may have ended long before.
    """
    own = [at for at, run in runs.items() if run.schedule == key]
    before = max((at for at in own if at < fire), default=None)
    if before is None:
        return False
    ended = runs[before].ended_at or now
    return ended >= fire and not any(fire < at < ended - tolerance for at in own)


_MAX_SHOWN = 10
"""Fires that a preview shows from each end of the range."""


class BackfillQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The range and options of a backfill."""

    start: str | None = None
    end: str | None = None
    concurrency: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A preview of a backfill."""

    first: list[tuple[datetime, bool]]
    """Fires in the schedule's time zone, and whether each would get a run."""
    left_out: int
    last: list[tuple[datetime, bool]]
    total: int
    missing: int
    """Fires that would get a run."""
    concurrency: int


@routes.get("/{workflow}/{name}/backfills", about=WORKFLOW, scope=Scope.OPERATE)
def preview_backfill(api: Api, workflow: str, name: str, query: BackfillQuery) -> Response:
    """Preview which runs a backfill would start."""
    stored = api.backend.schedules.find(f"{workflow}/{name}")
    found, wrong = None, ""
    if query.start is not None:
        try:
            found = _preview(api, stored.key, query)
        except InvalidWorkflow as error:
            wrong = str(error)
    return page("backfill.html", 422 if wrong else 200, stored=stored, query=query, found=found, wrong=wrong)


def _preview(api: Api, key: str, query: BackfillQuery) -> Preview:
    options = query.start or "", query.end, query.concurrency, query.again
    new, fires = api.backend.schedules.preview_backfill(key, *options)
    displayed = [*fires[:_MAX_SHOWN], *fires[_MAX_SHOWN:][-_MAX_SHOWN:]]
    local = [(fire.astimezone(new.schedule.zone), is_missing) for fire, is_missing in displayed]
    return Preview(
        first=local[:_MAX_SHOWN],
        left_out=len(fires) - len(displayed),
        last=local[_MAX_SHOWN:],
        total=len(fires),
        missing=sum(is_missing for _, is_missing in fires),
        concurrency=new.concurrency,
    )
