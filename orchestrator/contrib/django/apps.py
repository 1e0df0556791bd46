"""The effect of `"orchestrator.contrib.django"` in INSTALLED_APPS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules

from orchestrator.contrib.django import app, shared_database


class OrchestratorConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """Imports the module `tasks` of every installed app, and lets `migrate` upgrade the tables of tasks."""

    name = "orchestrator.contrib.django"
    label = "orchestrator"
    verbose_name = "Orchestrator"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the tasks of the project, and connect to `migrate`."""
        autodiscover_modules("tasks")
        post_migrate.connect(_upgrade, sender=self)
        if (alias := shared_database()) is not None:
            creation = connections[alias].creation
            for name in ("setup_worker_connection", "destroy_test_db"):
                setattr(creation, name, _reconnecting(getattr(creation, name)))


def _upgrade(using: str, plan: Any = None, **_: object) -> None:
    """Upgrade the schema after `migrate` in the database that tasks share with Django, but not after `flush`."""
    if plan is not None and using == shared_database():
        from orchestrator.store import shards  # loads SQLAlchemy, which workers do without

        app.close()  # it may be connected to another database: that of the tests was just created
        shards.upgrade(app.settings)


def _reconnecting(change: Callable[..., Any]) -> Callable[..., Any]:
    """Disconnect before and after Django switches or drops a test database: Postgres drops no database in use."""

    def disconnect_and_change(*args: Any, **keywords: Any) -> Any:
        app.close()
        try:
            return change(*args, **keywords)
        finally:
            app.close()

    return disconnect_and_change
