"""An event loop, in a thread of its own, that runs asynchronous tasks side by side."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

from orchestrator.workers.job import Job


class Coroutines:
    """Starts jobs on the loop; the loop starts with the first of them."""

    def __init__(self, run: Callable[[Job], Awaitable[None]]) -> None:
        self._run = run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Run these jobs."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tasks-async", daemon=True).start()
        self._loop.call_soon_threadsafe(self._start, jobs)

    def is_blocked(self, patience: float) -> bool:
        """Say whether the loop does nothing for `patience` seconds, because a task keeps it from running."""
        if self._loop is None:
            return False
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        return not turned.wait(patience)

    def _start(self, jobs: Sequence[Job]) -> None:
        assert self._loop is not None
        for job in jobs:
            task = self._loop.create_task(self._wrap(job))  # keeps its own context, so tasks never see each other's
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _wrap(self, job: Job) -> None:
        await self._run(job)
