"""What commands look at, over an API where one is set; and connections for those that change what no client does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext

from sqlalchemy import Connection

from orchestrator.sdk import acting
from orchestrator.sdk.calls.interface import Calls
from orchestrator.sealing import vault_of
from orchestrator.settings import Settings, load_settings
from orchestrator.store import audit, database

Record = Callable[..., None]
"""Writes into the audit log: what was done, to what kind of thing, to which, and details by name."""


@contextmanager
def writing() -> Iterator[tuple[Connection, Record]]:
    """Open a transaction, and an audit log for it; both are committed together."""
    settings = load_settings()
    with _connected(settings, autocommit=False) as connection:

        def record(act: str, kind: str, target: str, **detail: object) -> None:
            who, origin = acting.current(settings.audit_as)
            audit.add(connection, who=who, origin=origin, act=act, kind=kind, target=target, detail=detail)

        yield connection, record
        connection.commit()


@contextmanager
def reading(settings: Settings | None = None) -> Iterator[Connection]:
    """Open a connection to a database that is at the right revision; times come in UTC."""
    settings = settings or load_settings()
    with _connected(settings.of_shard("all") if settings.shards > 1 else settings, autocommit=True) as connection:
        yield connection


@contextmanager
def _connected(settings: Settings, *, autocommit: bool) -> Iterator[Connection]:
    vault_of(settings)  # so that what is sealed can be opened
    engine = database.engine_for(
        settings.require_database(),
        autocommit=autocommit,
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


@contextmanager
def looking() -> Iterator[Calls]:
    """Yield what can be asked, over the way that the settings name; nothing is asked before its answer is needed."""
    settings = load_settings()
    if settings.api_url:
        from orchestrator.sdk.remote import RemoteBackend

        with closing(RemoteBackend(settings)) as remote:
            yield remote
        return
    from orchestrator.sdk.backend import backend_of
    from orchestrator.sdk.backend.insights import InsightBackend

    os.environ.setdefault("PGTZ", "UTC")  # in which libpq has Postgres tell the time
    with reading(settings) as connection, closing(backend_of(settings)) as backend:
        backend.__dict__["insights"] = InsightBackend(backend.shared, lambda: nullcontext(connection))
        yield backend
