"""The ASGI application: every route, read, done in a thread or, if it can, without one, and answered."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

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
from orchestrator.api.conditions import condition_of, is_known
from orchestrator.api.context import Api
from orchestrator.api.endpoints import CLIENTS, Endpoint
from orchestrator.api.finding import Paths
from orchestrator.api.headers import ambiguity, safely
from orchestrator.api.live.answer import Admit
from orchestrator.api.live.answer import answer as live
from orchestrator.api.live.hub import Hub
from orchestrator.api.problems import MEDIA_TYPE, Problem, Refused, of_error, refused
from orchestrator.api.reach import WHOLE, OutOfReach
from orchestrator.api.refusals import Refusals
from orchestrator.api.routes import ROUTES
from orchestrator.api.turns import Turns, perform, read_body, wait_for
from orchestrator.domain.access import Reach, masked
from orchestrator.errors import NotFound
from orchestrator.monitoring.exposition import OTHER
from orchestrator.sdk.acting import Actor, served
from orchestrator.sealing import describe_json
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger
from orchestrator.tracing.entry import serving

log = get_logger("api")


def create_app(settings: Settings) -> Starlette:
    """Return the application, as any ASGI server takes it."""
    api = Api(settings)
    door, refusals, turns, hub = Doorkeeper(api), Refusals(api), Turns(), Hub(api)

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


class _Path:
    """All that is served under one path: an ASGI application."""

    def __init__(
        self, api: Api, door: Doorkeeper, refusals: Refusals, turns: Turns, hub: Hub, endpoints: Mapping[str, Endpoint]
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
                with serving(request.method, endpoint.path, request.headers.get("traceparent")):
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
        call = partial(perform, self._api, endpoint, given, reach)
        wanted = await self._turns.run(call) if reach.is_bound else call()  # only a look at whose it is takes a thread
        return await live(self._hub, wanted, request, admit)

    def _observe(self, method: str, status: int, seconds: float) -> None:
        known = next(iter(self._endpoints.values()))
        told = method if method in self._endpoints else OTHER
        self._api.observed.answered(told, known.path, known.tag, status, seconds)

    async def _note(self, error: Exception, actor: Actor, request: Request) -> None:
        """Have it in the audit log that somebody was not let do something."""
        status = error.problem.status if isinstance(error, Refused) else 404 if isinstance(error, OutOfReach) else 0
        if (status in (401, 403) or isinstance(error, OutOfReach)) and self._refusals.is_told():
            note = partial(self._refusals.write, actor, request.method, request.url.path, status)
            await anyio.to_thread.run_sync(note)

    def _endpoint(self, method: str) -> Endpoint:
        found = self._endpoints.get("GET" if method == "HEAD" else method)
        if found is None:
            allowed = ", ".join(sorted(self._endpoints))
            problem = Problem(title="The method is not served here", status=405, detail=f"Here go: {allowed}.")
            raise Refused(problem, {"Allow": allowed})
        return found


async def _answer(api: Api, turns: Turns, endpoint: Endpoint, request: Request, reach: Reach) -> Response:
    if reach.is_bound and endpoint.about is WHOLE:
        endpoint.about.check(api, reach, {})
    if endpoint.method == "POST" and not endpoint.takes_key and "idempotency-key" in request.headers:
        raise refused(422, "The request does not fit", "Idempotency-Key: this route takes none, and would do it again.")
    given = endpoint.read_path(request.path_params) | endpoint.read_query(request.url.query)
    if endpoint.body is not None:
        given |= endpoint.read_body(await read_body(request))
    if endpoint.takes_key:
        given["key"] = request.headers.get("Idempotency-Key")
    if endpoint.takes_match:
        given["match"] = condition_of(request.headers)
    answer = await (turns.count if endpoint.is_async else turns.run)(partial(perform, api, endpoint, given, reach))
    if isinstance(answer, Generator):
        answer = await wait_for(turns, answer, request)
    if isinstance(answer, Response):
        return answer
    if answer is None and endpoint.may_be_nothing:
        return Response(status_code=204)
    headers = {} if endpoint.etag is None else {"ETag": f'"{endpoint.etag(answer)}"'}
    if headers and endpoint.method == "GET" and is_known(headers["ETag"], request.headers.get("If-None-Match")):
        return Response(status_code=304, headers=headers)
    status = 202 if endpoint.is_kept is not None and endpoint.is_kept(answer) else endpoint.status
    data = msgspec.json.encode(answer)
    if not endpoint.is_for_clients:
        data = describe_json(data)
    return Response(data, status, headers=headers, media_type="application/json")


def _problem(error: Exception, request: Request) -> Response:
    found = of_error(error)
    if found is None:
        log.exception(
            "%s %s failed, which should not have happened", request.method, masked(request.url.path), exc_info=error
        )
        found = refused(500, "The server has a defect", "This should not have happened; the server's log says more.")
    data = msgspec.json.encode(found.problem)
    if not request.url.path.startswith(CLIENTS):
        data = describe_json(data)
    return Response(data, found.problem.status, headers=found.headers, media_type=MEDIA_TYPE)


def _without_names(error: Exception) -> Exception:
    """Return an error for somebody who may not know what else there is: no name that is near, and no reason."""
    return (
        refused(404, "It was not found", "There is none, or it is not for this key.") if _is_missing(error) else error
    )


def _is_missing(error: Exception) -> bool:
    return isinstance(error, NotFound) or (isinstance(error, Refused) and error.problem.status == 404)


async def _not_served(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    problem = Problem(
        title="It was not found", status=status, detail="Nothing is served here; /openapi.json lists the routes."
    )
    return Response(msgspec.json.encode(problem), status, media_type=MEDIA_TYPE)


async def _defect(request: Request, error: Exception) -> Response:
    return _problem(error, request)
