"""Keys of the HTTP API."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from orchestrator.domain.access import Key, Scope, Secret

_COLUMNS = "id, name, hash, scope, created_at, expires_at, revoked_at"
_ADD = f"""
INSERT INTO orchestrator.api_keys (id, name, hash, scope, expires_at)
VALUES (%(id)s, %(name)s, %(hash)s, %(scope)s, %(expires_at)s::timestamptz) RETURNING {_COLUMNS}
"""
_FIND = f"SELECT {_COLUMNS}, now() FROM orchestrator.api_keys WHERE id = %(id)s"
_LIST = f"SELECT {_COLUMNS} FROM orchestrator.api_keys ORDER BY created_at, id"
_ANY = """
SELECT EXISTS (SELECT FROM orchestrator.api_keys
                WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now()))
"""
_REVOKE = "UPDATE orchestrator.api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE id = %(id)s RETURNING id"


def _key(row: tuple[object, ...]) -> Key:
    id, name, hash, scope, created_at, expires_at, revoked_at = row
    return Key(str(id), str(name), bytes(hash), Scope(str(scope)), created_at, expires_at, revoked_at)  # type: ignore[arg-type, call-overload]


def add(connection: Connection, secret: Secret, name: str, scope: Scope, expires_at: datetime | None) -> Key:
    """Keep a new key: its hash, and what it may do."""
    given = {"id": secret.id, "name": name, "hash": secret.hash, "scope": str(scope), "expires_at": expires_at}
    return _key(tuple(connection.exec_driver_sql(_ADD, given).one()))


def find(connection: Connection, id: str) -> tuple[Key, datetime] | None:
    """Return a key, and the time by Postgres's clock."""
    row = connection.exec_driver_sql(_FIND, {"id": id}).one_or_none()
    return None if row is None else (_key(tuple(row[:-1])), row[-1])


def list_all(connection: Connection) -> list[Key]:
    """Return every key, the oldest first."""
    return [_key(tuple(row)) for row in connection.exec_driver_sql(_LIST)]


def has_any(connection: Connection) -> bool:
    """Say whether there is a key that lets somebody in."""
    return bool(connection.exec_driver_sql(_ANY).scalar_one())


def revoke(connection: Connection, id: str) -> bool:
    """Let a key open nothing any more; False if there is none."""
    return connection.exec_driver_sql(_REVOKE, {"id": id}).one_or_none() is not None
