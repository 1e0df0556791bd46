"""Service workers as they have registered: what brings them back when Redis has forgotten them.

One row for each, written when it registers and touched once an hour while it lives; its heartbeats go to Redis.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.store.sql import Statement

MOST_FORGOTTEN = 1_000


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
    """Keep what a service worker says of itself; say whether that is new."""
    return _PUT.first(connection, id=worker.id, url=worker.url, services=worker.services) is not None


@Statement.function("""
SELECT /* services.find */ id, url, services FROM orchestrator.services WHERE id = %(worker)s
""")
def find(connection: Connection, worker: str) -> Registered | None:
    """Return what a service worker said of itself."""


@Statement.function("UPDATE /* services.touch */ orchestrator.services SET seen_at = now() WHERE id = %(worker)s")
def touch(connection: Connection, worker: str) -> None:
    """Note that a service worker lives."""


def forget(connection: Connection) -> None:
    """Forget services that have been silent for a week, some at a time."""
    _FORGET.count(connection, most=MOST_FORGOTTEN)
