"""Background work while there are listeners: following Redis in a thread, and checking for outages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import anyio.to_thread
from redis import Redis

from orchestrator.api.context import Api
from orchestrator.api.live.listener import Cursor
from orchestrator.api.live.reads import retrieve_error
from orchestrator.errors import OrchestratorError
from orchestrator.telemetry import Outage, get_logger
from orchestrator.transport.changes import Follower, StreamRead
from orchestrator.transport.connection import UNAVAILABLE, connect, describe
from orchestrator.transport.keys import Keys

log = get_logger("api")

_PAUSE = 0.5
"""Seconds before Redis is tried again after an error."""


class Following:
    """Follows the stream of changes in a thread, and passes each batch to the event loop before it reads the next."""

    def __init__(
        self,
        redis_url: str,
        keys: Keys,
        on_changes: Callable[[StreamRead, Cursor], bool],
        on_outage: Callable[[], bool],
    ) -> None:
        self._url = redis_url
        self._keys = keys
        self._on_changes = on_changes
        """Called in the event loop with each batch; returns whether there are listeners."""
        self._on_outage = on_outage
        """Called in the event loop when Redis fails and when it works again."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_needed = threading.Event()
        self._is_closed = False
        self._start: asyncio.Future[Cursor] | None = None
        """The cursor at which the thread began to follow, once it has."""
        self._redis: Redis | None = None

    async def begin(self) -> None:
        """Start to follow, unless the thread does already. Return once the thread will see all later changes."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            threading.Thread(target=self._run, name="orchestrator-live", args=(loop,), daemon=True).start()
        if self._start is None:
            self._start = loop.create_future()
            self._start.add_done_callback(retrieve_error)
            self._is_needed.set()
        await asyncio.shield(self._start)

    def close(self) -> None:
        """Ask the thread to end; it does so after its current read."""
        self._is_closed = True
        self._is_needed.set()

    # -- run in the thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        redis = connect(self._url)
        outage = Outage(log, "Redis", "live updates are paused")
        try:
            while not self._is_closed and not loop.is_closed():
                self._is_needed.wait()
                try:
                    self._follow(loop, Follower(redis, self._keys), outage)
                except Exception:  # log the defect, and go on: otherwise all listeners would hear nothing
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
                changes = StreamRead() if is_first else follower.wait()
                outage.worked()
                if is_down:
                    is_down = False
                    _call_in_loop(loop, self._on_outage)
            except UNAVAILABLE as error:
                outage.failed(describe(error))
                if not (is_first or is_down):
                    is_down = True
                    _call_in_loop(loop, self._on_outage)
                if is_first:
                    self._is_needed.clear()
                    _call_in_loop(loop, self._fail, error)
                    return
                pause.wait(_PAUSE)
                continue
            cursor = Cursor(follower.generation, follower.position)
            if not _call_in_loop(loop, self._pass_on, changes, cursor, is_first):
                return
            is_first = False

    # -- run in the event loop

    def _pass_on(self, changes: StreamRead, cursor: Cursor, is_first: bool) -> bool:
        has_listeners = self._on_changes(changes, cursor) or is_first
        if self._start is not None and not self._start.done():
            self._start.set_result(cursor)
        if not has_listeners:
            self._start = None
            self._is_needed.clear()
        return has_listeners

    def _fail(self, error: Exception) -> bool:
        waiting, self._start = self._start, None
        if waiting is not None:
            waiting.set_exception(error)
        return False


def _call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., bool], *arguments: object) -> bool:
    """Call a function in the event loop, and return its result."""

    async def do() -> bool:
        return call(*arguments)

    coroutine = do()
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    except RuntimeError:
        coroutine.close()
        raise


_POSTGRES_DOWN = "Postgres is away", 1.0


class Watch:
    """Looks for outages, for all listeners: when Redis fails or works again, and when the leader's lease may end."""

    def __init__(self, api: Api, has_listeners: Callable[[], bool], notify: Callable[[str], None]) -> None:
        self._api = api
        self._has_listeners = has_listeners
        self._notify = notify
        """Called with the reason why no task can run, or an empty string once the outage is over."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.outage = ""
        """The outage that listeners were last told about."""

    def begin(self) -> None:
        """Start the task that looks for outages, unless it runs."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def check_now(self) -> bool:
        """Look for outages at once, because Redis has failed or works again."""
        self._api.outages.forget()
        self._wake.set()
        return True

    async def _run(self) -> None:
        while self._has_listeners():
            self._wake.clear()
            outage, pause = await anyio.to_thread.run_sync(self._find)
            if outage != self.outage:
                self.outage = outage
                self._api.recent.forget()
                self._notify(outage)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
        self.outage = ""

    def _find(self) -> tuple[str, float]:
        try:
            check = self._api.outages.find()
        except OrchestratorError:
            return _POSTGRES_DOWN
        return check.text, check.pause
