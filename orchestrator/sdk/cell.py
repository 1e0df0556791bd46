"""A cell is one deployment of an application: it starts tasks and workflows there, and looks them up.

Each cell has its own database, Redis, schedulers and workers, and shares nothing with other cells. The application
itself is the cell that the settings of its process name; `app.at(…)` creates more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Self, TypeVar, overload
from uuid import UUID

from orchestrator.sdk.checks import check_name
from orchestrator.sdk.client import Client, Deployment
from orchestrator.sdk.code.handle import W_co, WorkflowHandle
from orchestrator.sdk.code.workflow import CodeWorkflow, Registry
from orchestrator.sdk.dag.composing import Composer
from orchestrator.sdk.dag.workflows import Workflows
from orchestrator.sdk.flow.flows import Flows
from orchestrator.sdk.ids import new_id, parse_id
from orchestrator.sdk.middleware import HookStack
from orchestrator.sdk.queue import Queue
from orchestrator.sdk.tasks.by_name import check_iterable, new_tasks, start_many
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.tasks.compositions import Arguments
from orchestrator.sdk.tasks.handle import Handle, RunHandle
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.waiting.async_variants import async_variant
from orchestrator.settings import Settings
from orchestrator.trace_context import current_trace
from orchestrator.tracing.entry import sending

R = TypeVar("R")

_MAX_CHECKED_FIRST = 1_000
"""Calls that are all checked before any is sent. A longer list is checked while Postgres stores its first calls."""


class Cell(Deployment):
    """A deployment of the application. Connections are opened on first use."""

    def __init__(self, client: Client, registry: Registry) -> None:
        self._client = client
        self._registry = registry
        client.composer = Composer(client)
        client.run_handle = partial(CompositionHandle, client)
        self.workflows = Workflows(client, registry)
        """DAG workflows from YAML files and `Workflow` objects, stored in the database."""
        self.flows = Flows(client, registry)
        """Flow graphs, stored in the database: nodes, and the actions that lead from node to node."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self._client.via.removeprefix(' via the cell')}>"

    # -- starting work

    def enqueue(self, name: str, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Enqueue a registered task by name: `app.enqueue("shop.mail.send", "ann@example.com")`."""
        return self.find_task(name).enqueue(*args, **kwargs)

    async def aenqueue(self, name: str, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Do the same as `enqueue` without blocking the event loop."""
        task = self._registry.tasks.get(name)
        if task is None:
            task = await self._client.threads.run(self.find_task, name)  # may import modules
        return await self._own(task).aenqueue(*args, **kwargs)

    def enqueue_many(self, task: Task[..., R], calls: Iterable[Arguments]) -> list[Handle[R]]:
        """Enqueue any number of calls in one transaction. If one call is invalid, none is enqueued.

        Each call is a tuple or list of positional arguments, or a mapping of keyword arguments. This holds for a
        single argument, too: `app.enqueue_many(resize, [("a.png", 50), ("c.png",), {"path": "b.png"}])`.
        """
        task = self._own(task)
        if self._client.middleware is not None and not task._is_hooked:
            with HookStack() as hook_stack:
                return self.enqueue_many(task._for_many(hook_stack), calls)
        with sending("enqueue", task.name, task.queue):
            trace = current_trace()
            submit = task._enqueue_path()
            tasks = new_tasks(task, calls, trace)
            if submit is not None:
                holders = submit(made := [*tasks])
                ids = [holders.get(new.id, new.id) for new in made]
            elif task._is_hooked or not isinstance(calls, Sequence) or len(calls) < _MAX_CHECKED_FIRST:
                ids = self._client.backend.tasks.enqueue_many(made) if (made := [*tasks]) else []
            else:
                ids = self._client.backend.tasks.enqueue_many(tasks)
        return [Handle(self._client, identifier, task._signature) for identifier in ids]

    def start_many(self, task: Task[..., R], items: Iterable[Any], *, name: str | None = None) -> RunHandle[R]:
        """Start a run with one task for each item: `app.start_many(resize, ["a.png", "b.png"]).results()`.

        An item is a single argument, a tuple or list of positional arguments, or a mapping of keyword arguments.
        Inside a task, the scheduler starts the run, and all items travel in one message.
        """
        task = self._own(task)
        check_iterable(task, items)
        calls = (item if isinstance(item, (tuple, list, Mapping)) else (item,) for item in items)
        run_id = start_many(task, calls, name)
        return RunHandle(self._client, run_id, task._signature)

    def post_event(self, name: str, payload: Any = None) -> None:
        """Post an event, which starts the workflows that wait for events of this name. The payload is JSON data."""
        self._client.backend.workflows.post_event(new_id(), check_name("event", name), payload)

    def retry_failed(
        self,
        *,
        queue: str | None = None,
        name: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> int:
        """Retry every failed task that matches all given filters, and return the number of matches.

        `error` is a substring of the error's type or message; `since` and `until` bound the time of the failure.
        """
        from orchestrator.store.tasks.redrive import (
            FailedFilter,  # loads SQLAlchemy, which workers do without
        )

        return self._client.backend.tasks.retry_failed(
            FailedFilter(queue=queue, name=name, error=error, since=since, until=until)
        )

    aenqueue_many = async_variant(enqueue_many)
    astart_many = async_variant(start_many)
    apost_event = async_variant(post_event)
    aretry_failed = async_variant(retry_failed)

    # -- looking up tasks and runs

    def find_task(self, name: str) -> Task[..., Any]:
        """Return the registered task with this name."""
        return self._own(self._registry.find_task(name))

    def _own(self, task: Task[..., R]) -> Task[..., R]:
        self._client.refuse_other("This call", task)
        return task if task._client is self._client else task.via(self)

    def handle(self, task_id: str | UUID) -> Handle[Any]:
        """Return a handle to an existing task by its id."""
        return Handle(self._client, parse_id("task", task_id))

    def run(self, run_id: str | UUID) -> CompositionHandle[Any]:
        """Return a handle to an existing run by its id."""
        handle: CompositionHandle[Any] = self._client.run_handle(parse_id("run", run_id))
        return handle

    @overload
    def workflow_run(self, run_id: str | UUID) -> WorkflowHandle[Any]: ...
    @overload
    def workflow_run(self, run_id: str | UUID, workflow: CodeWorkflow[..., R, W_co]) -> WorkflowHandle[R, W_co]: ...

    def workflow_run(self, run_id: str | UUID, workflow: CodeWorkflow[..., Any] | None = None) -> WorkflowHandle[Any]:
        """Return a handle to an existing run of a workflow as code; with `workflow`, results have its types."""
        return WorkflowHandle(self._client, parse_id("run", run_id), None if workflow is None else workflow._signature)

    def queue(self, name: str) -> Queue:
        """Return a queue, to pause, limit or purge it."""
        return Queue(self._client, name)

    # -- settings and closing

    @property
    def settings(self) -> Settings:
        """The settings, read on first use."""
        return self._client.settings

    def close(self) -> None:
        """Close all connections. They are reopened when needed."""
        self._client.close()

    aclose = async_variant(close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
