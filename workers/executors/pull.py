"""Tasks for programs that poll the HTTP API for work: this offers the work, and waits for its end.

The watcher of an execution keeps the promises. It offers work again that Redis has lost, first to the program that had
it, and work whose program fell silent. A program hears that its completion counts once the report is in Postgres. So
work stands in Redis, where the processes of the API find it without a look into the database, and nothing is lost with
Redis but time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, TypeVar
from uuid import UUID

import msgspec

from orchestrator.domain.executors.builtin import LARGEST_BODY, Pull, reported, request_body, said_lines
from orchestrator.domain.executors.builtin import service_of_pull as service_of
from orchestrator.domain.executors.options import Broken, Execution, Outcome
from orchestrator.errors import PayloadError, Unavailable
from orchestrator.sdk.values.sealing import store_of
from orchestrator.transport.connection import UNAVAILABLE, connect, describe
from orchestrator.transport.keys import Keys
from orchestrator.transport.pull import Offer, Pulls, State
from orchestrator.transport.pull_notifications import PullNotifications
from orchestrator.workers.executors.protocol import Gone, Setup, Unreachable, Watcher, finished

T = TypeVar("T")

_LOOK_EVERY = 1.0
"""Seconds between two looks at everything that is watched: a holder may have fallen silent."""
_THREADS = 2


class PullExecutor:
    """Offers work, and waits until it is done."""

    options: ClassVar[type[Pull]] = Pull

    def __init__(self, setup: Setup) -> None:
        settings = setup.settings.of_shard(0)  # whose keys the HTTP API uses, of one generation
        self._redis = connect(settings.require_redis())
        keys = Keys.of(settings)
        self._pulls = Pulls(self._redis, keys)
        self._payloads = store_of(settings)
        self._news = PullNotifications(self._redis, keys.pull_ends, one_by_one=False)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pull")
        self._waiting: dict[str, tuple[State | None, asyncio.Future[State], float]] = {}
        """The watchers that wait for another state than the one they have seen, and until when the holder may be
        silent."""
        self._fair_time = 0.0
        """Seconds in which holders could be heard: while looks take long, Redis does not answer heartbeats either."""
        self._urgent: set[str] = set()
        self._rung = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    async def submit(self, execution: Execution) -> str:
        """Offer the work under the execution's name, once, to programs that poll once it is watched."""
        await self._offer_work(execution)
        return execution.name

    async def _offer_work(self, execution: Execution, *, again: bool = False) -> None:
        if not await self._call(lambda: self._pulls.offer(self._offer(execution), again=again)):
            raise Unreachable("Redis has restarted or was emptied, and no leader has begun on it yet")

    def _offer(self, execution: Execution) -> Offer:
        """Return what is offered; what is large goes into the payload store, and not into the memory of Redis."""
        options, stored = _options(execution), b""
        body = request_body(execution, options.params)
        if self._payloads is not None and len(body) > self._payloads.inline:
            if len(body) > LARGEST_BODY:
                raise PayloadError(
                    f"What task {execution.task!r} offers has {len(body):,} bytes as JSON, and who pulls is given at "
                    f"most {LARGEST_BODY:,}. Pass a reference to the data instead."
                )
            run = None if execution.run_id is None else UUID(execution.run_id).bytes
            stored = self._payloads.arguments(body, UUID(execution.task_id).bytes, run)
            body = b""
        return Offer(
            name=execution.name,
            service=service_of(execution, options),
            task=execution.task,
            task_id=execution.task_id,
            body=body,
            lease=options.lease,
            max_leases=options.max_leases,
            step=execution.step or "",
            stored=stored,
        )

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Return what was said when it was completed; silence of its holder is counted from here on."""
        loop, options = asyncio.get_running_loop(), _options(execution)
        seen: State | None = None
        with self._news.listening([external_id], partial(self._ring, loop, external_id)):
            while True:
                before, seen = seen, await self._change(external_id, seen, options.lease)
                if seen.state == "leased" and seen.leases > (0 if before is None else before.leases):
                    watcher.log(f"{seen.worker} has it" if seen.worker else "who had it before has it still")
                if seen.progress and (before is None or seen.progress != before.progress):
                    said = msgspec.json.decode(seen.progress)
                    watcher.progress(said["fraction"], message=said["text"])
                if seen.state == "done":
                    if lines := said_lines(seen.outcome):
                        watcher.log("\n".join(lines))
                    return _outcome(seen)
                if seen.state == "lost":
                    silent = f"{seen.leases} had it and fell silent for {options.lease:g} s, {seen.worker} last"
                    return Broken("LeaseLost", f"{silent}.")
                if seen.state in ("ended", "cancelled"):
                    raise Gone(f"Nobody works on {external_id} any more: it was {seen.state}.")
                if not seen.state:
                    grace = f"if nobody who has it is heard of within {options.lease:g} s"
                    watcher.log(f"Redis has lost it: it is offered again {grace}", level="warning")
                    await self._offer_work(execution, again=True)
                    seen = None

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002  # it is the name
        """Take it back; its holder learns that from the next heartbeat, and its completion is refused."""
        await self._call(partial(self._pulls.cancel, execution.name))

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Let the holder know that the end is in Postgres."""
        await self._call(partial(self._pulls.release, external_id))

    async def close(self) -> None:
        """End the threads and the connection."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await asyncio.get_running_loop().run_in_executor(None, self._news.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._redis.close()

    def _ring(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits any more
            loop.call_soon_threadsafe(self._look_at, name)

    def _look_at(self, name: str) -> None:
        self._urgent.add(name)
        self._rung.set()

    async def _change(self, name: str, seen: State | None, lease: float) -> State:
        """Return where it stands as soon as that is something else than what was seen."""
        future: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._waiting[name] = seen, future, self._fair_time + lease
        if seen is None:
            self._look_at(name)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_on())
        try:
            return await future
        finally:
            if self._waiting.get(name, (None, None))[1] is future:
                del self._waiting[name]

    async def _look_on(self) -> None:
        """Look at what something was heard of at once, and at everything every second, in one call."""
        try:
            await self._look_while_wanted()
        finally:
            for _, future, _ in self._waiting.values():  # watchers get the defect, and do not wait for ever
                if not future.done():
                    future.set_exception(Unreachable("nobody looks any more"))

    async def _look_while_wanted(self) -> None:
        due, looked = 0.0, time.monotonic()
        while self._waiting:
            now = time.monotonic()
            self._fair_time += min(now - looked, 2 * _LOOK_EVERY)
            looked = now
            names = list(self._waiting) if now >= due else [name for name in self._urgent if name in self._waiting]
            due = now + _LOOK_EVERY if now >= due else due
            self._urgent.clear()
            self._rung.clear()
            silent = {name: beat for name in names if (beat := self._last_beat(name))}
            try:
                found: dict[str, State] | Unreachable = await self._call(partial(self._pulls.look, names, silent))
            except Unreachable as error:
                found = error
            for name in names:
                seen, future, _ = self._waiting.get(name, (None, None, 0.0))
                if future is None or future.done():
                    continue
                if isinstance(found, Unreachable):
                    future.set_exception(found)
                elif found[name] != seen:
                    future.set_result(found[name])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._rung.wait(), max(0.0, due - time.monotonic()))

    def _last_beat(self, name: str) -> bytes:
        """Return the last heartbeat of a holder that was silent for one lease; empty if it was not."""
        seen, _, until = self._waiting[name]
        return seen.beat if seen is not None and seen.state == "leased" and self._fair_time >= until else b""

    async def _call(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except UNAVAILABLE as error:
            raise Unreachable(f"Redis cannot be used: {describe(error)}") from error
        except Unavailable as error:
            raise Unreachable(f"The payload store cannot be used: {error}") from error


def _options(execution: Execution) -> Pull:
    assert isinstance(execution.options, Pull)
    return execution.options


def _outcome(seen: State) -> Outcome:
    if seen.problem:
        return Broken("UnreadableOutput", f"What {seen.worker} said cannot be read: {seen.problem}.")
    read = msgspec.json.decode(seen.outcome)
    return reported(read["error"]) if read.get("error") else finished(read.get("result"))
