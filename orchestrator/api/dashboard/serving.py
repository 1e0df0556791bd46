"""Serves a path of the dashboard: authentication by key or session cookie, forms, and pages."""

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
from orchestrator.api.bodies import MAX_SMALL_REQUEST, SMALL_BODY, check_shape, read_body
from orchestrator.api.dashboard.form_errors import describe_problem
from orchestrator.api.dashboard.pages.overview import count_approvals
from orchestrator.api.dashboard.pages.search import find_match
from orchestrator.api.dashboard.rendering import (
    Action,
    Notice,
    Visit,
    current,
    page,
    prefix,
    problem_page,
    redirect,
    visitor,
    without_known_parts,
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
from orchestrator.api.problems import MEDIA_TYPE, Problem, Refused, invalid_field, refused
from orchestrator.api.quotas import Meter
from orchestrator.api.recent import Recent
from orchestrator.api.routes.workflows import Started
from orchestrator.api.serving import ServedPath, call_endpoint, problem_of_error, query_string
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
_TIME_WITHOUT_SECONDS = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d)Z?$")
"""A time as a browser's time field sends it."""
_AWAITS_HEADER = "orchestrator-awaits"
"""A header of pages that reload until a requested action is done."""
_NOT_DONE = Notice(
    "Nothing was changed: you are not logged in, or your session has expired. Log in and try again.", is_error=True
)


class PagePath(ServedPath):
    """Serves the dashboard's routes of one path."""

    @cached_property
    def _sent(self) -> Recent:
        """The parts of recently sent pages, by version."""
        return Recent()

    def ticket(self, request: Request) -> Ticket | None:
        return ticket_of(request)

    async def answer(self, endpoint: Endpoint, request: Request, caller: Caller) -> Response:
        """Show a page, or perform an action and redirect back to the page."""
        session = self._session(request)
        visit = _visit(request, caller, session, self._meter, self._api.replica)
        if endpoint.scope is not None:
            approvals = partial(count_approvals, self._api, caller.key_scope)
            visit = dataclasses.replace(visit, approvals=approvals, outage=self._api.outages.last)
        if session.notice is not None or _AWAITS_HEADER in request.headers:
            visit = dataclasses.replace(visit, pending_requests=cache(partial(self._api.read, inbox.waiting)))
        current.set(visit)
        replica = self._api.replica
        try:
            arguments = endpoint.read_path(request.path_params)
        except Refused:
            if (answer := await self._find_match(endpoint, request, caller)) is not None:
                return session.finish(answer)
            raise
        if replica is not None and not replica.has_heard(session.last_action):  # another server performed the action
            await self._slots.run(replica.acted, caller)
            self._api.recent.forget()
        if request.method != "POST":
            query = _normalized_query(query_string(request), endpoint.path)
            try:
                answer = await self._call(endpoint, arguments | endpoint.read_query(query), request, caller)
            except (Refused, OrchestratorError) as error:
                problem = problem_of_error(error, request).problem
                if problem.status == 404 and (match := await self._find_match(endpoint, request, caller)) is not None:
                    return session.finish(match)  # a run's key may look like an id
                if problem.status != 422 or not query or endpoint.is_live or endpoint.scope is not Scope.READ:
                    raise  # a preview of a bulk action must not include more than requested
                partial_page = await self._without_invalid_filters(endpoint, arguments, query, problem, request, caller)
                if partial_page is None:
                    raise
                return session.finish(partial_page)
            if (known_etag := request.headers.get("If-None-Match")) is not None:
                answer = await self._slots.run(partial(without_known_parts, answer, known_etag, self._sent), caller)
            return session.finish(answer)
        is_public = endpoint.scope is None
        data = await read_body(request, SMALL_BODY if is_public else MAX_SMALL_REQUEST)
        form = _decode(data) if len(data) <= SMALL_BODY else await self._slots.run(partial(_decode, data), caller)
        token = form.get(_TOKEN, [""])[0]
        if endpoint.path == LOG_IN and session.ticket is not None and not session.is_valid_token(token):
            return session.finish(redirect(own_page(form.get("to", [""])[0])))  # another tab has logged in since
        session.check(token)
        if endpoint.path == LOG_IN:
            return await self._log_in(request, session, form)
        if endpoint.path == LOG_OUT:
            return await self._log_out(session, caller)
        if endpoint.query is not None:
            arguments |= endpoint.read_query("")
        back = own_page(form.get(_BACK, [""])[0])
        try:
            answer = await self._call(endpoint, arguments, request, caller, partial(_parse_body, endpoint, form))
        except ClientDisconnect:
            raise  # there is nobody to respond to
        except Exception as error:
            found = problem_of_error(error, request)
            if found.problem.status in (401, 403, 429) or not isinstance(endpoint, Action):
                raise
            message = f"{found.problem.title}: {describe_problem(found.problem, endpoint.body)}"
            return session.finish(redirect(back), Notice(message, is_error=True))
        if replica is not None:
            session.action = await self._slots.run(replica.acted, caller)
        self._api.recent.forget()
        if isinstance(answer, Response):
            return session.finish(answer)
        assert isinstance(endpoint, Action), "everything else answers with a page"
        to = f"/ui/runs/{answer.id}" if isinstance(answer, Started) else getattr(answer, "to", "") or back
        text = await self._slots.run(partial(endpoint.outcome, answer), caller)
        return session.finish(redirect(to), Notice(text, undo=endpoint.undo_path(path_of(request))))

    async def _find_match(self, endpoint: Endpoint, request: Request, caller: Caller) -> Response | None:
        """Redirect from a run's key, or a part of an id, to the page with the whole id; None if nothing matches."""
        if endpoint.about not in (RUN, TASK) or endpoint.method != "GET" or endpoint.is_live:
            return None
        kind: Kind = "run" if endpoint.about is RUN else "task"
        text = request.path_params["id"]
        found = await self._slots.run(partial(find_match, self._api, kind, text, caller.key_scope), caller)
        if not found or found == text:
            return None
        ui, kinds, _, *rest = path_of(request).strip("/").split("/")
        query = f"?{request.url.query}" if request.url.query else ""
        return redirect(found if found.startswith("/") else "/".join(("", ui, kinds, found, *rest)) + query)

    async def _without_invalid_filters(
        self, endpoint: Endpoint, given: dict[str, Any], query: str, problem: Problem, request: Request, caller: Caller
    ) -> Response | None:
        """Show a page without invalid filters, or without all if they are invalid together, with a notice about them.

        Return None if there is no such page.
        """
        pairs = parse_qsl(query)
        valid = [pair for pair in pairs if _is_valid_query(endpoint, urlencode([pair]))]
        visit = visitor()
        notice = Notice(describe_problem(problem, endpoint.query), is_error=True, is_about_filter=True)
        current.set(dataclasses.replace(visit, notice=notice))
        try:
            query_arguments = endpoint.read_query(urlencode(valid if len(valid) < len(pairs) else []))
            answer: Response = await self._call(endpoint, given | query_arguments, request, caller)
            if answer.headers["Content-Type"].startswith("text/html"):
                answer.status_code = 422
                return answer
        except (Refused, OrchestratorError):
            pass  # the page cannot show the notice
        current.set(visit)
        return None

    async def _log_in(self, request: Request, session: Session, form: dict[str, list[str]]) -> Response:
        """Log in with the submitted key, or show the log-in page with the error."""
        key, to = form.get("key", [""])[0].strip(), own_page(form.get("to", [""])[0])
        headers = headers_with_key(request, key)
        peer = request.client.host if request.client else ""
        try:
            caller = await self._auth.admit(peer, headers, Scope.READ, self._slots.run_lookup)
        except Refused as error:
            await super()._log_rejection(error, self._auth.refused_actor(peer, headers), request)
            return session.finish(page("login.html", error.problem.status, to=to, wrong=error.problem))
        if caller.key is None:  # no key exists, so there is no log-in
            return session.finish(redirect(to))
        begin = partial(begin_session, self._api, caller.key, caller.actor, session.ticket)
        return session.enter(redirect(to), await self._slots.run(begin, caller))

    async def _log_out(self, session: Session, caller: Caller) -> Response:
        """End a session on this server and all others."""
        if session.ticket is not None:
            await self._slots.run(partial(end_session, self._api, session.ticket), caller)
            self._auth.forget(session.ticket)
        return session.leave(redirect(LOG_IN))

    async def _call(
        self,
        endpoint: Endpoint,
        arguments: dict[str, Any],
        request: Request,
        caller: Caller,
        read: Callable[[], dict[str, Any]] = dict,
    ) -> Any:
        if caller.key_scope.is_bound and endpoint.about is WHOLE:
            endpoint.about.check(self._api, caller.key_scope, {})
        if endpoint.takes_key:
            arguments["key"] = None
        if endpoint.takes_match:
            arguments["match"] = None

        def work() -> Any:
            return call_endpoint(self._api, endpoint, endpoint.call, arguments | read(), caller)

        is_expensive = endpoint.is_expensive
        with Client(request) as client:
            answer = await self._slots.run(work, caller, client, is_expensive=is_expensive)
            if isinstance(answer, Generator):
                answer = await self._slots.wait_for(answer, caller, client, is_expensive=is_expensive)
            return answer

    def refuse(self, error: Exception, request: Request, caller: Caller | None) -> Response:
        """Show an error page. Without a valid session, redirect to the log-in, except for requests by scripts."""
        found = problem_of_error(error, request)
        session = self._session(request)
        status = found.problem.status
        if next(iter(self._endpoints.values())).is_live:
            return Response(msgspec.json.encode(found.problem), status, media_type=MEDIA_TYPE)
        if status == 401 and request.method in ("GET", "HEAD"):
            here = f"{path_of(request)}?{request.url.query}" if request.url.query else path_of(request)
            return session.leave(redirect(_log_in_url(here)))
        if status == 401 and "authorization" not in request.headers:
            return session.leave(redirect(_log_in_url(_page_before(request))), _NOT_DONE)
        current.set(None if caller is None else _visit(request, caller, session, self._meter))
        headers = {name: value for name, value in found.headers.items() if name != "WWW-Authenticate"}
        shown = self._endpoints.get("GET")
        problem = msgspec.structs.replace(
            found.problem, detail=describe_problem(found.problem, shown.query if shown else None)
        )
        return session.finish(problem_page(problem, headers))

    async def _log_rejection(self, error: Exception, actor: Actor, request: Request) -> None:
        """Log a rejection to the audit log, unless the visitor only has to log in."""
        is_nobody = "authorization" not in request.headers and request.method == "GET"
        if not (is_nobody and isinstance(error, Refused) and error.problem.status == 401):
            await super()._log_rejection(error, actor, request)

    def _session(self, request: Request) -> Session:
        peer = request.client.host if request.client else ""
        prefix.set(self._auth.prefix(peer, request))
        return Session(request, self._auth.is_tls(peer, request), prefix.get())


def _is_valid_query(endpoint: Endpoint, query: str) -> bool:
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
        notice=session.notice,
        check_tasks=partial(meter.check_tasks, caller),
        has_key=session.ticket is not None and caller.key is not None,
    )


def _log_in_url(here: str) -> str:
    """Return the URL of the log-in that leads to a page afterwards."""
    return LOG_IN if here == "/ui" else f"{LOG_IN}?{urlencode({'to': here})}"


def _page_before(request: Request) -> str:
    """Return the page whose form was sent, from the Referer header: before a log-in the form is not read."""
    referrer = urlsplit(request.headers.get("referer", ""))
    is_trusted = referrer.netloc == request.headers.get("host", "")
    path = referrer.path.removeprefix(prefix.get())
    return own_page(f"{path}?{referrer.query}" if referrer.query else path) if is_trusted else own_page("")


_OPEN: dict[str, tuple[str, ...]] = {"/ui/runs": (RunState.RUNNING,), "/ui/tasks": tuple(OPEN_TASK_STATES)}
"""The states that the filter `open` stands for."""


def _normalized_query(query: str, path: str) -> str:
    """Return the query of a filter form without empty fields. Times without seconds are UTC, and `open` is expanded."""
    pairs = [(name, _TIME_WITHOUT_SECONDS.sub(r"\1:00Z", value)) for name, value in parse_qsl(query) if value]
    open_states = [("status", state) for state in _OPEN.get(path, ())]
    if not open_states or ("status", "open") not in pairs:
        return urlencode(pairs)
    return urlencode(
        [*(pair for pair in pairs if pair != ("status", "open") and pair not in open_states), *open_states]
    )


def _decode(data: bytes) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=2_000)
    except ValueError as error:
        raise refused(400, "The form cannot be read", f"It is not a valid form: {error}") from error
    for name, value in pairs:
        found.setdefault(name, []).append(value.replace("\r\n", "\n"))
    return found


def _parse_body(endpoint: Endpoint, form: dict[str, list[str]]) -> dict[str, Any]:
    """Return the body of a route from a form. A field of any type is JSON or else text; `as=text` makes it text."""
    if endpoint.body is None:
        return {}
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(endpoint.body):
        texts = [text for text in form.get(field.encode_name, []) if text.strip()]
        if not texts:
            if isinstance(endpoint, Action) and field.encode_name == endpoint.needs:
                name = field.encode_name
                raise refused(422, "The form is incomplete", f"Enter a {name}, such as true; null is a {name}, too.")
            continue
        kind = get_origin(field.type) or field.type
        if kind is Annotated:
            kind = get_origin(get_args(field.type)[0]) or kind
        if kind in (list, tuple) and Any not in get_args(field.type):
            values[field.encode_name] = texts
        elif field.type is Any or kind in (list, dict, tuple):
            is_text = field.type is Any and "text" in form.get("as", ())
            values[field.encode_name] = texts[0] if is_text else _json_or_text(field.encode_name, texts[0])
        else:
            values[field.encode_name] = texts[0] if field.type is str else texts[0].strip()
    try:
        return {"body": msgspec.convert(values, endpoint.body, strict=False)}
    except msgspec.ValidationError as error:
        raise invalid_field(error) from error


def _json_or_text(name: str, text: str) -> Any:
    """Return the JSON value of a text, or the text itself if it does not begin like JSON."""
    check_shape(text.encode())
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if text.lstrip()[0] not in '{["':
            return text
        detail = (
            f"The {name} looks like JSON but is invalid: {error}. Correct it, or start it with a different character."
        )
        raise refused(422, "The form cannot be read", detail) from error
