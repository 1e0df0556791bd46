"""Sessions of the dashboard, and its cookies: the ticket of a session, the token of forms, and the last message.

Sessions are rows in Postgres, so every server knows them and a restart ends none.

A ticket is random and stands for a session, which Postgres knows by its hash: the browser never keeps a key. Scripts
cannot read it, and it is sent under `/ui` only, behind the prefix of a proxy. The API takes no cookies.
"""

from __future__ import annotations

import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hmac import compare_digest
from urllib.parse import quote, urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import UNDOING, Said
from orchestrator.api.problems import refused
from orchestrator.domain.access import Ticket, parse_ticket
from orchestrator.sdk.acting import Actor
from orchestrator.store import audit, sessions

ROOT = "/ui"
_TICKET = "orchestrator_session"
_KEY = "orchestrator_key"
"""In which earlier releases kept the key itself; it is removed wherever it comes."""
_TOKEN = "orchestrator_form"
_SAID = "orchestrator_said"
_ACTED = "orchestrator_acted"
"""The position of the last action in Postgres's log, with a read replica: every server shows lists with it."""
_LONGEST_SAID = 1_500
"""Characters: a browser keeps some four thousand bytes of a cookie."""


class Session:
    """The cookies of one request, and those that go back with its answer."""

    def __init__(self, request: Request, is_secure: bool, prefix: str = "") -> None:
        self._request = request
        self._cookies = _cookies(request)
        self._secure = is_secure
        self._root = f"{prefix}{ROOT}"
        self._here = f"{prefix}{path_of(request)}"
        self.ticket = ticket_of(request)
        """Whatever it is good for."""
        self._has_token = self.ticket is not None or _is_token(self._cookies.get(_TOKEN, ""))
        self.token = self._token()
        said = _read(self._cookies.get(_SAID))
        self.said = said if said is not None and said.page in ("", self._here) else None
        acted = self._cookies.get(_ACTED, "")
        self.last_action = int(acted) if re.fullmatch("[0-9]{1,19}", acted) else 0
        self.action: int | None = None
        """The position of an action that this request was."""

    def check(self, given: str) -> None:
        """Refuse a form that another page than ours may have sent."""
        headers = self._request.headers
        site = headers.get("sec-fetch-site")
        origin = headers.get("origin")
        is_foreign = site not in ("same-origin", "none") if site else _is_foreign(origin, headers.get("host", ""))
        if is_foreign or not self._has_token or not self.is_of(given):
            detail = "It did not come from a page of this dashboard, or that page is too old. Go back, load it again."
            raise refused(403, "The form cannot be taken", detail)

    def is_of(self, given: str) -> bool:
        return compare_digest(given.encode(), self.token.encode())

    def finish(self, response: Response, said: Said | None = None) -> Response:
        """Send along what the next request is to have; what was said is said once."""
        if not self._has_token:
            self._set(response, _TOKEN, self.token)
        if _KEY in self._cookies:
            response.delete_cookie(_KEY, path=self._root)
        if self.action is not None:
            self._set(response, _ACTED, str(self.action), seconds=600)
        if said is not None:
            to = urlsplit(response.headers.get("Location", self._here)).path
            self._set(response, _SAID, _written(said._replace(page=to)), _scope(to), seconds=60)
        elif self.said is not None:
            response.delete_cookie(_SAID, path=_scope(self._here))
        return response

    def enter(self, response: Response, ticket: Ticket) -> Response:
        """Set the ticket, which lasts until the browser is closed, a log-out, or the end of the session."""
        self._set(response, _TICKET, ticket.text)
        response.delete_cookie(_TOKEN, path=self._root)
        return self.finish(response)

    def leave(self, response: Response, said: Said | None = None) -> Response:
        """Forget the ticket: it is good for nothing any more."""
        if _TICKET in self._cookies:
            response.delete_cookie(_TICKET, path=self._root)
        return self.finish(response, said)

    def _token(self) -> str:
        """Return what forms prove: that they are of this session, or, without one, of this browser."""
        if self.ticket is not None:
            return self.ticket.form_token
        return self._cookies[_TOKEN] if self._has_token else secrets.token_urlsafe(24)

    def _set(self, response: Response, name: str, value: str, path: str = "", seconds: int | None = None) -> None:
        path = path or self._root
        response.set_cookie(name, value, max_age=seconds, path=path, secure=self._secure, httponly=True, samesite="lax")


def ticket_of(request: Request) -> Ticket | None:
    """Return the ticket of a log-in, valid or not."""
    return parse_ticket(_cookies(request).get(_TICKET, ""))


def path_of(request: Request) -> str:
    """Return the path of a page as it was sent: a name with a slash is still one word of it."""
    raw: bytes | None = request.scope.get("raw_path")
    if raw is None:  # a server need not send it
        return quote(request.url.path)
    return quote(raw.partition(b"?")[0], safe="/%:@!$&'()*+,;=~")


def _cookies(request: Request) -> dict[str, str]:
    """Return the cookies that are ours. What is escaped in a value is none: reading that takes quadratic time."""
    pairs = (part.partition("=") for text in request.headers.getlist("cookie") for part in text.split(";"))
    found = {name.strip(): value.strip().strip('"') for name, _, value in pairs}
    return {name: value for name, value in found.items() if name in (_TICKET, _KEY, _TOKEN, _SAID, _ACTED)}


def headers_with_key(request: Request, typed: str) -> Headers:
    """Return the headers of a request, with the key that was typed."""
    kept = [pair for pair in request.headers.raw if pair[0] != b"authorization"]
    return Headers(raw=[*kept, (b"authorization", f"Bearer {typed}".encode("latin-1", "replace"))])


def own_page(text: str | None) -> str:
    """Return an address if it is one of the dashboard; else that of its first page."""
    found = urlsplit(text or "")
    is_ours = found.path == ROOT or found.path.startswith(f"{ROOT}/")
    if not is_ours or found.scheme or found.netloc or "\\" in (text or "") or not (text or "").isprintable():
        return ROOT
    return f"{found.path}?{found.query}" if found.query else found.path


def _scope(path: str) -> str:
    """Return where a cookie for one page belongs, so that few others send it."""
    return path.partition(";")[0]


def _is_foreign(origin: str | None, host: str) -> bool:
    return origin is not None and urlsplit(origin).netloc != host


def _is_token(text: str) -> bool:
    return 20 <= len(text) <= 100 and text.isascii() and text.isprintable()


def _written(said: Said) -> str:
    text = said.text if len(said.text) <= _LONGEST_SAID else f"{said.text[:_LONGEST_SAID]}…"
    shown = (text[:_LONGEST_SAID], said.is_error, said.undo, False, said.page)
    return urlsafe_b64encode(msgspec.json.encode(shown)).decode()


def _read(cookie: str | None) -> Said | None:
    """Return what was said last; a cookie that is none of ours says nothing."""
    if not cookie:
        return None
    try:
        said = msgspec.json.decode(urlsafe_b64decode(cookie), type=Said)
    except (ValueError, msgspec.MsgspecError):
        return None
    return said if UNDOING.fullmatch(said.undo) else said._replace(undo="")


def begin_session(api: Api, key: str, actor: Actor, before: Ticket | None) -> Ticket:
    """Begin a session for the id of a key, in place of the one that the browser had before."""
    ticket = Ticket(secrets.token_urlsafe(32))
    with api.backend.connections.writing("the session was begun", transaction=True) as connection:
        if before is not None:
            sessions.end(connection, before)
        sessions.add(connection, ticket, key, api.settings.session_lifetime)
        audit.add(connection, who=actor.who, origin=actor.origin, act="log in", kind="key", target=key, detail={})
    return ticket


def end_session(api: Api, ticket: Ticket) -> None:
    """End a session, if it has not ended yet."""
    with api.backend.connections.writing("the session was ended") as connection:
        sessions.end(connection, ticket)
