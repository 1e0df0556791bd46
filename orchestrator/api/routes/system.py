"""The system as a whole: status, events, health."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.arguments import Matches, find_all
from orchestrator.api.context import MAX_PAGE_SIZE, PAGE_SIZE, Api, Asked, build_from, filter_fields, view_fields
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import NOTHING, WHOLE, WITHIN
from orchestrator.api.problems import refused
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.plain import anchored
from orchestrator.errors import NotFound
from orchestrator.monitoring.exposition import CONTENT_TYPE, SECONDS, render
from orchestrator.monitoring.listener import REASON_HIDDEN
from orchestrator.sdk.checks import check_label
from orchestrator.sdk.ids import new_id
from orchestrator.store import audit, throughput
from orchestrator.store.audit import AuditEntry, AuditFilter
from orchestrator.store.insights import Overview
from orchestrator.store.throughput import Throughput
from orchestrator.transport.quarantine import CAP, SetAside

routes = Routes("system")

_WRITE_DELAY = timedelta(minutes=2)
"""The age at which counts are final: a leader writes them down by then, unless it was unavailable for longer."""


class SearchQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text to search for."""

    text: Annotated[str, Meta(min_length=1, max_length=500)]
    """The beginning of an id, a part of a name or an error, a tag, or an argument: `42`, `"acme"`, `customer=42`."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 10
    """Matches of each kind, at most."""


class NewEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event that workflows may wait for."""

    name: str
    payload: Any = None


class Health(msgspec.Struct, frozen=True):
    """The health or readiness of a process."""

    status: str


@routes.get("/api/v1/status", about=WHOLE)
def status(api: Api) -> Overview:
    """Show how the system is doing."""
    return replace(api.backend.insights.overview(), standbys=api.backend.insights.standbys())


@routes.get("/api/v1/search", about=WITHIN, is_expensive=True)
def search(api: Api, query: SearchQuery, key_scope: KeyScope) -> Matches:
    """Find tasks and runs by id, name, tag, the text of an error, or an argument."""
    return find_all(api, query.text, query.limit, key_scope)


class ThroughputQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The period and queue of throughput."""

    seconds: Annotated[int, Meta(ge=10, le=int(throughput.KEPT.total_seconds()))] = 3_600
    """Seconds before now at which the counts begin."""
    queue: str | None = None


class ThroughputAnswer(msgspec.Struct, frozen=True):
    """Counts of tasks by queue and ten seconds, oldest first. Intervals without tasks have no row."""

    bounds: list[float]
    """Upper bounds in seconds; `waits` and `runs` have a number of attempts for each, and one for longer times."""
    buckets: list[Throughput]


@routes.get("/api/v1/throughput", about=WITHIN)
def show_throughput(api: Api, query: ThroughputQuery, key_scope: KeyScope) -> ThroughputAnswer:
    """Show the throughput of tasks, by queue and ten seconds. The current ten seconds are not included."""
    since = datetime.now(UTC) - timedelta(seconds=query.seconds)
    found = api.read_list(throughput.read, since, query.queue)
    return ThroughputAnswer([*SECONDS], [row for row in found if key_scope.has_queue(row.queue)])


def read_minutes(api: Api, key_scope: KeyScope, queue: str | None = None, *, each: bool = False) -> list[Throughput]:
    """Return the last hour by minute: of one queue, of all queues together, or of each queue."""
    minute = datetime.now(UTC).replace(second=0, microsecond=0)
    since, boundary = minute - timedelta(minutes=59), minute - _WRITE_DELAY

    def read(since: datetime, until: datetime | None = None) -> list[Throughput]:
        if each:
            return api.read_list(throughput.minutes_of_queues, since, key_scope.queues)
        return api.read_list(throughput.minutes, since, queue, key_scope.queues, until)

    if each or queue is not None:
        return read(since)
    return [
        *api.past_minutes.get((key_scope.queues, boundary), 60.0, lambda: read(since, boundary)),
        *read(boundary),
    ]


@routes.post(
    "/api/v1/events",
    about=WHOLE,
    scope=Scope.ENQUEUE,
    status=202,
    examples=[{"name": "file.arrived", "payload": {"path": "a.csv"}}],
)
def post_event(api: Api, body: NewEvent) -> Asked:
    """Post an event, which starts the workflows that wait for it."""
    event = new_id()
    api.backend.workflows.post_event(event, check_label("event", body.name), body.payload)
    return Asked(UUID(bytes=event), "event")


@routes.get("/metrics", about=WHOLE, media_type="text/plain")
def metrics(api: Api) -> Response:
    """Metrics of this process and of the whole system, for Prometheus."""
    return Response(render(api.metrics.metrics()), media_type=CONTENT_TYPE)


@routes.get("/healthz", about=NOTHING, scope=None)
async def healthy(api: Api) -> Health:
    """Show that this process is alive."""
    del api
    return Health("ok")


@routes.get("/readyz", about=NOTHING, scope=None)
async def ready(api: Api) -> Health:
    """Show whether this process is ready: Postgres answers and has the schema of this release.

    The reason is only in its log, because this route needs no key.
    """
    reason = await api.readiness.find_problem()
    if reason is None:
        return Health("ready")
    detail = f"Not ready ({reason}): {REASON_HIDDEN}."
    raise refused(503, "The server is not ready", detail, data={"obstacles": [reason]})


audit_routes = Routes("audit", "/api/v1/audit")


class AuditQuery(filter_fields(AuditFilter)):  # type: ignore[misc]
    """Which entries to list, and how many."""

    cursor: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    """`next` of the previous page."""
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE


class AuditPage(msgspec.Struct, frozen=True):
    """A page of the audit log, newest first.

    A page reads some thousand entries. If few of them match, a page may have few or no items, and yet not be the last.
    """

    items: list[AuditEntry]
    next: int | None
    """Pass it as `cursor` to get the next page; null on the last one."""


@audit_routes.get("", about=WHOLE, scope=Scope.ADMIN)
def list_audit(api: Api, query: AuditQuery) -> AuditPage:
    """List who did what to which task, run, queue, schedule, workflow or key, newest first.

    Enqueues, starts of runs and posted events are not included.
    """
    found = api.read(audit.page, build_from(AuditFilter, query), limit=query.limit, before=query.cursor)
    return AuditPage(found.lines, found.next)


quarantine_routes = Routes("quarantine", "/api/v1/quarantine")

EntryId = Annotated[str, Meta(pattern=anchored("[0-9]{1,19}(-[0-9]{1,19})?"), examples=["1731600000000-0"])]


class QuarantineQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many messages to list."""

    limit: Annotated[int, Meta(ge=1, le=CAP)] = 50


class MessageView(view_fields(SetAside)):  # type: ignore[misc]
    """A message that could not be decoded or applied."""


class Messages(msgspec.Struct, frozen=True):
    """Quarantined messages, newest first. The last thousand are kept."""

    messages: list[MessageView]


@quarantine_routes.get("", about=WHOLE, scope=Scope.OPERATE)
def list_quarantine(api: Api, query: QuarantineQuery) -> Messages:
    """List messages that could not be decoded or applied. Nothing waits for them."""
    return Messages([build_from(MessageView, message) for message in api.backend.quarantine.newest(query.limit)])


@quarantine_routes.get("/{id}", about=WHOLE, scope=Scope.OPERATE)
def show_quarantined(api: Api, id: EntryId) -> MessageView:
    """Show one message: its position, why it was rejected, and its contents."""
    found = api.backend.quarantine.find(id)
    if found is None:
        raise NotFound(
            f"There is no quarantined message {id}. It may have been cleared, or dropped in favor of later messages."
        )
    return build_from(MessageView, found)
