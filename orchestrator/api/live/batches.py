"""One read, in a thread, answers all questions of a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import anyio
import anyio.to_thread

K = TypeVar("K")
V = TypeVar("V")

_PAUSE = 0.02
"""Seconds between two reads, in which more may gather."""


class Batches(Generic[K, V]):
    """Answers all questions since the last read began with one read. No answer is older than its question."""

    def __init__(self, read: Callable[[Sequence[K]], Mapping[K, V]]) -> None:
        self._read = read
        self._asked: dict[K, asyncio.Future[V]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._free: anyio.CapacityLimiter | None = None

    async def get(self, key: K) -> V:
        """Return what a read says of this; raises what went wrong with it."""
        answer = self._asked.get(key)
        if answer is None:
            answer = self._asked[key] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(_looked_at)
        if self._reader is None:
            self._reader = asyncio.create_task(self._answer())
        return await asyncio.shield(answer)

    async def _answer(self) -> None:
        self._free = self._free or anyio.CapacityLimiter(1)
        try:
            await asyncio.sleep(0)  # concurrent requests share a read
            while self._asked:
                asked, self._asked = self._asked, {}
                try:
                    keys = list(asked)
                    found = await anyio.to_thread.run_sync(partial(self._read, keys), limiter=self._free)
                except Exception as error:  # noqa: BLE001  # it is for those who asked
                    for answer in asked.values():
                        answer.set_exception(error)
                else:
                    for key, answer in asked.items():
                        answer.set_result(found[key])
                await asyncio.sleep(_PAUSE)
        finally:
            self._reader = None


def _looked_at(answer: asyncio.Future[V]) -> None:
    """Look at an error whose listener may have gone."""
    if not answer.cancelled():
        answer.exception()
