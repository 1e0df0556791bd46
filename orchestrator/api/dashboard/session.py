"""Sessions of the dashboard, and its cookies: the session ticket, the CSRF token, and the last notice.

Sessions are rows in Postgres, so every server knows them, and they survive restarts.

A ticket is random, and Postgres stores only its hash. The browser never stores a key. Scripts cannot read the ticket,
and the browser sends it only under `/ui`, after a proxy's prefix. The API accepts no cookies.
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
from orchestrator.api.dashboard.rendering import UNDOING, Notice
from orchestrator.api.problems import refused
from orchestrator.domain.access import Ticket, parse_ticket
from orchestrator.sdk.acting import Actor
from orchestrator.store import audit, sessions

ROOT = "/ui"
_TICKET = "orchestrator_session"
_KEY = "orchestrator_key"
"""The cookie in which earlier releases stored the key; it is deleted on sight."""
_TOKEN = "orchestrator_form"
_NOTICE = "orchestrator_said"
_LAST_ACTION = "orchestrator_acted"
"""The WAL position of the visitor's last action, with a read replica: every server waits for it before it shows
lists."""
_MAX_NOTICE = 1_500
"""Characters of a notice; browsers limit a cookie to about 4,000 bytes."""


class Session:
    """The cookies of one request, and those to set with its response."""

    def __init__(self, request: Request, is_secure: bool, prefix: str = "") -> None:
        self._request = request
        self._cookies = _cookies(request)
        self._secure = is_secure
        self._root = f"{prefix}{ROOT}"
        self._here = f"{prefix}{path_of(request)}"
        self.ticket = ticket_of(request)
        """The ticket, valid or not."""
        self._has_token = self.ticket is not None or _is_token(self._cookies.get(_TOKEN, ""))
        self.token = self._token()
        notice = _decode_notice(self._cookies.get(_NOTICE))
        self.notice = notice if notice is not None and notice.page in ("", self._here) else None
        last_action = self._cookies.get(_LAST_ACTION, "")
        self.last_action = int(last_action) if re.fullmatch("[0-9]{1,19}", last_action) else 0
        self.action: int | None = None
        """The WAL position of the action that this request performed."""

    def check(self, token: str) -> None:
        """Reject a form that may come from another site."""
        headers = self._request.headers
        site = headers.get("sec-fetch-site")
        origin = headers.get("origin")
        is_foreign = site not in ("same-origin", "none") if site else _is_foreign(origin, headers.get("host", ""))
        if is_foreign or not self._has_token or not self.is_valid_token(token):
            detail = "It did not come from a page of this dashboard, or the page is too old. Reload it and try again."
            raise refused(403, "The form was rejected", detail)

    def is_valid_token(self, token: str) -> bool:
        return compare_digest(token.encode(), self.token.encode())

    def finish(self, response: Response, notice: Notice | None = None) -> Response:
        """Set the cookies for the next request. A notice is shown once."""
        if not self._has_token:
            self._set(response, _TOKEN, self.token)
        if _KEY in self._cookies:
            response.delete_cookie(_KEY, path=self._root)
        if self.action is not None:
            self._set(response, _LAST_ACTION, str(self.action), seconds=600)
        if notice is not None:
            to = urlsplit(response.headers.get("Location", self._here)).path
            self._set(response, _NOTICE, _encode_notice(notice._replace(page=to)), _cookie_path(to), seconds=60)
        elif self.notice is not None:
            response.delete_cookie(_NOTICE, path=_cookie_path(self._here))
        return response

    def enter(self, response: Response, ticket: Ticket) -> Response:
        """Set the ticket, which lasts until the browser is closed, the visitor logs out, or the session expires."""
        self._set(response, _TICKET, ticket.text)
        response.delete_cookie(_TOKEN, path=self._root)
        return self.finish(response)

    def leave(self, response: Response, notice: Notice | None = None) -> Response:
        """Delete the ticket, which is no longer valid."""
        if _TICKET in self._cookies:
            response.delete_cookie(_TICKET, path=self._root)
        return self.finish(response, notice)

    def _token(self) -> str:
        """Return the CSRF token of the session or, without one, of the browser."""
        if self.ticket is not None:
            return self.ticket.form_token
        return self._cookies[_TOKEN] if self._has_token else secrets.token_urlsafe(24)

    def _set(self, response: Response, name: str, value: str, path: str = "", seconds: int | None = None) -> None:
        path = path or self._root
        response.set_cookie(name, value, max_age=seconds, path=path, secure=self._secure, httponly=True, samesite="lax")


def ticket_of(request: Request) -> Ticket | None:
    """Return the session ticket, valid or not."""
    return parse_ticket(_cookies(request).get(_TICKET, ""))


def path_of(request: Request) -> str:
    """Return the path as it was sent: a slash within a name stays escaped."""
    raw: bytes | None = request.scope.get("raw_path")
    if raw is None:  # optional in ASGI
        return quote(request.url.path)
    return quote(raw.partition(b"?")[0], safe="/%:@!$&'()*+,;=~")


def _cookies(request: Request) -> dict[str, str]:
    """Return the cookies of the dashboard. Escapes in values are not decoded, because that takes quadratic time."""
    pairs = (part.partition("=") for text in request.headers.getlist("cookie") for part in text.split(";"))
    cookies = {name.strip(): value.strip().strip('"') for name, _, value in pairs}
    return {name: value for name, value in cookies.items() if name in (_TICKET, _KEY, _TOKEN, _NOTICE, _LAST_ACTION)}


def headers_with_key(request: Request, key: str) -> Headers:
    """Return the headers of a request, with a submitted key."""
    kept = [pair for pair in request.headers.raw if pair[0] != b"authorization"]
    return Headers(raw=[*kept, (b"authorization", f"Bearer {key}".encode("latin-1", "replace"))])


def own_page(text: str | None) -> str:
    """Return a URL if it is in the dashboard; otherwise the dashboard's first page."""
    url = urlsplit(text or "")
    is_trusted = url.path == ROOT or url.path.startswith(f"{ROOT}/")
    if not is_trusted or url.scheme or url.netloc or "\\" in (text or "") or not (text or "").isprintable():
        return ROOT
    return f"{url.path}?{url.query}" if url.query else url.path


def _cookie_path(path: str) -> str:
    """Return the path of a cookie for one page, so that few other requests send it."""
    return path.partition(";")[0]


def _is_foreign(origin: str | None, host: str) -> bool:
    return origin is not None and urlsplit(origin).netloc != host


def _is_token(text: str) -> bool:
    return 20 <= len(text) <= 100 and text.isascii() and text.isprintable()


def _encode_notice(notice: Notice) -> str:
    text = notice.text if len(notice.text) <= _MAX_NOTICE else f"{notice.text[:_MAX_NOTICE]}…"
    fields = (text[:_MAX_NOTICE], notice.is_error, notice.undo, False, notice.page)
    return urlsafe_b64encode(msgspec.json.encode(fields)).decode()


def _decode_notice(cookie: str | None) -> Notice | None:
    """Return the last notice; None for an invalid cookie."""
    if not cookie:
        return None
    try:
        notice = msgspec.json.decode(urlsafe_b64decode(cookie), type=Notice)
    except (ValueError, msgspec.MsgspecError):
        return None
    return notice if UNDOING.fullmatch(notice.undo) else notice._replace(undo="")


def begin_session(api: Api, key: str, actor: Actor, previous: Ticket | None) -> Ticket:
    """Start a session for the id of a key, and end the browser's previous session."""
    ticket = Ticket(secrets.token_urlsafe(32))
    with api.backend.connections.writing("the session was started", transaction=True) as connection:
        if previous is not None:
            sessions.end(connection, previous)
        sessions.add(connection, ticket, key, api.settings.session_lifetime)
        audit.add(connection, who=actor.who, origin=actor.origin, act="log in", kind="key", target=key, detail={})
    return ticket


def end_session(api: Api, ticket: Ticket) -> None:
    """End a session, if it still exists."""
    with api.backend.connections.writing("the session was ended") as connection:
        sessions.end(connection, ticket)
