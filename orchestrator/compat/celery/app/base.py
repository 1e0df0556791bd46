"""The application: `Celery(…)`."""

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
"""The queue of tasks that name none, in Celery."""


class Celery:
    """An application of Celery's API, which runs on an `Orchestrator`: that is its attribute `orchestrator`."""

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
        """What `autodiscover_tasks` is to import when tasks are needed."""
        self._plain = (-1, False)
        self._entries: dict[str, periodic.Entry] = {}
        self._is_finalized = self._is_finalizing = False
        self.on_configure, self.on_after_configure, self.on_after_finalize, self.on_after_fork = (
            signals.Signal(name) for name in ("configure", "after_configure", "after_finalize", "after_fork")
        )
        self.orchestrator = Orchestrator(self._settings)
        """The application that does the work."""
        self.orchestrator._registry.modules.afterwards.append(self.finalize)
        registry.install(self)
        if task_cls is not None:
            self.task_cls = imported(task_cls)
        given = {"broker_url": broker, "result_backend": backend, "include": include, **(changes or {})}
        given |= {name: value for name, value in kwargs.items() if name not in PARTS}
        self.conf.take({name: value for name, value in given.items() if value is not None})
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

    if not TYPE_CHECKING:  # for which any name would be an attribute

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
        found = load_settings()
        told: dict[str, Any] = {
            name: url for name, url in settings.stores(self.conf).items() if not getattr(found, name)
        }
        return load_settings(**told) if told and not found.api_url else found

    # -- configuration

    def config_from_object(self, obj: Any, force: bool = False, namespace: str | None = None, **_: Any) -> None:
        """Read settings from an object, a module or its name; those that begin with `namespace_`, if one is given."""
        self.conf.later(obj, namespace)
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
        """Set settings that were not given."""
        given = fun() if callable(fun) else fun
        self.conf.take({name: value for name, value in given.items() if not self.conf.is_given(name)})

    def _configure(self) -> None:
        """Read the settings, and tell who waits for them."""
        if not self._is_configured:
            self.__dict__["_is_configured"] = True
            self.conf.load()
            self.on_configure.send(self)
            for task in self._tasks.values():
                routes.annotate(task, self.conf)
            self.on_after_configure.send(self, source=self.conf)

    _is_configured = False

    def autodiscover_tasks(self, packages: Any = None, related_name: str | None = "tasks", force: bool = False) -> None:
        """Import the module `tasks` of these packages when tasks are needed; without packages, of Django's apps."""

        def discover() -> None:
            for package in registry.packages(packages):
                import_related(package, related_name)

        if force:
            discover()
        else:
            self._pending.append(discover)
            self._is_finalized = False

    def finalize(self, **_: Any) -> None:
        """Import the modules with tasks, and register all tasks with the application that runs them."""
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
        """Registered tasks, by name."""
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
        made = type(
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
        return self._add(made())

    def register_task(self, task: Any, **options: Any) -> BaseTask:
        """Register a task that is a class, or an instance of one."""
        if isinstance(task, type):
            task = task()
        for name, value in options.items():
            setattr(task, name, value)
        task.name = task.name or self.gen_task_name(type(task).__name__, type(task).__module__)
        task.app = self
        found: BaseTask = task
        return self._add(found)

    def _add(self, task: BaseTask) -> BaseTask:
        self._tasks[task.name] = task
        if self._is_configured:
            routes.annotate(task, self.conf)
        task.on_bound(self)
        if self._is_finalized or self._is_finalizing:
            task._registered()
        return task

    def gen_task_name(self, name: str, module: str) -> str:
        """Return the name of a task: its module's and its own."""
        if module == "__main__":
            module = self.main or module_name(_InMain)
        return f"{module}.{name}"

    def _by_name(self, name: str) -> NativeTask[..., Any]:
        """Return a task of ours that only workers have."""

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
        """Call a task by its name; the program need not have it."""
        if self.conf.task_always_eager and name in self.tasks:
            return self.tasks[name].apply(args, kwargs, link, link_error, task_id)
        times = {key: value for key, value in (("countdown", countdown), ("eta", eta)) if value is not None}
        return calls.publish(name, args or (), kwargs or {}, task_id, link, link_error, {**times, **options}, self)

    # -- routes, queues, priorities

    @property
    def _is_plain(self) -> bool:
        """Say whether calls need nothing but their arguments; found out anew after a change of the settings."""
        if self._plain[0] != self.conf._version or not self._is_configured:
            self._configure()
            plain = not self.conf.task_always_eager and self._is_routed_by_name
            self._plain = (self.conf._version, plain)
        return self._plain[1]

    @property
    def _is_routed_by_name(self) -> bool:
        return not any(callable(one) for one in routes.listed(self.conf.task_routes))

    def _queue(self, name: str) -> str:
        """Return a queue's name here: Celery's default queue is ours."""
        return DEFAULT_QUEUE if name == _DEFAULT_QUEUE else name

    def _celery_queue(self, name: str) -> str:
        return _DEFAULT_QUEUE if name == DEFAULT_QUEUE else name

    def _priority(self, priority: int) -> int:
        """Return a priority of ours: higher goes first, as with RabbitMQ; with Redis, Celery has it the other way."""
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
        """Return the time, in the application's time zone."""
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
        """Let a call be made by the clock; return the name of its schedule."""
        return periodic.add(self, schedule, sig, args, kwargs or {}, name, options)


class _InMain:
    """A thing of the module that is run directly."""


_InMain.__module__ = "__main__"


def _default() -> Celery:
    return Celery("default", set_as_current=False)


apps.default = _default
