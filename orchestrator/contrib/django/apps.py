"""What `"orchestrator.contrib.django"` in INSTALLED_APPS does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules

from orchestrator.contrib.django import app, shared_database


class OrchestratorConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """Imports the module `tasks` of every installed app, and lets `migrate` prepare the tables of tasks."""

    name = "orchestrator.contrib.django"
    label = "orchestrator"
    verbose_name = "Orchestrator"

    def ready(self) -> None:
        """Register the tasks of the project."""
        autodiscover_modules("tasks")
        post_migrate.connect(_upgrade, sender=self)


def _upgrade(using: str, plan: Any = None, **_: object) -> None:
    """Bring the schema up to date after `migrate`, in the database that tasks share with Django; not after `flush`."""
    if plan is not None and using == shared_database():
        from orchestrator.store import database  # loads SQLAlchemy, which workers do without

        database.upgrade(app.settings.require_database(), namespace=app.settings.namespace)
        creation = connections[using].creation
        creation.destroy_test_db = _closing(creation.destroy_test_db)


def _closing(destroy: Callable[..., Any]) -> Callable[..., Any]:
    """Close our connections to a test database before it is dropped: Postgres drops none that is in use."""

    def close_and_destroy(*args: Any, **keywords: Any) -> Any:
        app.close()
        return destroy(*args, **keywords)

    return close_and_destroy
