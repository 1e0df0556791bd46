"""Calls of another task queue as tasks of ours."""

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
    """The end of a task cannot be written back now; it is tried again."""


class Call(NamedTuple):
    """What a message of another task queue asks for."""

    function: str
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    options: Mapping[str, Any] = {}
    """Options of ours that the message decides."""
    retries_done: int = 0
    """How often it was retried over there."""
    message: Mapping[str, Any] = {}
    """What a task written for Celery finds in `self.request`."""


class Calls:
    """Makes tasks of calls. With an application, names and arguments are checked, and its options hold."""

    def __init__(self, app: Orchestrator, renamed: Mapping[str, str], queue: str | None, *, is_checked: bool) -> None:
        self._app = app
        self._renamed = renamed
        self._common: dict[str, Any] = {} if queue is None else {"queue": queue}
        self._is_checked = is_checked

    def errbacks(self) -> dict[str, Callable[..., Any]]:
        """Return functions with the signatures of tasks, by their names in Celery, which decide how it calls errbacks.

        Celery gives the id alone to tasks that have `bind=True`.
        """
        names = {**{name: name for name in self._app.tasks}, **self._renamed}
        tasks = {name: self._app.tasks[ours] for name, ours in names.items() if ours in self._app.tasks}
        return {name: _header(task) for name, task in tasks.items() if not getattr(task.function, "bind", False)}

    def task(self, call: Call) -> NewTask:
        """Return the task of a call; nothing is written."""
        name = self._renamed.get(call.function, call.function)
        options = {**self._common, **call.options}
        if not self._is_checked:
            route = self._app._client.route(name)
            return call_by_name(self._app.settings, name, call.arguments, call.keywords, options=options, queue=route)
        if name not in self._app.tasks:
            raise ConfigurationError(
                f"no task is called {name!r}.{did_you_mean(name, self._app.tasks)} Say with --task "
                f"{call.function}=TASK which one does this work"
            )
        task = self._app.tasks[name]
        if call.retries_done:
            options["retries"] = _left(task._call_options.retries, call.retries_done)
        arguments, keywords = call.arguments, call.keywords
        if _takes_message(task.function):
            message = {MESSAGE: call.message} if call.message else {}
            arguments, keywords = tagged_call(arguments, {**keywords, **message})
        return (task.options(**options) if options else task)._new(arguments, keywords)


def _header(task: Task[..., Any]) -> Callable[..., Any]:
    def header(*_: Any, **__: Any) -> None: ...

    header.__signature__ = task._signature._signature  # type: ignore[attr-defined]
    return header


@lru_cache(maxsize=4096)
def _takes_message(function: Any) -> bool:
    """Say whether this is a task of `orchestrator.compat.celery`."""
    return MESSAGE in signature(function).parameters


def _left(retries: Any, done: int) -> Any:
    """Return how often a task is tried again that was tried again so often elsewhere."""
    if not isinstance(retries, Retry):
        return max(0, retries - done)
    waits = retries.backoff
    if isinstance(waits, tuple):
        waits = waits[done:] or waits[-1:]
    return replace(retries, max=max(0, retries.max - done), backoff=waits)
