"""The application and its tasks, at their import path in Celery."""

from __future__ import annotations

from orchestrator.compat.celery.app.base import Celery
from orchestrator.compat.celery.app.current import app_or_default, current_app, current_task, shared_task
from orchestrator.compat.celery.app.task import Task

__all__ = ["Celery", "Task", "app_or_default", "current_app", "current_task", "shared_task"]
