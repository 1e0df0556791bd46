"""What is looked at for as long as somebody listens: Redis, in a thread, and whether anything moves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import anyio.to_thread
from redis import Redis

from orchestrator.api.context import Api
from orchestrator.api.live.listener import Cursor
from orchestrator.api.live.reads import looked_at
from orchestrator.errors import OrchestratorError
from orchestrator.telemetry import Outage, get_logger
from orchestrator.transport.changes import Follower, Heard
from orchestrator.transport.connection import UNAVAILABLE, connect, describe
from orchestrator.transport.keys import Keys

log = get_logger("api")

_PAUSE = 0.5
"""Seconds before Redis is tried again."""


class Following:
    """Follows while it is wanted, and passes on what it hears to the event loop, before it listens again."""

    def __init__(
        self, redis_url: str, keys: Keys, heard: Callable[[Heard, Cursor], bool], turned: Callable[[], bool]
    ) -> None:
        self._url = redis_url
        self._keys = keys
        self._heard = heard
        """Called in the loop; says whether there are listeners."""
        self._turned = turned
        """Called in the loop when Redis fails, and when it works again."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted = threading.Event()
        self._is_closed = False
        self._began: asyncio.Future[Cursor] | None = None
        """Where it began; done when it has."""
        self._redis: Redis | None = None

    async def begin(self) -> None:
        """Follow, unless that is done already; returns when everything that comes from now on is heard."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            threading.Thread(target=self._run, name="orchestrator-live", args=(loop,), daemon=True).start()
        if self._began is None:
            self._began = loop.create_future()
            self._began.add_done_callback(looked_at)
            self._wanted.set()
        await asyncio.shield(self._began)

    def close(self) -> None:
        """End the thread when it comes round."""
        self._is_closed = True
        self._wanted.set()

    # -- in the thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        redis = connect(self._url)
        outage = Outage(log, "Redis", "listeners hear nothing")
        try:
            while not self._is_closed and not loop.is_closed():
                self._wanted.wait()
                try:
                    self._follow(loop, Follower(redis, self._keys), outage)
                except Exception:  # a defect: say so loudly, and go on rather than leave everybody deaf
                    if not loop.is_closed():
                        log.exception("api.live_events_failed: a defect; listeners continue with the current state")
        finally:
            redis.close()

    def _follow(self, loop: asyncio.AbstractEventLoop, follower: Follower, outage: Outage) -> None:
        pause = threading.Event()
        is_first, is_down = True, False
        while not self._is_closed:
            try:
                if is_first:
                    follower.begin()
                heard = Heard() if is_first else follower.wait()
                outage.worked()
                if is_down:
                    is_down = False
                    _in(loop, self._turned)
            except UNAVAILABLE as error:
                outage.failed(describe(error))
                if not (is_first or is_down):
                    is_down = True
                    _in(loop, self._turned)
                if is_first:
                    self._wanted.clear()
                    _in(loop, self._failed, error)
                    return
                pause.wait(_PAUSE)
                continue
            cursor = Cursor(follower.generation, follower.position)
            if not _in(loop, self._pass_on, heard, cursor, is_first):
                return
            is_first = False

    # -- in the loop

    def _pass_on(self, heard: Heard, cursor: Cursor, is_first: bool) -> bool:
        goes_on = self._heard(heard, cursor) or is_first
        if self._began is not None and not self._began.done():
            self._began.set_result(cursor)
        if not goes_on:
            self._began = None
            self._wanted.clear()
        return goes_on

    def _failed(self, error: Exception) -> bool:
        waiting, self._began = self._began, None
        if waiting is not None:
            waiting.set_exception(error)
        return False


def _in(loop: asyncio.AbstractEventLoop, call: Callable[..., bool], *arguments: object) -> bool:
    """Call something in the loop; return what it says."""

    async def do() -> bool:
        return call(*arguments)

    coroutine = do()
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    except RuntimeError:
        coroutine.close()
        raise


_AWAY = "Postgres is away", 1.0


class Watch:
    """One look for all listeners: when Redis fails or works again, and when the lease would have ended."""

    def __init__(self, api: Api, has_listeners: Callable[[], bool], tell: Callable[[str], None]) -> None:
        self._api = api
        self._has_listeners = has_listeners
        self._tell = tell
        """Called with why nothing moves, or nothing where something does again."""
        self._turned = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.outage = ""
        """What was told last."""

    def begin(self) -> None:
        """Look, unless that is done already."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def turn(self) -> bool:
        """Look at once: something has failed, or works again."""
        self._api.outages.forget()
        self._turned.set()
        return True

    async def _run(self) -> None:
        while self._has_listeners():
            self._turned.clear()
            outage, again = await anyio.to_thread.run_sync(self._look)
            if outage != self.outage:
                self.outage = outage
                self._api.recent.forget()
                self._tell(outage)
            with suppress(TimeoutError):
                async with asyncio.timeout(again):
                    await self._turned.wait()
        self.outage = ""

    def _look(self) -> tuple[str, float]:
        try:
            found = self._api.outages.find()
        except OrchestratorError:
            return _AWAY
        return found.text, found.again
