"""Failed tasks, grouped by task and error: over time, new since the last release, acknowledged and snoozed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.list_notes import SPANS, active_filters
from orchestrator.api.dashboard.pages.overview import ROLLOUT, read_failures, read_hour, read_marks
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages, visitor
from orchestrator.api.dashboard.words import call, own_frame
from orchestrator.api.key_scope import WITHIN, check_queue
from orchestrator.api.problems import refused
from orchestrator.domain.access import KeyScope
from orchestrator.domain.dag.composed import is_composed
from orchestrator.sdk.calls.insights import HandlingAct
from orchestrator.sdk.values.display import as_display_json, call_of
from orchestrator.store import insights
from orchestrator.store.insights.attempts import Release, last_release
from orchestrator.store.insights.failures import FailureGroup, failed_before
from orchestrator.store.insights.lookup import find_run_owners

routes, actions = pages("/ui/failures"), page_actions("/ui/failures")

_BARS = 24
"""Bars of each group over the displayed period."""
_MAX_EXAMPLES = 30
"""Groups whose last task is read for an example."""
_SORTS = {"name": "name", "queue": "queue", "first": "first_at", "last": "last_at", "tasks": "tasks"}


class FailuresQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The period and the order."""

    within: Literal["15m", "1h", "24h", "7d"] = "24h"
    since: Annotated[datetime, Meta(tz=True)] | None = None
    """The start of the period, instead of `within`."""
    until: Annotated[datetime, Meta(tz=True)] | None = None
    sort: Literal["name", "queue", "first", "last", "tasks", "-name", "-queue", "-first", "-last", "-tasks"] = "-tasks"


@routes.get("", about=WITHIN)
def list_failures(api: Api, query: FailuresQuery, key_scope: KeyScope) -> Response:
    """Show failed tasks by task and error."""
    now = datetime.now(UTC)
    until = query.until or now
    since = query.since or until - SPANS[query.within]
    if since >= until:
        raise refused(422, "The time range is invalid", "Choose a start that is before the end, and before now.")
    span = until - since if query.since else SPANS[query.within]
    decided = read_failures(api, key_scope, span, until=query.until)
    failures, handled = decided
    read_spread = partial(api.read_list, insights.spread_of_failures, since, until, _BARS, key_scope.queues)
    spread = api.recent.get(("spread", key_scope, span, query.until, visitor().pending_requests()), 5.0, read_spread)
    is_chosen = query.since is not None or query.until is not None
    period = (
        f"from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC" if is_chosen else f"in the last {query.within}"
    )
    states, last_hour = decided.states(now), read_hour(api, key_scope)
    groups = sorted(failures.groups, key=attrgetter(_SORTS[query.sort.lstrip("-")]), reverse=query.sort[0] == "-")
    release = api.recent.get(("last release",), 5.0, lambda: api.read(last_release))
    return page(
        "failures.html",
        groups=sorted(
            (group for group in groups if states.get(group.key) != "snoozed"),
            key=lambda group: bool(states.get(group.key)),
        ),
        snoozed=[group for group in groups if states.get(group.key) == "snoozed"],
        handled={key: one for key, one in handled.items() if states[key]},
        formerly={key: one for key, one in handled.items() if not states[key] and one.act != "reopen"},
        new=_new_groups(api, key_scope, groups, release),
        release=release,
        looked_at=failures.looked_at,
        query=query,
        asked=active_filters(query),
        ranges=list(SPANS),
        period=period,
        second=timedelta(seconds=1),
        is_chosen=is_chosen,
        meant={"since": since.isoformat(timespec="seconds"), "until": query.until and query.until.isoformat()},
        hour=last_hour,
        marks=[] if is_chosen else read_marks(api, key_scope, since, span),
        releases=[]
        if is_chosen
        else [mark for mark in read_marks(api, key_scope, since, span) if mark.kind == "release"],
        spread=spread,
        examples={group.task: _example(api, group.task) for group in groups[:_MAX_EXAMPLES]},
        workflows=_workflows(api, key_scope, groups),
        totals=[sum(part) for part in zip(*spread.values(), strict=True)] or [0] * _BARS,
    )


def _workflows(api: Api, key_scope: KeyScope, groups: list[FailureGroup]) -> dict[insights.GroupKey, list[str]]:
    """Return some of the workflows to which the tasks of each group belong."""
    owners = api.read_list(find_run_owners, {run for group in groups[:_MAX_EXAMPLES] for run in group.runs})
    names = {
        run: owner.workflow
        for run, owner in owners.items()
        if owner.workflow and key_scope.has_workflow(owner.workflow) and not is_composed(owner.workflow)
    }
    return {group.key: sorted({names[run] for run in group.runs if run in names}) for group in groups}


class Example(NamedTuple):
    """An example of a group's failures."""

    where: str
    """The last frame of the user's own code."""
    call: str
    step: str


def _example(api: Api, task: UUID) -> Example | None:
    """Return the line of code and arguments of a failed task; None if the task was retried."""

    def read() -> Example | None:
        found = api.read(insights.show_task, task)
        if found is None or found.error is None:
            return None
        arguments, keywords = api.redaction_of_task(found).redacted_call(*call_of(found.payload))
        location = own_frame(found.error.traceback or found.error.message.partition("\n\nRemote traceback:\n")[2])
        return Example(location, call(as_display_json(arguments), as_display_json(keywords)), found.step or "")

    return api.recent.get(("example", task), 30.0, read)


def _new_groups(
    api: Api, key_scope: KeyScope, groups: list[FailureGroup], release: Release | None
) -> set[insights.GroupKey]:
    """Return groups that are new: without failures before the last release, or in another release since.

    If workers announce no release, a restart counts as a deployment. Starts shortly after each other count as one.
    """
    at = _last_start(api) if release is None else release.at
    if at is None:
        return set()
    read = partial(api.read_list, failed_before, at, key_scope.queues, release and release.name)
    failed_earlier = api.recent.get(("failed before", key_scope, at), 30.0, read)
    return set() if failed_earlier is None else {group.key for group in groups if group.first_at >= at} - failed_earlier


def _last_start(api: Api) -> datetime | None:
    """Return when the last rollout of workers began."""
    workers = api.recent.get(("workers",), 5.0, api.backend.insights.list_workers)
    starts = sorted((worker.worker_started_at for worker in workers), reverse=True)
    last = starts[0] if starts else None
    for start in starts:
        last = start if last is not None and last - start <= ROLLOUT else last
    return last


class Snooze(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For how long to snooze a group."""

    hours: Annotated[int, Meta(ge=1, le=24 * 90)] = 24


@actions.post("/{name}/{queue}/{kind}/acknowledge", about=WITHIN)
def acknowledge_failures(api: Api, name: str, queue: str, kind: str, key_scope: KeyScope) -> Note:
    """Acknowledge a group of failures."""
    _handle(api, key_scope, (name, queue, kind), "acknowledge")
    return Note("the failures were acknowledged")


@actions.post("/{name}/{queue}/{kind}/snooze", about=WITHIN)
def snooze_failures(api: Api, name: str, queue: str, kind: str, body: Snooze, key_scope: KeyScope) -> Note:
    """Snooze a group: show it below the others, and not on the first page, for some hours."""
    until = datetime.now(UTC) + timedelta(hours=body.hours)
    _handle(api, key_scope, (name, queue, kind), "snooze", until)
    return Note(f"the failures were snoozed until {until:%Y-%m-%d %H:%M} UTC")


@actions.post("/{name}/{queue}/{kind}/reopen", about=WITHIN)
def reopen_failures(api: Api, name: str, queue: str, kind: str, key_scope: KeyScope) -> Note:
    """Undo the acknowledgment or snooze of a group."""
    _handle(api, key_scope, (name, queue, kind), "reopen")
    return Note("the failures were reopened")


def _handle(
    api: Api, key_scope: KeyScope, group: insights.GroupKey, act: HandlingAct, until: datetime | None = None
) -> None:
    name, queue, kind = group
    check_queue(key_scope, queue)
    api.backend.insights.handle_failures(name, queue, kind, act, until)
