"""All endpoints of one path: authenticate the caller, read the request, perform it, and answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

import anyio.to_thread
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.api.access import Caller, Doorkeeper
from orchestrator.api.bodies import SMALL, most_bytes, read_body
from orchestrator.api.client_checks import NEEDED, check_names, without_executors
from orchestrator.api.context import Api
from orchestrator.api.endpoints import CLIENTS, Endpoint
from orchestrator.api.headers import condition_of, is_known
from orchestrator.api.key_scope import WHOLE, OutOfKeyScope
from orchestrator.api.live.answer import Admit
from orchestrator.api.live.answer import answer as live
from orchestrator.api.live.hub import Hub
from orchestrator.api.problems import MEDIA_TYPE, Problem, Refused, of_error, refused, unfit
from orchestrator.api.quotas import Meter, Received
from orchestrator.api.redacting import shown
from orchestrator.api.slots import Client, Slots
from orchestrator.domain.access import Scope as Permission
from orchestrator.domain.access import Ticket, masked
from orchestrator.domain.tasks.headers import HTTP_HEADER, of_start, read_headers
from orchestrator.errors import NotFound, Uncertain
from orchestrator.monitoring.exposition import OTHER
from orchestrator.sdk.acting import Actor, may_operate, served
from orchestrator.sdk.backend.replica import Replica, lag_of_list
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.sealing import describe_json
from orchestrator.store import audit
from orchestrator.telemetry import get_logger
from orchestrator.tracing.entry import serving

log = get_logger("api")


class ServedPath:
    """All that is served under one path: an ASGI application."""

    def __init__(
        self,
        api: Api,
        door: Doorkeeper,
        refusals: Refusals,
        slots: Slots,
        meter: Meter,
        hub: Hub,
        endpoints: Mapping[str, Endpoint],
    ) -> None:
        self._api = api
        self._door = door
        self._refusals = refusals
        self._slots = slots
        self._meter = meter
        self._hub = hub
        self._endpoints = endpoints

    @property
    def methods(self) -> Collection[str]:
        return self._endpoints.keys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counted = Received(receive)
        request, observed, began = Request(scope, counted, send), self._api.observed, time.monotonic()
        peer = request.client.host if request.client else ""
        caller = None
        observed.under_way += 1
        with ExitStack() as held:
            try:
                endpoint = self._endpoint(request.method)
                admit = partial(
                    self._door.admit, peer, request.headers, endpoint.scope, self._slots.look_up, self.ticket(request)
                )
                caller = (await admit())._replace(again=admit)
                served.set(caller.actor)
                may_operate.set(caller.scope.includes(Permission.OPERATE))
                with self._meter.request(caller, counted):
                    if endpoint.is_live:
                        held.enter_context(self._meter.stream(caller))
                        response = await self._listen(endpoint, request, caller, admit)
                    else:
                        if (headers := request.headers.get(HTTP_HEADER)) is not None:
                            of_start.set(read_headers(headers))
                        with serving(request.method, endpoint.path, request.headers.get("traceparent")):
                            response = await self.answer(endpoint, request, caller)
            except ClientDisconnect:
                return
            except asyncio.CancelledError:
                stops = Uncertain("The server stops, and has not waited for the end of this request.")
                response = self.refuse(stops, request, caller)
            except Exception as error:  # noqa: BLE001  # a defect is one request's, and is told without a traceback
                actor = (
                    caller.actor if caller else self._door.refused_actor(peer, request.headers, self.ticket(request))
                )
                await self._note(error, actor, request)
                # In no variable of this frame, which the error holds: what was read would stay in memory.
                response = self.refuse(
                    _without_names(error) if caller and caller.key_scope.is_bound else error, request, caller
                )
            finally:
                observed.under_way -= 1
            self._observe(request.method, response.status_code, time.monotonic() - began)
            await response(scope, receive, send)

    def ticket(self, request: Request) -> Ticket | None:
        """Return what a caller has instead of a key; the API takes keys alone."""
        del request
        return None

    async def answer(self, endpoint: Endpoint, request: Request, caller: Caller) -> Response:
        """Do what was asked, and answer."""
        return await _answer(self._api, self._slots, self._meter, endpoint, request, caller)

    def refuse(self, error: Exception, request: Request, caller: Caller | None) -> Response:
        """Say why not; `caller` is None before authentication."""
        del caller
        return problem(error, request)

    async def _listen(self, endpoint: Endpoint, request: Request, caller: Caller, admit: Admit) -> Response:
        given = endpoint.read_path(request.path_params) | endpoint.read_query(query_of(request))
        call = partial(perform, self._api, endpoint, endpoint.call, given, caller)
        wanted = (
            await self._slots.run(call, caller) if caller.key_scope.is_bound else call()
        )  # only a look at whose it is takes a thread
        return await live(self._hub, wanted, request, admit)

    def _observe(self, method: str, status: int, seconds: float) -> None:
        known = next(iter(self._endpoints.values()))
        told = method if method in self._endpoints else OTHER
        self._api.observed.answered(told, known.path, known.tag, status, seconds)

    async def _note(self, error: Exception, actor: Actor, request: Request) -> None:
        """Write a refusal to the audit log."""
        status = error.problem.status if isinstance(error, Refused) else 404 if isinstance(error, OutOfKeyScope) else 0
        if (status in (401, 403) or isinstance(error, OutOfKeyScope)) and self._refusals.is_told():
            note = partial(self._refusals.write, actor, request.method, request.url.path, status)
            await anyio.to_thread.run_sync(note)

    def _endpoint(self, method: str) -> Endpoint:
        found = self._endpoints.get("GET" if method == "HEAD" else method)
        if found is None:
            allowed = ", ".join(sorted(self._endpoints))
            problem = Problem(title="The method is not served here", status=405, detail=f"Here go: {allowed}.")
            raise Refused(problem, {"Allow": allowed})
        return found


async def _answer(
    api: Api, slots: Slots, meter: Meter, endpoint: Endpoint, request: Request, caller: Caller
) -> Response:
    """Read a request, do what it asks for, and answer; all but small bodies and answers is done in a thread."""
    if caller.key_scope.is_bound and endpoint.about is WHOLE:
        endpoint.about.check(api, caller.key_scope, {})
    if endpoint.method == "POST" and not endpoint.takes_key and "idempotency-key" in request.headers:
        raise unfit("Idempotency-Key: this route takes none, and would do it again.")
    given = endpoint.read_path(request.path_params) | endpoint.read_query(query_of(request))
    if endpoint.takes_key:
        given["key"] = request.headers.get("Idempotency-Key")
    if endpoint.takes_match:
        given["match"] = condition_of(request.headers)
    known = request.headers.get("If-None-Match") if endpoint.method == "GET" else None

    def perform_read(call: Callable[..., Any]) -> Any:
        read = endpoint.read_body(body, request.headers.get("Content-Type", ""))
        if read and endpoint.is_for_clients:
            check_names(caller.key_scope, read["body"])
            read["body"] = read["body"] if caller.scope.includes(NEEDED) else without_executors(read["body"])
        if read and endpoint.scope is Permission.ENQUEUE:
            meter.check_tasks(caller, read["body"])
        return perform(api, endpoint, call, given | read, caller)

    def work() -> Response | Steps[Response]:
        answer = perform_read(endpoint.call_large or endpoint.call)
        if isinstance(answer, Generator):
            return _when_done(endpoint, answer, known)
        response = respond(endpoint, answer, known)
        if api.replica is not None:
            _mind_replica(api.replica, endpoint, response)
        return response

    with Client(request) as client:
        async with AsyncExitStack() as held:
            body = b""
            if endpoint.body is not None:
                room = lambda: held.enter_async_context(slots.large(caller))  # noqa: E731  # which most do not need
                most = most_bytes(endpoint.largest_body, api.settings.largest_value)
                body = await read_body(request, most, room)
            is_large = len(body) > SMALL
            if endpoint.is_async and not is_large:
                call = partial(perform_read, endpoint.call)
                answer = await (call() if endpoint.scope is None else slots.count(call))
                return respond(endpoint, answer, known)
            is_expensive = endpoint.is_expensive or is_large
            answer = await slots.run(work, caller, client, is_expensive=is_expensive)
        if isinstance(answer, Generator):
            answer = await slots.wait_for(answer, caller, client, is_expensive=is_expensive)
    assert isinstance(answer, Response), "so ends each of them"
    return answer


def perform(api: Api, endpoint: Endpoint, call: Callable[..., Any], given: dict[str, Any], caller: Caller) -> Any:
    """Do what was asked for, unless it is outside the caller's key scope, and hide what the answer may not show."""
    if caller.key_scope.is_bound:
        endpoint.about.check(api, caller.key_scope, given)
    if endpoint.takes_key_scope:
        given["key_scope"] = caller.key_scope
    answer = call(api, **given)
    if endpoint.true_values and caller.scope.includes(Permission.ENQUEUE):
        return answer
    asked = given.get("body")
    return _when_shown(api, answer, asked) if isinstance(answer, Generator) else shown(api, answer, asked)


def _when_shown(api: Api, steps: Steps[Any], asked: Any) -> Steps[Any]:
    return shown(api, (yield from steps), asked)


def _when_done(endpoint: Endpoint, steps: Steps[Any], known: str | None) -> Steps[Response]:
    return respond(endpoint, (yield from steps), known)


def _mind_replica(replica: Replica, endpoint: Endpoint, response: Response) -> None:
    """Have lists show an action, and say how old a list is."""
    if endpoint.method != "GET" and endpoint.scope in (Permission.OPERATE, Permission.ADMIN):
        replica.acted()
    if lag := lag_of_list.get():
        response.headers["Age"] = str(round(lag))


def respond(endpoint: Endpoint, answer: Any, known: str | None = None) -> Response:
    """Return what was answered as HTTP has it; `known` is the state of it that the client has."""
    if isinstance(answer, Response):
        return answer
    if answer is None and endpoint.may_be_nothing:
        return Response(status_code=204)
    headers = {} if endpoint.etag is None else {"ETag": f'"{endpoint.etag(answer)}"'}
    if headers and known is not None and is_known(headers["ETag"], known):
        return Response(status_code=304, headers=headers)
    status = 202 if endpoint.is_kept is not None and endpoint.is_kept(answer) else endpoint.status
    data = msgspec.json.encode(answer)
    if not endpoint.is_for_clients:
        data = describe_json(data)
    return Response(data, status, headers=headers, media_type="application/json")


def query_of(request: Request) -> str:
    """Return what follows `?`, without making the whole address of it."""
    query: bytes = request.scope["query_string"]
    return query.decode("latin-1")


def problem(error: Exception, request: Request) -> Response:
    """Return the answer for an error; a defect is logged, and its traceback is not sent."""
    found = explained(error, request)
    data = msgspec.json.encode(found.problem)
    if not request.url.path.startswith(CLIENTS):
        data = describe_json(data)
    return Response(data, found.problem.status, headers=found.headers, media_type=MEDIA_TYPE)


def explained(error: Exception, request: Request) -> Refused:
    """Return what to say of an error; a defect is logged."""
    found = of_error(error)
    if found is None:
        log.exception(
            "api.request_failed method=%s path=%s: a defect", request.method, masked(request.url.path), exc_info=error
        )
        found = refused(500, "The server has a defect", "This should not have happened; the server's log says more.")
    return found


def _without_names(error: Exception) -> Exception:
    """Return an error for a bound key: without similar names, and without the reason."""
    return (
        refused(404, "It was not found", "There is none, or it is not for this key.") if _is_missing(error) else error
    )


def _is_missing(error: Exception) -> bool:
    return isinstance(error, NotFound) or (isinstance(error, Refused) and error.problem.status == 404)


_AT_ONCE = 20
"""Refusals that are written one after the other."""
_EVERY = 3.0
"""Seconds for which there may be another one."""


class Refusals:
    """Writes them, a few at once and then one in a while, with the number of those between."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._room = float(_AT_ONCE)
        self._seen = time.monotonic()
        self._left_out = 0

    def is_told(self) -> bool:
        """Say whether there is room for this one, and count it where there is not."""
        now = time.monotonic()
        self._room = min(float(_AT_ONCE), self._room + (now - self._seen) / _EVERY)
        self._seen = now
        if self._room < 1:
            self._left_out += 1
            return False
        self._room -= 1
        return True

    def write(self, actor: Actor, method: str, path: str, status: int) -> None:
        """Write a line; a request has been refused by then, whatever becomes of this."""
        path = masked(path)
        left_out, self._left_out = self._left_out, 0
        detail = {"status": status} | ({"left_out": left_out} if left_out else {})
        log.warning("api.request_refused method=%s path=%s status=%d actor=%s address=%s", method, path, status, *actor)
        try:
            with self._api.backend.connections.writing("a refusal was noted") as connection:
                audit.add(
                    connection,
                    who=actor.who,
                    origin=actor.origin,
                    act="refused",
                    kind="request",
                    target=f"{method} {path}",
                    detail=detail,
                )
        except Exception as error:  # noqa: BLE001  # the client gets its refusal, and nothing else
            log.warning("api.audit_failed error=%s: a refused request is missing from the audit log", error)
