"""The ASGI application: every route, read, done in a thread or, if it can, without one, and answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from orchestrator.api import openapi
from orchestrator.api.access import Doorkeeper
from orchestrator.api.conditions import expected_tag, is_known
from orchestrator.api.context import Api
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.finding import Paths
from orchestrator.api.headers import ambiguity, safely
from orchestrator.api.live.answer import Admit
from orchestrator.api.live.answer import answer as live
from orchestrator.api.live.hub import Hub
from orchestrator.api.patience import LONGEST_BODY
from orchestrator.api.problems import MEDIA_TYPE, Problem, Refused, of_error, refused
from orchestrator.api.reach import WHOLE
from orchestrator.api.refusals import Refusals
from orchestrator.api.routes import ROUTES
from orchestrator.domain.access import Reach, masked
from orchestrator.errors import NotFound
from orchestrator.monitoring.exposition import OTHER
from orchestrator.sdk.acting import Actor, served
from orchestrator.sdk.waiting.steps import Pause, Steps
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger

log = get_logger("api")

LARGEST_BODY = 32_000_000
"""Bytes of one request."""
_LONGEST_WAIT = 300.0
"""Seconds that a request may wait for an answer of somebody else's."""
_AT_ONCE = 16
"""Requests that are worked on at the same time: each holds a connection to Postgres."""
_MOST_WAITING = 1_000
"""Requests that may wait for their turn."""


def create_app(settings: Settings) -> Starlette:
    """Return the application, as any ASGI server takes it."""
    api = Api(settings)
    door, refusals, turns, hub = Doorkeeper(api), Refusals(api), _Turns(), Hub(api)

    @asynccontextmanager
    async def alive(_: Starlette) -> AsyncIterator[None]:
        yield
        hub.let_go()
        await anyio.to_thread.run_sync(api.close)

    paths = {path: _Path(api, door, refusals, turns, hub, found) for path, found in _by_path(ROUTES).items()}
    document = msgspec.json.encode(openapi.document(ROUTES))
    routes = [
        Route("/openapi.json", partial(_constant, document, "application/json"), methods=["GET"]),
        Route("/docs", partial(_page, openapi.page(ROUTES)), methods=["GET"]),
        *(Route(path, served) for path, served in paths.items()),
    ]
    handlers = {HTTPException: _not_served, Exception: _defect}
    app = _Application(routes=routes, lifespan=alive, exception_handlers=handlers)
    app.paths = Paths(paths)
    app.state.let_go = hub.let_go
    return app


class _Application(Starlette):
    """Finds a path by its words: the router would hold it, decoded, against every route in turn."""

    paths: Paths[_Path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        send = safely(send, scope)
        if refusal := ambiguity(scope):
            await refusal(scope, receive, send)
        elif (found := self.paths.find(scope)) is None:
            await super().__call__(scope, receive, send)
        else:
            scope["path_params"] = found.places
            await found.served(scope, receive, send)


async def _constant(data: bytes, media_type: str, _: Request) -> Response:
    return Response(data, media_type=media_type)


async def _page(text: str, _: Request) -> Response:
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


def _by_path(endpoints: Sequence[Endpoint]) -> dict[str, dict[str, Endpoint]]:
    """Return the routes by path; a word of its own comes before a place that takes any word."""
    found: dict[str, dict[str, Endpoint]] = {}
    for endpoint in sorted(endpoints, key=lambda endpoint: endpoint.path.replace("{", "\x7f")):
        found.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return found


class _Turns:
    """Who is worked on, and how many wait."""

    def __init__(self) -> None:
        self._waiting = 0
        self._free: anyio.CapacityLimiter | None = None

    async def run(self, call: Callable[[], Any]) -> Any:
        """Do something in a thread when its turn comes."""
        if self._free is None:
            self._free = anyio.CapacityLimiter(_AT_ONCE)
        return await self.count(partial(anyio.to_thread.run_sync, call, limiter=self._free))

    async def count(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Wait for something that holds no thread; this is one more who waits."""
        if self._waiting >= _MOST_WAITING:
            raise refused(429, "Too many requests at once", f"{_MOST_WAITING:,} wait already.")
        self._waiting += 1
        try:
            return await call()
        finally:
            self._waiting -= 1


class _Path:
    """All that is served under one path: an ASGI application."""

    def __init__(
        self, api: Api, door: Doorkeeper, refusals: Refusals, turns: _Turns, hub: Hub, endpoints: Mapping[str, Endpoint]
    ) -> None:
        self._api = api
        self._door = door
        self._refusals = refusals
        self._turns = turns
        self._hub = hub
        self._endpoints = endpoints

    @property
    def methods(self) -> Collection[str]:
        """What can be asked here."""
        return self._endpoints.keys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, observed, began = Request(scope, receive, send), self._api.observed, time.monotonic()
        peer = request.client.host if request.client else ""
        caller = None
        observed.under_way += 1
        try:
            endpoint = self._endpoint(request.method)
            admit = partial(self._door.admit, peer, request.headers, endpoint.scope, self._turns.run)
            caller = await admit()
            served.set(caller.actor)
            if endpoint.is_live:
                response = await self._listen(endpoint, request, caller.reach, admit)
            else:
                response = await _answer(self._api, self._turns, endpoint, request, caller.reach)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  # a defect is one request's, and is told without a traceback
            actor = caller.actor if caller else self._door.stranger(peer, request.headers)
            await self._note(error, actor, request)
            response = _problem(_without_names(error) if caller and caller.reach.is_bound else error, request)
        finally:
            observed.under_way -= 1
        self._observe(request.method, response.status_code, time.monotonic() - began)
        await response(scope, receive, send)

    async def _listen(self, endpoint: Endpoint, request: Request, reach: Reach, admit: Admit) -> Response:
        given = endpoint.read_path(request.path_params) | endpoint.read_query(request.url.query)
        call = partial(_call, self._api, endpoint, given, reach)
        wanted = await self._turns.run(call) if reach.is_bound else call()  # only a look at whose it is takes a thread
        return await live(self._hub, wanted, request, admit)

    def _observe(self, method: str, status: int, seconds: float) -> None:
        known = next(iter(self._endpoints.values()))
        told = method if method in self._endpoints else OTHER
        self._api.observed.answered(told, known.path, known.tag, status, seconds)

    async def _note(self, error: Exception, actor: Actor, request: Request) -> None:
        """Have it in the audit log that somebody was not let do something."""
        status = error.problem.status if isinstance(error, Refused) else 0
        if status in (401, 403) and self._refusals.is_told():
            note = partial(self._refusals.write, actor, request.method, request.url.path, status)
            await anyio.to_thread.run_sync(note)

    def _endpoint(self, method: str) -> Endpoint:
        found = self._endpoints.get("GET" if method == "HEAD" else method)
        if found is None:
            allowed = ", ".join(sorted(self._endpoints))
            problem = Problem(title="No such method", status=405, detail=f"Here go: {allowed}.")
            raise Refused(problem, {"Allow": allowed})
        return found


async def _answer(api: Api, turns: _Turns, endpoint: Endpoint, request: Request, reach: Reach) -> Response:
    if reach.is_bound and endpoint.about is WHOLE:
        endpoint.about.check(api, reach, {})
    if endpoint.method == "POST" and not endpoint.takes_key and "idempotency-key" in request.headers:
        raise refused(422, "The request does not fit", "Idempotency-Key: this route takes none, and would do it again.")
    given = endpoint.read_path(request.path_params) | endpoint.read_query(request.url.query)
    if endpoint.body is not None:
        given |= endpoint.read_body(await _body(request))
    if endpoint.takes_key:
        given["key"] = request.headers.get("Idempotency-Key")
    if endpoint.takes_match:
        given["match"] = expected_tag(request.headers.get("If-Match"))
    answer = await (turns.count if endpoint.is_async else turns.run)(partial(_call, api, endpoint, given, reach))
    if isinstance(answer, Generator):
        answer = await _wait_for(turns, answer, request)
    if isinstance(answer, Response):
        return answer
    headers = {} if endpoint.etag is None else {"ETag": f'"{endpoint.etag(answer)}"'}
    if headers and is_known(headers["ETag"], request.headers.get("If-None-Match")):
        return Response(status_code=304, headers=headers)
    status = 202 if endpoint.is_kept is not None and endpoint.is_kept(answer) else endpoint.status
    return Response(msgspec.json.encode(answer), status, headers=headers, media_type="application/json")


def _call(api: Api, endpoint: Endpoint, given: dict[str, Any], reach: Reach) -> Any:
    """Do what was asked for, unless it is out of the caller's reach."""
    if reach.is_bound:
        endpoint.about.check(api, reach, given)
    if endpoint.takes_reach:
        given["reach"] = reach
    return endpoint.call(api, **given)


async def _wait_for(turns: _Turns, steps: Steps[Any], request: Request) -> Any:
    """Take the steps of a call that waits; none of the threads is held in between.

    It ends where nobody is there any more to be answered.
    """
    gone = asyncio.create_task(_hang_up(request))
    try:
        with anyio.fail_after(_LONGEST_WAIT):
            while True:
                pause, found = await turns.run(partial(_step, steps))
                if pause is None:
                    return found
                waiting = asyncio.create_task(pause.wait_async())
                await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    waiting.cancel()
                    raise ClientDisconnect
    except TimeoutError:
        raise refused(504, "It takes longer", f"There was no answer within {_LONGEST_WAIT:g} s.") from None
    finally:
        gone.cancel()
        steps.close()


async def _hang_up(request: Request) -> None:
    """Return when the client has left; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _step(steps: Steps[Any]) -> tuple[Pause | None, Any]:
    try:
        return next(steps), None
    except StopIteration as end:
        return None, end.value


async def _body(request: Request) -> bytes:
    """Read what was sent, but no more than anybody needs to send."""
    parts: list[bytes] = []
    size = 0
    if int(request.headers.get("Content-Length", "0")) > LARGEST_BODY:  # who waits to be told to go on need not send it
        raise _too_large()
    try:
        with anyio.fail_after(LONGEST_BODY):
            async for part in request.stream():
                size += len(part)
                if size > LARGEST_BODY:
                    raise _too_large()
                parts.append(part)
    except TimeoutError:
        raise _closing(408, "The body is late", f"It has to be here within {LONGEST_BODY:g} seconds.") from None
    return b"".join(parts)


def _too_large() -> Refused:
    return _closing(413, "The body is too large", f"At most {LARGEST_BODY:,} bytes are read.")


def _closing(status: int, title: str, detail: str) -> Refused:
    """Return a refusal after which nothing more is read on the connection."""
    return Refused(Problem(title=title, status=status, detail=detail), {"Connection": "close"})


def _problem(error: Exception, request: Request) -> Response:
    found = of_error(error)
    if found is None:
        log.exception(
            "%s %s failed, which should not have happened", request.method, masked(request.url.path), exc_info=error
        )
        found = refused(500, "A defect", "This should not have happened; the server's log says more.")
    data = msgspec.json.encode(found.problem)
    return Response(data, found.problem.status, headers=found.headers, media_type=MEDIA_TYPE)


def _without_names(error: Exception) -> Exception:
    """Return an error for somebody who may not know what else there is: no name that is near, and no reason."""
    return refused(404, "Not found", "There is none, or it is not for this key.") if _is_missing(error) else error


def _is_missing(error: Exception) -> bool:
    return isinstance(error, NotFound) or (isinstance(error, Refused) and error.problem.status == 404)


async def _not_served(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    problem = Problem(
        title="Not found", status=status, detail="Nothing is served here; /openapi.json lists the routes."
    )
    return Response(msgspec.json.encode(problem), status, media_type=MEDIA_TYPE)


async def _defect(request: Request, error: Exception) -> Response:
    return _problem(error, request)
