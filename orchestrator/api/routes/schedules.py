"""Schedules: list, show, set, trigger and backfill them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import MAX_INT, MAX_PAGE_SIZE, PAGE_SIZE, Api, build_from
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN, WORKFLOW
from orchestrator.api.routes.workflows import Started
from orchestrator.domain.access import KeyScope
from orchestrator.sdk.ids import new_id
from orchestrator.store.schedules.backfills import BackfillView
from orchestrator.store.schedules.definitions import StoredSchedule

routes = Routes("schedules", "/api/v1/schedules")

_EXAMPLE = {"schedule": {"cron": "0 6 * * *", "timezone": "Europe/Berlin"}}


class ScheduleView(msgspec.Struct, frozen=True):
    """A schedule and its state."""

    workflow: str
    name: str
    when: str
    """The schedule in words."""
    paused: bool
    declared: bool
    """Whether the schedule is declared in a workflow's definition or an application's code."""
    next_fire: datetime | None
    last_fire: datetime | None
    last_run: UUID | None
    last_state: str | None
    fired: int
    skipped: int
    """Fires that were skipped because a run was open."""
    error: str | None
    """Why the last fire could not start a run."""
    flow: bool = False
    """Whether it starts runs of a flow."""
    version: int | None = None
    """The version of the flow; null for the newest published version at the time of the fire."""


class SchedulesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which page of schedules to list."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE
    cursor: str | None = None
    """`next` of the previous page."""


class Schedules(msgspec.Struct, frozen=True):
    """A page of schedules, ordered by name."""

    schedules: list[ScheduleView]
    next: str | None
    """Pass it as `cursor` to get the next page; null on the last one."""


class NewSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule for a workflow or flow."""

    schedule: dict[str, Any]
    """The schedule, as in a workflow file: cron or every, timezone, overlap, catch_up, …"""
    version: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """The version of a flow; by default the newest published version at the time of the fire."""


class FiresQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1, le=1_000)] = 10


class Fires(msgspec.Struct, frozen=True):
    """The next fire times of a schedule."""

    fires: list[datetime]


class NewBackfill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of past fires to start runs for."""

    start: str
    end: str | None = None
    concurrency: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """Runs of the backfill that may be open at once."""
    again: bool = False
    """Start runs also for fires that already had a run."""


def view(stored: StoredSchedule) -> ScheduleView:
    return build_from(ScheduleView, stored, when=stored.schedule.description(), version=stored.flow_version)


@routes.get("", about=WITHIN)
def list_schedules(api: Api, query: SchedulesQuery, key_scope: KeyScope) -> Schedules:
    """List schedules, ordered by name."""
    found = api.backend.schedules.page(limit=query.limit, after=query.cursor, within=key_scope.workflows)
    return Schedules([view(stored) for stored in found.schedules], found.next)


@routes.get("/{workflow}/{name}", about=WORKFLOW)
def show_schedule(api: Api, workflow: str, name: str) -> ScheduleView:
    """Show one schedule."""
    return view(api.backend.schedules.find(f"{workflow}/{name}"))


@routes.put("/{workflow}", about=WORKFLOW, examples=[_EXAMPLE])
def set_schedule(api: Api, workflow: str, body: NewSchedule) -> ScheduleView:
    """Set a schedule of a workflow or flow; `name` distinguishes several schedules."""
    return view(api.backend.schedules.set(workflow, body.schedule, body.version))


@routes.post("/{workflow}/{name}/trigger", about=WORKFLOW, status=201)
def trigger_schedule(api: Api, workflow: str, name: str) -> Started:
    """Start a run of a schedule now."""
    run = new_id()
    api.backend.schedules.trigger(f"{workflow}/{name}", run)
    return Started(UUID(bytes=run))


@routes.get("/{workflow}/{name}/fires", about=WORKFLOW, is_expensive=True)
def next_fires(api: Api, workflow: str, name: str, query: FiresQuery) -> Fires:
    """Show the next fire times of a schedule."""
    return Fires(api.backend.schedules.upcoming(f"{workflow}/{name}", query.count))


@routes.post(
    "/{workflow}/{name}/backfills",
    about=WORKFLOW,
    status=201,
    examples=[{"start": "2026-01-01", "end": "2026-02-01"}],
    is_expensive=True,
)
def backfill(api: Api, workflow: str, name: str, body: NewBackfill) -> BackfillView:
    """Start runs for all fires in a past range, a few at a time."""
    number = api.backend.schedules.backfill(f"{workflow}/{name}", body.start, body.end, body.concurrency, body.again)
    return api.backend.schedules.show_backfill(number)
