"""The services over HTTP that a worker knows: the registry in Redis, read now and then."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from orchestrator.domain.executors.services import ServiceWorker, in_order
from orchestrator.settings import Settings
from orchestrator.transport import services
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.keys import Keys

_HURRIED = 0.5
"""Seconds between two looks where no service was found."""


class ServiceBook:
    """Knows the services. One read serves all executions within some seconds."""

    def __init__(self, settings: Settings) -> None:
        self._redis = connect(settings.require_redis())
        self._keys = Keys.of(settings)
        self._ttl = settings.registry_ttl
        self._every = settings.registry_refresh
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="services")
        self._looking = asyncio.Lock()
        self._looked_at = -1e9
        self._found: list[ServiceWorker] = []
        self._busy: Counter[str] = Counter()
        """Open requests of each service worker."""

    async def candidates(self, service: str, *, by_load: bool, anew: bool = False) -> list[ServiceWorker]:
        """Return the workers of a service, in the order in which to ask; `anew` reads again where the last were
        away."""
        async with self._looking:
            age = time.monotonic() - self._looked_at
            if age >= (_HURRIED if anew else self._every):
                await self._look()
        found = [one for one in self._found if service in one.services]
        if not found and not anew:
            return await self.candidates(service, by_load=by_load, anew=True)
        return in_order(found, [random.random() for _ in found], self._busy, by_load=by_load)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            look = loop.run_in_executor(self._thread, services.list_live, self._redis, self._keys, self._ttl)
            self._found = await look
        except UNAVAILABLE:
            return  # the last known state is good enough; trouble with Redis is logged elsewhere
        self._looked_at = time.monotonic()

    def begin(self, worker: str) -> None:
        """Count a request that is under way."""
        self._busy[worker] += 1

    def end(self, worker: str) -> None:
        """Count it no more."""
        self._busy[worker] -= 1
        if self._busy[worker] <= 0:
            del self._busy[worker]

    def close(self) -> None:
        """Close the connection."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._redis.close()
