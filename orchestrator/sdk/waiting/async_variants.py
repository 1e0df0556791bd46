"""Blocking methods and their async variants, such as `cancel` and `acancel`, from one source.

@blocking
def drain(self, timeout: float | None = None) -> Steps[None]:
    ...
    yield Pause(0.25)

adrain = async_variant(drain)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from orchestrator.sdk.waiting.steps import Steps, complete
from orchestrator.sdk.waiting.threads import Threads

P = ParamSpec("P")
R = TypeVar("R")
_STEPS = "_steps_of_call"


class _Client(Protocol):
    @property
    def threads(self) -> Threads: ...


class _Owner(Protocol):
    @property
    def _client(self) -> _Client: ...


S = TypeVar("S", bound=_Owner)


def blocking(steps: Callable[Concatenate[S, P], Steps[R]]) -> Callable[Concatenate[S, P], R]:
    """Return the blocking method of a call that is written as a generator of pauses, because it may wait for long."""

    @functools.wraps(steps)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return complete(steps(self, *args, **kwargs))

    return_type = steps.__annotations__.get("return", "").removeprefix("Steps[").removesuffix("]")
    call.__signature__ = inspect.signature(steps).replace(return_annotation=return_type)  # type: ignore[attr-defined]
    call.__annotations__ = steps.__annotations__ | {"return": return_type}
    vars(call)[_STEPS] = steps
    return call


def async_variant_of(method: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a decorator that replaces a stub with the async variant of a method with overloads."""
    return lambda _: async_variant(method)


def async_variant(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the async variant of a method, which does the same without blocking the event loop.

    The method runs in a thread of the client. A `blocking` method holds no thread during its pauses.
    """
    steps: Callable[Concatenate[S, P], Steps[R]] | None = vars(method).get(_STEPS)

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if steps is None:
            return await self._client.threads.run(method, self, *args, **kwargs)
        return await self._client.threads.complete(steps(self, *args, **kwargs))

    name = f"a{method.__name__}"
    call.__qualname__ = method.__qualname__.removesuffix(method.__name__) + name
    call.__name__ = name
    call.__doc__ = f"Do the same as `{method.__name__}` without blocking the event loop.\n\n{method.__doc__}"
    return call
