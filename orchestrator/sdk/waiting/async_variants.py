"""Async variants of blocking methods: `cancel` and `acancel`, `result` and `aresult`, each from one source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from orchestrator.sdk.waiting.steps import Steps
from orchestrator.sdk.waiting.threads import Threads

P = ParamSpec("P")
R = TypeVar("R")


class _Client(Protocol):
    """Who has threads in which methods can run."""

    @property
    def threads(self) -> Threads: ...


class _Owner(Protocol):
    """The owner of methods with async variants."""

    @property
    def _client(self) -> _Client: ...


S = TypeVar("S", bound=_Owner)


def async_variant(
    method: Callable[Concatenate[S, P], R], steps: Callable[Concatenate[S, P], Steps[R]] | None = None
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the async variant of a method: it does the same, and the event loop goes on meanwhile.

    The method runs in a thread of the client. One that may wait for long is written in `steps`: its async
    variant holds no thread while it waits.
    """

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if steps is None:
            return await self._client.threads.run(method, self, *args, **kwargs)
        return await self._client.threads.complete(steps(self, *args, **kwargs))

    return _named(call, method)


def _named(async_variant: Callable[P, R], method: Callable[..., Any]) -> Callable[P, R]:
    name = f"a{method.__name__}"
    async_variant.__qualname__ = method.__qualname__.removesuffix(method.__name__) + name
    async_variant.__name__ = name
    async_variant.__doc__ = f"Do the same as `{method.__name__}` without blocking the event loop.\n\n{method.__doc__}"
    return async_variant
