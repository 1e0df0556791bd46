"""A connection for commands that only look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from orchestrator.settings import Settings, load_settings
from orchestrator.store import database


@contextmanager
def reading(settings: Settings | None = None) -> Iterator[Connection]:
    """Open a connection to a database that is at the right revision; times come in UTC."""
    settings = settings or load_settings()
    engine = database.engine_for(
        settings.require_database(),
        autocommit=True,
        pool_size=1,
        name="orchestrator command",
        namespace=settings.namespace,
    )
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("SET timezone = 'UTC'")
            database.check_schema(connection)
            yield connection
    finally:
        engine.dispose()
