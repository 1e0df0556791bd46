"""A backend for `django.tasks` of Django 6, or for its backport, the package django-tasks.

Each function with `@task` is registered as a task of the application, named by its path. OPTIONS apply to all of them,
such as `{"retries": 3}`. A task that is enqueued in a transaction of the shared database is part of the transaction.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any
from uuid import UUID

from django.db import connections
from django.utils.module_loading import import_string
from django.utils.timezone import is_naive, make_aware

from orchestrator.contrib.django import app, shared_database
from orchestrator.domain.states import TaskState
from orchestrator.sdk.tasks.context import current_task
from orchestrator.sdk.values.payload import decode_call

try:
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued
except ImportError:  # before Django 6
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued

_STATUS = {
    TaskState.RUNNING: TaskResultStatus.RUNNING,
    TaskState.SUCCESS: TaskResultStatus.SUCCESSFUL,
    TaskState.FAILED: TaskResultStatus.FAILED,
    TaskState.CANCELLED: TaskResultStatus.FAILED,
    TaskState.SKIPPED: TaskResultStatus.FAILED,
}
"""The Django status of task states. All other states are READY."""


class OrchestratorBackend(BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    """Use with `TASKS = {"default": {"BACKEND": "orchestrator.contrib.django.backend.OrchestratorBackend"}}`."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def validate_task(self, task: Any) -> None:
        """Check a task when it is declared, and register it."""
        super().validate_task(task)
        if task.module_path not in app.tasks:
            function = _with_context(task) if task.takes_context else task.func
            app.task(name=task.module_path, **self.options)(function)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Enqueue a task, in the open transaction if the database is shared."""
        options: dict[str, Any] = {"queue": task.queue_name, "priority": task.priority}
        if task.run_after is not None:
            options["eta"] = make_aware(task.run_after) if is_naive(task.run_after) else task.run_after
        bound_task, alias = app.tasks[task.module_path].options(**options), shared_database()
        if alias is not None and connections[alias].in_atomic_block:
            handle = bound_task.enqueue_in(connections[alias], *args, **kwargs)
        else:
            handle = bound_task.enqueue(*args, **kwargs)
        result = self._result(task, handle.id, args=list(args), kwargs=kwargs)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        try:
            details = app._client.backend.insights.show_task(UUID(result_id))
        except ValueError:
            details = None
        if details is None:
            raise TaskResultDoesNotExist(result_id)
        args, kwargs, *_ = decode_call(details.payload)
        errors = [attempt.error for attempt in details.attempts if attempt.error is not None]
        result = self._result(
            import_string(details.name),
            result_id,
            status=_STATUS.get(TaskState(details.status), TaskResultStatus.READY),
            enqueued_at=details.created_at,
            started_at=details.attempts[0].started_at if details.attempts else details.started_at,
            last_attempted_at=details.started_at,
            finished_at=details.ended_at,
            args=args,
            kwargs=kwargs,
            errors=[TaskError(exception_class_path=_path(error.kind), traceback=error.traceback) for error in errors],
            worker_ids=[attempt.worker or "" for attempt in details.attempts],
        )
        if details.status == TaskState.SUCCESS:
            object.__setattr__(result, "_return_value", app.handle(result_id).result())
        return result

    def _result(self, task: Any, identifier: str, **fields: Any) -> Any:
        return _result(task, self.alias, identifier, **fields)


def _result(task: Any, alias: str, identifier: str, **fields: Any) -> Any:
    times = dict.fromkeys(("enqueued_at", "started_at", "finished_at", "last_attempted_at"))
    other = {"status": TaskResultStatus.READY, "args": [], "kwargs": {}, "errors": [], "worker_ids": []}
    return TaskResult(task=task, id=identifier, backend=alias, **times | other | fields)


def _path(kind: str) -> str:
    return kind if "." in kind else f"builtins.{kind}"


def _with_context(task: Any) -> Callable[..., Any]:
    """Return the function of a task without its first parameter, for which it passes Django's context."""

    def context() -> Any:
        current = current_task()
        attempts = 1 if current is None else current.attempt
        identifier = "" if current is None else str(current.task_id)
        fields = {"status": TaskResultStatus.RUNNING, "worker_ids": [""] * attempts}
        return TaskContext(task_result=_result(task, task.backend, identifier, **fields))

    @wraps(task.func)
    def run(*args: Any, **kwargs: Any) -> Any:
        return task.func(context(), *args, **kwargs)

    @wraps(task.func)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        return await task.func(context(), *args, **kwargs)

    wrapper: Any = run_async if inspect.iscoroutinefunction(task.func) else run
    signature = inspect.signature(task.func)
    wrapper.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return wrapper  # type: ignore[no-any-return]
