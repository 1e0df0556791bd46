"""The registry of services over HTTP, at the root: service workers, their load, and which one to call next.

Registrations are in Postgres, and heartbeats in Redis, where the workers that ask for services find them. So a
heartbeat writes nothing into Postgres but a time once an hour, and a Redis that has lost everything is filled again by
the next heartbeats, also of service workers that register only once.
"""

from __future__ import annotations

import random
from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.api.context import Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WHOLE
from orchestrator.api.problems import refused, unfit
from orchestrator.domain.executors.services import SERVICE_NAME, ServiceWorker, address_problem, in_order
from orchestrator.domain.plain import whole
from orchestrator.errors import NotFound, did_you_mean
from orchestrator.store import services as kept
from orchestrator.store.services import Registered
from orchestrator.transport import announcements

routes = Routes("services", "/workers")

_TOUCH_EVERY = 3_600.0
"""Seconds between two notes in Postgres that a service worker lives."""

WorkerId = Annotated[str, Meta(pattern=whole("[!-~]{1,200}"), examples=["worker-1"])]
ServiceName = Annotated[str, Meta(pattern=whole(SERVICE_NAME), examples=["transform"])]
Load = Annotated[float, Meta(ge=0, le=1e9)]


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A process that answers `POST /exec/<service>`."""

    id: WorkerId
    url: Annotated[str, Meta(max_length=2_000, examples=["http://10.0.0.7:8080"])]
    """The address before `/exec/`."""
    services: Annotated[list[ServiceName], Meta(max_length=1_000)]
    """Its services from now on; none, if it leaves."""
    load: Load = 0.0


class ServiceHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A word of a service worker: it lives, and is so busy."""

    id: WorkerId
    load: Load = 0.0
    """How many requests it works on, or any other measure: only the ratio to those of others counts."""


class ServiceWorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A service worker, as others see it."""

    id: str
    url: str
    services: list[str]
    load: float
    last_heartbeat: int = msgspec.field(name="lastHeartbeat")
    """Seconds since 1970."""
    status: str = "online"


class Ok(msgspec.Struct, frozen=True):
    """It is done."""

    ok: str = "1"


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A filter of service workers."""

    service: ServiceName | None = None
    ttl: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """Seconds of silence that are allowed; the setting registry_ttl, if it is not given."""


class AllocateQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The service that is wanted."""

    service: ServiceName


@routes.post(
    "/register", about=WHOLE, examples=[{"id": "worker-1", "url": "http://10.0.0.7:8080", "services": ["transform"]}]
)
def register_worker(api: Api, body: Registration) -> Ok:
    """Register a process that offers services over HTTP, or change what it offers.

    Tasks with the executor `http` are then sent to it, for as long as it sends heartbeats.
    """
    if problem := address_problem(body.url):
        raise unfit(f"url: {problem}, found {body.url!r:.200}.")
    connections = api.backend.connections
    if not announcements.make_room(connections.redis, connections.keys, body.id):
        raise refused(429, "There are too many service workers", f"{announcements.MOST:,} are registered already.")
    said = Registered(body.id, body.url.rstrip("/"), sorted(set(body.services)))
    with connections.writing(f"service worker {body.id} was registered", transaction=True) as connection:
        if kept.put(connection, said):
            connections.record(connection, "register", "service", body.id, url=said.url, services=said.services)
            kept.forget(connection)
    _, now = announcements.find(connections.redis, connections.keys, body.id)
    announcements.write(connections.redis, connections.keys, _entry(said, body.load, now, now))
    return Ok()


@routes.post("/heartbeat", about=WHOLE, examples=[{"id": "worker-1", "load": 3}])
def worker_heartbeat(api: Api, body: ServiceHeartbeat) -> Ok:
    """Say that a service worker lives, and how busy it is: every 5 seconds, or at least every 15."""
    connections = api.backend.connections
    entry, now = announcements.find(connections.redis, connections.keys, body.id)
    if entry is None or now - entry.kept_at > _TOUCH_EVERY:
        with connections.writing("", transaction=False) as connection:
            said = kept.find(connection, body.id)
            if said is not None:
                kept.touch(connection, body.id)
        if said is None:
            raise NotFound(f"Nobody is registered as {body.id!r}: register first, with POST /workers/register.")
        entry = _entry(said, body.load, now, now)
    beat = msgspec.structs.replace(entry, load=body.load, heard_at=now)
    announcements.write(connections.redis, connections.keys, beat)
    return Ok()


@routes.get("/list", about=WHOLE)
def list_service_workers(api: Api, query: ListQuery) -> list[ServiceWorkerView]:
    """List the service workers that live, of one service or of all."""
    return [_view(one) for one in _live(api, query.service, query.ttl)]


@routes.get("/allocate", about=WHOLE)
def allocate_worker(api: Api, query: AllocateQuery) -> ServiceWorkerView:
    """Choose a service worker to ask: by chance, and the less busy ones rather."""
    found = _live(api, query.service)
    if not found:
        known = {name for one in _live(api) for name in one.services}
        raise NotFound(f"Nobody offers the service {query.service!r} now.{did_you_mean(query.service, known)}")
    return _view(in_order(found, [random.random() for _ in found], {})[0])


def _live(api: Api, service: str | None = None, ttl: float | None = None) -> list[ServiceWorker]:
    connections = api.backend.connections
    return announcements.list_live(connections.redis, connections.keys, ttl or api.settings.registry_ttl, service)


def _entry(said: Registered, load: float, heard_at: float, kept_at: float) -> ServiceWorker:
    return ServiceWorker(
        id=said.id, url=said.url, services=tuple(said.services), load=load, heard_at=heard_at, kept_at=kept_at
    )


def _view(one: ServiceWorker) -> ServiceWorkerView:
    return ServiceWorkerView(
        id=one.id, url=one.url, services=list(one.services), load=one.load, last_heartbeat=int(one.heard_at)
    )
