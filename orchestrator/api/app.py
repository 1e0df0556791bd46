"""The ASGI application: composes all routes and pages, and finds the route of a request."""

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
from orchestrator.api.access import Authenticator
from orchestrator.api.context import Api
from orchestrator.api.dashboard.paths import NOT_FOUND, PAGES
from orchestrator.api.dashboard.serving import PagePath
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.headers import find_ambiguity, with_safe_headers
from orchestrator.api.live.hub import Hub
from orchestrator.api.problems import MEDIA_TYPE, Problem
from orchestrator.api.quotas import Meter
from orchestrator.api.routes import ROUTES
from orchestrator.api.serving import RejectionLog, ServedPath, problem
from orchestrator.api.slots import Slots
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger


class HasMethods(Protocol):
    @property
    def methods(self) -> Collection[str]: ...


T = TypeVar("T", bound=HasMethods)
_ID = re.compile(r"[0-9a-f-]{32,36}", re.IGNORECASE)


class Match(NamedTuple, Generic[T]):
    """The route of a request."""

    target: T
    path_params: dict[str, str]

    @property
    def is_plausible(self) -> bool:
        """Return whether the path has no `id`, or the value of `id` looks like one."""
        return "id" not in self.path_params or _ID.fullmatch(self.path_params["id"]) is not None


@dataclass
class _Node(Generic[T]):
    children: dict[str, _Node[T]] = field(default_factory=dict)
    wildcard: _Node[T] | None = None
    target: T | None = None
    names: tuple[str, ...] = ()


class Paths(Generic[T]):
    """All routes, in a tree of path segments."""

    def __init__(self, paths: Mapping[str, T]) -> None:
        self._root: _Node[T] = _Node()
        self._plain = {path: target for path, target in paths.items() if "{" not in path}
        for path, target in paths.items():
            self._add(path, target)

    def _add(self, path: str, target: T) -> None:
        node = self._root
        for segment in path.split("/")[1:]:
            if segment.startswith("{"):
                node.wildcard = node.wildcard or _Node()
                node = node.wildcard
            else:
                node = node.children.setdefault(segment, _Node())
        node.target, node.names = target, tuple(re.findall(r"{(\w+)", path))

    def find(self, scope: Scope) -> Match[T] | None:
        """Return the route with the path and method of a request, or any route with its path; None if there is none."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        plain = self._plain.get(scope["path"])
        if plain is not None and method in plain.methods:
            return Match(plain, {})
        first: Match[T] | None = None
        for match in _matches(self._root, _segments(scope), ()):
            if method in match.target.methods and (first is None or match.is_plausible):
                return match
            first = first or match
        return first


def _segments(scope: Scope) -> list[str]:
    """Return the segments of the path, each URL-decoded separately."""
    raw: bytes | None = scope.get("raw_path")
    if raw is None:  # optional in ASGI
        return [*scope["path"].split("/")[1:]]
    return [unquote(segment) for segment in raw.partition(b"?")[0].decode("latin-1").split("/")[1:]]


def _matches(node: _Node[T], segments: list[str], values: tuple[str, ...]) -> Iterator[Match[T]]:
    """Yield all routes that match a path; literal segments come before parameters."""
    if not segments:
        if node.target is not None:
            yield Match(node.target, dict(zip(node.names, values, strict=True)))
        return
    segment, *rest = segments
    if segment in node.children:
        yield from _matches(node.children[segment], rest, values)
    if segment and node.wildcard is not None:
        yield from _matches(node.wildcard, rest, (*values, segment))


log = get_logger("api")
_CONSTANTS = (_DOCUMENT, _DOCS) = ("/openapi.json", "/docs")


def create_app(settings: Settings) -> Starlette:
    """Return the ASGI application."""
    api = Api(settings)
    auth, rejections, slots, meter, hub = (Authenticator(api), RejectionLog(api), Slots(), Meter(api), Hub(api))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        anyio.CapacityLimiter(1)  # loads anyio's event loop, which takes 50 ms, before the first request
        yield
        hub.close_streams()
        await anyio.to_thread.run_sync(api.close)

    paths: dict[str, ServedPath] = {
        path: ServedPath(api, auth, rejections, slots, meter, hub, found) for path, found in _by_path(ROUTES).items()
    }
    paths |= {
        path: PagePath(api, auth, rejections, slots, meter, hub, found) for path, found in _by_path(PAGES).items()
    }
    routes = [
        Route(_DOCUMENT, partial(_constant, _document(), "application/json"), methods=["GET"]),
        Route("/", _redirect_to_dashboard, methods=["GET"]),
        Route(_DOCS, partial(_page, openapi.page(ROUTES)), methods=["GET"]),
        *(Route(path, served) for path, served in paths.items()),
    ]
    handlers: dict[type[Exception], ExceptionHandler] = {
        HTTPException: partial(_not_found, paths[NOT_FOUND]),
        Exception: _defect,
    }
    app = _Application(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.paths = Paths(paths)
    app.router.redirect_slashes = False  # its redirects name a scheme and host, which are wrong behind a proxy
    app.state.close_streams = hub.close_streams
    return app


@cache
def _document() -> bytes:
    """Return the OpenAPI document. It is slow to build and never changes."""
    return msgspec.json.encode(openapi.document(ROUTES))


class _Application(Starlette):
    """Finds routes by path segment. Starlette's router would match the decoded path against every route in turn."""

    paths: Paths[ServedPath]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        send = with_safe_headers(send, scope)
        if rejection := find_ambiguity(scope):
            await rejection(scope, receive, send)
        elif (match := self.paths.find(scope)) is None:
            await super().__call__(scope, receive, send)
        else:
            scope["path_params"] = match.path_params
            await match.target(scope, receive, send)


async def _constant(data: bytes, media_type: str, _: Request) -> Response:
    return Response(data, media_type=media_type)


async def _redirect_to_dashboard(_: Request) -> Response:
    return RedirectResponse("ui", 303)  # relative, because a proxy may have cut a prefix


async def _page(text: str, _: Request) -> Response:
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


def _by_path(endpoints: Sequence[Endpoint]) -> dict[str, dict[str, Endpoint]]:
    """Return the routes by path; literal segments come before parameters."""
    found: dict[str, dict[str, Endpoint]] = {}
    for endpoint in sorted(endpoints, key=lambda endpoint: endpoint.path.replace("{", "\x7f")):
        found.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return found


class _Delegated(Response):
    """A response that another application sends."""

    def __init__(self, served: ServedPath) -> None:
        super().__init__()
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._served(scope, receive, send)


def _redirect_without_slash(request: Request) -> Response | None:
    """Return a relative redirect to the path without its trailing slash: a proxy may have cut a prefix."""
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


async def _not_found(not_found_page: ServedPath, request: Request, error: Exception) -> Response:
    if redirect := _redirect_without_slash(request):
        return redirect
    if request.url.path.startswith("/ui/"):
        request.scope["path_params"] = {"anything": request.url.path.removeprefix("/ui/")}
        return _Delegated(not_found_page)
    status = error.status_code if isinstance(error, HTTPException) else 404
    problem = Problem(
        title="The resource was not found",
        status=status,
        detail="There is no such route; /openapi.json lists the routes.",
    )
    return Response(msgspec.json.encode(problem), status, media_type=MEDIA_TYPE)


async def _defect(request: Request, error: Exception) -> Response:
    return problem(error, request)
