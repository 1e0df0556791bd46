"""Routes as typed functions. Requests are parsed and documented from the types.

    @routes.get("/tasks/{id}", about=TASK)
    def show_task(api: Api, id: UUID) -> TaskAnswer:
        '''Show all that is known of one task.'''

Names in braces in the path are parameters of the function. `query` is a struct of the query parameters, `body` the
request body, `key` the header `Idempotency-Key`, `match` the condition in `If-Match` and `If-None-Match`, and
`key_scope` the queues and workflows of the caller's key, against which `about` is checked. The first line of the
docstring is the summary in the documentation.
"""

from __future__ import annotations

import codecs
import inspect
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypedDict, TypeVar, Unpack, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec

from orchestrator.api.bodies import MAX_SMALL_REQUEST, ONE_VALUE, decoder
from orchestrator.api.key_scope import NOTHING, TASK, WITHIN, WORKFLOW, Subject
from orchestrator.api.problems import invalid, invalid_field, refused
from orchestrator.domain.access import Scope

F = TypeVar("F", bound=Callable[..., Any])
JSON = "application/json"
EVENTS = "text/event-stream"
CLIENTS = ("/api/v1/client/", "/api/v1/waits")
"""Prefixes of paths for the Python client and workers."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    method: str
    path: str
    call: Callable[..., Any]
    """Called in a thread, or on the event loop if it is `async`, with the Api and the parsed request."""
    call_large: Callable[..., Any] | None = None
    """Called in a thread instead of an `async` function if the body is large."""
    scope: Scope | None
    """The scope that a key needs; None if no key is needed."""
    about: Subject
    """The subject of the route, which is checked for bound keys."""
    tag: str
    status: int = 200
    summary: str = ""
    description: str = ""
    path_params: Mapping[str, Any] = field(default_factory=dict)
    query: Any = None
    body: Any = None
    answer: Any = None
    is_async: bool = False
    is_expensive: bool = False
    """The call may be slow, and uses the slots for expensive requests."""
    max_body: int = MAX_SMALL_REQUEST
    """Bytes of a body, at most; ONE_VALUE for a body with one value."""
    media_type: str = JSON
    takes_key: bool = False
    takes_match: bool = False
    etag: Callable[[Any], str] | None = None
    """Returns the ETag of a response, so that clients need not read it again."""
    is_pending: Callable[[Any], bool] | None = None
    """Returns whether the request is accepted but not finished; then the status is 202."""
    may_be_empty: bool = False
    """The result may be None; then the status is 204."""
    takes_key_scope: bool = False
    true_values: bool = False
    """The response has unredacted values, for programs."""
    examples: Sequence[Any] = ()
    repeated: frozenset[str] = frozenset()
    """Query parameters that may be repeated."""

    @property
    def is_for_sdk(self) -> bool:
        """Return whether the Python client reads the response, and opens sealed values if it has the key."""
        return self.path.startswith(CLIENTS)

    @property
    def is_live(self) -> bool:
        """Return whether the response is an event stream; then the function returns a StreamRequest."""
        return self.media_type == EVENTS

    def read_path(self, texts: Mapping[str, str]) -> dict[str, Any]:
        values = {}
        for name, kind in self.path_params.items():
            try:
                values[name] = msgspec.convert(texts[name], kind, strict=False)
            except msgspec.ValidationError as error:
                said = "expected one such as 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17" if kind is UUID else str(error)
                raise refused(
                    404, "The resource was not found", f"{texts[name]!r:.100} is not a valid {name}: {said}."
                ) from error
        return values

    def read_query(self, text: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in parse_qsl(text, keep_blank_values=True):
            if name in self.repeated:
                values.setdefault(name, []).append(value)
            elif name in values:
                raise invalid(f"?{name} is given twice.")
            else:
                values[name] = value
        if self.query is None:
            if values:
                raise invalid(f"?{next(iter(values))}: this route has no query parameters.")
            return {}
        try:
            return {"query": msgspec.convert(values, self.query, strict=False)}
        except msgspec.ValidationError as error:
            raise invalid_field(error, "?") from error

    @property
    def takes_yaml(self) -> bool:
        """Return whether the body may be YAML, which is passed to the function as text."""
        return isinstance(self.body, UnionType) and str in get_args(self.body)

    def read_body(self, data: bytes, content_type: str = "") -> dict[str, Any]:
        if self.body is None:
            return {}
        if self.takes_yaml and "yaml" in content_type.lower():
            try:
                return {"body": data.decode()}
            except UnicodeDecodeError as error:
                raise refused(400, "The body is not YAML", f"Expected UTF-8: {error}.") from error
        try:
            return {"body": decoder(self.body).decode(data or b"{}")}
        except msgspec.ValidationError as error:
            raise invalid_field(error) from error
        except RecursionError:
            raise invalid("The body is nested too deeply.") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            marked = data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            detail = "It begins with a byte order mark: send UTF-8 without one." if marked else str(error)
            raise refused(400, "The body is not JSON", detail) from error


class Options(TypedDict, total=False):
    """Fields of an endpoint that are not derived from its function."""

    scope: Scope | None
    status: int
    examples: Sequence[Any]
    media_type: str
    etag: Callable[[Any], str] | None
    is_pending: Callable[[Any], bool] | None
    may_be_empty: bool
    true_values: bool
    is_expensive: bool
    max_body: int
    call_large: Callable[..., Any] | None


def max_body(scope: Scope | None) -> int:
    """Return the default maximum size of a body for a scope."""
    return MAX_SMALL_REQUEST if scope in (None, Scope.READ) else ONE_VALUE


@dataclass
class Routes:
    tag: str
    """The subject, for documentation."""
    prefix: str = ""
    media_type: str = JSON
    """The media type of GET responses."""
    kind: type[Endpoint] = Endpoint
    endpoints: list[Endpoint] = field(default_factory=list)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.endpoints)

    def get(self, path: str, *, about: Subject, **options: Unpack[Options]) -> Callable[[F], F]:
        """Declare a route that reads."""
        return self._add("GET", path, about, {"scope": Scope.READ, "media_type": self.media_type, **options})

    def live(self, path: str, *, about: Subject) -> Callable[[F], F]:
        """Declare a route that streams events."""
        return self.get(path, about=about, media_type=EVENTS)

    def post(self, path: str, *, about: Subject, **options: Unpack[Options]) -> Callable[[F], F]:
        return self._add("POST", path, about, {"scope": Scope.OPERATE, **options})

    def put(self, path: str, *, about: Subject, **options: Unpack[Options]) -> Callable[[F], F]:
        """Declare a route that sets something; repeating the request changes nothing."""
        return self._add("PUT", path, about, {"scope": Scope.OPERATE, **options})

    def delete(self, path: str, *, about: Subject, **options: Unpack[Options]) -> Callable[[F], F]:
        return self._add("DELETE", path, about, {"scope": Scope.OPERATE, **options})

    def _add(self, method: str, path: str, about: Subject, options: Options) -> Callable[[F], F]:
        options.setdefault("max_body", max_body(options["scope"]))

        def declare(call: F) -> F:
            hints = get_type_hints(call, include_extras=True)
            names = inspect.signature(call).parameters
            if ("key_scope" in names) != (about is WITHIN) and not (about in (WORKFLOW, TASK) and "key_scope" in names):
                raise TypeError(
                    f"{method} {path}: a function with `about=WITHIN` must take `key_scope`. With `about=WORKFLOW` or "
                    f"`about=TASK` it may; with any other subject it must not."
                )
            if inspect.iscoroutinefunction(call) and about not in (WITHIN, NOTHING):
                raise TypeError(
                    f"{method} {path}: the scope check may query Postgres, so the function must not be a coroutine."
                )
            summary, _, description = (inspect.getdoc(call) or "").partition("\n")
            self.endpoints.append(
                self.kind(
                    method=method,
                    path=self.prefix + path,
                    call=call,
                    about=about,
                    tag=self.tag,
                    summary=summary.rstrip("."),
                    description=description.strip(),
                    path_params={name: hints[name] for name in re.findall(r"{(\w+)", path)},
                    query=hints.get("query"),
                    body=hints.get("body"),
                    answer=_result_type(hints.get("return")),
                    is_async=inspect.iscoroutinefunction(call),
                    takes_key="key" in names,
                    takes_match="match" in names,
                    takes_key_scope="key_scope" in names,
                    repeated=frozenset(_list_fields(hints.get("query"))),
                    **options,
                )
            )
            return call

        return declare


def endpoint_named(name: str, endpoints: Iterable[Endpoint]) -> Endpoint:
    """Return the route with a function of this name."""
    return next(endpoint for endpoint in endpoints if endpoint.call.__name__ == name)


def _result_type(returned: Any) -> Any:
    """Return the type of a function's result. A function that waits is a generator of pauses."""
    kinds = get_args(returned) if get_origin(returned) is UnionType else (returned,)
    waiting = next((kind for kind in kinds if get_origin(kind) is Generator), None)
    return returned if waiting is None else get_args(waiting)[2]


def _list_fields(query: Any) -> Iterator[str]:
    """Yield the fields of a struct that hold several values."""
    for item in msgspec.structs.fields(query) if query is not None else ():
        if get_origin(item.type) in (tuple, list) or any(
            get_origin(kind) in (tuple, list) for kind in get_args(item.type)
        ):
            yield item.encode_name
