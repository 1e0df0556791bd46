"""The application: where tasks are registered and work is started."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload
from weakref import WeakSet

from orchestrator.errors import InvalidTask
from orchestrator.sdk.cell import Cell
from orchestrator.sdk.checks import shown
from orchestrator.sdk.client import Client
from orchestrator.sdk.code.context import WorkflowContext
from orchestrator.sdk.code.options import CodeOptions, Versioning, check_workflow_function, with_code_options
from orchestrator.sdk.code.workflow import CodeWorkflow, CodeWorkflows, Registry
from orchestrator.sdk.code.workflow_class import function_of, registered
from orchestrator.sdk.middleware import CarriedContext, Chain, Middleware, MiddlewareList, each_of
from orchestrator.sdk.modules import Modules
from orchestrator.sdk.names import registered_name
from orchestrator.sdk.schedule_declarations import T, Times
from orchestrator.sdk.schedules import Schedules
from orchestrator.sdk.tasks.context import TaskContext
from orchestrator.sdk.tasks.followers import queues_of
from orchestrator.sdk.tasks.option_types import OptionTypes, WorkflowOptionTypes
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE, OPTION_NAMES, CallOptions, with_options
from orchestrator.sdk.tasks.resources import Resources, Scope
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.conversion import register_type
from orchestrator.sdk.waiting.async_variants import async_variant
from orchestrator.settings import Settings


class TaskDecorator(Protocol):
    """The type of `@app.task(...)` with options."""

    @overload
    def __call__(self, function: Callable[Concatenate[TaskContext, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[TaskContext, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class WorkflowDecorator(Protocol):
    """The type of `@app.workflow(...)` with options."""

    @overload
    def __call__(self, kind: K, /) -> K: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[WorkflowContext, P], Awaitable[R]], /
    ) -> CodeWorkflow[P, R, None]: ...


P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")


class Orchestrator(Cell):
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
        _check_settings("Orchestrator", settings)
        modules = Modules(include, autodiscover)
        super().__init__(Client(settings, overrides, routes or {}), Registry({}, CodeWorkflows(modules), modules))
        self._clients = WeakSet([self._client])
        """Its own, and those of its cells, which share its middleware."""
        self._resources = Resources()
        self.tasks = self._registry.tasks
        """The registered tasks, by name."""
        self.code_workflows = self._registry.workflows
        """Workflows that are code, registered with `@app.workflow`."""
        self.schedules = Schedules(self._client, self._registry)
        """Schedules: those that the code declares, and all that are in the database."""
        self.middleware = MiddlewareList(self._install)
        """Hooks around enqueues, attempts and turns, the outermost first."""
        carried = CarriedContext(context)
        self.middleware.add(*([carried] if carried.variables else []), *each_of("middleware", middleware))

    def _install(self, middleware: Chain) -> None:
        for client in self._clients:
            client.middleware = middleware

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
            if isinstance(function, Task):
                self._client.refuse_other("@app.task", function)
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

    def queues(self) -> list[str]:
        """Return every queue that the code names: for tasks, what follows them, workflows as code, and by routes."""
        self.load_modules()
        tasks = {queue for task in self.tasks.values() for queue in queues_of(task)}
        code = {workflow._queue for workflow in self.code_workflows.values()}
        return [DEFAULT_QUEUE, *sorted({*tasks, *code, *self._client.routes.values()} - {DEFAULT_QUEUE})]

    # -- settings and closing

    def at(self, settings: Settings | Callable[[], Settings] | None = None, /, **overrides: Any) -> Cell:
        """Return the same tasks and workflows on another deployment, a cell: one database, Redis and their processes.

        `europe = app.at(database_url=…, redis_url=…)` takes all other settings, `shards` too, from here. Then
        `resize.via(europe).enqueue(…)` and `order.via(europe).start(…)` return handles of that cell. Make it once.
        """
        _check_settings("at", settings)
        given = settings or (lambda: self.settings)
        cell = Cell(Client(given, overrides, self._client.routes, is_cell=True), self._registry)
        cell._client.middleware = self._client.middleware
        self._clients.add(cell._client)
        return cell

    def close(self) -> None:
        """Close all connections and resources; the application can be used again afterwards."""
        self._resources.close()
        super().close()

    aclose = async_variant(close)  # type: ignore[arg-type]


def _check_settings(called: str, settings: object) -> None:
    if settings is not None and not isinstance(settings, Settings) and not callable(settings):
        raise TypeError(
            f"{called}(…): expected Settings(…), or single settings by name, such as {called}(namespace='shop'), found "
            f"{shown(settings)}."
        )


def _code(function: Callable[..., Any]) -> object:
    """Return what two functions share of which one is the other, imported again."""
    return getattr(inspect.unwrap(function), "__code__", function)
