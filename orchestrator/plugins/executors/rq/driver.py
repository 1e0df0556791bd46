"""Tasks that run as jobs of an existing RQ fleet.

RQ does not notify when a job ends, so a periodic poll reads all awaited jobs in one round trip. RQ's library blocks: a
few threads, shared by all executions, call it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

from redis import Redis
from redis.exceptions import RedisError

from orchestrator.domain.executors.options import Execution, Outcome
from orchestrator.plugins.executors.rq import Rq
from orchestrator.plugins.executors.rq import fleet as rq
from orchestrator.terminal_safe import sentence, without_password
from orchestrator.workers.executors.protocol import Gone, Poller, Setup, Unequipped, Unreachable, Watcher

T = TypeVar("T")

_POLL_INTERVAL = 0.5
"""Seconds between two polls."""
_TIMEOUT = 10.0
"""Seconds for an answer of Redis, unless the setting executor_timeout is lower."""
_THREADS = 2


class RqExecutor:
    """Enqueues tasks as RQ jobs, and watches them."""

    options: ClassVar[type[Rq]] = Rq

    def __init__(self, setup: Setup) -> None:
        self._timeout = min(_TIMEOUT, setup.settings.executor_timeout)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rq")
        self._fleets: dict[str, _Fleet] = {}

    async def submit(self, execution: Execution) -> str:
        """Enqueue a job under the execution's name, unless it exists."""
        fleet, options = self._fleet(execution)
        await fleet.call(rq.submit, execution, options)
        return execution.name

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Wait until the job has ended, and return its outcome. Report `meta` as progress, and log printed lines."""
        fleet, options = self._fleet(execution)
        meta = b""
        while True:
            state = await fleet.next(external_id, options)
            if state is None:
                raise Gone(f"RQ has no job {external_id} any more: it was deleted, or its Redis has lost it.")
            if state.meta != meta:
                meta = state.meta
                if (values := rq.progress(meta, options.serializer)) is not None:
                    watcher.progress(*values)
            if state.status == "lost":
                return rq.worker_lost(external_id)
            if state.has_ended:
                if lines := rq.printed(state.meta, options.serializer) if options.prints else []:
                    watcher.log("\n".join(lines))
                outcome = await fleet.call(rq.collect, external_id, options)
                if outcome is None:
                    raise Gone(f"RQ has no job {external_id} any more: it was deleted, or its Redis has lost it.")
                return outcome

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Cancel the job until it has ended: remove it from its queue, or make its worker stop it."""
        fleet, options = self._fleet(execution)
        while (state := await fleet.next(execution.name, options)) is not None and not state.has_ended:
            await fleet.call(rq.stop, execution.name, options)

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Delete the job and its result."""
        await self._fleet(execution)[0].call(rq.delete, execution.name)

    async def expire(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Let Redis delete the job and its result in a minute."""
        await self._fleet(execution)[0].call(rq.expire, execution.name)

    async def close(self) -> None:
        """Close connections. Jobs continue."""
        for fleet in self._fleets.values():
            await fleet.close()
        self._fleets.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fleet(self, execution: Execution) -> tuple[_Fleet, Rq]:
        options = cast(Rq, execution.options)
        url = options.url or os.environ.get(options.url_variable, "")
        if not url:
            raise Unequipped(
                f"Task {execution.task} is for an RQ fleet whose Redis this worker does not know: set "
                f"{options.url_variable} in its environment, or the option url."
            )
        if url not in self._fleets:
            self._fleets[url] = _Fleet(url, self._threads, self._timeout)
        return self._fleets[url], options


class _Fleet:
    """The RQ workers of one Redis."""

    def __init__(self, url: str, threads: ThreadPoolExecutor, timeout: float) -> None:
        try:
            self._redis = Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        except ValueError as error:
            raise Unequipped(f"The address of the RQ fleet's Redis is not valid: {sentence(str(error))}") from None
        self._address = without_password(url)
        self._threads = threads
        self._poller = Poller(self._poll, _POLL_INTERVAL)
        self._queues: set[str] = set()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, partial(function, self._redis, *args)
            )
        except (RedisError, OSError) as error:
            raise Unreachable(f"The Redis of the RQ fleet, {self._address}: {error}") from error

    async def next(self, name: str, options: Rq) -> rq.JobState | None:
        """Return the state of a job from the next poll."""
        self._queues.add(options.queue)
        return await self._poller.next(name)

    async def close(self) -> None:
        """Stop polling, and close connections."""
        await self._poller.close()
        self._redis.close()

    async def _poll(self, names: Collection[str]) -> Mapping[str, rq.JobState]:
        queues, self._queues = self._queues, set()  # the watchers of their jobs add them again
        return await self.call(rq.poll, queues, names)
