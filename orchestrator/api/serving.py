"""Serves the endpoints of one path: authenticates the caller, parses the request, calls the endpoint, and responds."""

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

from orchestrator.api.access import Authenticator, Caller
from orchestrator.api.bodies import SMALL_BODY, max_body_size, read_body
from orchestrator.api.client_checks import EXECUTOR_SCOPE, check_names, without_executors
from orchestrator.api.context import Api
from orchestrator.api.endpoints import CLIENTS, Endpoint
from orchestrator.api.headers import condition_of, matches_etag
from orchestrator.api.key_scope import WHOLE, OutOfKeyScope
from orchestrator.api.live.answer import Admit
from orchestrator.api.live.answer import answer as live
from orchestrator.api.live.hub import Hub
from orchestrator.api.problems import MEDIA_TYPE, Problem, Refused, from_error, invalid, refused
from orchestrator.api.quotas import CountedReceive, Meter
from orchestrator.api.redacting import redacted
from orchestrator.api.slots import Client, Slots
from orchestrator.domain.access import Scope as Permission
from orchestrator.domain.access import Ticket, masked
from orchestrator.domain.tasks.headers import HTTP_HEADER, of_start, read_headers
from orchestrator.errors import NotFound, Uncertain
from orchestrator.monitoring.exposition import OTHER_QUEUES
from orchestrator.sdk.acting import Actor, may_operate, served
from orchestrator.sdk.backend.replica import Replica, lag_of_list
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.sealing import describe_json
from orchestrator.store import audit
from orchestrator.telemetry import get_logger
from orchestrator.tracing.entry import serving

log = get_logger("api")


class ServedPath:
    """An ASGI application that serves all endpoints of one path."""

    def __init__(
        self,
        api: Api,
        auth: Authenticator,
        rejection_log: RejectionLog,
        slots: Slots,
        meter: Meter,
        hub: Hub,
        endpoints: Mapping[str, Endpoint],
    ) -> None:
        self._api = api
        self._auth = auth
        self._rejection_log = rejection_log
        self._slots = slots
        self._meter = meter
        self._hub = hub
        self._endpoints = endpoints

    @property
    def methods(self) -> Collection[str]:
        return self._endpoints.keys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = CountedReceive(receive)
        request, metrics, began = Request(scope, received, send), self._api.metrics, time.monotonic()
        peer = request.client.host if request.client else ""
        caller = None
        metrics.in_flight += 1
        with ExitStack() as held:
            try:
                endpoint = self._endpoint(request.method)
                admit = partial(
                    self._auth.admit,
                    peer,
                    request.headers,
                    endpoint.scope,
                    self._slots.run_lookup,
                    self.ticket(request),
                )
                caller = (await admit())._replace(recheck=admit)
                served.set(caller.actor)
                may_operate.set(caller.scope.includes(Permission.OPERATE))
                with self._meter.request(caller, received):
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
                stops = Uncertain("The server is stopping, and did not wait for this request to complete.")
                response = self.refuse(stops, request, caller)
            except Exception as error:  # noqa: BLE001  # a defect fails one request, and its traceback is not sent
                actor = (
                    caller.actor if caller else self._auth.refused_actor(peer, request.headers, self.ticket(request))
                )
                await self._log_rejection(error, actor, request)
                # No variable of this frame may hold the request data: the error keeps the frame in memory.
                response = self.refuse(
                    _without_names(error) if caller and caller.key_scope.is_bound else error, request, caller
                )
            finally:
                metrics.in_flight -= 1
            self._observe(request.method, response.status_code, time.monotonic() - began)
            await response(scope, receive, send)

    def ticket(self, request: Request) -> Ticket | None:
        """Return the caller's session ticket; None here, because the API accepts only keys."""
        del request
        return None

    async def answer(self, endpoint: Endpoint, request: Request, caller: Caller) -> Response:
        """Serve a request of an admitted caller."""
        return await _answer(self._api, self._slots, self._meter, endpoint, request, caller)

    def refuse(self, error: Exception, request: Request, caller: Caller | None) -> Response:
        """Return the response for an error. `caller` is None if authentication failed."""
        del caller
        return problem(error, request)

    async def _listen(self, endpoint: Endpoint, request: Request, caller: Caller, admit: Admit) -> Response:
        arguments = endpoint.read_path(request.path_params) | endpoint.read_query(query_string(request))
        call = partial(call_endpoint, self._api, endpoint, endpoint.call, arguments, caller)
        stream = (
            await self._slots.run(call, caller) if caller.key_scope.is_bound else call()
        )  # only the check of a bound key reads Postgres
        return await live(self._hub, stream, request, admit)

    def _observe(self, method: str, status: int, seconds: float) -> None:
        endpoint = next(iter(self._endpoints.values()))
        label = method if method in self._endpoints else OTHER_QUEUES
        self._api.metrics.record(label, endpoint.path, endpoint.tag, status, seconds)

    async def _log_rejection(self, error: Exception, actor: Actor, request: Request) -> None:
        """Log the rejection of an unauthorized request to the audit log."""
        status = error.problem.status if isinstance(error, Refused) else 404 if isinstance(error, OutOfKeyScope) else 0
        if (status in (401, 403) or isinstance(error, OutOfKeyScope)) and self._rejection_log.is_due():
            note = partial(self._rejection_log.write, actor, request.method, request.url.path, status)
            await anyio.to_thread.run_sync(note)

    def _endpoint(self, method: str) -> Endpoint:
        found = self._endpoints.get("GET" if method == "HEAD" else method)
        if found is None:
            allowed = ", ".join(sorted(self._endpoints))
            problem = Problem(title="The method is not allowed", status=405, detail=f"Allowed methods: {allowed}.")
            raise Refused(problem, {"Allow": allowed})
        return found


async def _answer(
    api: Api, slots: Slots, meter: Meter, endpoint: Endpoint, request: Request, caller: Caller
) -> Response:
    """Parse a request, call its endpoint, and respond. Only requests with small bodies run on the event loop."""
    if caller.key_scope.is_bound and endpoint.about is WHOLE:
        endpoint.about.check(api, caller.key_scope, {})
    if endpoint.method == "POST" and not endpoint.takes_key and "idempotency-key" in request.headers:
        raise invalid("Idempotency-Key: this route does not support it, and would repeat the action.")
    arguments = endpoint.read_path(request.path_params) | endpoint.read_query(query_string(request))
    if endpoint.takes_key:
        arguments["key"] = request.headers.get("Idempotency-Key")
    if endpoint.takes_match:
        arguments["match"] = condition_of(request.headers)
    known_etag = request.headers.get("If-None-Match") if endpoint.method == "GET" else None

    def parse_and_call(call: Callable[..., Any]) -> Any:
        read = endpoint.read_body(body, request.headers.get("Content-Type", ""))
        if read and endpoint.is_for_sdk:
            check_names(caller.key_scope, read["body"])
            read["body"] = read["body"] if caller.scope.includes(EXECUTOR_SCOPE) else without_executors(read["body"])
        if read and endpoint.scope is Permission.ENQUEUE:
            meter.check_tasks(caller, read["body"])
        return call_endpoint(api, endpoint, call, arguments | read, caller)

    def work() -> Response | Steps[Response]:
        answer = parse_and_call(endpoint.call_large or endpoint.call)
        if isinstance(answer, Generator):
            return _respond_when_done(endpoint, answer, known_etag)
        response = respond(endpoint, answer, known_etag)
        if api.replica is not None:
            _note_replica(api.replica, endpoint, response)
        return response

    with Client(request) as client:
        async with AsyncExitStack() as held:
            body = b""
            if endpoint.body is not None:
                acquire_room = lambda: held.enter_async_context(slots.large_body(caller))  # noqa: E731
                max_size = max_body_size(endpoint.max_body, api.settings.largest_value)
                body = await read_body(request, max_size, acquire_room)
            is_large = len(body) > SMALL_BODY
            if endpoint.is_async and not is_large:
                call = partial(parse_and_call, endpoint.call)
                answer = await (call() if endpoint.scope is None else slots.queued(call))
                return respond(endpoint, answer, known_etag)
            is_expensive = endpoint.is_expensive or is_large
            answer = await slots.run(work, caller, client, is_expensive=is_expensive)
        if isinstance(answer, Generator):
            answer = await slots.wait_for(answer, caller, client, is_expensive=is_expensive)
    assert isinstance(answer, Response), "each generator returns a response"
    return answer


def call_endpoint(api: Api, endpoint: Endpoint, call: Callable[..., Any], args: dict[str, Any], caller: Caller) -> Any:
    """Call an endpoint, unless the request is outside the caller's key scope, and redact its answer."""
    if caller.key_scope.is_bound:
        endpoint.about.check(api, caller.key_scope, args)
    if endpoint.takes_key_scope:
        args["key_scope"] = caller.key_scope
    answer = call(api, **args)
    if endpoint.true_values and caller.scope.includes(Permission.ENQUEUE):
        return answer
    body = args.get("body")
    return _redact_result(api, answer, body) if isinstance(answer, Generator) else redacted(api, answer, body)


def _redact_result(api: Api, steps: Steps[Any], body: Any) -> Steps[Any]:
    return redacted(api, (yield from steps), body)


def _respond_when_done(endpoint: Endpoint, steps: Steps[Any], known_etag: str | None) -> Steps[Response]:
    return respond(endpoint, (yield from steps), known_etag)


def _note_replica(replica: Replica, endpoint: Endpoint, response: Response) -> None:
    """Make later lists show this action, or send the age of this list from the read replica."""
    if endpoint.method != "GET" and endpoint.scope in (Permission.OPERATE, Permission.ADMIN):
        replica.acted()
    if lag := lag_of_list.get():
        response.headers["Age"] = str(round(lag))


def respond(endpoint: Endpoint, answer: Any, known_etag: str | None = None) -> Response:
    """Return the HTTP response for an answer. `known_etag` is the ETag of the client's copy."""
    if isinstance(answer, Response):
        return answer
    if answer is None and endpoint.may_be_empty:
        return Response(status_code=204)
    headers = {} if endpoint.etag is None else {"ETag": f'"{endpoint.etag(answer)}"'}
    if headers and known_etag is not None and matches_etag(headers["ETag"], known_etag):
        return Response(status_code=304, headers=headers)
    status = 202 if endpoint.is_pending is not None and endpoint.is_pending(answer) else endpoint.status
    data = msgspec.json.encode(answer)
    if not endpoint.is_for_sdk:
        data = describe_json(data)
    return Response(data, status, headers=headers, media_type="application/json")


def query_string(request: Request) -> str:
    """Return the query string. `request.url` would parse the whole URL."""
    query: bytes = request.scope["query_string"]
    return query.decode("latin-1")


def problem(error: Exception, request: Request) -> Response:
    """Return the response for an error. A defect is logged, and its traceback is not sent."""
    found = problem_of_error(error, request)
    data = msgspec.json.encode(found.problem)
    if not request.url.path.startswith(CLIENTS):
        data = describe_json(data)
    return Response(data, found.problem.status, headers=found.headers, media_type=MEDIA_TYPE)


def problem_of_error(error: Exception, request: Request) -> Refused:
    """Return the problem of an error. A defect is logged."""
    found = from_error(error)
    if found is None:
        log.exception(
            "api.request_failed method=%s path=%s: a defect", request.method, masked(request.url.path), exc_info=error
        )
        found = refused(500, "The server failed unexpectedly", "This is a defect; the server's log has the traceback.")
    return found


def _without_names(error: Exception) -> Exception:
    """Return an error for a bound key. A 404 has no similar names and no reason."""
    return (
        refused(404, "The resource was not found", "It does not exist, or is outside the key's scope.")
        if _is_missing(error)
        else error
    )


def _is_missing(error: Exception) -> bool:
    return isinstance(error, NotFound) or (isinstance(error, Refused) and error.problem.status == 404)


_BURST = 20
"""Rejections that are logged at once, before the rate limit applies."""
_REFILL_SECONDS = 3.0
"""Seconds between two logged rejections under the rate limit."""


class RejectionLog:
    """Writes rejected requests to the audit log: a few at once, then at a limited rate with the number left out."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._tokens = float(_BURST)
        self._refilled_at = time.monotonic()
        self._left_out = 0

    def is_due(self) -> bool:
        """Return whether the rate limit allows another entry. If not, count the rejection as left out."""
        now = time.monotonic()
        self._tokens = min(float(_BURST), self._tokens + (now - self._refilled_at) / _REFILL_SECONDS)
        self._refilled_at = now
        if self._tokens < 1:
            self._left_out += 1
            return False
        self._tokens -= 1
        return True

    def write(self, actor: Actor, method: str, path: str, status: int) -> None:
        """Write a rejection to the log and the audit log. An error in this changes nothing for the client."""
        path = masked(path)
        left_out, self._left_out = self._left_out, 0
        detail = {"status": status} | ({"left_out": left_out} if left_out else {})
        log.warning("api.request_refused method=%s path=%s status=%d actor=%s address=%s", method, path, status, *actor)
        try:
            with self._api.backend.connections.writing("a rejection was logged") as connection:
                audit.add(
                    connection,
                    who=actor.who,
                    origin=actor.origin,
                    act="refused",
                    kind="request",
                    target=f"{method} {path}",
                    detail=detail,
                )
        except Exception as error:  # noqa: BLE001  # the client receives its rejection in any case
            log.warning("api.audit_failed error=%s: a refused request is missing from the audit log", error)
