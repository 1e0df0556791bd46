"""Databases of one test or one module, on the Postgres of all tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import psycopg2

from orchestrator.embedded import EmbeddedServices


@contextmanager
def administering(services: EmbeddedServices) -> Iterator[psycopg2.extensions.cursor]:
    """Yield a cursor of a connection to no database of the tests."""
    with closing(psycopg2.connect(services.postgres.url)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        yield cursor


@contextmanager
def new_database(services: EmbeddedServices, kind: str, template: str = "template1") -> Iterator[str]:
    """Yield the URL of a copy of another database; `orchestrator` has the current schema. It is dropped in the end."""
    name = f"{kind}_{uuid.uuid4().hex}"
    with administering(services) as cursor:
        # File by file, and not page by page through the log, which takes five times as long.
        is_new = cursor.connection.server_version >= 15_00_00  # before, there is no other way
        cursor.execute(f"CREATE DATABASE {name} TEMPLATE {template} {'STRATEGY file_copy' if is_new else ''}")
    yield services.postgres.database_url(name)
    with suppress(psycopg2.Error), administering(services) as cursor:  # if it is in use, it goes with the server
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
