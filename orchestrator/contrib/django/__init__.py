"""Django: `app` is the application of the project, configured by `ORCHESTRATOR` in Django's settings.

When Django is set up, the module `tasks` of every installed app is imported, and registers its tasks with this `app`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote, urlencode

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections

from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.middleware import Middleware
from orchestrator.sdk.tasks.context import TaskContext
from orchestrator.settings import Settings, load_settings

__all__ = ["app"]

_NOT_SETTINGS = ("database", "dashboard", "routes")
"""Keys of `ORCHESTRATOR` that are not settings: an alias of DATABASES, the dashboard's URL, queues by task name."""
_LIBPQ_PREFIXES = ("ssl", "target_session_attrs", "passfile", "channel_binding")
"""Prefixes of database options that every driver understands."""


def option(name: str) -> Any:
    """Return a value of `ORCHESTRATOR` in Django's settings, or None."""
    return getattr(settings, "ORCHESTRATOR", {}).get(name)


def shared_database() -> str | None:
    """Return the alias of the Django database that also holds the tasks; None if they are stored elsewhere."""
    configured = (option("database_url"), option("api_url"))
    if any(configured) or os.environ.get("ORCHESTRATOR_DATABASE_URL") or os.environ.get("ORCHESTRATOR_API_URL"):
        return None
    alias: str = option("database") or "default"
    return alias if connections[alias].vendor == "postgresql" else None


def project_settings() -> dict[str, Any]:
    """Return the settings from Django's settings, with the URL of the shared database."""
    configured = {
        name: value for name, value in getattr(settings, "ORCHESTRATOR", {}).items() if name not in _NOT_SETTINGS
    }
    if (alias := shared_database()) is not None:
        configured["database_url"] = _url(connections[alias].settings_dict)
    return configured


def _url(database: dict[str, Any]) -> str:
    """Return the URL of a Django database; in tests, of the test database."""
    query = {name: value for name, value in database["OPTIONS"].items() if name.startswith(_LIBPQ_PREFIXES)}
    host = str(database["HOST"])
    if not host or host.startswith("/"):
        query, host = query | ({"host": host} if host else {}), ""
    user, password = quote(database["USER"], safe=""), quote(database["PASSWORD"], safe="")
    login = f"{user}{password and ':' + password}@" if user else ""
    port = f":{database['PORT']}" if database["PORT"] and host else ""
    if database["PORT"] and not host:
        query |= {"port": database["PORT"]}
    return f"postgresql://{login}{host}{port}/{quote(database['NAME'], safe='')}?{urlencode(query)}".rstrip("?")


def _settings() -> Settings:
    return load_settings(**project_settings())


def _close_old_connections() -> None:
    """Close connections that are broken or too old, except transactions of tests that run tasks in memory."""
    in_memory = getattr(app._client._backend, "is_in_memory", False)
    for connection in connections.all(initialized_only=True):
        if not (in_memory and connection.in_atomic_block):
            connection.close_if_unusable_or_obsolete()


class _Connections(Middleware):
    """Closes broken or old Django connections around each attempt, as Django does around a request."""

    def execute(self, ctx: TaskContext) -> Iterator[None]:  # noqa: ARG002
        _close_old_connections()
        try:
            yield
        finally:
            _close_old_connections()

    async def aexecute(self, ctx: TaskContext) -> AsyncIterator[None]:  # noqa: ARG002
        await sync_to_async(_close_old_connections)()
        try:
            yield
        finally:
            await sync_to_async(_close_old_connections)()


app = Orchestrator(_settings, routes=option("routes"), middleware=[_Connections()])
"""The application of this Django project."""
