"""Runs requests to services. Repeated requests with the same id are run once."""

from __future__ import annotations

import asyncio
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain.executors.options import strict_json
from orchestrator.errors import GiveUp, InvalidTask, OrchestratorError, PayloadError, TaskTimeout
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import decode_value, encode_value
from orchestrator.telemetry import get_logger


class ServiceRequest(msgspec.Struct, frozen=True, kw_only=True):
    input: Any = None
    params: dict[str, Any] = {}
    request_id: str = ""
    """Identifies the work: requests with the same id are run once."""
    arguments: list[Any] | None = None
    """Positional arguments, if there are several."""


def as_call(task: Task[..., Any], request: ServiceRequest) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the function, converted to its types.

    A parameter named `input` or `params` gets that value unchanged. Without a parameter `input`, named values of input
    and params are bound to parameters of the same name. Any other input is the first argument, if there is one.
    """
    signature, input = task._signature, request.input
    names = signature.names
    arguments = list(request.arguments or ())
    keywords: dict[str, Any] = {}
    if "input" in names:
        keywords = {"input": input}
    elif isinstance(input, Mapping):
        keywords = signature.pick({**request.params, **input})
    elif not arguments and input is not None and (free := [name for name in names if name != "params"]):
        keywords = {free[0]: input}
    if "params" in names:
        keywords["params"] = request.params
    elif not isinstance(input, Mapping) or "input" in names:
        taken = {*names[: len(arguments)], *keywords}
        additional = signature.pick({name: value for name, value in request.params.items() if name in names})
        keywords |= {name: value for name, value in additional.items() if name not in taken}
    return signature.restore(arguments, keywords)


log = get_logger("service")

_MAX_RECENT = 1_000
"""Answers kept for repeated requests, at most."""
_MAX_RECENT_BYTES = 64_000_000
_MAX_WAITING_FACTOR = 10
"""Requests that may wait, per concurrent request."""
_MAX_DETAIL = 4_000


class Busy(Exception):
    """Too many requests are waiting."""


class Answer(NamedTuple):
    """A response to a request."""

    status: int
    body: bytes


class Executions:
    """Running requests, and recent answers."""

    def __init__(self, concurrency: int, largest: int) -> None:
        self._concurrency = concurrency
        self._largest = largest
        self._slots = asyncio.Semaphore(concurrency)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="service")
        self._running: dict[tuple[str, str], asyncio.Task[Answer]] = {}
        self._unnamed: set[asyncio.Task[Answer]] = set()
        self._in_threads: set[tuple[str, str]] = set()
        """Requests that run in threads, which cannot be cancelled."""
        self._recent: OrderedDict[tuple[str, str], Answer] = OrderedDict()
        self._bytes = 0

    @property
    def load(self) -> int:
        """The number of requests that run or wait."""
        return len(self._running) + len(self._unnamed)

    async def run(self, task: Task[..., Any], request: ServiceRequest) -> Answer:
        """Return the answer to a request. The work goes on if the client disconnects."""
        key = task.name, request.request_id
        if request.request_id:
            if (recent := self._recent.get(key)) is not None:
                return recent
            if (work := self._running.get(key)) is not None:
                return await _outcome(work)
        if self.load >= self._concurrency * (1 + _MAX_WAITING_FACTOR):
            raise Busy
        work = asyncio.create_task(self._answer(task, request))
        if request.request_id:
            self._running[key] = work
            work.add_done_callback(partial(self._remember, key))
        else:
            self._unnamed.add(work)
            work.add_done_callback(self._unnamed.discard)
        return await _outcome(work)

    def cancel(self, service: str, request_id: str) -> bool:
        """Cancel a request. Return False if it does not exist, or if it runs in a thread and cannot be cancelled."""
        key = service, request_id
        work = self._running.get(key)
        return work is not None and key not in self._in_threads and work.cancel()

    async def finish(self) -> None:
        """Wait until all requests have ended."""
        while work := [*self._running.values(), *self._unnamed]:
            await asyncio.wait(work)
        self._threads.shutdown(wait=False)

    def _remember(self, key: tuple[str, str], done: asyncio.Task[Answer]) -> None:
        del self._running[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._recent[key] = done.result()
        self._bytes += len(done.result().body)
        while len(self._recent) > _MAX_RECENT or self._bytes > _MAX_RECENT_BYTES:
            self._bytes -= len(self._recent.popitem(last=False)[1].body)

    async def _answer(self, task: Task[..., Any], request: ServiceRequest) -> Answer:
        async with self._slots:
            try:
                arguments, keywords = as_call(task, request)
                call = partial(task, *arguments, **keywords)
                key = task.name, request.request_id
                value = await (_with_timeout(task, call) if task._is_async else self._in_thread(call, key))
                plain = decode_value(encode_value(value, f"The result of {task.name}", self._largest))
                return Answer(200, strict_json({"result": plain, "error": ""}, f"The return value of {task.name}"))
            except (InvalidTask, PayloadError) as error:
                return _failed(error, retryable=False)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001  # whatever a task raises is its failure
                log.warning("task.failed task=%s error=%r", task.name, error)
                return _failed(error, retryable=not isinstance(error, GiveUp))

    async def _in_thread(self, call: Callable[[], Any], key: tuple[str, str]) -> Any:
        self._in_threads.add(key)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self._in_threads.discard(key)


async def _with_timeout(task: Task[..., Any], call: Callable[[], Awaitable[Any]]) -> Any:
    """Run an asynchronous function with the timeout of its task.

    A result or error after the timeout is ignored, even if the function caught the cancellation.
    """
    seconds = task._call_options.timeout_seconds
    limit = asyncio.timeout(seconds)
    value: Any = None
    late: Exception | None = None
    try:
        async with limit:
            value = await call()
    except Exception as error:
        if not limit.expired():
            raise
        late = None if isinstance(error, TimeoutError) else error
    if limit.expired():
        raise TaskTimeout(f"Task {task.name!r} ran for more than {seconds:g} s.") from late
    return value


async def _outcome(work: asyncio.Task[Answer]) -> Answer:
    """Wait for work that other requests may wait for, too."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if not work.cancelled():
            raise
        return Answer(200, msgspec.json.encode({"result": None, "error": "It was cancelled.", "kind": "Cancelled"}))


def _failed(error: BaseException, *, retryable: bool) -> Answer:
    """Return a failure: an error text for any client, and details for the HTTP executor."""
    detail = "" if isinstance(error, OrchestratorError) else "".join(traceback.format_exception(error))
    body = {
        "result": None,
        "error": str(error) or type(error).__name__,
        "kind": type(error).__name__,
        "retryable": retryable,
        "detail": detail[-_MAX_DETAIL:],
    }
    return Answer(200, msgspec.json.encode(body))
