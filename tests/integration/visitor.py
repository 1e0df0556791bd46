"""Somebody with a browser that runs no scripts: keeps cookies, follows what it is told to, sends forms of pages."""

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
    """One browser."""

    def __init__(self, app: Starlette, scheme: str = "http", headers: dict[str, str] | None = None) -> None:
        """Someone whose requests a proxy may have added headers to."""
        self._app = app
        self._added = headers or {}
        self._base = f"{scheme}://{HOST}"
        self.cookies: dict[str, str] = {}
        self.set: dict[str, str] = {}
        """Every cookie that was set, as the header says it."""
        self.led_to = "/ui"
        self._token = self._token_of = ""

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._send("GET", path, headers)

    def post(
        self, path: str, token: str | None = None, headers: dict[str, str] | None = None, **form: Any
    ) -> httpx.Response:
        """Send a form; without a token, that of the pages of this session, or of this browser."""
        given = {"token": self.token() if token is None else token, **form}
        told = {"Origin": self._base, "Sec-Fetch-Site": "same-origin"} if headers is None else headers
        return self._send("POST", path, told, data=given)

    def token(self) -> str:
        """Return what forms send along, as pages of the session have it."""
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
        """Return what the page that the last form led to says came of it."""
        found = re.search(r'<p class="said[^>]*>(.*?)(?:<button.*)?</p>', self.get(self.led_to).text, re.DOTALL)
        return unescape(re.sub("<[^>]*>", "", found[1])).strip() if found else ""

    def _send(self, method: str, path: str, headers: dict[str, str], **given: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, client=("127.0.0.1", 40_000))
            async with httpx.AsyncClient(transport=transport, base_url=self._base, cookies=self.cookies) as client:
                return await client.request(method, path, headers={**headers, **self._added}, **given)

        answer = asyncio.run(ask())
        if method == "POST" and "Location" in answer.headers:
            self.led_to = "/ui" + answer.headers["Location"].partition("/ui")[2]  # a proxy takes off what is before
        for line in answer.headers.get_list("set-cookie"):
            name, _, value = line.partition(";")[0].partition("=")
            self.set[name] = line
            if "Max-Age=0" in line:
                self.cookies.pop(name, None)
            else:
                self.cookies[name] = value
        return answer
