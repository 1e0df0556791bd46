"""A browser without scripts: keeps cookies, follows redirects, and sends forms."""

from __future__ import annotations

import asyncio
import re
from html import unescape
from typing import Any

import httpx
from starlette.applications import Starlette

HOST = "localhost"
SESSION = "orchestrator_session"


class Visitor:
    """A browser session."""

    def __init__(self, app: Starlette, scheme: str = "http", headers: dict[str, str] | None = None) -> None:
        """Open a session; a proxy adds `headers` to each request."""
        self._app = app
        self._added = headers or {}
        self._base = f"{scheme}://{HOST}"
        self.cookies: dict[str, str] = {}
        self.set: dict[str, str] = {}
        """The set-cookie header of every cookie."""
        self.redirect_path = "/ui"
        self._token = self._token_of = ""

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._send("GET", path, headers)

    def post(
        self, path: str, token: str | None = None, headers: dict[str, str] | None = None, **form: Any
    ) -> httpx.Response:
        """Send a form; the default token is that of the session, or of the browser if it has no session."""
        fields = {"token": self.token() if token is None else token, **form}
        request_headers = {"Origin": self._base, "Sec-Fetch-Site": "same-origin"} if headers is None else headers
        return self._send("POST", path, request_headers, data=fields)

    def token(self) -> str:
        """Return the form token of the pages of this session."""
        if SESSION not in self.cookies:
            return self.cookies.get("orchestrator_form", "")
        if self._token_of != self.cookies[SESSION]:
            found = re.search(r'name="token" value="(\w+)"', self.get("/ui/login").text)
            assert found, "the page has a form"
            self._token, self._token_of = found[1], self.cookies[SESSION]
        return self._token

    def log_in(self, key: object) -> httpx.Response:
        self.get("/ui/login")
        return self.post("/ui/login", key=str(key), to="/ui")

    def said(self) -> str:
        """Return the message of the page that the last form led to."""
        found = re.search(r'<p class="said[^>]*>(.*?)(?:<button.*)?</p>', self.get(self.redirect_path).text, re.DOTALL)
        return unescape(re.sub("<[^>]*>", "", found[1])).strip() if found else ""

    def _send(self, method: str, path: str, headers: dict[str, str], **fields: Any) -> httpx.Response:
        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, client=("127.0.0.1", 40_000))
            async with httpx.AsyncClient(transport=transport, base_url=self._base, cookies=self.cookies) as client:
                return await client.request(method, path, headers={**headers, **self._added}, **fields)

        answer = asyncio.run(request())
        if method == "POST" and "Location" in answer.headers:
            self.redirect_path = "/ui" + answer.headers["Location"].partition("/ui")[2]  # without the prefix of a proxy
        for set_cookie in answer.headers.get_list("set-cookie"):
            name, _, value = set_cookie.partition(";")[0].partition("=")
            self.set[name] = set_cookie
            if "Max-Age=0" in set_cookie:
                self.cookies.pop(name, None)
            else:
                self.cookies[name] = value
        return answer
