"""Tasks that services over HTTP do: `POST /exec/<service>` with `{input, params, request_id}`.

The request is the execution: its watcher holds a connection on which the answer comes. A watcher that died, or was
stopped, leaves a service that may still be at work; the next one asks the same service worker first, under the same
`request_id`, by which the service can recognise the repetition, join the work under way, and answer once more. A
service that does not may do the work twice, as may two workers where the first broke the connection within its work.
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

from orchestrator.domain.executors.builtin import Http, Passed, read_answer, request_body, said_lines, service_of
from orchestrator.domain.executors.options import Broken, Execution, Outcome
from orchestrator.domain.executors.services import ServiceWorker, in_order
from orchestrator.domain.tasks.destinations import Destinations, parse_destinations
from orchestrator.secret_keys import service_keys
from orchestrator.settings import Settings
from orchestrator.transport import announcements
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.keys import Keys
from orchestrator.workers.executors.asking import Barred, Place, Request, TooLarge, Unanswered, Unreadable, ask
from orchestrator.workers.executors.protocol import Setup, Unreachable, Watcher, finished

_NOBODY = "nobody yet"
"""The external id of an execution for which no service was there when it began."""
_CANCELLING = 5.0
"""Seconds that a service has to take note that its work is not wanted any more."""
_WRAPPING = 4_096
"""Bytes of an answer that may be around its result."""
_HURRIED = 0.5
"""Seconds between two looks where no service was found."""


class ServiceBook:
    """Knows the services. One read serves all executions within some seconds."""

    def __init__(self, settings: Settings) -> None:
        self._redis = connect(settings.of_shard(0).require_redis())
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
            look = loop.run_in_executor(self._thread, announcements.list_live, self._redis, self._keys, self._ttl)
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
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._redis.close()


class HttpExecutor:
    """Asks services, and waits for their answers."""

    options: ClassVar[type[Http]] = Http

    def __init__(self, setup: Setup) -> None:
        settings = setup.settings
        self._book = ServiceBook(settings)
        self._allowed = parse_destinations(settings.webhooks, settings.webhook_allow)
        self._largest = settings.max_payload + _WRAPPING
        self._key = next(iter(service_keys(settings.service_keys, settings.service_keys_file)), "")
        self._asked: dict[str, ServiceWorker] = {}
        """The service worker that got an execution last."""

    async def submit(self, execution: Execution) -> str:
        """Choose a service worker, and return its address; the watcher makes the request."""
        options = _options(execution)
        candidates = await self._candidates(execution, options)
        if not candidates:
            if options.max_attempts is None:
                raise Unreachable(f"Nobody offers the service {service_of(execution, options)!r} now.")
            return _NOBODY
        return candidates[0].url

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Ask until a service answers."""
        options, body = _options(execution), request_body(execution, _options(execution).params)
        service, tried = service_of(execution, options), 0
        reason = f"nobody offers the service {service!r} now"
        while True:
            candidates = await self._candidates(execution, options, anew=tried > 0)
            candidates.sort(key=lambda one: one.url != external_id)
            for worker in candidates:
                try:
                    return await self._request(execution, worker, service, body, watcher)
                except Barred as error:
                    return Broken("NotAllowed", f"{worker.url}: {error}. The worker's operator can allow it.", False)
                except (Unanswered, Passed) as error:
                    reason, tried = str(error), tried + 1
                    watcher.log(f"{service}: {reason}", level="warning")
                if options.max_attempts is not None and tried >= options.max_attempts:
                    return _in_vain(service, tried, reason)
                await asyncio.sleep(options.attempt_delay)
            if options.max_attempts is None:
                raise Unreachable(f"{service}: {reason}")
            if not candidates:
                tried += 1
                if tried >= options.max_attempts:
                    return _in_vain(service, tried, reason)
                await asyncio.sleep(max(options.attempt_delay, 0.1))

    async def cancel(self, execution: Execution, external_id: str) -> None:
        """Tell the service that the work is cancelled: `DELETE /exec/<service>/<request_id>`.

        A service that does not know this request has had its connection closed.
        """
        worker = self._asked.pop(execution.name, None)
        url = external_id if worker is None else worker.url
        if url in ("", _NOBODY):
            return
        options = _options(execution)
        path = f"{_path(service_of(execution, options))}/{quote(execution.name, safe='')}"
        with contextlib.suppress(Unanswered, Unreadable, TooLarge, Barred, TimeoutError):
            async with asyncio.timeout(_CANCELLING):
                request = Request("DELETE", path, headers=self._headers(options))
                await ask(Place.of(url), request, largest=_WRAPPING, allowed=self._guard(options))

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Forget the service worker of an execution."""
        self._asked.pop(execution.name, None)

    async def close(self) -> None:
        """Forget all known services."""
        self._book.close()

    async def _request(
        self, execution: Execution, worker: ServiceWorker, service: str, body: bytes, watcher: Watcher
    ) -> Outcome:
        options = _options(execution)
        self._asked[execution.name] = worker
        self._book.begin(worker.id)
        who = f"{service!r} at {worker.url}"
        request = Request("POST", _path(service), body, self._headers(options))
        try:
            async with asyncio.timeout(options.request_timeout):
                place, guard = Place.of(worker.url), self._guard(options)
                reply = await ask(place, request, largest=self._largest, allowed=guard)
        except TimeoutError:
            raise Unanswered(f"{who} did not answer within {options.request_timeout:g} s") from None
        except Unreadable as error:
            return Broken("BadAnswer", f"{error}.")
        except TooLarge as error:
            return Broken("AnswerTooLarge", f"{error}, which is what the setting max_payload allows.", retryable=False)
        finally:
            self._book.end(worker.id)
        if lines := said_lines(reply.body):
            watcher.log("\n".join(lines))
        if reply.status == 413:
            return Broken("RequestTooLarge", f"{who} does not take a request of {len(body):,} bytes.", retryable=False)
        read = read_answer(reply.status, reply.body, who)
        return read if isinstance(read, Broken) else finished(read)

    async def _candidates(self, execution: Execution, options: Http, *, anew: bool = False) -> list[ServiceWorker]:
        if options.url:
            return [ServiceWorker(id=options.url, url=options.url.rstrip("/"))]
        service = service_of(execution, options)
        return await self._book.candidates(service, by_load=options.weighted_by_load, anew=anew)

    def _guard(self, options: Http) -> Destinations | None:
        """Return the addresses it may go to: registered services belong to the operator, an address in a task may be
        anybody's."""
        return self._allowed if options.url else None

    def _headers(self, options: Http) -> list[tuple[str, str]]:
        """Return the key to send; never to an address that a task gives."""
        return [("Authorization", f"Bearer {self._key}")] if self._key and not options.url else []


def _options(execution: Execution) -> Http:
    assert isinstance(execution.options, Http)
    return execution.options


def _path(service: str) -> str:
    return f"/exec/{quote(service, safe=':')}"


def _in_vain(service: str, tried: int, reason: str) -> Broken:
    return Broken("ServiceUnreachable", f"{service}: nobody answered {tried} requests; the last: {reason}.")
