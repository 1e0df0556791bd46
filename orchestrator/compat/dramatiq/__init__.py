"""Dramatiq's API: `import orchestrator.compat.dramatiq as dramatiq`.

An actor is a task of the same name. `orchestrator worker --app shop.tasks`, with the module of the actors, runs them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.compat.coverage import DRAMATIQ, refused
from orchestrator.compat.dramatiq.errors import DramatiqError, Retry, TimeLimitExceeded
from orchestrator.compat.dramatiq.messages import (
    DECLARED,
    DEFAULTS,
    PIPED,
    Message,
    app,
    group,
    native_options,
    pipeline,
)
from orchestrator.errors import TaskTimeout
from orchestrator.sdk.app import Orchestrator

__all__ = ["Actor", "DramatiqError", "Message", "Retry", "actor", "app", "group", "pipeline"]

_REFUSED = refused(DRAMATIQ.names["dramatiq"])
_MODULES: dict[str, str] = {}
"""Modules of the actors, by actor name."""


class Actor:
    """A function that workers run. Calling the actor runs it in the current process."""

    def __init__(self, fn: Callable[..., Any], actor_name: str, queue_name: str, options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.actor_name, self.queue_name, self.options = fn, actor_name, queue_name, dict(options)
        chosen = native_options({**DEFAULTS, **options})
        if _MODULES.setdefault(actor_name, fn.__module__) != fn.__module__:
            raise ValueError(f"An actor named {actor_name!r} is already registered.")
        DECLARED[actor_name] = self.options
        app.task(name=actor_name, queue=queue_name, **chosen)(_with_piped_result(fn))

    @property
    def __orchestrator__(self) -> Orchestrator:
        return app

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Actor {self.actor_name}>"

    def message(self, *args: Any, **kwargs: Any) -> Message:
        return self.message_with_options(args=args, kwargs=kwargs)

    def message_with_options(
        self, *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Message:
        """Return a message with options, without sending it."""
        native_options(options)
        return Message(self.queue_name, self.actor_name, args, kwargs or {}, options)

    def send(self, *args: Any, **kwargs: Any) -> Message:
        """Enqueue a call. It is durable when this returns."""
        return self.send_with_options(args=args, kwargs=kwargs)

    def send_with_options(
        self, *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Message:
        """Enqueue a call with options: `delay` in milliseconds, and the options of actors."""
        message = self.message_with_options(args=args, kwargs=kwargs, **options)
        handle = message.task().enqueue(*message.args, **message.kwargs)
        return message.copy(message_id=handle.id)


def actor(
    fn: Callable[..., Any] | None = None,
    *,
    actor_name: str | None = None,
    queue_name: str = "default",
    actor_class: Any = None,
    **options: Any,
) -> Any:
    """Declare an actor: `@actor`, or `@actor(max_retries=3, min_backoff=1000)`."""

    def declare(fn: Callable[..., Any]) -> Actor:
        return Actor(fn, actor_name or fn.__name__, queue_name, options)

    return declare if fn is None else declare(fn)


def _with_piped_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return an actor's function as the worker calls it: with a piped result as the last argument."""

    def ordered(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        return (*args[1:], args[0]) if kwargs.pop(PIPED, False) else args

    if inspect.iscoroutinefunction(fn):

        async def acall(*args: Any, **kwargs: Any) -> Any:
            return await fn(*ordered(args, kwargs), **kwargs)

        return acall

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*ordered(args, kwargs), **kwargs)

    call._interruptions = {TaskTimeout: TimeLimitExceeded}  # type: ignore[attr-defined]
    return call


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise ImportError(f"dramatiq.{name} is not covered: {_REFUSED[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
