"""Converts calls of another task queue into tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

from orchestrator.compat.celery.request import MESSAGE
from orchestrator.compat.celery.tags import tagged_call
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import ConfigurationError, OrchestratorError, did_you_mean
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.sdk.tasks.retry import Retry
from orchestrator.sdk.tasks.task import Task


class Unreadable(OrchestratorError):
    """A message of another task queue cannot become a task."""


class NotYet(OrchestratorError):
    """The end of a task cannot be written back now. The bridge retries later."""


class Call(NamedTuple):
    """A call, as read from a message of another task queue."""

    function: str
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    options: Mapping[str, Any] = {}
    """Task options that the message sets."""
    retries_done: int = 0
    """Retries that the other task queue has already made."""
    message: Mapping[str, Any] = {}
    """Fields of `self.request` for a task written for Celery."""


class Calls:
    """Creates tasks from calls. With an application, names and arguments are checked, and its task options apply."""

    def __init__(self, app: Orchestrator, renamed: Mapping[str, str], queue: str | None, *, is_checked: bool) -> None:
        self._app = app
        self._renamed = renamed
        self._common: dict[str, Any] = {} if queue is None else {"queue": queue}
        self._is_checked = is_checked

    def errbacks(self) -> dict[str, Callable[..., Any]]:
        """Return functions with the signatures of tasks, by Celery names. Celery inspects them to call errbacks.

        A task with `bind=True` is left out: Celery passes it only the id.
        """
        names = {**{name: name for name in self._app.tasks}, **self._renamed}
        tasks = {name: self._app.tasks[task] for name, task in names.items() if task in self._app.tasks}
        return {name: _header(task) for name, task in tasks.items() if not getattr(task.function, "bind", False)}

    def task(self, call: Call) -> NewTask:
        """Return the task of a call, without writing it."""
        name = self._renamed.get(call.function, call.function)
        options = {**self._common, **call.options}
        if not self._is_checked:
            route = self._app._client.route(name)
            return call_by_name(self._app.settings, name, call.arguments, call.keywords, options=options, queue=route)
        if name not in self._app.tasks:
            raise ConfigurationError(
                f"no task is called {name!r}.{did_you_mean(name, self._app.tasks)} Name the task that replaces "
                f"it with --task {call.function}=TASK"
            )
        task = self._app.tasks[name]
        if call.retries_done:
            options["retries"] = _remaining_retries(task._call_options.retries, call.retries_done)
        arguments, keywords = call.arguments, call.keywords
        if _takes_celery_message(task.function):
            message = {MESSAGE: call.message} if call.message else {}
            arguments, keywords = tagged_call(arguments, {**keywords, **message})
        return (task.options(**options) if options else task)._new(arguments, keywords)


def _header(task: Task[..., Any]) -> Callable[..., Any]:
    def header(*_: Any, **__: Any) -> None: ...

    header.__signature__ = task._signature._signature  # type: ignore[attr-defined]
    return header


@lru_cache(maxsize=4096)
def _takes_celery_message(function: Any) -> bool:
    """Return whether a function is a task of `orchestrator.compat.celery`."""
    return MESSAGE in signature(function).parameters


def _remaining_retries(retries: Any, done: int) -> Any:
    """Return the retries of a task that remain after `done` retries elsewhere."""
    if not isinstance(retries, Retry):
        return max(0, retries - done)
    backoff = retries.backoff
    if isinstance(backoff, tuple):
        backoff = backoff[done:] or backoff[-1:]
    return replace(retries, max=max(0, retries.max - done), backoff=backoff)
