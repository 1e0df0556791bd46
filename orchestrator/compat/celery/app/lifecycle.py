"""Signals of worker processes, and Django around tasks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.compat.celery import request as requests
from orchestrator.compat.celery import signals
from orchestrator.compat.celery.app.execution import watch_stops
from orchestrator.compat.celery.request import hostname


def install(app: Any) -> None:
    """Send signals around the life of each worker process."""

    def worker() -> Iterator[None]:
        name = hostname()
        sender = SimpleNamespace(app=app, hostname=name, pid=os.getpid())
        signals.celeryd_init.send(name, instance=app, conf=app.conf, options={})
        signals.celeryd_after_setup.send(name, instance=app, conf=app.conf)
        told = {"loglevel": None, "logfile": None, "format": "", "colorize": False}
        signals.setup_logging.send(None, **told)
        signals.after_setup_logger.send(None, logger=logging.getLogger(), **told)
        signals.after_setup_task_logger.send(None, logger=logging.getLogger("celery.task"), **told)
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
    """Say whether the program is one of Django: as for Celery, the environment names its settings."""
    return bool(os.environ.get("DJANGO_SETTINGS_MODULE"))


def set_up() -> None:
    """Set up Django, if the program is one of it, and close its old connections around each task."""
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
    found = requests.current.get()
    if found is not None and found[1].is_eager:
        return  # the connection is that of the request, or of the test, around the task
    from django.db import close_old_connections

    close_old_connections()


def packages(given: Any) -> Iterable[str]:
    if callable(given):
        given = given()
    if given:
        return [given] if isinstance(given, str) else list(given)
    if not has_django():
        return []
    from django.apps import apps

    return [config.name for config in apps.get_app_configs()]
