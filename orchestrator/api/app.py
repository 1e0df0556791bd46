"""The ASGI application: composes all routes and pages, and finds the one that a request is for."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, unquote

import anyio
import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ExceptionHandler, Receive, Scope, Send

from orchestrator.api import openapi
from orchestrator.api.access import Doorkeeper
from orchestrator.api.context import Api
from orchestrator.api.dashboard.paths import NOWHERE, PAGES
from orchestrator.api.dashboard.serving import PagePath
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.headers import fault, safely
from orchestrator.api.live.hub import Hub
from orchestrator.api.problems import MEDIA_TYPE, Problem
from orchestrator.api.quotas import Meter
from orchestrator.api.routes import ROUTES
from orchestrator.api.serving import Refusals, ServedPath, problem
from orchestrator.api.slots import Slots
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger


class Served(Protocol):
    """Something that is served under one path."""

    @property
    def methods(self) -> Collection[str]:
        """Its HTTP methods."""


T = TypeVar("T", bound=Served)
_ID = re.compile(r"[0-9a-f-]{32,36}", re.IGNORECASE)


class Match(NamedTuple, Generic[T]):
    """The route of a request."""

    served: T
    path_params: dict[str, str]
    """The words that stand for the parameters of its path."""

    @property
    def is_plausible(self) -> bool:
        """Say whether an id stands where one is expected."""
        return "id" not in self.path_params or _ID.fullmatch(self.path_params["id"]) is not None


@dataclass
class _Node(Generic[T]):
    words: dict[str, _Node[T]] = field(default_factory=dict)
    any: _Node[T] | None = None
    served: T | None = None
    names: tuple[str, ...] = ()


class Paths(Generic[T]):
    """Everything that is served, by the words of its path."""

    def __init__(self, paths: Mapping[str, T]) -> None:
        self._root: _Node[T] = _Node()
        self._plain = {path: served for path, served in paths.items() if "{" not in path}
        for path, served in paths.items():
            self._add(path, served)

    def _add(self, path: str, served: T) -> None:
        node = self._root
        for word in path.split("/")[1:]:
            if word.startswith("{"):
                node.any = node.any or _Node()
                node = node.any
            else:
                node = node.words.setdefault(word, _Node())
        node.served, node.names = served, tuple(re.findall(r"{(\w+)", path))

    def find(self, scope: Scope) -> Match[T] | None:
        """Return what has the path and the method of a request; else what has its path, if anything has."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        plain = self._plain.get(scope["path"])
        if plain is not None and method in plain.methods:
            return Match(plain, {})
        first: Match[T] | None = None
        for match in _matches(self._root, _words(scope), ()):
            if method in match.served.methods and (first is None or match.is_plausible):
                return match
            first = first or match
        return first


def _words(scope: Scope) -> list[str]:
    """Return the words of a path as they were sent, each decoded by itself."""
    raw: bytes | None = scope.get("raw_path")
    if raw is None:  # a server need not send it
        return [*scope["path"].split("/")[1:]]
    return [unquote(word) for word in raw.partition(b"?")[0].decode("latin-1").split("/")[1:]]


def _matches(node: _Node[T], words: list[str], found: tuple[str, ...]) -> Iterator[Match[T]]:
    """Yield all that a path fits; a word of its own comes before a parameter."""
    if not words:
        if node.served is not None:
            yield Match(node.served, dict(zip(node.names, found, strict=True)))
        return
    word, *rest = words
    if word in node.words:
        yield from _matches(node.words[word], rest, found)
    if word and node.any is not None:
        yield from _matches(node.any, rest, (*found, word))


log = get_logger("api")
_CONSTANTS = (_DOCUMENT, _DOCS) = ("/openapi.json", "/docs")


def create_app(settings: Settings) -> Starlette:
    """Return the application, as any ASGI server takes it."""
    api = Api(settings)
    door, refusals, slots, meter, hub = Doorkeeper(api), Refusals(api), Slots(), Meter(api), Hub(api)

    @asynccontextmanager
    async def alive(_: Starlette) -> AsyncIterator[None]:
        anyio.CapacityLimiter(1)  # loads anyio's event loop, which takes 50 ms, before the first request
        yield
        hub.let_go()
        await anyio.to_thread.run_sync(api.close)

    paths: dict[str, ServedPath] = {
        path: ServedPath(api, door, refusals, slots, meter, hub, found) for path, found in _by_path(ROUTES).items()
    }
    paths |= {path: PagePath(api, door, refusals, slots, meter, hub, found) for path, found in _by_path(PAGES).items()}
    routes = [
        Route(_DOCUMENT, partial(_constant, _document(), "application/json"), methods=["GET"]),
        Route("/", _to_the_pages, methods=["GET"]),
        Route(_DOCS, partial(_page, openapi.page(ROUTES)), methods=["GET"]),
        *(Route(path, served) for path, served in paths.items()),
    ]
    handlers: dict[type[Exception], ExceptionHandler] = {
        HTTPException: partial(_not_served, paths[NOWHERE]),
        Exception: _defect,
    }
    app = _Application(routes=routes, lifespan=alive, exception_handlers=handlers)
    app.paths = Paths(paths)
    app.router.redirect_slashes = False  # its redirects name a scheme and a host, which are others before a proxy
    app.state.let_go = hub.let_go
    return app


@cache
def _document() -> bytes:
    """Return what `/openapi.json` says, which takes long to make and never changes."""
    return msgspec.json.encode(openapi.document(ROUTES))


class _Application(Starlette):
    """Finds a path by its words: the router would hold it, decoded, against every route in turn."""

    paths: Paths[ServedPath]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        send = safely(send, scope)
        if refusal := fault(scope):
            await refusal(scope, receive, send)
        elif (found := self.paths.find(scope)) is None:
            await super().__call__(scope, receive, send)
        else:
            scope["path_params"] = found.path_params
            await found.served(scope, receive, send)


async def _constant(data: bytes, media_type: str, _: Request) -> Response:
    return Response(data, media_type=media_type)


async def _to_the_pages(_: Request) -> Response:
    return RedirectResponse("ui", 303)  # seen from here: a proxy may have cut a prefix


async def _page(text: str, _: Request) -> Response:
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


def _by_path(endpoints: Sequence[Endpoint]) -> dict[str, dict[str, Endpoint]]:
    """Return the routes by path; a word of its own comes before a parameter."""
    found: dict[str, dict[str, Endpoint]] = {}
    for endpoint in sorted(endpoints, key=lambda endpoint: endpoint.path.replace("{", "\x7f")):
        found.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return found


class _Elsewhere(Response):
    """An answer that another application gives."""

    def __init__(self, served: ServedPath) -> None:
        super().__init__()
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._served(scope, receive, send)


def _without_slash(request: Request) -> Response | None:
    """Return where to go instead of a path with a slash behind it, seen from there: a proxy may have cut a prefix."""
    sent = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
    raw = sent.partition(b"?")[0].decode("latin-1")
    path = raw.removesuffix("/")
    if path in ("", raw) or path.endswith("/"):
        return None
    shorter = {**request.scope, "path": unquote(path), "raw_path": path.encode("latin-1")}
    if path not in _CONSTANTS and request.app.paths.find(shorter) is None:
        return None
    query = request.scope["query_string"].decode("latin-1")
    target = f"../{path.rpartition('/')[2]}"
    return RedirectResponse(f"{target}?{query}" if query else target)


async def _not_served(nowhere: ServedPath, request: Request, error: Exception) -> Response:
    if elsewhere := _without_slash(request):
        return elsewhere
    if request.url.path.startswith("/ui/"):
        request.scope["path_params"] = {"anything": request.url.path.removeprefix("/ui/")}
        return _Elsewhere(nowhere)
    status = error.status_code if isinstance(error, HTTPException) else 404
    problem = Problem(
        title="It was not found", status=status, detail="Nothing is served here; /openapi.json lists the routes."
    )
    return Response(msgspec.json.encode(problem), status, media_type=MEDIA_TYPE)


async def _defect(request: Request, error: Exception) -> Response:
    return problem(error, request)
