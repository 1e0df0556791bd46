"""A path of the dashboard: authentication by a key or the cookie of a log-in, forms, and pages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator
from functools import cache, cached_property, partial
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from orchestrator.api.access import Caller
from orchestrator.api.bodies import LARGEST_QUESTION, SMALL, check_shape, read_body
from orchestrator.api.dashboard.misfits import in_words
from orchestrator.api.dashboard.pages.overview import count_approvals
from orchestrator.api.dashboard.pages.search import find_elsewhere
from orchestrator.api.dashboard.rendering import (
    Action,
    Said,
    Visit,
    current,
    go,
    page,
    prefix,
    refusal,
    visitor,
    without_known,
)
from orchestrator.api.dashboard.session import (
    Session,
    begin_session,
    end_session,
    headers_with_key,
    own_page,
    path_of,
    ticket_of,
)
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.key_scope import RUN, TASK, WHOLE
from orchestrator.api.problems import MEDIA_TYPE, Problem, Refused, misfit, refused
from orchestrator.api.quotas import Meter
from orchestrator.api.recent import Recent
from orchestrator.api.routes.workflows import Started
from orchestrator.api.serving import ServedPath, explained, perform, query_of
from orchestrator.api.slots import Client
from orchestrator.domain.access import Scope, Ticket
from orchestrator.domain.states import OPEN_TASK_STATES, RunState
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.acting import Actor
from orchestrator.sdk.backend.replica import Replica
from orchestrator.store import inbox
from orchestrator.store.insights.lookup import Kind

LOG_IN, LOG_OUT = "/ui/login", "/ui/logout"
_TOKEN, _BACK = "token", "back"
_MINUTE = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d)Z?$")
"""A time as a browser's own field for times sends it."""
_AWAITS = "orchestrator-awaits"
"""A header of a page that is read again until what was asked for is done."""
_NOT_DONE = Said("Nothing was done: you are not logged in, or no longer. Log in, and do it once more.", is_error=True)


class PagePath(ServedPath):
    """All that the dashboard serves under one path."""

    @cached_property
    def _sent(self) -> Recent:
        """The parts of pages that were sent lately, by version."""
        return Recent()

    def ticket(self, request: Request) -> Ticket | None:
        return ticket_of(request)

    async def answer(self, endpoint: Endpoint, request: Request, caller: Caller) -> Response:
        """Show a page, or do what a form asks for and go back to the page."""
        session = self._session(request)
        visit = _visit(request, caller, session, self._meter, self._api.replica)
        if endpoint.scope is not None:
            approvals = partial(count_approvals, self._api, caller.key_scope)
            visit = dataclasses.replace(visit, approvals=approvals, outage=self._api.outages.last)
        if session.said is not None or _AWAITS in request.headers:
            visit = dataclasses.replace(visit, asked=cache(partial(self._api.read, inbox.waiting)))
        current.set(visit)
        replica = self._api.replica
        try:
            given = endpoint.read_path(request.path_params)
        except Refused:
            if (answer := await self._elsewhere(endpoint, request, caller)) is not None:
                return session.finish(answer)
            raise
        if replica is not None and not replica.has_heard(session.last_action):  # another server did it
            await self._slots.run(replica.acted, caller)
            self._api.recent.forget()
        if request.method != "POST":
            query = _without_blanks(query_of(request), endpoint.path)
            try:
                answer = await self._do(endpoint, given | endpoint.read_query(query), request, caller)
            except (Refused, OrchestratorError) as error:
                problem = explained(error, request).problem
                if problem.status == 404 and (other := await self._elsewhere(endpoint, request, caller)) is not None:
                    return session.finish(other)  # the key of a run may be a UUID, too
                if problem.status != 422 or not query or endpoint.is_live or endpoint.scope is not Scope.READ:
                    raise  # a preview of what is done to many must not mean more than was asked for
                shown = await self._without_misfits(endpoint, given, query, problem, request, caller)
                if shown is None:
                    raise
                return session.finish(shown)
            if (known := request.headers.get("If-None-Match")) is not None:
                answer = await self._slots.run(partial(without_known, answer, known, self._sent), caller)
            return session.finish(answer)
        is_public = endpoint.scope is None
        data = await read_body(request, SMALL if is_public else LARGEST_QUESTION)
        form = _form(data) if len(data) <= SMALL else await self._slots.run(partial(_form, data), caller)
        token = form.get(_TOKEN, [""])[0]
        if endpoint.path == LOG_IN and session.ticket is not None and not session.is_of(token):
            return session.finish(
                go(own_page(form.get("to", [""])[0]))
            )  # another tab of the browser has logged in since
        session.check(token)
        if endpoint.path == LOG_IN:
            return await self._log_in(request, session, form)
        if endpoint.path == LOG_OUT:
            return await self._log_out(session, caller)
        if endpoint.query is not None:
            given |= endpoint.read_query("")
        back = own_page(form.get(_BACK, [""])[0])
        try:
            answer = await self._do(endpoint, given, request, caller, partial(_read, endpoint, form))
        except ClientDisconnect:
            raise  # the client has gone
        except Exception as error:
            found = explained(error, request)
            if found.problem.status in (401, 403, 429) or not isinstance(endpoint, Action):
                raise
            told = f"{found.problem.title}: {in_words(found.problem, endpoint.body)}"
            return session.finish(go(back), Said(told, is_error=True))
        if replica is not None:
            session.action = await self._slots.run(replica.acted, caller)
        self._api.recent.forget()
        if isinstance(answer, Response):
            return session.finish(answer)
        assert isinstance(endpoint, Action), "everything else answers with a page"
        to = f"/ui/runs/{answer.id}" if isinstance(answer, Started) else getattr(answer, "to", "") or back
        text = await self._slots.run(partial(endpoint.outcome, answer), caller)
        return session.finish(go(to), Said(text, undo=endpoint.undone_by(path_of(request))))

    async def _elsewhere(self, endpoint: Endpoint, request: Request, caller: Caller) -> Response | None:
        """Lead from the page of a run's key, or of a part of an id, to that of the whole id; None if there is none."""
        if endpoint.about not in (RUN, TASK) or endpoint.method != "GET" or endpoint.is_live:
            return None
        kind: Kind = "run" if endpoint.about is RUN else "task"
        text = request.path_params["id"]
        found = await self._slots.run(partial(find_elsewhere, self._api, kind, text, caller.key_scope), caller)
        if not found or found == text:
            return None
        ui, kinds, _, *rest = path_of(request).strip("/").split("/")
        query = f"?{request.url.query}" if request.url.query else ""
        return go(found if found.startswith("/") else "/".join(("", ui, kinds, found, *rest)) + query)

    async def _without_misfits(
        self, endpoint: Endpoint, given: dict[str, Any], query: str, problem: Problem, request: Request, caller: Caller
    ) -> Response | None:
        """Show a page without those filters that do not fit, or without any if they do not fit together, and say so.

        None if there is no such page.
        """
        asked = parse_qsl(query)
        fitting = [pair for pair in asked if _fits(endpoint, urlencode([pair]))]
        visit = visitor()
        said = Said(in_words(problem, endpoint.query), is_error=True, is_of_filter=True)
        current.set(dataclasses.replace(visit, said=said))
        try:
            kept = endpoint.read_query(urlencode(fitting if len(fitting) < len(asked) else []))
            answer: Response = await self._do(endpoint, given | kept, request, caller)
            if answer.headers["Content-Type"].startswith("text/html"):
                answer.status_code = 422
                return answer
        except (Refused, OrchestratorError):
            pass  # the page cannot say what is wrong
        current.set(visit)
        return None

    async def _log_in(self, request: Request, session: Session, form: dict[str, list[str]]) -> Response:
        """Log in with the key that was typed, or say why not."""
        key, to = form.get("key", [""])[0].strip(), own_page(form.get("to", [""])[0])
        headers = headers_with_key(request, key)
        peer = request.client.host if request.client else ""
        try:
            caller = await self._door.admit(peer, headers, Scope.READ, self._slots.look_up)
        except Refused as error:
            await super()._note(error, self._door.refused_actor(peer, headers), request)
            return session.finish(page("login.html", error.problem.status, to=to, wrong=error.problem))
        if caller.key is None:  # there are no keys, so there is no log-in
            return session.finish(go(to))
        begin = partial(begin_session, self._api, caller.key, caller.actor, session.ticket)
        return session.enter(go(to), await self._slots.run(begin, caller))

    async def _log_out(self, session: Session, caller: Caller) -> Response:
        """End a session here and at every other server."""
        if session.ticket is not None:
            await self._slots.run(partial(end_session, self._api, session.ticket), caller)
            self._door.forget(session.ticket)
        return session.leave(go(LOG_IN))

    async def _do(
        self,
        endpoint: Endpoint,
        given: dict[str, Any],
        request: Request,
        caller: Caller,
        read: Callable[[], dict[str, Any]] = dict,
    ) -> Any:
        if caller.key_scope.is_bound and endpoint.about is WHOLE:
            endpoint.about.check(self._api, caller.key_scope, {})
        if endpoint.takes_key:
            given["key"] = None
        if endpoint.takes_match:
            given["match"] = None

        def work() -> Any:
            return perform(self._api, endpoint, endpoint.call, given | read(), caller)

        is_expensive = endpoint.is_expensive
        with Client(request) as client:
            answer = await self._slots.run(work, caller, client, is_expensive=is_expensive)
            if isinstance(answer, Generator):
                answer = await self._slots.wait_for(answer, caller, client, is_expensive=is_expensive)
            return answer

    def refuse(self, error: Exception, request: Request, caller: Caller | None) -> Response:
        """Show why not. A visitor without a valid session goes to the log-in, unless a script of the page asks."""
        found = explained(error, request)
        session = self._session(request)
        status = found.problem.status
        if next(iter(self._endpoints.values())).is_live:
            return Response(msgspec.json.encode(found.problem), status, media_type=MEDIA_TYPE)
        if status == 401 and request.method in ("GET", "HEAD"):
            here = f"{path_of(request)}?{request.url.query}" if request.url.query else path_of(request)
            return session.leave(go(_log_in_for(here)))
        if status == 401 and "authorization" not in request.headers:
            return session.leave(go(_log_in_for(_page_before(request))), _NOT_DONE)
        current.set(None if caller is None else _visit(request, caller, session, self._meter))
        headers = {name: value for name, value in found.headers.items() if name != "WWW-Authenticate"}
        asked = self._endpoints.get("GET")
        problem = msgspec.structs.replace(found.problem, detail=in_words(found.problem, asked.query if asked else None))
        return session.finish(refusal(problem, headers))

    async def _note(self, error: Exception, actor: Actor, request: Request) -> None:
        """Write a refusal to the audit log, unless only a log-in is missing."""
        is_nobody = "authorization" not in request.headers and request.method == "GET"
        if not (is_nobody and isinstance(error, Refused) and error.problem.status == 401):
            await super()._note(error, actor, request)

    def _session(self, request: Request) -> Session:
        peer = request.client.host if request.client else ""
        prefix.set(self._door.prefix(peer, request))
        return Session(request, self._door.is_tls(peer, request), prefix.get())


def _fits(endpoint: Endpoint, query: str) -> bool:
    try:
        endpoint.read_query(query)
    except Refused:
        return False
    return True


def _visit(request: Request, caller: Caller, session: Session, meter: Meter, replica: Replica | None = None) -> Visit:
    return Visit(
        replica=replica,
        who=caller.actor.who,
        scope=caller.scope,
        key_scope=caller.key_scope,
        path=path_of(request),
        query=request.url.query,
        token=session.token,
        said=session.said,
        check_tasks=partial(meter.check_tasks, caller),
        has_key=session.ticket is not None and caller.key is not None,
    )


def _log_in_for(here: str) -> str:
    """Return the address of the log-in that leads to a page."""
    return LOG_IN if here == "/ui" else f"{LOG_IN}?{urlencode({'to': here})}"


def _page_before(request: Request) -> str:
    """Return the page whose form was sent, by the browser's header; the form itself is not read before a log-in."""
    found = urlsplit(request.headers.get("referer", ""))
    is_ours = found.netloc == request.headers.get("host", "")
    path = found.path.removeprefix(prefix.get())
    return own_page(f"{path}?{found.query}" if found.query else path) if is_ours else own_page("")


_OPEN: dict[str, tuple[str, ...]] = {"/ui/runs": (RunState.RUNNING,), "/ui/tasks": tuple(OPEN_TASK_STATES)}
"""The states that lists call open."""


def _without_blanks(query: str, path: str) -> str:
    """Return what a form of filters asks for: fields that are empty are not meant, times to the minute are UTC, and
    `open` is a state."""
    found = [(name, _MINUTE.sub(r"\1:00Z", value)) for name, value in parse_qsl(query) if value]
    open_states = [("status", state) for state in _OPEN.get(path, ())]
    if not open_states or ("status", "open") not in found:
        return urlencode(found)
    return urlencode(
        [*(pair for pair in found if pair != ("status", "open") and pair not in open_states), *open_states]
    )


def _form(data: bytes) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=2_000)
    except ValueError as error:
        raise refused(400, "The form cannot be read", f"It is no form of a page: {error}") from error
    for name, value in pairs:
        found.setdefault(name, []).append(value.replace("\r\n", "\n"))
    return found


def _read(endpoint: Endpoint, form: dict[str, list[str]]) -> dict[str, Any]:
    """Return what a form says, in the type of the route; what may be anything is JSON or else a text,
    or a text `as` the form says."""
    if endpoint.body is None:
        return {}
    given: dict[str, Any] = {}
    for field in msgspec.structs.fields(endpoint.body):
        texts = [text for text in form.get(field.encode_name, []) if text.strip()]
        if not texts:
            if isinstance(endpoint, Action) and field.encode_name == endpoint.needs:
                name = field.encode_name
                raise refused(422, "The form is not complete", f"Give a {name}, such as true; null is a {name}, too.")
            continue
        kind = get_origin(field.type) or field.type
        if kind is Annotated:
            kind = get_origin(get_args(field.type)[0]) or kind
        if kind in (list, tuple) and Any not in get_args(field.type):
            given[field.encode_name] = texts
        elif field.type is Any or kind in (list, dict, tuple):
            is_text = field.type is Any and "text" in form.get("as", ())
            given[field.encode_name] = texts[0] if is_text else _value(field.encode_name, texts[0])
        else:
            given[field.encode_name] = texts[0] if field.type is str else texts[0].strip()
    try:
        return {"body": msgspec.convert(given, endpoint.body, strict=False)}
    except msgspec.ValidationError as error:
        raise misfit(error) from error


def _value(name: str, text: str) -> Any:
    """Return what a text says as JSON, or the text itself; what was begun as JSON is not taken for a text."""
    check_shape(text.encode())
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if text.lstrip()[0] not in '{["':
            return text
        detail = f"The {name} begins as JSON and is none: {error}. Mend it, or give a text that begins otherwise."
        raise refused(422, "The form cannot be read", detail) from error
