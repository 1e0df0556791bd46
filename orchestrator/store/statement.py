"""Statements that are planned once per connection, and sent to the driver by the shortest way.

The leader sends the same few statements hundreds of times a second, and planning one can take longer than running
it. Prepared with a generic plan, they also cannot be led astray by statistics that are missing or out of date.

SQLAlchemy keeps the connection and its errors, but each of its results costs as much as a small statement takes in
Postgres. So a prepared statement goes through a cursor of the driver, and rows come back as plain tuples.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from sqlalchemy import Connection

from orchestrator.store.driver import Rows, send

_PARAMETER = re.compile(r"%\((\w+)\)s(::[a-z]+(?: precision)?(?:\[\])?)?")


class Statement:
    """One SQL statement with named parameters, prepared on first use of a connection."""

    def __init__(self, sql: str) -> None:
        found = _PARAMETER.findall(sql)
        names = list(dict.fromkeys(name for name, _ in found))
        casts = {name: cast for name, cast in found if cast}
        body = _PARAMETER.sub(lambda match: f"${names.index(match[1]) + 1}{match[2] or ''}", sql)
        self.sql = sql
        self._name = f"orchestrator_{hashlib.blake2b(sql.encode(), digest_size=6).hexdigest()}"
        self._prepare = f"PREPARE {self._name} AS {body}"
        arguments = ", ".join(f"%({name})s{casts.get(name, '')}" for name in names)
        self._execute = f"EXECUTE {self._name}" + (f"({arguments})" if names else "")

    def __call__(self, connection: Connection, parameters: dict[str, Any] | None = None) -> Rows:
        """Run it; return its rows."""
        self._ensure(connection)
        return send(connection, self._execute, parameters)

    def begin(self, connection: Connection, parameters: dict[str, Any]) -> Rows:
        """Begin a transaction with it, in one round trip. The connection must be in autocommit mode."""
        self._ensure(connection)
        return send(connection, f"BEGIN; {self._execute}", parameters)

    def commit(self, connection: Connection, parameters: dict[str, Any]) -> None:
        """End a transaction with it, in one round trip; if it fails, nothing is committed."""
        self._ensure(connection)
        send(connection, f"{self._execute}; COMMIT", parameters)

    def _ensure(self, connection: Connection) -> None:
        prepared: set[str] = connection.info.setdefault("orchestrator_prepared", set())
        if self._name not in prepared:
            connection.exec_driver_sql(self._prepare)
            prepared.add(self._name)
