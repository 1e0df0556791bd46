"""Run an application on real services in a test session: Postgres, Redis, a scheduler and a worker."""

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
"""Short timeouts, so that losses are detected quickly."""


class TestServices:
    """The services of a test session, with methods to inject faults."""

    __test__ = False

    def __init__(self, app: Orchestrator, app_path: str, servers: EmbeddedServices, programs: LocalServices) -> None:
        self.app = app
        """The application, connected to these services."""
        self._app_path = app_path
        self._servers = servers
        self._programs = programs
        self._engine = engine_for(servers.database_url)
        self._redis = Redis.from_url(servers.redis_url)
        programs.scheduler()
        self._worker = self._start_worker()

    def _start_worker(self) -> LocalProgram:
        return self._programs.worker("--app", self._app_path)

    def empty(self) -> None:
        """Delete all tasks, runs, schedules and definitions. A worker that still has tasks is killed and replaced."""
        with self._engine.begin() as connection:
            if empty_beside_leader(connection, self._worker.kill):
                self._redis.flushall()
        if not self._worker.is_alive:
            self._worker = self._start_worker()

    def lose_worker(self) -> None:
        """Kill the worker and its running tasks, as if its machine had died, and start another."""
        self._worker.kill()
        self._worker = self._start_worker()

    @contextmanager
    def redis_down(self) -> Iterator[None]:
        """Kill Redis, and restart it empty after the block."""
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
    """Start services for the application in the setting `app`. Logs and data are kept in the folder."""
    app_path = load_settings().app
    if not app_path:
        raise ConfigurationError(
            "The fixture orchestrator_app: expected an application in the setting app, found none. Write "
            'app = "shop.tasks:app" under [tool.orchestrator] in pyproject.toml, or set ORCHESTRATOR_APP.'
        )
    app = load_app(app_path)
    with EmbeddedServices(folder / "servers") as servers:
        upgrade(servers.database_url)
        urls = {"database_url": servers.database_url, "redis_url": servers.redis_url}
        programs = LocalServices(folder, **urls, **_SETTINGS)
        programs.environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        app.close()
        before, app._client._settings = app._client._settings, programs.settings
        services: TestServices | None = None
        try:
            services = TestServices(app, app_path, servers, programs)
            yield services
        finally:
            app.close()
            app._client._settings = before
            if services is None:
                programs.close()
            else:
                services.close()
