"""Tasks of an application by name, what it imports, and what of Celery's application is refused."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from orchestrator.compat.celery.app.task import Task
from orchestrator.compat.celery.canvas import maybe_signature
from orchestrator.compat.celery.exceptions import NotRegistered
from orchestrator.compat.coverage import CELERY, refused

PARTS = ("loader", "amqp", "events", "log", "control", "tasks", "fixups", "autofinalize", "strict_typing")
"""Arguments of Celery about its own parts, which are not here."""
REFUSED = {
    **refused(CELERY.attributes),
    "amqp": "Queues need no declaration.",
    "connection": "There is no broker connection: app.orchestrator has the clients.",
    "producer_pool": "There is no broker connection.",
    "pool": "There is no broker connection.",
    "steps": "Bootsteps are parts of Celery's worker. Use signals, or app.orchestrator.lifespan.",
    "user_options": "Read the environment.",
    "select_queues": "`orchestrator celery worker -Q` chooses queues.",
    "loader": "app.conf has the settings.",
    "log": "Logging is that of `logging`; log_level and log_format are settings.",
    "Beat": "Run `orchestrator celery beat`.",
    "start": "Run `orchestrator celery -A module worker`.",
    "Worker": "Run `orchestrator celery worker`.",
}


class Registry(dict[str, Task]):
    """`app.tasks`: tasks by name."""

    def __missing__(self, name: str) -> Task:
        raise NotRegistered(name)

    def register(self, task: Task) -> None:
        task.app.register_task(task)

    def unregister(self, name: Any) -> None:
        self.pop(getattr(name, "name", name), None)

    def regular(self) -> dict[str, Task]:
        return {name: task for name, task in self.items() if not name.startswith("celery.")}


def import_related(package: str, related: str | None) -> None:
    """Import a module of a package, if there is one."""
    name = f"{package}.{related}" if related else package
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None  # `package` is a module, or an entry of Django that names a class
    if found is not None:
        importlib.import_module(name)


def each(task: Any, it: Sequence[Any]) -> list[Any]:
    called = maybe_signature(task)
    return [called.type(item) for item in it]


def star_each(task: Any, it: Sequence[Any]) -> list[Any]:
    """Call a task for each tuple of arguments."""
    called = maybe_signature(task)
    return [called.type(*item) for item in it]
