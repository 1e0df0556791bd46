"""Postgres and Redis with default durability in a temporary folder, and an empty database for every pass."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg2
from redis import Redis
from sqlalchemy.engine import make_url

from orchestrator.embedded import EmbeddedServices

REPOSITORY = Path(__file__).resolve().parents[3]


class Services:
    """Both servers, and a working folder."""

    def __init__(self, folder: Path, embedded: EmbeddedServices) -> None:
        self.embedded = embedded
        self._folder = folder
        self._numbers = count(1)

    def fresh(self, template: str | None = None) -> tuple[Path, dict[str, str]]:
        """Return a new folder, and an environment with an empty Redis and an empty or copied database."""
        name = f"pass_{next(self._numbers)}"
        if template is not None:
            self._command(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        database = self.embedded.postgres.create_database(name)
        with Redis.from_url(self.embedded.redis_url) as redis:
            redis.flushall()
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("ORCHESTRATOR_", "PG"))}
        urls = {
            "ORCHESTRATOR_DATABASE_URL": database,
            "ORCHESTRATOR_REDIS_URL": self.embedded.redis_url,
            "BENCH_DATABASE_URL": database,
            "BENCH_REDIS_URL": self.embedded.redis_url,
            "BENCH_EFFECTS": str(self._folder / name / "effects"),
        }
        return self._folder / name, {**kept, **urls, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": ""}

    def drop(self, environ: Mapping[str, str]) -> None:
        """Drop the database of an environment."""
        self._command(f"DROP DATABASE {make_url(environ['BENCH_DATABASE_URL']).database} WITH (FORCE)")

    def _command(self, statement: str) -> None:
        connection = psycopg2.connect(self.embedded.postgres.url)
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
        connection.close()

    def versions(self) -> dict[str, str]:
        connection = psycopg2.connect(self.embedded.postgres.url)
        version = str(connection.get_parameter_status("server_version"))
        connection.close()
        with Redis.from_url(self.embedded.redis_url) as redis:
            return {"postgres": version, "redis": str(redis.info("server")["redis_version"])}


@contextmanager
def started() -> Iterator[Services]:
    """Start both servers within the block, and remove all files afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-bench-"))
    folder.chmod(0o755)  # Postgres may have to run as another user
    try:
        with EmbeddedServices(folder / "services") as embedded:
            yield Services(folder, embedded)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
