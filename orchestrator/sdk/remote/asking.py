"""Calls over HTTP: requests, retried where that is safe, and their answers or the server's errors."""

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
"""The path that the client itself puts behind the address."""
_KEYS = (
    "Set ORCHESTRATOR_API_KEY to one that `orchestrator keys create NAME --scope SCOPE` has shown; `orchestrator keys "
    "list` has all of them."
)
"""Where keys come from, and go."""
_SAYS_NOTHING = (Unavailable, ConfigurationError, Forbidden, OrchestratorError)
"""Errors of a request that was not carried out, whatever became of the one before it."""
_ON_THE_WAY = (502, 503, 504)
"""Statuses of a proxy between client and server: the server may have done it."""
_TRIES = 4
_PAUSES = (0.05, 0.25, 1.0)
"""Seconds between tries, unless the server says how many."""
_LONGEST_PAUSE = 5.0
_MOST_WAITING = 64
"""Calls that wait for an answer at the same time; others wait for a thread."""
_UNLIMITED = 330.0
"""Seconds that a call may take which gives no time of its own: a little more than the server gives it."""
_FOREVER = 1e9


class Problem(msgspec.Struct, frozen=True):
    """An error from the server."""

    title: str = ""
    status: int = 0
    detail: str = ""
    type: str = ""
    data: dict[str, Any] = {}


class UnknownCall(OrchestratorError):
    """The server is of a release that does not have this call."""


class Asking:
    """Makes calls."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self._threads = PerProcess(lambda: ThreadPoolExecutor(_MOST_WAITING, "orchestrator-asking"))

    def close(self) -> None:
        """Let the threads end with what they do now."""
        threads = self._threads.take()
        if threads is not None:
            threads.shutdown(wait=False)

    def call(self, call: Declared, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call, and return what it returns or raise what it raises."""
        args = tuple(_repeatable(arg) for arg in args)
        kwargs = {name: _repeatable(arg) for name, arg in kwargs.items()}
        try:
            body = call.encode(args, kwargs)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise OrchestratorError(f"This cannot be sent: {error}.") from error
        reply = self._ask(call, body, args, kwargs)
        return self.answer(call.answer, reply).result

    def steps(self, call: Declared, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Steps[Any]:
        """Do the same for one that waits: in a thread of its own, which a caller on an event loop does not hold."""
        done: Future[Any] = self._threads().submit(self.call, call, args, kwargs)
        pause = Pause(_FOREVER)
        done.add_done_callback(lambda _: pause.ring())
        while not done.done():
            yield pause
        return done.result()

    async def run(self, ask: Callable[[], R]) -> R:
        """Ask in a thread, while the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._threads(), ask)

    def answer(self, kind: type[Any], reply: Reply) -> Any:
        try:
            return msgspec.json.decode(reveal_json(reply.body), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OrchestratorError(
                f"What the API at {self.http.url} answered cannot be understood: {error}. Client and server should be "
                f"of the same release."
            ) from error

    def _ask(self, call: Declared, body: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reply:
        if not call.waits:
            return self._try(call, body, args, kwargs, self.http.timeout)
        timeout = call.signature.bind(None, *args, **kwargs).arguments.get("timeout")
        # The server gives up in its own time, and its answer has a way to go.
        with TimeLimit(None if timeout is None else timeout + GRACE, writes=True):
            return self._try(call, body, args, kwargs, min(timeout or _UNLIMITED, _UNLIMITED) + self.http.timeout)

    def _try(self, call: Declared, body: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any], most: float) -> Reply:
        """Ask until there is an answer, or the time of the call is over; each time takes so many seconds at most."""
        doubt: Uncertain | None = None
        for pause in (*_PAUSES, None):
            try:
                reply = self.http.post(call.path, body, time_limits.left(most))
                problem = self.problem(reply)
                if problem is None:
                    return reply
                if call.rules.scope != "read" and reply.status in _ON_THE_WAY and reply.content_type != _PROBLEM:
                    problem = self._uncertain(call, args, problem)
            except Unreached as error:
                problem, reply = self.away(error), None
            except Broken as error:
                problem, reply = self._uncertain(call, args, error), None
            if isinstance(problem, Uncertain):
                doubt = doubt or problem
            if isinstance(problem, Uncertain) and call.is_repeatable and pause is not None:
                if call.knows_repeats:
                    body = call.encode(args, {**kwargs, REPEATED: True})
            elif not isinstance(problem, Unavailable) or pause is None:
                raise _in_doubt(doubt, problem)
            wait = pause if reply is None or reply.retry_after is None else reply.retry_after
            if wait > time_limits.left(_LONGEST_PAUSE):
                raise _in_doubt(doubt, problem)
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def problem(self, reply: Reply) -> OrchestratorError | None:
        """Return what a reply says that went wrong, as the exception that the server has raised."""
        if reply.status < 300 and reply.content_type == "application/json":
            return None
        if reply.content_type != _PROBLEM:
            return self._not_ours(reply)
        try:
            problem = msgspec.json.decode(describe_json(reveal_json(reply.body)), type=Problem)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._not_ours(reply)
        text = problem.detail or problem.title
        if reply.status == 401:
            what = "refuses setting api_key" if self.http.has_key else "asks for a key, and setting api_key is not set"
            return ConfigurationError(f"The API at {self.http.url} {what}: {text} {_KEYS}")
        if reply.status == 403:
            return Forbidden(f"The API at {self.http.url} does not allow this with setting api_key: {text} {_KEYS}")
        found = from_problem(problem.type, text, problem.data)
        if found is not None:
            return found
        if reply.status in (404, 405) and self.http.url.endswith(_ROUTES):
            expected = self.http.url.removesuffix(_ROUTES)
            return ConfigurationError(
                f"Setting api_url: expected the address without {_ROUTES}, {expected}, found {self.http.url}."
            )
        if reply.status in (404, 405):
            return UnknownCall(
                f"The API at {self.http.url} does not know this call: it is of another release. Use a client of the "
                f"same one."
            )
        if reply.status in (429, 503):
            return Unavailable(f"The API at {self.http.url} cannot be used now: {text}")
        kind = PayloadError if reply.status == 413 else OrchestratorError
        return kind(f"The API at {self.http.url} refuses this ({problem.title}): {text}")

    def away(self, error: Exception) -> Unavailable:
        """Return what to say of a server that cannot be reached."""
        return Unavailable(
            f"The API at {self.http.url} cannot be reached: {sentence(str(error))} See whether `orchestrator api` runs "
            f"there, and whether setting api_url (ORCHESTRATOR_API_URL) is its address."
        )

    def _uncertain(self, call: Declared, args: tuple[Any, ...], error: Exception) -> Uncertain:
        if call.rules.scope == "read":
            return Uncertain(f"The connection to the API at {self.http.url} broke: {error}")
        whom = f" of {to_text(args[0].id)}" if args and isinstance(args[0], NewTask) else ""
        return Uncertain(
            f"The connection to the API at {self.http.url} broke, and it is not known whether this was done "
            f"({call.part} {call.name}{whom}): {error}"
        )

    def _not_ours(self, reply: Reply) -> OrchestratorError:
        if reply.status in (429, 502, 503, 504):
            return Unavailable(f"What stands before the API at {self.http.url} cannot reach it: status {reply.status}")
        return ConfigurationError(
            f"Setting api_url: {self.http.url} is no API of an orchestrator: it answered with status {reply.status} "
            f"and {reply.content_type}. Expected the address that `orchestrator api` says it serves."
        )


def _repeatable(arg: Any) -> Any:
    """Return an argument that can be encoded again if the request is lost: a generator would be empty then."""
    return [*arg] if isinstance(arg, Iterator) else arg


def _in_doubt(doubt: Uncertain | None, problem: OrchestratorError) -> OrchestratorError:
    """Return what to raise: after a lost answer, only the server's own word says that something was not done."""
    if doubt is None or isinstance(problem, Uncertain) or type(problem) not in _SAYS_NOTHING:
        return problem
    doubt.__cause__ = problem
    return doubt


def bound(call: Declared) -> Any:
    """Return a method of a part that has an `_asking`."""

    def blocking(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._asking.call(call, args, kwargs)

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Steps[Any]:
        return (yield from self._asking.steps(call, args, kwargs))

    method = waiting if call.waits else blocking
    method.__name__, method.__doc__ = call.name, call.summary
    return method
