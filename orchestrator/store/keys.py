"""API keys of the HTTP API."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.access import Key, Scope, Secret
from orchestrator.domain.quotas import DEFAULTS, Quotas
from orchestrator.store.sql import Row, Statement, columns_of

COLUMNS = f"{columns_of(Key)}, now() AS now"
"""A key and the current time in Postgres, for `key_of`."""
_ADD = Statement[Row](f"""
INSERT /* keys.add */ INTO orchestrator.api_keys (id, name, hash, scope, expires_at, queues, workflows, tasks, quotas)
VALUES (%(id)s, %(name)s, %(hash)s, %(scope)s, %(expires_at)s::timestamptz, %(queues)s, %(workflows)s, %(tasks)s,
        %(quotas)s::jsonb)
RETURNING {COLUMNS}
""")
_FIND = Statement[Row](f"SELECT /* keys.find */ {COLUMNS} FROM orchestrator.api_keys WHERE id = %(id)s")
_LIST = Statement[Row](f"SELECT /* keys.list */ {COLUMNS} FROM orchestrator.api_keys ORDER BY created_at, id")
_REVOKE = Statement[None]("""
WITH /* keys.revoke */ ended AS (
    DELETE FROM orchestrator.sessions WHERE key_id = %(id)s
)
UPDATE orchestrator.api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE id = %(id)s
""")


def key_of(row: Row) -> tuple[Key, datetime]:
    """Return the key in a row, and the time in its last column."""
    quotas = DEFAULTS if row.quotas is None else msgspec.convert(row.quotas, Quotas)
    return Key(*row[:-1])._replace(hash=bytes(row.hash), scope=Scope(row.scope), quotas=quotas), row.now


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
    """Store a new key. `queues`, `workflows` and `tasks` are prefixes of the names that the key may use."""
    stored = None if quotas == DEFAULTS else msgspec.json.encode(quotas).decode()
    values = {"id": secret.id, "name": name, "hash": secret.hash, "scope": str(scope), "expires_at": expires_at}
    return key_of(_ADD.one(connection, values, queues=queues, workflows=workflows, tasks=tasks, quotas=stored))[0]


def find(connection: Connection, id: str) -> tuple[Key, datetime] | None:
    """Return a key, and the current time in Postgres."""
    found = _FIND.first(connection, id=id)
    return None if found is None else key_of(found)


def list_all(connection: Connection) -> list[Key]:
    """Return all keys, oldest first."""
    return [key_of(row)[0] for row in _LIST(connection)]


@Statement.function("SELECT /* keys.has_any */ EXISTS (SELECT FROM orchestrator.api_keys)")
def has_any(connection: Connection) -> bool:
    """Return whether any key was ever made. A revoked or expired last key must not make the API public."""


def revoke(connection: Connection, id: str) -> bool:
    """Revoke a key and end its sessions. Return whether the key exists."""
    return bool(_REVOKE.count(connection, id=id))
