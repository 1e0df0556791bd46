"""`Celery(…)`: the application."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orchestrator.compat.celery import conf as settings
from orchestrator.compat.celery import result as results
from orchestrator.compat.celery import signals
from orchestrator.compat.celery.app import calls, periodic, registry, routes
from orchestrator.compat.celery.app.control import Control
from orchestrator.compat.celery.app.current import apps, current_task
from orchestrator.compat.celery.app.registry import PARTS, REFUSED, Registry, each, import_related, star_each
from orchestrator.compat.celery.app.task import Task as BaseTask
from orchestrator.compat.celery.canvas import signature
from orchestrator.compat.celery.exceptions import AttributeNotCovered, NotCovered, NotRegistered
from orchestrator.compat.celery.utils import imported
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.names import module_name
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE, CallOptions
from orchestrator.sdk.tasks.signature import Signature as NativeSignature
from orchestrator.sdk.tasks.task import Task as NativeTask
from orchestrator.settings import Settings, load_settings

_DEFAULT_QUEUE = "celery"
"""Celery's default queue."""


class Celery:
    """Celery's application on top of an `Orchestrator`, which is its attribute `orchestrator`."""

    task_cls: Any = BaseTask

    def __init__(
        self,
        main: str | None = None,
        *,
        backend: str | None = None,
        broker: str | None = None,
        include: Sequence[str] | None = None,
        set_as_current: bool = True,
        changes: Mapping[str, Any] | None = None,
        config_source: Any = None,
        namespace: str | None = None,
        task_cls: Any = None,
        **kwargs: Any,
    ) -> None:
        self.main = main
        self.conf: Any = settings.Conf()
        self._tasks = Registry()
        self._pending: list[Callable[[], None]] = []
        """Imports of `autodiscover_tasks` that run when tasks are needed."""
        self._plain_cache = (-1, False)
        self._entries: dict[str, periodic.Entry] = {}
        self._is_finalized = self._is_finalizing = False
        self.on_configure, self.on_after_configure, self.on_after_finalize, self.on_after_fork = (
            signals.Signal(name) for name in ("configure", "after_configure", "after_finalize", "after_fork")
        )
        self.orchestrator = Orchestrator(self._settings)
        """The native application."""
        self.orchestrator._registry.modules.afterwards.append(self.finalize)
        registry.install(self)
        if task_cls is not None:
            self.task_cls = imported(task_cls)
        values = {"broker_url": broker, "result_backend": backend, "include": include, **(changes or {})}
        values |= {name: value for name, value in kwargs.items() if name not in PARTS}
        self.conf.apply({name: value for name, value in values.items() if value is not None})
        if config_source is not None:
            self.config_from_object(config_source, namespace=namespace)
        for name, function in (("map", each), ("starmap", star_each)):
            self._task_from(function, name=f"celery.{name}", base=self._base_class)
        if set_as_current:
            self.set_current()

    # -- what it is

    @property
    def __orchestrator__(self) -> Orchestrator:
        return self.orchestrator

    def __repr__(self) -> str:
        return f"<Celery {self.main or '__main__'}>"

    if not TYPE_CHECKING:  # for a type checker, `__getattr__` would make every name valid

        def __getattr__(self, name: str) -> Any:
            if name in REFUSED:
                raise AttributeNotCovered(f"app.{name}", REFUSED[name])
            raise AttributeError(f"'Celery' object has no attribute {name!r}")

    def set_current(self) -> None:
        apps.current = self

    set_default = set_current

    def close(self) -> None:
        self.orchestrator.close()

    def __enter__(self) -> Celery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settings(self) -> Settings:
        native = load_settings()
        urls: dict[str, Any] = {
            name: url for name, url in settings.stores(self.conf).items() if not getattr(native, name)
        }
        return load_settings(**urls) if urls and not native.api_url else native

    # -- configuration

    def config_from_object(self, obj: Any, force: bool = False, namespace: str | None = None, **_: Any) -> None:
        """Read settings from an object, a module or its name; with `namespace`, those with that prefix."""
        self.conf.add_source(obj, namespace)
        if force:
            self.conf.load()

    def config_from_envvar(self, variable_name: str, silent: bool = False, force: bool = False) -> None:
        """Read settings from the module that an environment variable names."""
        name = os.environ.get(variable_name)
        if name:
            self.config_from_object(name, force=force)
        elif not silent:
            raise NotCovered(f"config_from_envvar({variable_name!r})", "The variable is not set.")

    def add_defaults(self, fun: Any) -> None:
        """Set settings that have no value yet."""
        values = fun() if callable(fun) else fun
        self.conf.apply({name: value for name, value in values.items() if not self.conf.is_given(name)})

    def _configure(self) -> None:
        """Load the settings, and send the configuration signals."""
        if not self._is_configured:
            self.__dict__["_is_configured"] = True
            self.conf.load()
            self.on_configure.send(self)
            for task in self._tasks.values():
                routes.annotate(task, self.conf)
            self.on_after_configure.send(self, source=self.conf)

    _is_configured = False

    def autodiscover_tasks(self, packages: Any = None, related_name: str | None = "tasks", force: bool = False) -> None:
        """Import the module `tasks` of these packages, or of Django's apps, when tasks are needed."""

        def discover() -> None:
            for package in registry.packages(packages):
                import_related(package, related_name)

        if force:
            discover()
        else:
            self._pending.append(discover)
            self._is_finalized = False

    def finalize(self, **_: Any) -> None:
        """Import the task modules, and register all tasks with the native application."""
        if self._is_finalized or self._is_finalizing:
            return
        self._is_finalizing = True
        try:
            registry.set_up()
            self._configure()
            signals.import_modules.send(self)
            for name in (*self.conf.imports, *self.conf.include):
                importlib.import_module(name)
            while self._pending:
                self._pending.pop(0)()
            for register in apps.shared:
                register(self)
            for task in self._tasks.values():
                task._registered()
            self.on_after_finalize.send(self)
            periodic.declare(self)
            self._is_finalized = True
        finally:
            self._is_finalizing = False

    # -- tasks

    @property
    def Task(self) -> Any:  # noqa: N802  # Celery's name
        return self.__dict__.get("_task_class") or self._base_class

    @Task.setter
    def Task(self, base: Any) -> None:  # noqa: N802
        self.__dict__["_task_class"] = base

    @cached_property
    def _base_class(self) -> Any:
        return type("Task", (self.task_cls,), {"app": self, "__module__": self.task_cls.__module__, "abstract": True})

    @property
    def tasks(self) -> Registry:
        """Registered tasks by name."""
        if not self._is_finalized and not self._is_finalizing:
            for register in apps.shared:
                register(self)
        return self._tasks

    def task(self, *args: Any, **options: Any) -> Any:
        """Register a function as a task: `@app.task`, or `@app.task(bind=True, max_retries=5)`."""
        if len(args) == 1 and callable(args[0]):
            return self._task_from(args[0], **options)
        if args:
            raise TypeError(f"@task() takes exactly 1 argument ({len(args)} given)")
        return lambda function: self._task_from(function, **options)

    def _task_from(
        self, fun: Any, name: str | None = None, base: Any = None, bind: bool = False, **options: Any
    ) -> BaseTask:
        name = name or self.gen_task_name(fun.__name__, fun.__module__)
        if name in self._tasks:
            return self._tasks[name]
        for ignored in ("shared", "lazy", "filter", "_force_evaluate", "accept_magic_kwargs"):
            options.pop(ignored, None)
        if "autoretry_for" in options:
            options["autoretry_for"] = tuple(options["autoretry_for"])
        cls = type(
            fun.__name__,
            (base or self.Task,),
            {
                **options,
                "app": self,
                "name": name,
                "run": fun if bind else staticmethod(fun),
                "bind": bind,
                "abstract": False,
                "__doc__": fun.__doc__,
                "__module__": fun.__module__,
                "__wrapped__": fun,
            },
        )
        return self._add(cls())

    def register_task(self, task: Any, **options: Any) -> BaseTask:
        """Register a task class or its instance."""
        if isinstance(task, type):
            task = task()
        for name, value in options.items():
            setattr(task, name, value)
        task.name = task.name or self.gen_task_name(type(task).__name__, type(task).__module__)
        task.app = self
        registered: BaseTask = task
        return self._add(registered)

    def _add(self, task: BaseTask) -> BaseTask:
        self._tasks[task.name] = task
        if self._is_configured:
            routes.annotate(task, self.conf)
        task.on_bound(self)
        if self._is_finalized or self._is_finalizing:
            task._registered()
        return task

    def gen_task_name(self, name: str, module: str) -> str:
        """Return the default name of a task: module and function."""
        if module == "__main__":
            module = self.main or module_name(_InMain)
        return f"{module}.{name}"

    def _by_name(self, name: str) -> NativeTask[..., Any]:
        """Return a native task for a name that only workers know."""

        def function(*args: Any, **kwargs: Any) -> Any:
            raise NotRegistered(name)

        queue = self._queue(self.conf.task_default_queue)
        signature = NativeSignature(name, function)
        return NativeTask(self.orchestrator._client, name, function, CallOptions(queue=queue), signature)

    def send_task(
        self,
        name: str,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        countdown: float | None = None,
        eta: datetime | None = None,
        task_id: str | None = None,
        link: Any = None,
        link_error: Any = None,
        **options: Any,
    ) -> Any:
        """Enqueue a task by its name, which this program need not have registered."""
        if self.conf.task_always_eager and name in self.tasks:
            return self.tasks[name].apply(args, kwargs, link, link_error, task_id)
        times = {key: value for key, value in (("countdown", countdown), ("eta", eta)) if value is not None}
        return calls.publish(name, args or (), kwargs or {}, task_id, link, link_error, {**times, **options}, self)

    # -- routes, queues, priorities

    @property
    def _is_plain(self) -> bool:
        """Return whether no call runs eagerly or is routed by a function; cached until a setting changes."""
        if self._plain_cache[0] != self.conf._version or not self._is_configured:
            self._configure()
            is_plain = not self.conf.task_always_eager and self._is_routed_by_name
            self._plain_cache = (self.conf._version, is_plain)
        return self._plain_cache[1]

    @property
    def _is_routed_by_name(self) -> bool:
        return not any(callable(router) for router in routes.listed(self.conf.task_routes))

    def _queue(self, name: str) -> str:
        """Return the native name of a queue: Celery's default queue is `default` here."""
        return DEFAULT_QUEUE if name == _DEFAULT_QUEUE else name

    def _celery_queue(self, name: str) -> str:
        return _DEFAULT_QUEUE if name == DEFAULT_QUEUE else name

    def _priority(self, priority: int) -> int:
        """Return the native priority: higher goes first, as in RabbitMQ; Celery with Redis has the reverse order."""
        is_redis = str(self.conf.broker_url or "").startswith(("redis", "unix", "sentinel"))
        return -int(priority) if is_redis else min(100, int(priority))

    # -- results, canvas and control

    def AsyncResult(self, id: str, **kwargs: Any) -> Any:  # noqa: N802  # Celery's names
        kwargs.pop("app", None)
        return results.AsyncResult(id, app=self, **kwargs)

    def GroupResult(self, id: str | None = None, results: Any = None, **kwargs: Any) -> Any:  # noqa: N802
        return results.GroupResult(id, results, app=self, **kwargs)

    def ResultSet(self, results: Any, **kwargs: Any) -> Any:  # noqa: N802
        return results.ResultSet(results, app=self, **kwargs)

    def signature(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["app"] = self
        return signature(*args, **kwargs)

    subtask = signature

    @cached_property
    def control(self) -> Control:
        return Control(self)

    @property
    def current_task(self) -> Any:
        return current_task._get_current_object()

    current_worker_task = current_task

    @property
    def timezone(self) -> Any:
        return calls.zone(self)

    def now(self) -> datetime:
        """Return the time in the application's time zone."""
        return datetime.now(calls.zone(self))

    def add_periodic_task(
        self,
        schedule: Any,
        sig: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> str:
        """Schedule a call; return the schedule's name."""
        return periodic.add(self, schedule, sig, args, kwargs or {}, name, options)


class _InMain:
    """Stands for an object of the module `__main__`."""


_InMain.__module__ = "__main__"


def _default() -> Celery:
    return Celery("default", set_as_current=False)


apps.default = _default
