"""Tasks that an existing RQ fleet runs.

RQ does not say by itself that a job has ended, so one look at intervals shows all that are waited for, in one round
trip. Its library blocks: a few threads, shared by all executions, call it.
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
from orchestrator.workers.executors.protocol import Gone, Looks, Setup, Unequipped, Unreachable, Watcher

T = TypeVar("T")

_EVERY = 0.5
"""Seconds between two looks."""
_TIMEOUT = 10.0
"""Seconds within which a Redis answers at most; the setting executor_timeout may say fewer."""
_THREADS = 2


class RqExecutor:
    """Hands tasks to RQ, and watches them there."""

    options: ClassVar[type[Rq]] = Rq

    def __init__(self, setup: Setup) -> None:
        self._timeout = min(_TIMEOUT, setup.settings.executor_timeout)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rq")
        self._fleets: dict[str, _Fleet] = {}

    async def submit(self, execution: Execution) -> str:
        """Enqueue a job under the execution's name, unless there is one."""
        fleet, options = self._fleet(execution)
        await fleet.call(rq.submit, execution, options)
        return execution.name

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Return how the job ended; `meta` is shown as progress, and printed lines are logged."""
        fleet, options = self._fleet(execution)
        shown = b""
        while True:
            seen = await fleet.next(external_id, options)
            if seen is None:
                raise Gone(f"RQ has no job {external_id} any more: it was deleted, or its Redis has lost it.")
            if seen.meta != shown:
                shown = seen.meta
                if (said := rq.progress(shown, options.serializer)) is not None:
                    watcher.progress(*said)
            if seen.status == "lost":
                return rq.worker_lost(external_id)
            if seen.has_ended:
                if lines := rq.printed(seen.meta, options.serializer) if options.prints else []:
                    watcher.log("\n".join(lines))
                outcome = await fleet.call(rq.collect, external_id, options)
                if outcome is None:
                    raise Gone(f"RQ has no job {external_id} any more: it was deleted, or its Redis has lost it.")
                return outcome

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Take the job out of its queue, or have its worker stop it; return when it has ended."""
        fleet, options = self._fleet(execution)
        while (seen := await fleet.next(execution.name, options)) is not None and not seen.has_ended:
            await fleet.call(rq.stop, execution.name, options)

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Delete the job and its result."""
        await self._fleet(execution)[0].call(rq.delete, execution.name)

    async def expire(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Have Redis delete the job and its result in a minute."""
        await self._fleet(execution)[0].call(rq.expire, execution.name)

    async def close(self) -> None:
        """Close connections; jobs go on."""
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
            raise Unequipped(f"The address of the RQ fleet's Redis cannot be read: {sentence(str(error))}") from None
        self._where = without_password(url)
        self._threads = threads
        self._looks = Looks(self._look, _EVERY)
        self._queues: set[str] = set()

    async def call(self, what: Callable[..., T], *given: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(what, self._redis, *given))
        except (RedisError, OSError) as error:
            raise Unreachable(f"The Redis of the RQ fleet, {self._where}: {error}") from error

    async def next(self, name: str, options: Rq) -> rq.Seen | None:
        """Return what the next look shows of a job."""
        self._queues.add(options.queue)
        return await self._looks.next(name)

    async def close(self) -> None:
        """Look no more, and close connections."""
        await self._looks.close()
        self._redis.close()

    async def _look(self, names: Collection[str]) -> Mapping[str, rq.Seen]:
        queues, self._queues = self._queues, set()  # a watcher of a job of one puts it back
        return await self.call(rq.look, queues, names)
