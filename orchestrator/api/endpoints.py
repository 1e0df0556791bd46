"""A route as a declaration: a function with types, from which requests are read and its documentation is made.

    @routes.get("/tasks/{id}", about=TASK)
    def show_task(api: Api, id: UUID) -> TaskAnswer:
        '''Show all that is known of one task.'''

What stands in braces in the path is read as the parameter of that name; `query` is a structure of what follows `?`,
`body` what is sent, `key` the header `Idempotency-Key`, `match` the condition in `If-Match` and `If-None-Match`,
`key_scope` the queues and workflows that the key is for. `about` says what is checked against it. The first line of the
docstring is the summary.
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

from orchestrator.api.bodies import LARGEST_QUESTION, ONE_VALUE, decoder
from orchestrator.api.key_scope import NOTHING, TASK, WITHIN, WORKFLOW, Subject
from orchestrator.api.problems import misfit, refused, unfit
from orchestrator.domain.access import Scope

F = TypeVar("F", bound=Callable[..., Any])
JSON = "application/json"
EVENTS = "text/event-stream"
CLIENTS = ("/api/v1/client/", "/api/v1/waits")
"""How the paths begin that programs of ours ask for."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One route."""

    method: str
    path: str
    call: Callable[..., Any]
    """Called in a thread, or on the event loop if it is `async`, with the server's parts and what was read."""
    call_large: Callable[..., Any] | None = None
    """Called in a thread in place of one that is `async`, where the body is large."""
    scope: Scope | None
    """The scope that a key needs; None if no key is needed."""
    about: Subject
    """The subject of the route. A bound key is checked against it."""
    tag: str
    status: int = 200
    summary: str = ""
    description: str = ""
    path_params: Mapping[str, Any] = field(default_factory=dict)
    """The types of the parameters in the path."""
    query: Any = None
    body: Any = None
    answer: Any = None
    is_async: bool = False
    is_expensive: bool = False
    """It may take long, and so has other request slots than what takes milliseconds."""
    largest_body: int = LARGEST_QUESTION
    """Bytes of a body; ONE_VALUE for those of one value."""
    media_type: str = JSON
    """The media type of the answer."""
    takes_key: bool = False
    takes_match: bool = False
    etag: Callable[[Any], str] | None = None
    """Returns the ETag of an answer, so that a client that has it need not read it again."""
    is_kept: Callable[[Any], bool] | None = None
    """Says whether an answer means that nothing has come of it yet; then the status is 202."""
    may_be_nothing: bool = False
    """There may be nothing to answer with; then the status is 204."""
    takes_key_scope: bool = False
    true_values: bool = False
    """The answer has values as a program needs them, also those that `redact` names."""
    examples: Sequence[Any] = ()
    """Of the body."""
    repeated: frozenset[str] = frozenset()
    """Names in the query that may be given more than once."""

    @property
    def is_for_clients(self) -> bool:
        """Say whether a program of ours reads the answer: that opens what is sealed, if it has the key."""
        return self.path.startswith(CLIENTS)

    @property
    def is_live(self) -> bool:
        """Say whether it is answered with events as they happen; then the call says what is listened to."""
        return self.media_type == EVENTS

    def read_path(self, found: Mapping[str, str]) -> dict[str, Any]:
        """Return what stands in the path, in its types."""
        read = {}
        for name, kind in self.path_params.items():
            try:
                read[name] = msgspec.convert(found[name], kind, strict=False)
            except msgspec.ValidationError as error:
                said = "expected one such as 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17" if kind is UUID else str(error)
                raise refused(404, "It was not found", f"{found[name]!r:.100} is no {name}: {said}.") from error
        return read

    def read_query(self, text: str) -> dict[str, Any]:
        """Return what follows `?`, in its type."""
        given: dict[str, Any] = {}
        for name, value in parse_qsl(text, keep_blank_values=True):
            if name in self.repeated:
                given.setdefault(name, []).append(value)
            elif name in given:
                raise unfit(f"?{name} is given twice.")
            else:
                given[name] = value
        if self.query is None:
            if given:
                raise unfit(f"?{next(iter(given))}: this route takes no options.")
            return {}
        try:
            return {"query": msgspec.convert(given, self.query, strict=False)}
        except msgspec.ValidationError as error:
            raise misfit(error, "?") from error

    @property
    def takes_yaml(self) -> bool:
        """Say whether the body may be YAML, which the function is given as a text."""
        return isinstance(self.body, UnionType) and str in get_args(self.body)

    def read_body(self, data: bytes, content_type: str = "") -> dict[str, Any]:
        """Return what was sent, in its type."""
        if self.body is None:
            return {}
        if self.takes_yaml and "yaml" in content_type.lower():
            try:
                return {"body": data.decode()}
            except UnicodeDecodeError as error:
                raise refused(400, "The body is no YAML", f"Expected UTF-8: {error}.") from error
        try:
            return {"body": decoder(self.body).decode(data or b"{}")}
        except msgspec.ValidationError as error:
            raise misfit(error) from error
        except RecursionError:
            raise unfit("The body has too many levels within each other.") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            marked = data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            detail = "It begins with a byte order mark: send UTF-8 without one." if marked else str(error)
            raise refused(400, "The body is no JSON", detail) from error


class Options(TypedDict, total=False):
    """Fields of an endpoint that are not derived from its function."""

    scope: Scope | None
    status: int
    examples: Sequence[Any]
    media_type: str
    etag: Callable[[Any], str] | None
    is_kept: Callable[[Any], bool] | None
    may_be_nothing: bool
    true_values: bool
    is_expensive: bool
    largest_body: int
    call_large: Callable[..., Any] | None


def largest_body(scope: Scope | None) -> int:
    """Return how many bytes a body may have, unless its route says otherwise."""
    return LARGEST_QUESTION if scope in (None, Scope.READ) else ONE_VALUE


@dataclass
class Routes:
    """The routes of one subject."""

    tag: str
    """Their subject."""
    prefix: str = ""
    media_type: str = JSON
    """Of what routes answer that look at something."""
    kind: type[Endpoint] = Endpoint
    found: list[Endpoint] = field(default_factory=list)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.found)

    def get(self, path: str, *, about: Subject, **options: Unpack[Options]) -> Callable[[F], F]:
        """Declare a route that looks at something."""
        return self._add("GET", path, about, {"scope": Scope.READ, "media_type": self.media_type, **options})

    def live(self, path: str, *, about: Subject) -> Callable[[F], F]:
        """Declare a route that sends events as they happen."""
        return self.get(path, about=about, media_type=EVENTS)

    def post(self, path: str, *, about: Subject, **options: Unpack[Options]) -> Callable[[F], F]:
        return self._add("POST", path, about, {"scope": Scope.OPERATE, **options})

    def put(self, path: str, *, about: Subject, **options: Unpack[Options]) -> Callable[[F], F]:
        """Declare a route that sets something: the same again changes nothing."""
        return self._add("PUT", path, about, {"scope": Scope.OPERATE, **options})

    def delete(self, path: str, *, about: Subject, **options: Unpack[Options]) -> Callable[[F], F]:
        """Declare a route that removes something."""
        return self._add("DELETE", path, about, {"scope": Scope.OPERATE, **options})

    def _add(self, method: str, path: str, about: Subject, options: Options) -> Callable[[F], F]:
        options.setdefault("largest_body", largest_body(options["scope"]))

        def declare(call: F) -> F:
            hints = get_type_hints(call, include_extras=True)
            names = inspect.signature(call).parameters
            if ("key_scope" in names) != (about is WITHIN) and not (about in (WORKFLOW, TASK) and "key_scope" in names):
                raise TypeError(
                    f"{method} {path}: a function takes the `key_scope` if it is about what is WITHIN it. One about a "
                    f"workflow or a task may; no other does."
                )
            if inspect.iscoroutinefunction(call) and about not in (WITHIN, NOTHING):
                raise TypeError(f"{method} {path}: whom it is about may have to be looked up, which needs a thread.")
            summary, _, description = (inspect.getdoc(call) or "").partition("\n")
            self.found.append(
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
                    answer=_answered(hints.get("return")),
                    is_async=inspect.iscoroutinefunction(call),
                    takes_key="key" in names,
                    takes_match="match" in names,
                    takes_key_scope="key_scope" in names,
                    repeated=frozenset(_lists(hints.get("query"))),
                    **options,
                )
            )
            return call

        return declare


def of_name(name: str, endpoints: Iterable[Endpoint]) -> Endpoint:
    """Return the route that is performed by the function of this name."""
    return next(one for one in endpoints if one.call.__name__ == name)


def _answered(returned: Any) -> Any:
    """Return what a function answers with; one that waits, if only at times, is a generator of its pauses."""
    kinds = get_args(returned) if get_origin(returned) is UnionType else (returned,)
    waiting = next((kind for kind in kinds if get_origin(kind) is Generator), None)
    return returned if waiting is None else get_args(waiting)[2]


def _lists(query: Any) -> Iterator[str]:
    """Yield the fields of a structure that hold several values."""
    for one in msgspec.structs.fields(query) if query is not None else ():
        if get_origin(one.type) in (tuple, list) or any(
            get_origin(kind) in (tuple, list) for kind in get_args(one.type)
        ):
            yield one.encode_name
