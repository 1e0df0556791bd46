"""Schedules: list, show, set, trigger and backfill them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import LARGEST, LARGEST_PAGE, PAGE, Api, made_from
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
    """A schedule and how it is doing."""

    workflow: str
    name: str
    when: str
    """In words."""
    paused: bool
    declared: bool
    """It stands in the definition of its workflow, or in an application's code."""
    next_fire: datetime | None
    last_fire: datetime | None
    last_run: UUID | None
    last_state: str | None
    fired: int
    skipped: int
    """Fires that came while a run was open."""
    error: str | None
    """Why the last fire could not start a run."""
    flow: bool = False
    """It starts runs of a flow."""
    version: int | None = None
    """Of the flow, if that is not the newest one that is published when it fires."""


class SchedulesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of them."""

    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE)] = PAGE
    cursor: str | None = None
    """`next` of the page before."""


class Schedules(msgspec.Struct, frozen=True):
    """Some of the schedules, in order of their names."""

    schedules: list[ScheduleView]
    next: str | None
    """Give it as `cursor` to get the next page; null on the last one."""


class NewSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a workflow or a flow starts by itself."""

    schedule: dict[str, Any]
    """As a workflow file has it: cron or every, timezone, overlap, catch_up, …"""
    version: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Of a flow: which one, unless it is the newest that is published when it fires."""


class FiresQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many fires to show."""

    count: Annotated[int, Meta(ge=1, le=1_000)] = 10


class Fires(msgspec.Struct, frozen=True):
    """The next times at which a schedule fires."""

    fires: list[datetime]


class NewBackfill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of the past to fill in."""

    start: str
    end: str | None = None
    concurrency: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None
    """How many of its runs are under way at once."""
    again: bool = False
    """Start runs also for fires that had theirs."""


def view(stored: StoredSchedule) -> ScheduleView:
    return made_from(ScheduleView, stored, when=stored.schedule.words(), version=stored.flow_version)


@routes.get("", about=WITHIN)
def list_schedules(api: Api, query: SchedulesQuery, key_scope: KeyScope) -> Schedules:
    """List schedules, in order of their names."""
    found = api.backend.schedules.page(limit=query.limit, after=query.cursor, within=key_scope.workflows)
    return Schedules([view(stored) for stored in found.schedules], found.next)


@routes.get("/{workflow}/{name}", about=WORKFLOW)
def show_schedule(api: Api, workflow: str, name: str) -> ScheduleView:
    """Show one schedule."""
    return view(api.backend.schedules.find(f"{workflow}/{name}"))


@routes.put("/{workflow}", about=WORKFLOW, examples=[_EXAMPLE])
def set_schedule(api: Api, workflow: str, body: NewSchedule) -> ScheduleView:
    """Set when a workflow or a flow starts by itself; `name` distinguishes several of one."""
    return view(api.backend.schedules.set(workflow, body.schedule, body.version))


@routes.post("/{workflow}/{name}/trigger", about=WORKFLOW, status=201)
def trigger_schedule(api: Api, workflow: str, name: str) -> Started:
    """Start a run of a schedule now."""
    run = new_id()
    api.backend.schedules.trigger(f"{workflow}/{name}", run)
    return Started(UUID(bytes=run))


@routes.get("/{workflow}/{name}/fires", about=WORKFLOW, is_expensive=True)
def next_fires(api: Api, workflow: str, name: str, query: FiresQuery) -> Fires:
    """Show when a schedule fires next."""
    return Fires(api.backend.schedules.upcoming(f"{workflow}/{name}", query.count))


@routes.post(
    "/{workflow}/{name}/backfills",
    about=WORKFLOW,
    status=201,
    examples=[{"start": "2026-01-01", "end": "2026-02-01"}],
    is_expensive=True,
)
def backfill(api: Api, workflow: str, name: str, body: NewBackfill) -> BackfillView:
    """Start the runs of all fires in a range of the past, a few at a time."""
    number = api.backend.schedules.backfill(f"{workflow}/{name}", body.start, body.end, body.concurrency, body.again)
    return api.backend.schedules.show_backfill(number)
