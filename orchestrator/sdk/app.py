"""The application: where tasks are registered and work is started."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, overload
from uuid import UUID

from orchestrator.errors import InvalidTask
from orchestrator.sdk.checks import check_name, shown
from orchestrator.sdk.client import Client
from orchestrator.sdk.code.context import WorkflowContext
from orchestrator.sdk.code.handle import W_co, WorkflowHandle
from orchestrator.sdk.code.options import CodeOptions, Versioning, check_workflow_function, with_code_options
from orchestrator.sdk.code.workflow import CodeWorkflow, CodeWorkflows, Registry
from orchestrator.sdk.code.workflow_class import function_of, registered
from orchestrator.sdk.dag.composing import Composer
from orchestrator.sdk.dag.workflows import Workflows
from orchestrator.sdk.decorators import TaskDecorator, WorkflowDecorator
from orchestrator.sdk.flow.flows import Flows
from orchestrator.sdk.ids import new_id, parse_id
from orchestrator.sdk.middleware import CarriedContext, HookStack, Middleware, MiddlewareList, each_of
from orchestrator.sdk.modules import Modules
from orchestrator.sdk.names import registered_name
from orchestrator.sdk.queue import Queue
from orchestrator.sdk.schedule_declarations import T, Times
from orchestrator.sdk.schedules import Schedules
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.tasks.compositions import Arguments
from orchestrator.sdk.tasks.context import TaskContext
from orchestrator.sdk.tasks.followers import queues_of
from orchestrator.sdk.tasks.handle import Handle, RunHandle
from orchestrator.sdk.tasks.many import new_tasks, start_many
from orchestrator.sdk.tasks.option_types import OptionTypes, WorkflowOptionTypes
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE, OPTION_NAMES, CallOptions, with_options
from orchestrator.sdk.tasks.resources import Resources, Scope
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.conversion import register_type
from orchestrator.sdk.waiting.async_variants import async_variant
from orchestrator.settings import Settings
from orchestrator.trace_context import current_trace
from orchestrator.tracing.entry import sending

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")


class Orchestrator:
    """An application. Settings are read when they are first needed, so importing a module needs none.

    `with Orchestrator() as app:` and `async with` close its connections at the end; so does `app.close()`.

    Args:
        settings: All settings, or a function that returns them on first use, and again after `close()`; read from the
            environment and pyproject.toml if none are given.
        include: Modules in which further tasks stand, such as `shop.mail`. They are imported when a worker or a command
            starts, and when something is asked for that is not known yet.
        autodiscover: Packages whose modules called `tasks` are imported in the same way, with all below them.
        routes: Queues of tasks by their names: `{"shop.mail.*": "mail"}`; the first that fits counts.
        middleware: Hooks around enqueues, attempts and turns, the outermost first; see `Middleware`.
        context: Context variables whose values, JSON data, travel from callers to tasks and to all that comes of them.
        overrides: Single settings, by name, that go before `settings` and those of the environment.
    """

    def __init__(
        self,
        settings: Settings | Callable[[], Settings] | None = None,
        *,
        include: Iterable[str] = (),
        autodiscover: Iterable[str] = (),
        routes: Mapping[str, str] | None = None,
        middleware: Iterable[Middleware] = (),
        context: Iterable[ContextVar[Any]] = (),
        **overrides: Any,
    ) -> None:
        if settings is not None and not isinstance(settings, Settings) and not callable(settings):
            raise TypeError(
                f"Orchestrator(…): expected Settings(…), or single settings by name, such as "
                f"Orchestrator(namespace='shop'), found {shown(settings)}."
            )
        modules = Modules(include, autodiscover)
        self._client = Client(settings, overrides, routes or {})
        self._resources = Resources()
        self._registry = Registry({}, CodeWorkflows(modules), modules)
        self._client.composer = Composer(self._client)
        self._client.run_handle = partial(CompositionHandle, self._client)
        self.tasks = self._registry.tasks
        """The registered tasks, by name."""
        self.workflows = Workflows(self._client, self._registry)
        """Workflows that are data: files and graphs, stored in the database."""
        self.flows = Flows(self._client, self._registry)
        """Flow graphs: nodes and the actions that lead from one to the next, stored in the database."""
        self.code_workflows = self._registry.workflows
        """Workflows that are code, registered with `@app.workflow`."""
        self.schedules = Schedules(self._client, self._registry)
        """Schedules: those that the code declares, and all that are in the database."""
        self.middleware = MiddlewareList(partial(setattr, self._client, "middleware"))
        """Hooks around enqueues, attempts and turns, the outermost first."""
        carried = CarriedContext(context)
        self.middleware.add(*([carried] if carried.variables else []), *each_of("middleware", middleware))

    # -- tasks

    @overload
    def task(self, function: Callable[Concatenate[TaskContext, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[TaskContext, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, /, *, name: str | None = None, **options: Unpack[OptionTypes]) -> TaskDecorator: ...

    def task(self, function: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any) -> Any:
        """Register a function as a task: `@app.task`, or `@app.task(retries=3, timeout=30)`."""
        checked = with_options(CallOptions(), options)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            chosen = registered_name(function, name)
            existing = self.tasks.get(chosen)
            if existing is not None and _code(existing.function) is not _code(function):
                raise InvalidTask(f"Two functions want to be the task {chosen!r}. Give one of them another name=.")
            function = self._resources.injected(function)
            signature = Signature(chosen, function, options=OPTION_NAMES)
            signature.check_keys(options)
            task: Task[..., Any] = Task(self._client, chosen, function, checked, signature, frozenset(options))
            self.tasks[chosen] = task
            return task

        return register if function is None else register(function)

    @overload
    def resource(self, function: F, /) -> F: ...
    @overload
    def resource(self, /, *, scope: Scope = "task") -> Callable[[F], F]: ...

    def resource(self, function: Any = None, /, *, scope: Scope = "task") -> Any:
        """Say how long what a function yields to `Depends` is open: an attempt of a task, or the process.

        `@app.resource(scope="process")` is for engines and clients. It is opened on first use and closed when the
        worker process has drained; elsewhere by `app.close()`, or when the program ends. Of an asynchronous one, each
        event loop has its own.
        """

        def declare(function: F) -> F:
            self._resources.declare(function, scope)
            return function

        return declare if function is None else declare(function)

    def lifespan(self, function: F, /) -> F:
        """Run a function with `yield` around the life of each worker process: what precedes it before the first task.

        If that raises, the process does not start. It may be a dependency of tasks, too.
        """
        self._resources.declare_lifespan(function)
        return function

    def override(self, function: Callable[..., Any], value: Any) -> AbstractContextManager[None]:
        """Give tasks of this process a value in place of a dependency: `with app.override(session, fake):`."""
        return self._resources.override(function, value)

    def register_type(self, kind: type[V], *, encode: Callable[[V], Any], decode: Callable[[Any], V]) -> None:
        """Let values of a class of your own travel: `app.register_type(Money, encode=str, decode=Money.parse)`.

        `encode` returns plain data, and `decode` makes a value of it where an annotation names the class. This holds
        for all applications of the process.
        """
        register_type(kind, encode, decode)

    def _adapted(self, function: Callable[..., Any], find: Callable[[str], Any]) -> Callable[..., Any]:  # noqa: ARG002
        """Return how a worker calls a function that it may run by name; `find` finds others that it may."""
        return function

    def find_task(self, name: str) -> Task[..., Any]:
        """Return the registered task of that name."""
        return self._registry.find_task(name)

    def load_modules(self) -> None:
        """Import the modules of `include` and `autodiscover`; ConfigurationError if one cannot be.

        It is done without being asked for when a worker or a command starts, and when a task is looked up that is not
        known, schedules or workflows are applied, or queues listed. Call it to learn of mistakes at once.
        """
        self._registry.modules.load()

    def schedule(
        self, *, name: str | None = None, params: Mapping[str, Any] | None = None, **times: Unpack[Times]
    ) -> Callable[[T], T]:
        """Let a task run by itself: `@app.schedule(cron="0 3 * * *", timezone="Europe/Berlin")` above `@app.task`.

        It is stored by `orchestrator schedules apply`, which belongs to a deploy, and by `orchestrator dev`. There it
        is a workflow of one step, called like the task unless `name` says otherwise; a second schedule of the same
        task wants a name. `params` are the task's arguments; `${run.fire_time}` in them is the time that a run is for.

        Above `@app.workflow`, it starts runs of that. Another thing is `task.schedule(…)`: inside a workflow, it has a
        worker run a task now.
        """
        return self.schedules._declare(name, params or {}, times)

    # -- workflows as code

    @overload
    def workflow(self, kind: K, /) -> K: ...
    @overload
    def workflow(
        self, function: Callable[Concatenate[WorkflowContext, P], Awaitable[R]], /
    ) -> CodeWorkflow[P, R, None]: ...
    @overload
    def workflow(
        self,
        /,
        *,
        name: str | None = None,
        version: int = 1,
        versioning: Versioning | None = None,
        **options: Unpack[WorkflowOptionTypes],
    ) -> WorkflowDecorator: ...

    def workflow(
        self,
        given: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        version: int = 1,
        versioning: Versioning | None = None,
        **options: Any,
    ) -> Any:
        """Register an `async def` function or a class as a workflow: `@app.workflow`, or `@app.workflow(version=2)`."""
        checked = with_code_options(CodeOptions(), options)

        def register(given: Callable[..., Any]) -> Any:
            chosen = registered_name(given, name, "workflow")
            function = function_of(given) if isinstance(given, type) else given
            check_workflow_function(chosen, version, versioning, function)
            workflow: CodeWorkflow[..., Any] = CodeWorkflow(
                self._client, self._registry, chosen, version, function, checked, versioning=versioning
            )
            self.code_workflows._add(workflow)
            if not isinstance(given, type):
                return workflow
            registered(given, workflow)
            return given

        return register if given is None else register(given)

    # -- starting work

    def enqueue(self, name: str, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Enqueue a task by its name: `app.enqueue("shop.mail.send", "ann@example.com")`."""
        return self.find_task(name).enqueue(*args, **kwargs)

    async def aenqueue(self, name: str, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Do the same as `enqueue` without blocking the event loop."""
        task = self.tasks.get(name)
        if task is None:
            task = await self._client.threads.run(self.find_task, name)  # which may load modules
        return await task.aenqueue(*args, **kwargs)

    def enqueue_many(self, task: Task[..., R], calls: Iterable[Arguments]) -> list[Handle[R]]:
        """Enqueue any number of calls in one transaction: all of them or, if one is refused, none.

        A call is a tuple or list of arguments, or a mapping of named ones, also where there is a single one:
        `app.enqueue_many(resize, [("a.png", 50), ("c.png",), {"path": "b.png"}])`.
        """
        if self._client.middleware is not None and not task._is_hooked:
            with HookStack() as afterwards:
                return self.enqueue_many(task._for_many(afterwards), calls)
        with sending("enqueue", task.name, task.queue):
            trace = current_trace()
            tasks = list(new_tasks(task, calls, trace))
            hand_over = task._enqueue_path()
            ids = [new.id for new in tasks]
            if hand_over is not None:
                holders = hand_over(tasks)
                ids = [holders.get(identifier, identifier) for identifier in ids]
            elif tasks:
                ids = self._client.backend.tasks.enqueue_many(tasks)
        return [Handle(self._client, identifier, task._signature) for identifier in ids]

    def start_many(self, task: Task[..., R], items: Iterable[Any], *, name: str | None = None) -> RunHandle[R]:
        """Start a run of one task per item: one argument, a tuple or list of all, or a mapping of named ones.

        `app.start_many(resize, ["a.png", "b.png"]).results()` waits for all of them. Inside a task, the scheduler
        starts it, and all of it travels in one message.
        """
        calls = (item if isinstance(item, (tuple, list, Mapping)) else (item,) for item in items)
        run_id = start_many(task, calls, name)
        return RunHandle(self._client, run_id, task._signature)

    def post_event(self, name: str, payload: Any = None) -> None:
        """Say that something happened; workflows that wait for it are started. The payload is JSON data."""
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
        """Open every failed task again that matches all that is given; return how many match.

        `error` is part of the error's type or message; `since` and `until` say when the tasks failed.
        """
        from orchestrator.store.tasks.redrive import (
            FailedFilter,  # with the backend's other parts, which workers do without
        )

        return self._client.backend.tasks.retry_failed(
            FailedFilter(queue=queue, name=name, error=error, since=since, until=until)
        )

    aenqueue_many = async_variant(enqueue_many)
    astart_many = async_variant(start_many)
    apost_event = async_variant(post_event)
    aretry_failed = async_variant(retry_failed)

    # -- finding it again

    def handle(self, task_id: str | UUID) -> Handle[Any]:
        """Return a handle to a task that was enqueued elsewhere."""
        return Handle(self._client, parse_id("task", task_id))

    def run(self, run_id: str | UUID) -> CompositionHandle[Any]:
        """Return a handle to a run that was started elsewhere."""
        found: CompositionHandle[Any] = self._client.run_handle(parse_id("run", run_id))
        return found

    @overload
    def workflow_run(self, run_id: str | UUID) -> WorkflowHandle[Any]: ...
    @overload
    def workflow_run(self, run_id: str | UUID, workflow: CodeWorkflow[..., R, W_co]) -> WorkflowHandle[R, W_co]: ...

    def workflow_run(self, run_id: str | UUID, workflow: CodeWorkflow[..., Any] | None = None) -> WorkflowHandle[Any]:
        """Return a handle to a run of a workflow as code that was started elsewhere; typed if that is given."""
        return WorkflowHandle(self._client, parse_id("run", run_id), None if workflow is None else workflow._signature)

    def queues(self) -> list[str]:
        """Return every queue that the code names: for tasks, what follows them, workflows as code, and by routes."""
        self.load_modules()
        tasks = {queue for task in self.tasks.values() for queue in queues_of(task)}
        code = {workflow._queue for workflow in self.code_workflows.values()}
        return [DEFAULT_QUEUE, *sorted({*tasks, *code, *self._client.routes.values()} - {DEFAULT_QUEUE})]

    def queue(self, name: str) -> Queue:
        """Return a queue, to pause, limit or empty it."""
        return Queue(self._client, name)

    # -- settings and closing

    @property
    def settings(self) -> Settings:
        """The settings, read on first use."""
        return self._client.settings

    def close(self) -> None:
        """Close all connections and resources; the application can be used again afterwards."""
        self._resources.close()
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


def _code(function: Callable[..., Any]) -> object:
    """Return what two functions share of which one is the other, imported again."""
    return getattr(inspect.unwrap(function), "__code__", function)
