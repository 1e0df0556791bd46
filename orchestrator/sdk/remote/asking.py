"""Calls over HTTP: requests, retries where they are safe, answers and errors of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from orchestrator import time_limits
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import (
    ConfigurationError,
    Forbidden,
    OrchestratorError,
    PayloadError,
    Unavailable,
    Uncertain,
    from_problem,
)
from orchestrator.sdk.calls.declaring import REPEATED, Declared
from orchestrator.sdk.remote.http import Broken, Http, Reply, Unreached
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.sdk.waiting.steps import Pause, Steps
from orchestrator.sealing import describe_json, reveal_json
from orchestrator.terminal_safe import sentence
from orchestrator.time_limits import GRACE, TimeLimit

R = TypeVar("R")

_PROBLEM = "application/problem+json"
_ROUTES = "/api/v1"
"""The path that the client itself appends to the setting api_url."""
_KEY_HINT = (
    "Set ORCHESTRATOR_API_KEY to one that `orchestrator keys create NAME --scope SCOPE` has shown; `orchestrator keys "
    "list` has all of them."
)
_INCONCLUSIVE = (Unavailable, ConfigurationError, Forbidden, OrchestratorError)
"""Errors of a request that was not executed. They do not tell whether an earlier try of the request was executed."""
_PROXY_ERRORS = (502, 503, 504)
"""Status codes of a proxy between client and server. The server may have executed the request."""
_TRIES = 4
_PAUSES = (0.05, 0.25, 1.0)
"""Seconds between tries, unless the server sends Retry-After."""
_MAX_PAUSE = 5.0
_MAX_WAITING = 64
"""Parallel calls that wait for a run; further calls wait for a thread."""
_MAX_TIMEOUT = 330.0
"""Seconds that a call without a timeout may take, a little longer than the server allows."""
_FOREVER = 1e9


class Problem(msgspec.Struct, frozen=True):
    """An error response of the server."""

    title: str = ""
    status: int = 0
    detail: str = ""
    type: str = ""
    data: dict[str, Any] = {}


class UnknownCall(OrchestratorError):
    """The release of the server does not have this call."""


class Asking:
    """Makes calls over HTTP."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self._threads = PerProcess(lambda: ThreadPoolExecutor(_MAX_WAITING, "orchestrator-asking"))

    def close(self) -> None:
        """Stop the threads after their current calls."""
        threads = self._threads.take()
        if threads is not None:
            threads.shutdown(wait=False)

    def call(self, call: Declared, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call. Return its result or raise its error."""
        args = tuple(_repeatable(arg) for arg in args)
        kwargs = {name: _repeatable(arg) for name, arg in kwargs.items()}
        try:
            body = call.encode(args, kwargs)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise OrchestratorError(f"The request cannot be encoded: {error}.") from error
        reply = self._ask(call, body, args, kwargs)
        return self.answer(call.answer, reply).result

    def steps(self, call: Declared, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Steps[Any]:
        """Make a call that waits, in a thread of its own, so that callers on an event loop hold no thread."""
        done: Future[Any] = self._threads().submit(self.call, call, args, kwargs)
        pause = Pause(_FOREVER)
        done.add_done_callback(lambda _: pause.ring())
        while not done.done():
            yield pause
        return done.result()

    async def run(self, ask: Callable[[], R]) -> R:
        """Make a blocking call in a thread, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads(), ask)

    def answer(self, kind: type[Any], reply: Reply) -> Any:
        try:
            return msgspec.json.decode(reveal_json(reply.body), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OrchestratorError(
                f"The response of the API at {self.http.url} cannot be decoded: {error}. Client and server "
                "should be of the same release."
            ) from error

    def _ask(self, call: Declared, body: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reply:
        if not call.waits:
            return self._try(call, body, args, kwargs, self.http.timeout)
        timeout = call.signature.bind(None, *args, **kwargs).arguments.get("timeout")
        # The server times out by its own clock, and its answer needs time on the network.
        with TimeLimit(None if timeout is None else timeout + GRACE, writes=True):
            return self._try(call, body, args, kwargs, min(timeout or _MAX_TIMEOUT, _MAX_TIMEOUT) + self.http.timeout)

    def _try(
        self, call: Declared, body: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float
    ) -> Reply:
        """Send a request until there is an answer or the time limit has passed. `timeout` is the limit of one try."""
        uncertain: Uncertain | None = None
        for pause in (*_PAUSES, None):
            try:
                reply = self.http.post(call.path, body, time_limits.remaining(timeout))
                problem = self.problem(reply)
                if problem is None:
                    return reply
                if call.rules.scope != "read" and reply.status in _PROXY_ERRORS and reply.content_type != _PROBLEM:
                    problem = self._uncertain(call, args, problem)
            except Unreached as error:
                problem, reply = self.away(error), None
            except Broken as error:
                problem, reply = self._uncertain(call, args, error), None
            if isinstance(problem, Uncertain):
                uncertain = uncertain or problem
            if isinstance(problem, Uncertain) and call.is_repeatable and pause is not None:
                if call.knows_repeats:
                    body = call.encode(args, {**kwargs, REPEATED: True})
            elif not isinstance(problem, Unavailable) or pause is None:
                raise _in_doubt(uncertain, problem)
            wait = pause if reply is None or reply.retry_after is None else reply.retry_after
            if wait > time_limits.remaining(_MAX_PAUSE):
                raise _in_doubt(uncertain, problem)
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def problem(self, reply: Reply) -> OrchestratorError | None:
        """Return the exception for an error response; None for a success."""
        if reply.status < 300 and reply.content_type == "application/json":
            return None
        if reply.content_type != _PROBLEM:
            return self._foreign_reply(reply)
        try:
            problem = msgspec.json.decode(describe_json(reveal_json(reply.body)), type=Problem)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._foreign_reply(reply)
        text = problem.detail or problem.title
        if reply.status == 401:
            subject = (
                "refuses setting api_key" if self.http.has_key else "asks for a key, and setting api_key is not set"
            )
            return ConfigurationError(f"The API at {self.http.url} {subject}: {text} {_KEY_HINT}")
        if reply.status == 403:
            return Forbidden(f"The API at {self.http.url} does not allow this with setting api_key: {text} {_KEY_HINT}")
        error = from_problem(problem.type, text, problem.data)
        if error is not None:
            return error
        if reply.status in (404, 405) and self.http.url.endswith(_ROUTES):
            expected = self.http.url.removesuffix(_ROUTES)
            return ConfigurationError(
                f"Setting api_url: expected the address without {_ROUTES}, {expected}, found {self.http.url}."
            )
        if reply.status in (404, 405):
            return UnknownCall(
                f"The API at {self.http.url} does not know this call: it is a different release. Use a client of "
                "the same release."
            )
        if reply.status in (429, 503):
            return Unavailable(f"The API at {self.http.url} cannot be used now: {text}")
        kind = PayloadError if reply.status == 413 else OrchestratorError
        return kind(f"The API at {self.http.url} refuses this ({problem.title}): {text}")

    def away(self, error: Exception) -> Unavailable:
        """Return the exception for a server that cannot be reached."""
        return Unavailable(
            f"The API at {self.http.url} cannot be reached: {sentence(str(error))} See whether `orchestrator api` runs "
            f"there, and whether setting api_url (ORCHESTRATOR_API_URL) is its address."
        )

    def _uncertain(self, call: Declared, args: tuple[Any, ...], error: Exception) -> Uncertain:
        if call.rules.scope == "read":
            return Uncertain(f"The connection to the API at {self.http.url} broke: {error}")
        subject = f" of {to_text(args[0].id)}" if args and isinstance(args[0], NewTask) else ""
        return Uncertain(
            f"The connection to the API at {self.http.url} broke, and it is not known whether this was done "
            f"({call.part} {call.name}{subject}): {error}"
        )

    def _foreign_reply(self, reply: Reply) -> OrchestratorError:
        if reply.status in (429, 502, 503, 504):
            return Unavailable(
                f"The proxy in front of the API at {self.http.url} cannot reach it: status {reply.status}"
            )
        return ConfigurationError(
            f"Setting api_url: {self.http.url} is not the API of an orchestrator: it answered with status "
            f"{reply.status} and {reply.content_type}. Expected the address that `orchestrator api` says it "
            "serves."
        )


def _repeatable(arg: Any) -> Any:
    """Return an argument that can be encoded again for a retry: the items of an iterator as a list."""
    return [*arg] if isinstance(arg, Iterator) else arg


def _in_doubt(doubt: Uncertain | None, problem: OrchestratorError) -> OrchestratorError:
    """Return the error to raise. After a lost answer (`doubt`), an inconclusive error must not hide the uncertainty."""
    if doubt is None or isinstance(problem, Uncertain) or type(problem) not in _INCONCLUSIVE:
        return problem
    doubt.__cause__ = problem
    return doubt


def bound(call: Declared) -> Any:
    """Make the method of a call, for a class with an attribute `_asking`."""

    def blocking(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._asking.call(call, args, kwargs)

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Steps[Any]:
        return (yield from self._asking.steps(call, args, kwargs))

    method = waiting if call.waits else blocking
    method.__name__, method.__doc__ = call.name, call.summary
    return method
