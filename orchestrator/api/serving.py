"""All that is served under one path: who asks is let in, what was asked is read, done and answered."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping
from functools import partial

import anyio.to_thread
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.api.access import Caller, Doorkeeper
from orchestrator.api.brought_executors import NEEDED, without_executors
from orchestrator.api.conditions import condition_of, is_known
from orchestrator.api.context import Api
from orchestrator.api.endpoints import CLIENTS, Endpoint
from orchestrator.api.live.answer import Admit
from orchestrator.api.live.answer import answer as live
from orchestrator.api.live.hub import Hub
from orchestrator.api.problems import MEDIA_TYPE, Problem, Refused, of_error, refused
from orchestrator.api.reach import WHOLE, OutOfReach
from orchestrator.api.refusals import Refusals
from orchestrator.api.turns import Turns, perform, read_body, wait_for
from orchestrator.domain.access import Reach, Ticket, masked
from orchestrator.domain.access import Scope as Permission
from orchestrator.errors import NotFound
from orchestrator.monitoring.exposition import OTHER
from orchestrator.sdk.acting import Actor, may_operate, served
from orchestrator.sealing import describe_json
from orchestrator.telemetry import get_logger
from orchestrator.tracing.entry import serving

log = get_logger("api")


class ServedPath:
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
            admit = partial(
                self._door.admit, peer, request.headers, endpoint.scope, self._turns.run, self.ticket(request)
            )
            caller = (await admit())._replace(again=admit)
            served.set(caller.actor)
            may_operate.set(caller.scope.includes(Permission.OPERATE))
            if endpoint.is_live:
                response = await self._listen(endpoint, request, caller.reach, admit)
            else:
                with serving(request.method, endpoint.path, request.headers.get("traceparent")):
                    response = await self.answer(endpoint, request, caller)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  # a defect is one request's, and is told without a traceback
            actor = caller.actor if caller else self._door.stranger(peer, request.headers, self.ticket(request))
            await self._note(error, actor, request)
            told = _without_names(error) if caller and caller.reach.is_bound else error
            response = self.refuse(told, request, caller)
        finally:
            observed.under_way -= 1
        self._observe(request.method, response.status_code, time.monotonic() - began)
        await response(scope, receive, send)

    def ticket(self, request: Request) -> Ticket | None:
        """Return what somebody shows instead of a key; the API takes keys alone."""
        del request
        return None

    async def answer(self, endpoint: Endpoint, request: Request, caller: Caller) -> Response:
        """Do what was asked, and answer."""
        return await _answer(self._api, self._turns, endpoint, request, caller)

    def refuse(self, error: Exception, request: Request, caller: Caller | None) -> Response:
        """Say why not; without a caller, nobody was let in."""
        del caller
        return problem(error, request)

    async def _listen(self, endpoint: Endpoint, request: Request, reach: Reach, admit: Admit) -> Response:
        given = endpoint.read_path(request.path_params) | endpoint.read_query(query_of(request))
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


async def _answer(api: Api, turns: Turns, endpoint: Endpoint, request: Request, caller: Caller) -> Response:
    reach = caller.reach
    if reach.is_bound and endpoint.about is WHOLE:
        endpoint.about.check(api, reach, {})
    if endpoint.method == "POST" and not endpoint.takes_key and "idempotency-key" in request.headers:
        raise refused(422, "The request does not fit", "Idempotency-Key: this route takes none, and would do it again.")
    given = endpoint.read_path(request.path_params) | endpoint.read_query(query_of(request))
    if endpoint.body is not None:
        given |= endpoint.read_body(await read_body(request))
        if endpoint.is_for_clients and not caller.scope.includes(NEEDED):
            given["body"] = without_executors(given["body"])
    if endpoint.takes_key:
        given["key"] = request.headers.get("Idempotency-Key")
    if endpoint.takes_match:
        given["match"] = condition_of(request.headers)
    answer = await (turns.count if endpoint.is_async else turns.run)(partial(perform, api, endpoint, given, reach))
    if isinstance(answer, Generator):
        answer = await wait_for(turns, answer, request, caller)
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


def query_of(request: Request) -> str:
    """Return what follows `?`, without making the whole address of it."""
    query: bytes = request.scope["query_string"]
    return query.decode("latin-1")


def problem(error: Exception, request: Request) -> Response:
    """Return the answer that tells of an error; a defect is logged, and told without a traceback."""
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
            "%s %s failed, which should not have happened", request.method, masked(request.url.path), exc_info=error
        )
        found = refused(500, "The server has a defect", "This should not have happened; the server's log says more.")
    return found


def _without_names(error: Exception) -> Exception:
    """Return an error for somebody who may not know what else there is: no name that is near, and no reason."""
    return (
        refused(404, "It was not found", "There is none, or it is not for this key.") if _is_missing(error) else error
    )


def _is_missing(error: Exception) -> bool:
    return isinstance(error, NotFound) or (isinstance(error, Refused) and error.problem.status == 404)
