"""A backend for `django.tasks` of Django 6, or for its backport, the package django-tasks.

Each function with `@task` is registered as a task of the application under its path. OPTIONS are options of all of
them, such as `{"retries": 3}`. A task that is enqueued in a transaction of the database that Django and the application
share is part of it.
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
"""All other states are READY."""


class OrchestratorBackend(BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    """`TASKS = {"default": {"BACKEND": "orchestrator.contrib.django.backend.OrchestratorBackend"}}`."""

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
        """Enqueue a task: in the transaction that is open, if the database is shared."""
        options: dict[str, Any] = {"queue": task.queue_name, "priority": task.priority}
        if task.run_after is not None:
            options["eta"] = make_aware(task.run_after) if is_naive(task.run_after) else task.run_after
        chosen, alias = app.tasks[task.module_path].options(**options), shared_database()
        if alias is not None and connections[alias].in_atomic_block:
            handle = chosen.enqueue_in(connections[alias], *args, **kwargs)
        else:
            handle = chosen.enqueue(*args, **kwargs)
        result = self._result(task, handle.id, args=list(args), kwargs=kwargs)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        try:
            found = app._client.backend.insights.show_task(UUID(result_id))
        except ValueError:
            found = None
        if found is None:
            raise TaskResultDoesNotExist(result_id)
        args, kwargs, *_ = decode_call(found.payload)
        errors = [attempt.error for attempt in found.attempts if attempt.error is not None]
        result = self._result(
            import_string(found.name),
            result_id,
            status=_STATUS.get(TaskState(found.status), TaskResultStatus.READY),
            enqueued_at=found.created_at,
            started_at=found.attempts[0].started_at if found.attempts else found.started_at,
            last_attempted_at=found.started_at,
            finished_at=found.ended_at,
            args=args,
            kwargs=kwargs,
            errors=[TaskError(exception_class_path=_path(one.kind), traceback=one.traceback) for one in errors],
            worker_ids=[attempt.worker or "" for attempt in found.attempts],
        )
        if found.status == TaskState.SUCCESS:
            object.__setattr__(result, "_return_value", app.handle(result_id).result())
        return result

    def _result(self, task: Any, identifier: str, **known: Any) -> Any:
        return _result(task, self.alias, identifier, **known)


def _result(task: Any, alias: str, identifier: str, **known: Any) -> Any:
    times = dict.fromkeys(("enqueued_at", "started_at", "finished_at", "last_attempted_at"))
    other = {"status": TaskResultStatus.READY, "args": [], "kwargs": {}, "errors": [], "worker_ids": []}
    return TaskResult(task=task, id=identifier, backend=alias, **times | other | known)


def _path(kind: str) -> str:
    return kind if "." in kind else f"builtins.{kind}"


def _with_context(task: Any) -> Callable[..., Any]:
    """Return the function of a task without its first parameter, for which it makes Django's context."""

    def context() -> Any:
        found = current_task()
        attempts = 1 if found is None else found.attempt
        identifier = "" if found is None else str(found.task_id)
        known = {"status": TaskResultStatus.RUNNING, "worker_ids": [""] * attempts}
        return TaskContext(task_result=_result(task, task.backend, identifier, **known))

    @wraps(task.func)
    def run(*args: Any, **kwargs: Any) -> Any:
        return task.func(context(), *args, **kwargs)

    @wraps(task.func)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        return await task.func(context(), *args, **kwargs)

    chosen: Any = run_async if inspect.iscoroutinefunction(task.func) else run
    signature = inspect.signature(task.func)
    chosen.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return chosen  # type: ignore[no-any-return]
