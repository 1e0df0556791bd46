"""Enter and leave a workflow's code in a thread, refuse changes by queries, and describe where the code waits.

Queries and validators may change nothing. Commands and random numbers call `Commander.check_unseen`. Objects of asyncio
do not. During a query, a profile function (as in `guards.py`) therefore checks every call, and refuses those that would
change an event, a queue or a future.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from orchestrator.domain.code.activation import WaitingPlaces
from orchestrator.sdk.code.commander import Commander, current, enter
from orchestrator.sdk.code.guards import guarded, is_own_code, watch


@contextmanager
def inside(commander: Commander, *, watched: bool = True) -> Iterator[None]:
    """Enter a workflow: make its loop the running one, and check its calls."""
    before, loop, hooks = enter(commander), asyncio._get_running_loop(), sys.get_asyncgen_hooks()
    asyncio._set_running_loop(commander.loop)
    sys.set_asyncgen_hooks(firstiter=commander.loop.keep_generator, finalizer=_ignore)
    try:
        with guarded() if watched else ExitStack():
            yield
    finally:
        sys.set_asyncgen_hooks(*hooks)
        asyncio._set_running_loop(loop)
        enter(before)


@contextmanager
def outside() -> Iterator[None]:
    """Leave the workflow temporarily, to run other code in its thread."""
    before, loop, profile = enter(None), asyncio._get_running_loop(), sys.getprofile()
    sys.setprofile(None)
    asyncio._set_running_loop(None)
    if before is not None:
        before.is_away = True
    try:
        yield
    finally:
        if before is not None:
            before.step += 1
            before.is_away = False
        asyncio._set_running_loop(loop)
        enter(before)
        sys.setprofile(profile)


def _ignore(_: object) -> None:
    """Ignore garbage-collected asynchronous generators: the loop keeps them until the run is evicted."""


_CHANGING_METHODS: dict[CodeType, str] = {
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
    if hasattr(kind, name)  # methods that this Python has
}
_QUEUE_CONSTRUCTOR = asyncio.Queue.__init__.__code__
"""The constructor of a queue sets its own event."""
_CHANGING_FUTURE_METHODS = frozenset(
    (*("set_result", "set_exception", "cancel", "uncancel"), *("add_done_callback", "remove_done_callback"))
)


@contextmanager
def read_only(commander: Commander, who: str) -> Iterator[None]:
    """Refuse changes to the workflow while a query or validator (`who`) runs."""
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
    """Return whether a value must be awaited. Close it if it is a coroutine."""
    if inspect.iscoroutine(value):
        value.close()
    return inspect.isawaitable(value)


def _watch(frame: FrameType, event: str, argument: Any) -> None:
    """Check one call. An exception raised here is raised in the calling code."""
    if event == "call":
        name = _CHANGING_METHODS.get(frame.f_code)
        if name is not None and (frame.f_back is None or frame.f_back.f_code is not _QUEUE_CONSTRUCTOR):
            _refuse(name)
    elif event == "c_call":
        owner = getattr(argument, "__self__", None)
        if isinstance(owner, asyncio.Future) and argument.__name__ in _CHANGING_FUTURE_METHODS:
            _refuse(f"{type(owner).__name__}.{argument.__name__}()")
    watch(frame, event, argument)


def _refuse(action: str) -> None:
    commander = current()
    if commander is not None:
        commander.check_unseen(action)


class RunRandom(random.Random):
    """The random number generator of a run. Queries may not use it."""

    def __init__(self, commander: Commander) -> None:
        self._commander = commander
        super().__init__(commander.origin)

    def _check(self) -> None:
        self._commander.check_unseen("ctx.random")

    def random(self) -> float:
        """Return the next number from 0 to 1."""
        self._check()
        return super().random()

    def getrandbits(self, k: int, /) -> int:
        """Return the next number of `k` bits."""
        self._check()
        return super().getrandbits(k)

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """Return the next number of a normal distribution. Every second one was computed by the call before."""
        self._check()
        return super().gauss(mu, sigma)

    def seed(self, *args: Any, **kwargs: Any) -> None:
        self._check()
        super().seed(*args, **kwargs)

    def setstate(self, state: Any) -> None:
        """Restore a state returned by `getstate`."""
        self._check()
        super().setstate(state)


_MAX_ITEMS = 5
"""The maximum number of lines, signals and updates to report per run: there may be thousands."""
_MAX_HANDLERS = 20
_MAX_LENGTH = 200
_INNER = ("cr_await", "gi_yieldfrom", "ag_await")
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")


def frame_location(frame: FrameType) -> str:
    """Return the location of a frame: `shop.py, line 7, in order`."""
    return _location(frame.f_code, frame.f_lineno)


def _location(code: CodeType, number: int) -> str:
    return f"{Path(code.co_filename).name}, line {number}, in {code.co_name}"


def waiting(
    commander: Commander, updates: Iterable[str], handlers: Mapping[tuple[str, str], list[str]]
) -> WaitingPlaces:
    """Return where the code of a run waits, and what it handles. The cost does not grow with the number of waits."""
    places = (_waiting_line(coroutine) for coroutine in commander.loop.first_suspended(_MAX_ITEMS))
    signals = (box.name for box in commander.mailboxes.values() if box.is_awaited)
    return WaitingPlaces(
        list(dict.fromkeys(filter(None, places))),
        list(islice(signals, _MAX_ITEMS)),
        list(islice(updates, _MAX_ITEMS)),
        [(kind, name, names) for (kind, name), names in islice(handlers.items(), _MAX_HANDLERS)],
    )


def _waiting_line(coroutine: Any) -> str:
    """Return the innermost line of the project's own code at which a coroutine waits."""
    own_frame: FrameType | None = None
    while coroutine is not None:
        frame = next((frame for name in _FRAMES if (frame := getattr(coroutine, name, None)) is not None), None)
        if frame is not None and is_own_code(frame):
            own_frame = frame
        coroutine = next((inner for name in _INNER if (inner := getattr(coroutine, name, None)) is not None), None)
    return "" if own_frame is None else _source_line(own_frame.f_code, own_frame.f_lineno)


@lru_cache(maxsize=4096)
def _source_line(code: CodeType, number: int) -> str:
    line = linecache.getline(code.co_filename, number).strip()
    text = f"{_location(code, number)}: {line}" if line else _location(code, number)
    return text[:_MAX_LENGTH].encode(errors="replace").decode()  # file names need not be valid text
