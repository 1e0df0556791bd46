"""Runs tasks on programs that poll the HTTP API for work: offers the work, and waits for its end.

The watcher of an execution recovers losses. If Redis has lost the work, the watcher offers it again, first to
the program that held it. If the program becomes silent, the watcher offers the work to others. A program learns that
its completion counts once the report is in Postgres. So work can live in Redis, where the API finds it without a
database query, and losing Redis costs only time.
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

from orchestrator.domain.executors.builtin import MAX_BODY, Pull, log_lines, reported, request_body
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

_POLL_INTERVAL = 1.0
"""Seconds between two checks of all watched work, to detect silent holders."""
_THREADS = 2


class PullExecutor:
    """Offers work, and waits until it is done."""

    options: ClassVar[type[Pull]] = Pull

    def __init__(self, setup: Setup) -> None:
        settings = setup.settings.of_shard(0)  # the HTTP API uses the keys of the first shard, with one generation
        self._redis = connect(settings.require_redis())
        keys = Keys.of(settings)
        self._pulls = Pulls(self._redis, keys)
        self._payloads = store_of(settings)
        self._notifications = PullNotifications(self._redis, keys.pull_ends, one_by_one=False)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pull")
        self._waiting: dict[str, tuple[State | None, asyncio.Future[State], float]] = {}
        """Watchers by work name: the last seen state, the future for the next state, and when the holder's silence is
        too long."""
        self._observed_time = 0.0
        """Seconds in which holders could send heartbeats: while checks are slow, Redis is slow for heartbeats, too."""
        self._urgent: set[str] = set()
        self._wakeup = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None

    async def submit(self, execution: Execution) -> str:
        """Offer the work once, under the execution's name. Programs get it when it is watched."""
        await self._offer_work(execution)
        return execution.name

    async def _offer_work(self, execution: Execution, *, again: bool = False) -> None:
        if not await self._call(lambda: self._pulls.offer(self._offer(execution), again=again)):
            raise Unreachable("Redis has restarted or was flushed, and no leader uses it yet")

    def _offer(self, execution: Execution) -> Offer:
        """Return the offer. A large body goes to the payload store instead of the memory of Redis."""
        options, stored = _options(execution), b""
        body = request_body(execution, options.params)
        if self._payloads is not None and len(body) > self._payloads.inline:
            if len(body) > MAX_BODY:
                raise PayloadError(
                    f"The work of task {execution.task!r} has {len(body):,} bytes as JSON; a pulling worker can "
                    f"receive at most {MAX_BODY:,}. Pass a reference to the data instead."
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
        """Wait for the completion, and return its outcome. The holder's silence counts from the start of this call."""
        loop, options = asyncio.get_running_loop(), _options(execution)
        seen: State | None = None
        with self._notifications.listening([external_id], partial(self._on_notification, loop, external_id)):
            while True:
                previous, seen = seen, await self._next_state(external_id, seen, options.lease)
                if seen.state == "leased" and seen.leases > (0 if previous is None else previous.leases):
                    watcher.log(
                        f"{seen.worker} has it" if seen.worker else "the worker that had it before still has it"
                    )
                if seen.progress and (previous is None or seen.progress != previous.progress):
                    progress = msgspec.json.decode(seen.progress)
                    watcher.progress(progress["fraction"], message=progress["text"])
                if seen.state == "done":
                    if lines := log_lines(seen.outcome):
                        watcher.log("\n".join(lines))
                    return _outcome(seen)
                if seen.state == "lost":
                    silent = f"{seen.leases} had it and were silent for {options.lease:g} s, {seen.worker} last"
                    return Broken("LeaseLost", f"{silent}.")
                if seen.state in ("ended", "cancelled"):
                    raise Gone(f"No worker has {external_id} any longer: it was {seen.state}.")
                if not seen.state:
                    grace = f"unless its worker is heard from within {options.lease:g} s"
                    watcher.log(f"Redis has lost it: it is offered again {grace}", level="warning")
                    await self._offer_work(execution, again=True)
                    seen = None

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002  # the external id is the name
        """Withdraw the work. The holder learns that from its next heartbeat, and its completion is refused."""
        await self._call(partial(self._pulls.cancel, execution.name))

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Confirm to the holder that the end is in Postgres."""
        await self._call(partial(self._pulls.release, external_id))

    async def close(self) -> None:
        """Close the threads and the connection."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait([self._poller])
        await asyncio.get_running_loop().run_in_executor(None, self._notifications.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._redis.close()

    def _on_notification(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits
            loop.call_soon_threadsafe(self._check_soon, name)

    def _check_soon(self, name: str) -> None:
        self._urgent.add(name)
        self._wakeup.set()

    async def _next_state(self, name: str, seen: State | None, lease: float) -> State:
        """Wait until the state of the work differs from the one last seen, and return it."""
        future: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._waiting[name] = seen, future, self._observed_time + lease
        if seen is None:
            self._check_soon(name)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            return await future
        finally:
            if self._waiting.get(name, (None, None))[1] is future:
                del self._waiting[name]

    async def _poll(self) -> None:
        """Read the states of all watched work every second, and of notified work at once, in one call for all."""
        try:
            await self._poll_while_waiting()
        finally:
            for _, future, _ in self._waiting.values():  # on a defect, watchers must not wait for ever
                if not future.done():
                    future.set_exception(Unreachable("the execution is no longer watched"))

    async def _poll_while_waiting(self) -> None:
        due, checked_at = 0.0, time.monotonic()
        while self._waiting:
            now = time.monotonic()
            self._observed_time += min(now - checked_at, 2 * _POLL_INTERVAL)
            checked_at = now
            names = list(self._waiting) if now >= due else [name for name in self._urgent if name in self._waiting]
            due = now + _POLL_INTERVAL if now >= due else due
            self._urgent.clear()
            self._wakeup.clear()
            silent = {name: beat for name in names if (beat := self._last_beat(name))}
            try:
                states: dict[str, State] | Unreachable = await self._call(partial(self._pulls.poll, names, silent))
            except Unreachable as error:
                states = error
            for name in names:
                seen, future, _ = self._waiting.get(name, (None, None, 0.0))
                if future is None or future.done():
                    continue
                if isinstance(states, Unreachable):
                    future.set_exception(states)
                elif states[name] != seen:
                    future.set_result(states[name])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), max(0.0, due - time.monotonic()))

    def _last_beat(self, name: str) -> bytes:
        """Return the last heartbeat of a holder that has been silent for a whole lease; else an empty value."""
        seen, _, silent_until = self._waiting[name]
        return seen.beat if seen is not None and seen.state == "leased" and self._observed_time >= silent_until else b""

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
        return Broken("UnreadableOutput", f"The answer of {seen.worker} cannot be read: {seen.problem}.")
    answer = msgspec.json.decode(seen.outcome)
    return reported(answer["error"]) if answer.get("error") else finished(answer.get("result"))
