"""Postgres and Redis for development and tests, with only the `embedded` extra installed.

    .orchestrator/
      postgres/       data, log, socket          postgres.lock   held while Postgres runs
      redis/          data, log, socket          redis.lock      held while Redis runs
      services.json   the addresses of both for other commands; written by `orchestrator dev`

The servers do not listen on the network, and two folders share nothing. If an owner is killed, its servers run until
the next start in the same folder, which stops them and starts anew on the same data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from orchestrator.embedded.postgres import EmbeddedPostgres
from orchestrator.embedded.redis import EmbeddedRedis
from orchestrator.environment import SERVICES_FILE

__all__ = ["EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServices", "remove_services_file", "write_services_file"]

DEFAULT_FOLDER = SERVICES_FILE.parent
DATABASE = "orchestrator"


class EmbeddedServices:
    """Postgres and Redis under one folder, for the duration of a `with` block."""

    def __init__(self, folder: Path = DEFAULT_FOLDER) -> None:
        self.folder = folder.resolve()
        self.postgres = EmbeddedPostgres(self.folder)
        self.redis = EmbeddedRedis(self.folder)

    @property
    def database_url(self) -> str:
        """The URL of the database `orchestrator`."""
        return self.postgres.database_url(DATABASE)

    @property
    def redis_url(self) -> str:
        return self.redis.url

    def start(self) -> None:
        """Start both servers. Raise ConfigurationError if they already run in this folder."""
        try:
            self.postgres.start()
            self.redis.start()
            self.postgres.create_database(DATABASE)
        except BaseException:
            self.stop()
            raise
        (self.folder / ".gitignore").write_text("*\n", encoding="utf-8")
        remove_services_file(self.folder)  # a file left from a crash names services that are gone

    def stop(self) -> None:
        """Stop both servers, and keep their data."""
        try:
            self.redis.stop()
        finally:
            self.postgres.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def write_services_file(folder: Path, **values: str | int) -> None:
    """Write the addresses of the services for other commands: database_url, redis_url, app, pid."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SERVICES_FILE.name
    draft = folder / f"{SERVICES_FILE.name}.{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600, exist_ok=False)  # readable only by its owner: a URL may contain a password
    draft.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def remove_services_file(folder: Path) -> None:
    """Remove the file of `write_services_file`, if it exists."""
    (folder / SERVICES_FILE.name).unlink(missing_ok=True)
