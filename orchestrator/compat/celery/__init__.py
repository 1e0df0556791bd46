"""Celery's API on this system: a program moves by changing `from celery import …` to this package.

A Celery task is a native task with the same name; a chain, group or chord is a composition; `beat_schedule` becomes
schedules. There is no second engine: each file translates one part of Celery's API. Parts without a counterpart raise
NotCovered with the alternative; `docs/from-celery.md` has the table.
"""

from __future__ import annotations

from orchestrator.compat.celery.app.base import Celery
from orchestrator.compat.celery.app.current import current_app, current_task, shared_task
from orchestrator.compat.celery.app.task import Task
from orchestrator.compat.celery.canvas import (
    Signature,
    chain,
    chord,
    chunks,
    group,
    maybe_signature,
    signature,
    subtask,
    xmap,
    xstarmap,
)
from orchestrator.compat.celery.schedules import crontab
from orchestrator.compat.celery.utils import uuid

__version__ = "5.5.0"
"""The version of Celery whose API this package has."""

__all__ = [
    "Celery",
    "Signature",
    "Task",
    "chain",
    "chord",
    "chunks",
    "crontab",
    "current_app",
    "current_task",
    "group",
    "maybe_signature",
    "shared_task",
    "signature",
    "subtask",
    "uuid",
    "xmap",
    "xstarmap",
]
