"""One poll at intervals for all watchers of a remote side that does not notify."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Generic, TypeVar

Seen = TypeVar("Seen")


class Looks(Generic[Seen]):
    """Polls all watched executions together, and not at all while there are none."""

    def __init__(self, look: Callable[[Collection[str]], Awaitable[Mapping[str, Seen]]], every: float) -> None:
        self._look = look
        self._every = every
        self._wanted: dict[str, asyncio.Future[Seen | Exception | None]] = {}
        self._going: asyncio.Task[None] | None = None

    async def next(self, name: str) -> Seen | None:
        """Return what the next look finds under a name; None if there is nothing."""
        future = self._wanted.get(name)
        if future is None:
            future = self._wanted[name] = asyncio.get_running_loop().create_future()
        if self._going is None or self._going.done():
            self._going = asyncio.create_task(self._go())
        found = await asyncio.shield(future)  # one watcher that stops does not end it for another
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        """Poll no more; remaining watchers are cancelled."""
        for future in self._wanted.values():
            future.cancel()
        self._wanted.clear()
        if self._going is not None:
            self._going.cancel()
            await asyncio.wait([self._going])

    async def _go(self) -> None:
        while self._wanted:
            wanted, self._wanted = self._wanted, {}
            try:
                seen: Mapping[str, Seen] | Exception = await self._look(wanted.keys())
            except Exception as error:  # noqa: BLE001  # it is for those who wait
                seen = error
            except asyncio.CancelledError:
                for future in wanted.values():
                    future.cancel()
                raise
            for name, future in wanted.items():
                if not future.done():
                    future.set_result(seen if isinstance(seen, Exception) else seen.get(name))
            await asyncio.sleep(self._every)
