"""The current application and task, and shared tasks, which belong to every application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.compat.celery import request

App = Any
"""An application; its class is in a module that imports this one."""


class _Apps:
    """The application behind `current_app`, and shared tasks that wait for one."""

    def __init__(self) -> None:
        self.current: App = None
        self.default: Callable[[], App]
        """Creates an application if the program has none."""
        self.shared: list[Callable[[App], Any]] = []
        """Functions that register a shared task with an application."""


apps = _Apps()


def app_or_default(app: App = None) -> App:
    """Return this application, or the current one."""
    if app is not None:
        return app
    if apps.current is None:
        apps.current = apps.default()
    return apps.current


class Proxy:
    """A proxy for an object that is looked up at each access."""

    def __init__(self, find: Callable[[], Any], name: str = "", doc: str | None = None) -> None:
        object.__setattr__(self, "_find", find)
        object.__setattr__(self, "__name__", name)
        object.__setattr__(self, "__doc__", doc)

    def _get_current_object(self) -> Any:
        return object.__getattribute__(self, "_find")()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._get_current_object())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get_current_object(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._get_current_object(), name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._get_current_object()(*args, **kwargs)

    def __bool__(self) -> bool:
        return self._get_current_object() is not None

    def __eq__(self, other: object) -> bool:
        other = other._get_current_object() if type(other) is Proxy else other
        return bool(self._get_current_object() == other)

    def __hash__(self) -> int:
        return hash(self._get_current_object())

    def __repr__(self) -> str:
        return repr(self._get_current_object())


def _running() -> Any:
    running = request.current.get()
    return None if running is None else running[0]


current_app: Any = Proxy(app_or_default, "current_app")
"""The newest application, or a default one."""
current_task: Any = Proxy(_running, "current_task")
"""The running task of this context."""


def shared_task(*args: Any, **options: Any) -> Any:
    """Register a function as a task of every application, including later ones."""

    def share(function: Callable[..., Any]) -> Any:
        name = options.get("name")

        def register(app: App) -> Any:
            return app._task_from(function, **options)

        apps.shared.append(register)
        if apps.current is not None:
            register(apps.current)

        def find() -> Any:
            app = app_or_default()
            task_name = name or app.gen_task_name(function.__name__, function.__module__)
            return app.tasks[task_name] if task_name in app.tasks else register(app)

        return Proxy(find, function.__name__, function.__doc__)

    if len(args) == 1 and callable(args[0]):
        return share(args[0])
    return share
