"""Whether this server can work, looked up in a thread and on a connection of its own: no load keeps a probe waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from sqlalchemy import Engine, exc

from orchestrator.errors import OrchestratorError, SchemaError, Unavailable
from orchestrator.sdk.backend.connections import Connections
from orchestrator.settings import Settings
from orchestrator.store import database
from orchestrator.telemetry import Outage, first_line, get_logger

_LONGEST = 5.0
"""Seconds that Postgres has to answer."""


class Readiness:
    """Looks when it is asked; concurrent questions share one answer."""

    def __init__(self, settings: Settings, connections: Connections) -> None:
        self._settings = settings
        self._connections = connections
        self._outage = Outage(get_logger("api"), "Postgres", "this server is not ready")
        self._engine: Engine | None = None
        self._look: asyncio.Task[Any] | None = None

    async def obstacle(self) -> str | None:
        """Return what is in the way, `postgres` or `schema`; None if nothing is."""
        if self._look is None or self._look.done():
            look = anyio.to_thread.run_sync(self._find_obstacle, limiter=CapacityLimiter(1))
            self._look = asyncio.create_task(look)
        try:
            found: str | None = await asyncio.wait_for(asyncio.shield(self._look), _LONGEST + 1.0)
        except TimeoutError:
            return "postgres"
        return found

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _find_obstacle(self) -> str | None:
        try:
            self._check()
        except OrchestratorError as error:
            self._outage.failed(first_line(error))
            return "schema" if isinstance(error, SchemaError) else "postgres"
        self._outage.worked()
        return None

    def _check(self) -> None:
        if self._engine is None:
            self._engine = database.probe_engine(self._settings, "orchestrator readiness", _LONGEST)
        try:
            with self._engine.connect() as connection:
                database.check_schema(connection)
        except exc.SQLAlchemyError as error:
            raise self._connections.known(error, "") or Unavailable(str(error)) from error
