"""The HTTP registry of services, at the root: service workers, their load, and the choice of a worker to call.

Registrations are in Postgres, heartbeats in Redis, where workers that call services find them. So a heartbeat writes to
Postgres once an hour at most. If Redis loses its data, the next heartbeats restore it, also for service workers that
register only once.
"""

from __future__ import annotations

import random
from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.api.context import Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WHOLE
from orchestrator.api.problems import invalid, refused
from orchestrator.domain.executors.services import SERVICE_NAME, ServiceWorker, address_problem, in_order
from orchestrator.domain.plain import anchored
from orchestrator.errors import NotFound, did_you_mean
from orchestrator.store import services as registrations
from orchestrator.store.services import Registered
from orchestrator.transport import announcements

routes = Routes("services", "/workers")

_TOUCH_INTERVAL = 3_600.0
"""Seconds between two updates of a service worker's row in Postgres."""

WorkerId = Annotated[str, Meta(pattern=anchored("[!-~]{1,200}"), examples=["worker-1"])]
ServiceName = Annotated[str, Meta(pattern=anchored(SERVICE_NAME), examples=["transform"])]
Load = Annotated[float, Meta(ge=0, le=1e9)]


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A process that serves `POST /exec/<service>`."""

    id: WorkerId
    url: Annotated[str, Meta(max_length=2_000, examples=["http://10.0.0.7:8080"])]
    """The address before `/exec/`."""
    services: Annotated[list[ServiceName], Meta(max_length=1_000)]
    """The complete list of its services; empty when it leaves."""
    load: Load = 0.0


class ServiceHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat of a service worker, with its load."""

    id: WorkerId
    load: Load = 0.0
    """The requests in progress, or any other measure: only the ratio to other workers' load counts."""


class ServiceWorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A service worker, as clients see it."""

    id: str
    url: str
    services: list[str]
    load: float
    last_heartbeat: int = msgspec.field(name="lastHeartbeat")
    """Seconds since 1970."""
    status: str = "online"


class Ok(msgspec.Struct, frozen=True):
    """The request succeeded."""

    ok: str = "1"


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A filter of service workers."""

    service: ServiceName | None = None
    ttl: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """Seconds without a heartbeat that are allowed; the setting registry_ttl by default."""


class AllocateQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requested service."""

    service: ServiceName


@routes.post(
    "/register", about=WHOLE, examples=[{"id": "worker-1", "url": "http://10.0.0.7:8080", "services": ["transform"]}]
)
def register_worker(api: Api, body: Registration) -> Ok:
    """Register a process that offers services over HTTP, or change its registration.

    Tasks with the executor `http` are sent to the process for as long as it sends heartbeats.
    """
    if problem := address_problem(body.url):
        raise invalid(f"url: {problem}, found {body.url!r:.200}.")
    connections = api.backend.connections
    if not announcements.make_room(connections.redis, connections.keys, body.id):
        raise refused(
            429, "There are too many service workers", f"{announcements.MAX_WORKERS:,} are registered already."
        )
    row = Registered(body.id, body.url.rstrip("/"), sorted(set(body.services)))
    with connections.writing(f"service worker {body.id} was registered", transaction=True) as connection:
        if registrations.put(connection, row):
            connections.record(connection, "register", "service", body.id, url=row.url, services=row.services)
            registrations.forget(connection)
    _, now = announcements.find(connections.redis, connections.keys, body.id)
    announcements.write(connections.redis, connections.keys, _entry(row, body.load, now, now))
    return Ok()


@routes.post("/heartbeat", about=WHOLE, examples=[{"id": "worker-1", "load": 3}])
def worker_heartbeat(api: Api, body: ServiceHeartbeat) -> Ok:
    """Send a heartbeat of a service worker, with its load: every 5 seconds, or at least every 15."""
    connections = api.backend.connections
    entry, now = announcements.find(connections.redis, connections.keys, body.id)
    if entry is None or now - entry.kept_at > _TOUCH_INTERVAL:
        with connections.writing("", transaction=False) as connection:
            row = registrations.find(connection, body.id)
            if row is not None:
                registrations.touch(connection, body.id)
        if row is None:
            raise NotFound(
                f"No service worker is registered as {body.id!r}: register first, with POST /workers/register."
            )
        entry = _entry(row, body.load, now, now)
    heartbeat = msgspec.structs.replace(entry, load=body.load, heard_at=now)
    announcements.write(connections.redis, connections.keys, heartbeat)
    return Ok()


@routes.get("/list", about=WHOLE)
def list_service_workers(api: Api, query: ListQuery) -> list[ServiceWorkerView]:
    """List the live service workers, of one service or of all."""
    return [_view(worker) for worker in _live(api, query.service, query.ttl)]


@routes.get("/allocate", about=WHOLE)
def allocate_worker(api: Api, query: AllocateQuery) -> ServiceWorkerView:
    """Choose a live service worker at random, with preference for lower load."""
    workers = _live(api, query.service)
    if not workers:
        services = {name for worker in _live(api) for name in worker.services}
        raise NotFound(f"No live worker offers the service {query.service!r}.{did_you_mean(query.service, services)}")
    return _view(in_order(workers, [random.random() for _ in workers], {})[0])


def _live(api: Api, service: str | None = None, ttl: float | None = None) -> list[ServiceWorker]:
    connections = api.backend.connections
    return announcements.list_live(connections.redis, connections.keys, ttl or api.settings.registry_ttl, service)


def _entry(row: Registered, load: float, heard_at: float, kept_at: float) -> ServiceWorker:
    return ServiceWorker(
        id=row.id, url=row.url, services=tuple(row.services), load=load, heard_at=heard_at, kept_at=kept_at
    )


def _view(worker: ServiceWorker) -> ServiceWorkerView:
    return ServiceWorkerView(
        id=worker.id,
        url=worker.url,
        services=list(worker.services),
        load=worker.load,
        last_heartbeat=int(worker.heard_at),
    )
