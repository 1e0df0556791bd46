"""Registrations of service workers, so that they survive a loss of Redis.

Each worker has one row, written on registration and touched once an hour. Heartbeats go to Redis.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.store.sql import Statement

MAX_DELETED = 1_000


class Registered(NamedTuple):
    """The registration of a service worker."""

    id: str
    url: str
    services: list[str]


_PUT = Statement[bool]("""
INSERT /* services.put */ INTO orchestrator.services AS s (id, url, services)
VALUES (%(id)s, %(url)s, %(services)s::text[])
ON CONFLICT (id) DO UPDATE SET url = excluded.url, services = excluded.services, seen_at = now()
WHERE (s.url, s.services) IS DISTINCT FROM (excluded.url, excluded.services)
RETURNING true
""")
_FORGET = Statement[None]("""
DELETE /* services.forget */ FROM orchestrator.services WHERE id IN (
    SELECT id FROM orchestrator.services WHERE seen_at < now() - interval '7 days'
    ORDER BY seen_at LIMIT %(most)s FOR UPDATE SKIP LOCKED
)
""")


def put(connection: Connection, worker: Registered) -> bool:
    """Store a registration. Return whether it is new or changed."""
    return _PUT.first(connection, id=worker.id, url=worker.url, services=worker.services) is not None


@Statement.function("""
SELECT /* services.find */ id, url, services FROM orchestrator.services WHERE id = %(worker)s
""")
def find(connection: Connection, worker: str) -> Registered | None:
    """Return the registration of a service worker."""


@Statement.function("UPDATE /* services.touch */ orchestrator.services SET seen_at = now() WHERE id = %(worker)s")
def touch(connection: Connection, worker: str) -> None:
    """Update the time at which a service worker was last seen."""


def forget(connection: Connection) -> None:
    """Delete up to `MAX_DELETED` registrations of workers that were silent for a week."""
    _FORGET.count(connection, most=MAX_DELETED)
