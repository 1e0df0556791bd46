"""Runs tasks on services over HTTP: `POST /exec/<service>` with `{input, params, request_id}`.

The request is the execution: its watcher holds the connection on which the answer arrives. If the watcher dies or
stops, the service may still be working. The next watcher asks the same service worker first, with the same
`request_id`, by which the service can recognize the repetition, join the running work, and answer again. A service that
does not may do the work twice, as may two workers if the first breaks the connection during its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from urllib.parse import quote

from orchestrator.domain.executors.builtin import (
    Http,
    TryAnotherWorker,
    log_lines,
    read_answer,
    request_body,
    service_of,
)
from orchestrator.domain.executors.options import Broken, Execution, Outcome
from orchestrator.domain.executors.services import ServiceWorker, in_order
from orchestrator.domain.tasks.destinations import Destinations, parse_destinations
from orchestrator.secret_keys import service_keys
from orchestrator.settings import Settings
from orchestrator.transport import announcements
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.keys import Keys
from orchestrator.workers.executors.asking import Barred, Endpoint, Request, TooLarge, Unanswered, Unreadable, ask
from orchestrator.workers.executors.protocol import Setup, Unreachable, Watcher, finished

_NO_WORKER = "nobody yet"
"""External id of an execution for which no service worker existed at its start."""
_CANCEL_TIMEOUT = 5.0
"""Seconds for a service to accept a cancellation."""
_ENVELOPE = 4_096
"""Bytes of an answer beside its result, at most."""
_MIN_REFRESH = 0.5
"""Minimum seconds between two reads of the registry while no service is found."""


class ServiceBook:
    """A cache of the registered services, which one read refreshes for all executions."""

    def __init__(self, settings: Settings) -> None:
        self._redis = connect(settings.of_shard(0).require_redis())
        self._keys = Keys.of(settings)
        self._ttl = settings.registry_ttl
        self._refresh_interval = settings.registry_refresh
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="services")
        self._refresh_lock = asyncio.Lock()
        self._refreshed_at = -1e9
        self._services: list[ServiceWorker] = []
        self._busy: Counter[str] = Counter()
        """Open requests by service worker."""

    async def candidates(self, service: str, *, by_load: bool, refresh: bool = False) -> list[ServiceWorker]:
        """Return the workers of a service, in the order to ask them. With `refresh`, read the registry again even if
        the cache is fresh, because the last workers did not answer."""
        async with self._refresh_lock:
            age = time.monotonic() - self._refreshed_at
            if age >= (_MIN_REFRESH if refresh else self._refresh_interval):
                await self._refresh()
        workers = [worker for worker in self._services if service in worker.services]
        if not workers and not refresh:
            return await self.candidates(service, by_load=by_load, refresh=True)
        return in_order(workers, [random.random() for _ in workers], self._busy, by_load=by_load)

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            read = loop.run_in_executor(self._thread, announcements.list_live, self._redis, self._keys, self._ttl)
            self._services = await read
        except UNAVAILABLE:
            return  # the cached state is good enough; Redis errors are logged elsewhere
        self._refreshed_at = time.monotonic()

    def begin(self, worker: str) -> None:
        """Count a new request."""
        self._busy[worker] += 1

    def end(self, worker: str) -> None:
        """Count the end of a request."""
        self._busy[worker] -= 1
        if self._busy[worker] <= 0:
            del self._busy[worker]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._redis.close()


class HttpExecutor:
    """Sends requests to services, and waits for their answers."""

    options: ClassVar[type[Http]] = Http

    def __init__(self, setup: Setup) -> None:
        settings = setup.settings
        self._book = ServiceBook(settings)
        self._allowed = parse_destinations(settings.webhooks, settings.webhook_allow)
        self._max_answer = settings.max_payload + _ENVELOPE
        self._key = next(iter(service_keys(settings.service_keys, settings.service_keys_file)), "")
        self._last_workers: dict[str, ServiceWorker] = {}
        """The service worker that last got a request, by execution name."""

    async def submit(self, execution: Execution) -> str:
        """Choose a service worker, and return its address. `watch` sends the request."""
        options = _options(execution)
        candidates = await self._candidates(execution, options)
        if not candidates:
            if options.max_attempts is None:
                raise Unreachable(f"No worker offers the service {service_of(execution, options)!r} now.")
            return _NO_WORKER
        return candidates[0].url

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Send requests until a service answers."""
        options, body = _options(execution), request_body(execution, _options(execution).params)
        service, tries = service_of(execution, options), 0
        reason = f"no worker offers the service {service!r} now"
        while True:
            candidates = await self._candidates(execution, options, refresh=tries > 0)
            candidates.sort(key=lambda worker: worker.url != external_id)
            for worker in candidates:
                try:
                    return await self._request(execution, worker, service, body, watcher)
                except Barred as error:
                    return Broken("NotAllowed", f"{worker.url}: {error}. The worker's operator can allow it.", False)
                except (Unanswered, TryAnotherWorker) as error:
                    reason, tries = str(error), tries + 1
                    watcher.log(f"{service}: {reason}", level="warning")
                if options.max_attempts is not None and tries >= options.max_attempts:
                    return _no_answer(service, tries, reason)
                await asyncio.sleep(options.attempt_delay)
            if options.max_attempts is None:
                raise Unreachable(f"{service}: {reason}")
            if not candidates:
                tries += 1
                if tries >= options.max_attempts:
                    return _no_answer(service, tries, reason)
                await asyncio.sleep(max(options.attempt_delay, 0.1))

    async def cancel(self, execution: Execution, external_id: str) -> None:
        """Cancel the work at the service: `DELETE /exec/<service>/<request_id>`.

        A service that does not support this sees its connection closed.
        """
        worker = self._last_workers.pop(execution.name, None)
        url = external_id if worker is None else worker.url
        if url in ("", _NO_WORKER):
            return
        options = _options(execution)
        path = f"{_path(service_of(execution, options))}/{quote(execution.name, safe='')}"
        with contextlib.suppress(Unanswered, Unreadable, TooLarge, Barred, TimeoutError):
            async with asyncio.timeout(_CANCEL_TIMEOUT):
                request = Request("DELETE", path, headers=self._headers(options))
                await ask(Endpoint.of(url), request, max_size=_ENVELOPE, allowed=self._destinations(options))

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Forget the service worker of an execution."""
        self._last_workers.pop(execution.name, None)

    async def close(self) -> None:
        """Close the connection to the registry."""
        self._book.close()

    async def _request(
        self, execution: Execution, worker: ServiceWorker, service: str, body: bytes, watcher: Watcher
    ) -> Outcome:
        options = _options(execution)
        self._last_workers[execution.name] = worker
        self._book.begin(worker.id)
        name = f"{service!r} at {worker.url}"
        request = Request("POST", _path(service), body, self._headers(options))
        try:
            async with asyncio.timeout(options.request_timeout):
                place, destinations = Endpoint.of(worker.url), self._destinations(options)
                reply = await ask(place, request, max_size=self._max_answer, allowed=destinations)
        except TimeoutError:
            raise Unanswered(f"{name} did not answer within {options.request_timeout:g} s") from None
        except Unreadable as error:
            return Broken("BadAnswer", f"{error}.")
        except TooLarge as error:
            return Broken("AnswerTooLarge", f"{error}, the limit of the setting max_payload.", retryable=False)
        finally:
            self._book.end(worker.id)
        if lines := log_lines(reply.body):
            watcher.log("\n".join(lines))
        if reply.status == 413:
            return Broken("RequestTooLarge", f"{name} does not take a request of {len(body):,} bytes.", retryable=False)
        answer = read_answer(reply.status, reply.body, name)
        return answer if isinstance(answer, Broken) else finished(answer)

    async def _candidates(self, execution: Execution, options: Http, *, refresh: bool = False) -> list[ServiceWorker]:
        if options.url:
            return [ServiceWorker(id=options.url, url=options.url.rstrip("/"))]
        service = service_of(execution, options)
        return await self._book.candidates(service, by_load=options.weighted_by_load, refresh=refresh)

    def _destinations(self, options: Http) -> Destinations | None:
        """Return the destinations to allow. Registered services are the operator's; an address in a task could be
        anybody's."""
        return self._allowed if options.url else None

    def _headers(self, options: Http) -> list[tuple[str, str]]:
        """Return the header with the service key. An address from a task never gets the key."""
        return [("Authorization", f"Bearer {self._key}")] if self._key and not options.url else []


def _options(execution: Execution) -> Http:
    assert isinstance(execution.options, Http)
    return execution.options


def _path(service: str) -> str:
    return f"/exec/{quote(service, safe=':')}"


def _no_answer(service: str, tries: int, reason: str) -> Broken:
    return Broken("ServiceUnreachable", f"{service}: no worker answered {tries} requests; the last: {reason}.")
