"""The task registry, imports of the application, and attributes of Celery's application that are refused."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.compat.celery import request as requests
from orchestrator.compat.celery import signals
from orchestrator.compat.celery.app.execution import watch_stops
from orchestrator.compat.celery.app.task import Task
from orchestrator.compat.celery.canvas import maybe_signature
from orchestrator.compat.celery.exceptions import NotRegistered
from orchestrator.compat.celery.request import hostname
from orchestrator.compat.coverage import CELERY, refused

PARTS = ("loader", "amqp", "events", "log", "control", "tasks", "fixups", "autofinalize", "strict_typing")
"""Constructor arguments for parts of Celery that do not exist here."""
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
    """Import a submodule of a package, if it exists."""
    name = f"{package}.{related}" if related else package
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None  # `package` is a module, or a Django entry that names a class
    if spec is not None:
        importlib.import_module(name)


def each(task: Any, it: Sequence[Any]) -> list[Any]:
    signature_ = maybe_signature(task)
    return [signature_.type(item) for item in it]


def star_each(task: Any, it: Sequence[Any]) -> list[Any]:
    """Call a task for each tuple of arguments."""
    signature_ = maybe_signature(task)
    return [signature_.type(*item) for item in it]


def install(app: Any) -> None:
    """Send Celery's worker signals at the start and the end of each worker process."""

    def worker() -> Iterator[None]:
        name = hostname()
        sender = SimpleNamespace(app=app, hostname=name, pid=os.getpid())
        signals.celeryd_init.send(name, instance=app, conf=app.conf, options={})
        signals.celeryd_after_setup.send(name, instance=app, conf=app.conf)
        logging_options = {"loglevel": None, "logfile": None, "format": "", "colorize": False}
        signals.setup_logging.send(None, **logging_options)
        signals.after_setup_logger.send(None, logger=logging.getLogger(), **logging_options)
        signals.after_setup_task_logger.send(None, logger=logging.getLogger("celery.task"), **logging_options)
        signals.worker_init.send(sender)
        signals.worker_process_init.send(None)
        signals.worker_ready.send(sender)
        watch_stops(app)
        yield
        signals.worker_shutting_down.send(name, sig="SIGTERM", how="Warm", exitcode=0)
        signals.worker_process_shutdown.send(None, pid=os.getpid(), exitcode=0)
        signals.worker_shutdown.send(sender)

    app.orchestrator.lifespan(worker)


def has_django() -> bool:
    """Return whether this is a Django program: as in Celery, DJANGO_SETTINGS_MODULE is set."""
    return bool(os.environ.get("DJANGO_SETTINGS_MODULE"))


def set_up() -> None:
    """In a Django program, set Django up, and close old database connections around each task."""
    if not has_django():
        return
    import django
    from django.apps import apps

    if not apps.ready and not getattr(apps, "loading", False) and not apps.app_configs:
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, folder)
        django.setup()
    signals.task_prerun.connect(_close_old_connections, dispatch_uid="django")
    signals.task_postrun.connect(_close_old_connections, dispatch_uid="django")


def _close_old_connections(**_: Any) -> None:
    running = requests.current.get()
    if running is not None and running[1].is_eager:
        return  # an eager task shares the connection of the request or test around it
    from django.db import close_old_connections

    close_old_connections()


def packages(names: Any) -> Iterable[str]:
    if callable(names):
        names = names()
    if names:
        return [names] if isinstance(names, str) else list(names)
    if not has_django():
        return []
    from django.apps import apps

    return [config.name for config in apps.get_app_configs()]
