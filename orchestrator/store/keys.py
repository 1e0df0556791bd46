"""Keys of the HTTP API."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.access import Key, Scope, Secret
from orchestrator.domain.quotas import DEFAULTS, Quotas
from orchestrator.store.sql import Statement


class KeyRow(NamedTuple):
    """A key, and the time by Postgres's clock."""

    id: str
    name: str
    hash: memoryview
    scope: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    queues: str | None
    workflows: str | None
    tasks: str | None
    quotas: dict[str, Any] | None
    now: datetime

    @property
    def key(self) -> Key:
        """The key as others know it."""
        times = self.created_at, self.expires_at, self.revoked_at
        return Key(
            *(self.id, self.name, bytes(self.hash), Scope(self.scope), *times),
            *(self.queues, self.workflows, self.tasks),
            DEFAULTS if self.quotas is None else msgspec.convert(self.quotas, Quotas),
        )


COLUMNS = "id, name, hash, scope, created_at, expires_at, revoked_at, queues, workflows, tasks, quotas, now()"
_ADD = Statement[KeyRow](f"""
INSERT /* keys.add */ INTO orchestrator.api_keys (id, name, hash, scope, expires_at, queues, workflows, tasks, quotas)
VALUES (%(id)s, %(name)s, %(hash)s, %(scope)s, %(expires_at)s::timestamptz, %(queues)s, %(workflows)s, %(tasks)s,
        %(quotas)s::jsonb)
RETURNING {COLUMNS}
""")
_FIND = Statement[KeyRow](f"SELECT /* keys.find */ {COLUMNS} FROM orchestrator.api_keys WHERE id = %(id)s")
_LIST = Statement[KeyRow](f"SELECT /* keys.list */ {COLUMNS} FROM orchestrator.api_keys ORDER BY created_at, id")
_REVOKE = Statement[None]("""
WITH /* keys.revoke */ ended AS (
    DELETE FROM orchestrator.sessions WHERE key_id = %(id)s
)
UPDATE orchestrator.api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE id = %(id)s
""")


def add(
    connection: Connection,
    secret: Secret,
    name: str,
    scope: Scope,
    expires_at: datetime | None,
    *,
    queues: str | None = None,
    workflows: str | None = None,
    tasks: str | None = None,
    quotas: Quotas = DEFAULTS,
) -> Key:
    """Keep a new key: its hash, what it may do, and what the names of what it may do that to begin with."""
    chosen = None if quotas == DEFAULTS else msgspec.json.encode(quotas).decode()
    given = {"id": secret.id, "name": name, "hash": secret.hash, "scope": str(scope), "expires_at": expires_at}
    return _ADD.one(connection, given, queues=queues, workflows=workflows, tasks=tasks, quotas=chosen).key


def find(connection: Connection, id: str) -> tuple[Key, datetime] | None:
    """Return a key, and the time by Postgres's clock."""
    found = _FIND.first(connection, id=id)
    return None if found is None else (found.key, found.now)


def list_all(connection: Connection) -> list[Key]:
    """Return every key, the oldest first."""
    return [row.key for row in _LIST(connection)]


@Statement.function("SELECT /* keys.has_any */ EXISTS (SELECT FROM orchestrator.api_keys)")
def has_any(connection: Connection) -> bool:
    """Say whether there is a key, or ever was one: that the last is revoked or has expired opens no door."""


def revoke(connection: Connection, id: str) -> bool:
    """Revoke a key, and end the sessions that were opened with it; False if there is none."""
    return bool(_REVOKE.count(connection, id=id))
