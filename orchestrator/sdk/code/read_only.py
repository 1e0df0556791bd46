"""Queries and validators look at a workflow, and may change nothing of it.

Commands and random numbers ask `Commander.check_unseen`. Objects of asyncio do not, so during a query the interpreter
reports every call (it is a profile function, as in `guards.py`), and a call that would change an event, a queue or a
future is refused before it begins.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from orchestrator.sdk.code.commander import Commander, current
from orchestrator.sdk.code.guards import watch

_CHANGING: dict[CodeType, str] = {
    getattr(kind, name).__code__: f"{kind.__name__}.{name}()"
    for kind, names in (
        (asyncio.Event, "set clear"),
        (asyncio.Lock, "release"),
        (asyncio.Semaphore, "release"),
        (asyncio.Condition, "notify notify_all"),
        (asyncio.Queue, "put_nowait get_nowait task_done shutdown"),
        (asyncio.Handle, "cancel"),
        (asyncio.TimerHandle, "cancel"),
    )
    for name in names.split()
    if hasattr(kind, name)  # as far as this Python has it
}
_MAKES_ITS_OWN = asyncio.Queue.__init__.__code__
"""A new queue sets an event of its own."""
_FUTURES = frozenset(
    (*("set_result", "set_exception", "cancel", "uncancel"), *("add_done_callback", "remove_done_callback"))
)


@contextmanager
def read_only(commander: Commander, who: str) -> Iterator[None]:
    """Refuse changes of a workflow while a query or validator (`who`) looks at it."""
    before = sys.getprofile()
    commander.read_only = who
    commander.loop.sealed = True
    sys.setprofile(_watch)
    try:
        yield
    finally:
        sys.setprofile(before)
        commander.loop.sealed = False
        commander.read_only = ""


def is_awaitable(value: object) -> bool:
    """Say whether a function that only looks has returned something to await; a coroutine is closed."""
    if inspect.iscoroutine(value):
        value.close()
    return inspect.isawaitable(value)


def _watch(frame: FrameType, event: str, argument: Any) -> None:
    """Look at one call; raising here raises in the code that makes it."""
    if event == "call":
        name = _CHANGING.get(frame.f_code)
        if name is not None and (frame.f_back is None or frame.f_back.f_code is not _MAKES_ITS_OWN):
            _refuse(name)
    elif event == "c_call":
        owner = getattr(argument, "__self__", None)
        if isinstance(owner, asyncio.Future) and argument.__name__ in _FUTURES:
            _refuse(f"{type(owner).__name__}.{argument.__name__}()")
    watch(frame, event, argument)


def _refuse(what: str) -> None:
    commander = current()
    if commander is not None:
        commander.check_unseen(what)


class RunRandom(random.Random):
    """The random numbers of a run, which a query may not take."""

    def __init__(self, commander: Commander) -> None:
        self._commander = commander
        super().__init__(commander.origin)

    def _check(self) -> None:
        self._commander.check_unseen("ctx.random")

    def random(self) -> float:
        """Return the next number, from 0 to 1."""
        self._check()
        return super().random()

    def getrandbits(self, k: int, /) -> int:
        """Return the next number of `k` bits."""
        self._check()
        return super().getrandbits(k)

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """Return the next number of a normal distribution; every second one was kept from the call before."""
        self._check()
        return super().gauss(mu, sigma)

    def seed(self, *args: Any, **kwargs: Any) -> None:
        """Begin anew."""
        self._check()
        super().seed(*args, **kwargs)

    def setstate(self, state: Any) -> None:
        """Go on as `getstate` left it."""
        self._check()
        super().setstate(state)
