"""The ASGI application that answers `POST /exec/<service>`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from hmac import compare_digest
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.errors import did_you_mean
from orchestrator.sdk.tasks.task import Task
from orchestrator.workers.serving.executions import Busy, Executions, ServiceRequest

LARGEST_REQUEST = 32_000_000
"""Bytes of a request that are read, as by the HTTP API, or more where `max_payload` asks for it."""


class Services:
    """The tasks that are served, and their requests."""

    def __init__(
        self, tasks: Mapping[str, Task[..., Any]], concurrency: int, largest: int, keys: Sequence[str] = ()
    ) -> None:
        self.tasks = tasks
        self._concurrency = concurrency
        self._largest = largest
        self._keys = [f"Bearer {key}".encode() for key in keys]
        self._executions: Executions | None = None

    @property
    def load(self) -> int:
        """How many requests are worked on, or wait."""
        return 0 if self._executions is None else self._executions.load

    def application(self) -> Starlette:
        """Return what any ASGI server takes."""

        @asynccontextmanager
        async def alive(_: Starlette) -> AsyncIterator[None]:
            self._executions = Executions(self._concurrency, self._largest)
            yield
            await self._executions.finish()

        routes = [
            Route("/exec/{service:path}", self._serve, methods=["POST"]),
            Route("/exec/{service:path}/{request_id}", self._cancel, methods=["DELETE"]),
            Route("/healthz", _healthy, methods=["GET"]),
        ]
        return Starlette(routes=routes, lifespan=alive)

    async def _serve(self, request: Request) -> Response:
        name = request.path_params["service"]
        task = self.tasks.get(name)
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if task is None:
            return _error(404, f"There is no service {name!r:.200} here.{did_you_mean(name, self.tasks)}")
        body = await _read(request, max(LARGEST_REQUEST, 2 * self._largest))
        if isinstance(body, Response):
            return body
        try:
            wanted = msgspec.json.decode(body, type=ServiceRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, f"Expected an object with `input` and `params` in JSON: {error}.")
        assert self._executions is not None
        try:
            said = await self._executions.do(task, wanted)
        except Busy:
            return _error(503, f"{self.load} requests are worked on or wait here already.")
        return Response(said.body, said.status, media_type="application/json")

    async def _cancel(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        assert self._executions is not None
        service, _, request_id = _path(request).removeprefix("/exec/").rpartition("/")
        is_cancelled = self._executions.cancel(unquote(service), unquote(request_id))
        return Response(msgspec.json.encode({"cancelled": is_cancelled}), media_type="application/json")

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without a valid key; all keys are compared in constant time."""
        if "origin" in request.headers:
            return _error(403, "A page in a browser has sent this, and services are for programs.")
        if not self._keys:
            return None
        given = request.headers.get("authorization", "").encode("latin-1")
        if any([compare_digest(given, key) for key in self._keys]):  # noqa: C419
            return None
        response = _error(401, "This service asks for a key: Authorization: Bearer KEY (setting service_keys).")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response


async def _read(request: Request, most: int) -> bytes | Response:
    """Return the body of a request, or the answer to one that is too large, once all of it was sent.

    A client that is answered while it sends may find its connection broken, and no answer.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
        else:
            parts.clear()
    return b"".join(parts) if size <= most else _error(413, f"At most {most:,} bytes are read, found {size:,}.")


def _path(request: Request) -> str:
    """Return the path as it was sent, in which the slash of a name is `%2F`."""
    raw: bytes | None = request.scope.get("raw_path")
    return quote(request.url.path) if raw is None else raw.partition(b"?")[0].decode("latin-1")


async def _healthy(_: Request) -> Response:
    return Response(b'{"ok":true}', media_type="application/json")


def _error(status: int, words: str) -> Response:
    data = msgspec.json.encode({"result": None, "error": words, "retryable": status >= 500})
    return Response(data, status, media_type="application/json")
