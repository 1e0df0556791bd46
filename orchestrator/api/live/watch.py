"""Looks whether anything moves, for as long as somebody listens: an outage sends no events of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import anyio.to_thread

from orchestrator.api.context import Api
from orchestrator.errors import OrchestratorError

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
