"""An application on real services in a test: Postgres, Redis, a scheduler and a worker, for a whole test session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from orchestrator.embedded import EmbeddedServices
from orchestrator.errors import ConfigurationError
from orchestrator.sdk.app import Orchestrator
from orchestrator.settings import load_settings
from orchestrator.store.database import engine_for, upgrade
from orchestrator.store.emptying import empty_beside_leader
from orchestrator.testing.executor_stage import LocalProgram, LocalServices
from orchestrator.workers.functions import load_app

_SETTINGS: dict[str, Any] = {"heartbeat": 0.5, "lease": 2.0, "worker_ttl": 2.0}
"""What makes losses known soon."""


class TestServices:
    """Services of a test session, and faults to inject into them."""

    __test__ = False

    def __init__(self, app: Orchestrator, where: str, servers: EmbeddedServices, programs: LocalServices) -> None:
        self.app = app
        """The application, which uses these services."""
        self._where = where
        self._servers = servers
        self._programs = programs
        self._engine = engine_for(servers.database_url)
        self._redis = Redis.from_url(servers.redis_url)
        programs.scheduler()
        self._worker = self._start_worker()

    def _start_worker(self) -> LocalProgram:
        return self._programs.worker("--app", self._where)

    def empty(self) -> None:
        """Forget all tasks, runs, schedules and definitions. A worker that still has tasks is killed and replaced."""
        with self._engine.begin() as connection:
            if empty_beside_leader(connection, self._worker.kill):
                self._redis.flushall()
        if not self._worker.is_alive:
            self._worker = self._start_worker()

    def lose_worker(self) -> None:
        """Kill the worker with all that it runs, as if its machine had died, and start another."""
        self._worker.kill()
        self._worker = self._start_worker()

    @contextmanager
    def redis_down(self) -> Iterator[None]:
        """Kill Redis, and start it after the block, without what it held."""
        self._servers.redis.kill()
        try:
            yield
        finally:
            self._servers.redis.start(persistence=False)

    def close(self) -> None:
        self._programs.close()
        self._redis.close()
        self._engine.dispose()


@contextmanager
def started_services(folder: Path) -> Iterator[TestServices]:
    """Start services for the application that the setting `app` names; logs and data are kept in the folder."""
    where = load_settings().app
    if not where:
        raise ConfigurationError(
            "The fixture orchestrator_app: expected an application in the setting app, found none. Write "
            'app = "shop.tasks:app" under [tool.orchestrator] in pyproject.toml, or set ORCHESTRATOR_APP.'
        )
    app = load_app(where)
    with EmbeddedServices(folder / "servers") as servers:
        upgrade(servers.database_url)
        urls = {"database_url": servers.database_url, "redis_url": servers.redis_url}
        programs = LocalServices(folder, **urls, **_SETTINGS)
        programs.environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        app.close()
        before, app._client._settings = app._client._settings, programs.settings
        services: TestServices | None = None
        try:
            services = TestServices(app, where, servers, programs)
            yield services
        finally:
            app.close()
            app._client._settings = before
            if services is None:
                programs.close()
            else:
                services.close()
