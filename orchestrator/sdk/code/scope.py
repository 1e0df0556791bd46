"""Around the code of a workflow: what its thread is set to while it runs, what may only look at it, and where it is.

Queries and validators may change nothing. Commands and random numbers ask `Commander.check_unseen`. Objects of asyncio
do not, so during a query the interpreter reports every call (it is a profile function, as in `guards.py`), and a call
that would change an event, a queue or a future is refused before it begins.
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
    """Be in a workflow: its loop is the running one, and its calls are watched."""
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
    """Be out of the workflow for a while: run something in its thread that is not its code."""
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
    """Do nothing when an asynchronous generator is collected: the loop keeps it until the flow is evicted."""


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
        self._check()
        super().seed(*args, **kwargs)

    def setstate(self, state: Any) -> None:
        """Go on as `getstate` left it."""
        self._check()
        super().setstate(state)


_MOST = 5
"""Lines, signals and updates of one run that are shown: there may be thousands."""
_MOST_HANDLERS = 20
_LONGEST = 200
_INNER = ("cr_await", "gi_yieldfrom", "ag_await")
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")


def place(frame: FrameType) -> str:
    """Return where a frame is: `shop.py, line 7, in order`."""
    return _place(frame.f_code, frame.f_lineno)


def _place(code: CodeType, number: int) -> str:
    return f"{Path(code.co_filename).name}, line {number}, in {code.co_name}"


def waiting(
    commander: Commander, updates: Iterable[str], handlers: Mapping[tuple[str, str], list[str]]
) -> WaitingPlaces:
    """Return where the code of a run waits, which costs the same however much it waits for; and what it answers."""
    places = (_place_of(coroutine) for coroutine in commander.loop.first_suspended(_MOST))
    signals = (box.name for box in commander.mailboxes.values() if box.is_awaited)
    return WaitingPlaces(
        list(dict.fromkeys(filter(None, places))),
        list(islice(signals, _MOST)),
        list(islice(updates, _MOST)),
        [(kind, name, names) for (kind, name), names in islice(handlers.items(), _MOST_HANDLERS)],
    )


def _place_of(waits: Any) -> str:
    """Return the innermost line of the project's own code at which a coroutine waits."""
    found: FrameType | None = None
    while waits is not None:
        frame = next((frame for name in _FRAMES if (frame := getattr(waits, name, None)) is not None), None)
        if frame is not None and is_own_code(frame):
            found = frame
        waits = next((inner for name in _INNER if (inner := getattr(waits, name, None)) is not None), None)
    return "" if found is None else _line(found.f_code, found.f_lineno)


@lru_cache(maxsize=4096)
def _line(code: CodeType, number: int) -> str:
    """Return a line of code, with its place."""
    line = linecache.getline(code.co_filename, number).strip()
    text = f"{_place(code, number)}: {line}" if line else _place(code, number)
    return text[:_LONGEST].encode(errors="replace").decode()  # the name of a file need not be text
