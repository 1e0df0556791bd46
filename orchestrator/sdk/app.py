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
from orchestrator.sdk.checks import for_message
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
    """An application. Settings are read on first use, so modules can be imported without any.

    `with Orchestrator() as app:` and `async with` close all connections at the end, as `app.close()` does.

    Args:
        settings: All settings, or a function that returns them; it is called on first use, and again after `close()`.
            By default, settings come from the environment and pyproject.toml.
        include: Modules that define more tasks, such as `shop.mail`. They are imported when a worker or a command
            starts, and when a task is looked up that is not registered yet.
        autodiscover: Packages whose modules named `tasks` are imported in the same way, at any depth.
        routes: Queues by pattern of task names: `{"shop.mail.*": "mail"}`. The first matching pattern wins.
        middleware: Hooks around enqueues, attempts and turns, outermost first; see `Middleware`.
        context: Context variables, with JSON values, that travel from callers to tasks and to all tasks these start.
        overrides: Single settings by name. They override `settings` and the environment.
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
        """The clients of the application and of its cells; all share one middleware chain."""
        self._resources = Resources()
        self.tasks = self._registry.tasks
        """The registered tasks, by name."""
        self.code_workflows = self._registry.workflows
        """Workflows as code, registered with `@app.workflow`."""
        self.schedules = Schedules(self._client, self._registry)
        """Schedules that the code declares, and all schedules in the database."""
        self.middleware = MiddlewareList(self._install)
        """Hooks around enqueues, attempts and turns, outermost first."""
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
                raise InvalidTask(
                    f"Task name {chosen!r} is registered twice. Pass a different name= to one of the functions."
                )
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
        """Set the scope of a dependency that tasks name in `Depends`: one attempt of a task, or the whole process.

        `@app.resource(scope="process")` suits engines and clients. The resource is opened on first use and closed
        when the worker process has drained; outside of workers, by `app.close()` or when the program ends. An
        asynchronous resource is opened once for each event loop.
        """

        def declare(function: F) -> F:
            self._resources.declare(function, scope)
            return function

        return declare if function is None else declare(function)

    def lifespan(self, function: F, /) -> F:
        """Run a function with `yield` around each worker process: the part before the `yield` runs before any task.

        If that part raises, the process does not start. The function can also be a dependency of tasks.
        """
        self._resources.declare_lifespan(function)
        return function

    def override(self, function: Callable[..., Any], value: Any) -> AbstractContextManager[None]:
        """Replace a dependency of tasks in this process with a value: `with app.override(session, fake):`."""
        return self._resources.override(function, value)

    def register_type(self, kind: type[V], *, encode: Callable[[V], Any], decode: Callable[[Any], V]) -> None:
        """Support a class of your own in arguments and results.

        For example, `app.register_type(Money, encode=str, decode=Money.parse)`. `encode` returns plain data; `decode`
        makes a value from that data where an annotation names the class. All applications of the process share it.
        """
        register_type(kind, encode, decode)

    def _adapted(self, function: Callable[..., Any], find: Callable[[str], Any]) -> Callable[..., Any]:  # noqa: ARG002
        """Return a function as a worker calls it for a task by name; `find` looks up other functions by name."""
        return function

    def load_modules(self) -> None:
        """Import the modules of `include` and `autodiscover`. Raise ConfigurationError if a module cannot be imported.

        This happens automatically when a worker or a command starts, an unknown task is looked up, schedules or
        workflows are applied, or queues are listed. Call it yourself to find import errors early.
        """
        self._registry.modules.load()

    def schedule(
        self, *, name: str | None = None, params: Mapping[str, Any] | None = None, **times: Unpack[Times]
    ) -> Callable[[T], T]:
        """Schedule a task: put `@app.schedule(cron="0 3 * * *", timezone="Europe/Berlin")` above `@app.task`.

        Run `orchestrator schedules apply` on each deploy to store the schedule; `orchestrator dev` stores it, too. It
        is stored as a workflow of one step, named like the task unless `name` is given; a second schedule of the same
        task needs a name. `params` are the task's arguments; `${run.fire_time}` in them is the scheduled time of a run.

        Above `@app.workflow`, it starts runs of that workflow. Do not confuse it with `task.schedule(…)`, which runs a
        task now from inside a workflow.
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
        target: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        version: int = 1,
        versioning: Versioning | None = None,
        **options: Any,
    ) -> Any:
        """Register an `async def` function or a class as a workflow: `@app.workflow`, or `@app.workflow(version=2)`."""
        checked = with_code_options(CodeOptions(), options)

        def register(target: Callable[..., Any]) -> Any:
            chosen = registered_name(target, name, "workflow")
            function = function_of(target) if isinstance(target, type) else target
            check_workflow_function(chosen, version, versioning, function)
            workflow: CodeWorkflow[..., Any] = CodeWorkflow(
                self._client, self._registry, chosen, version, function, checked, versioning=versioning
            )
            self.code_workflows._add(workflow)
            if not isinstance(target, type):
                return workflow
            registered(target, workflow)
            return target

        return register if target is None else register(target)

    def queues(self) -> list[str]:
        """Return all queues that the code names, in tasks, their callbacks, workflows as code, and routes."""
        self.load_modules()
        tasks = {queue for task in self.tasks.values() for queue in queues_of(task)}
        code = {workflow._queue for workflow in self.code_workflows.values()}
        return [DEFAULT_QUEUE, *sorted({*tasks, *code, *self._client.routes.values()} - {DEFAULT_QUEUE})]

    # -- settings and closing

    def at(self, settings: Settings | Callable[[], Settings] | None = None, /, **overrides: Any) -> Cell:
        """Return a cell: the same tasks and workflows on another deployment, with its own database, Redis and workers.

        `europe = app.at(database_url=…, redis_url=…)` inherits all other settings, including `shards`. Then
        `resize.via(europe).enqueue(…)` and `order.via(europe).start(…)` return handles of that cell. Create it once.
        """
        _check_settings("at", settings)
        base_settings = settings or (lambda: self.settings)
        cell = Cell(Client(base_settings, overrides, self._client.routes, is_cell=True), self._registry)
        cell._client.middleware = self._client.middleware
        self._clients.add(cell._client)
        return cell

    def close(self) -> None:
        """Close all connections and resources. The application can be used again afterwards."""
        self._resources.close()
        super().close()

    aclose = async_variant(close)  # type: ignore[arg-type]


def _check_settings(called: str, settings: object) -> None:
    if settings is not None and not isinstance(settings, Settings) and not callable(settings):
        raise TypeError(
            f"{called}(…): expected Settings(…), or single settings by name, such as {called}(namespace='shop'), found "
            f"{for_message(settings)}."
        )


def _code(function: Callable[..., Any]) -> object:
    """Return the code object of a function. A module that is imported twice defines a function twice, with one code."""
    return getattr(inspect.unwrap(function), "__code__", function)
