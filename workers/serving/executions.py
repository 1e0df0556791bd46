"""Requests to a service, and the work for them: once for each request id, however often it is asked for."""

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
    """The same for the same work: it is done once, however often it is asked for."""
    arguments: list[Any] | None = None
    """By place, where there is more than one of them."""


def as_call(task: Task[..., Any], request: ServiceRequest) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the function, in its types.

    A parameter that is called `input` or `params` takes that as it is. Without an `input`, named values are bound by
    name, of the params too, where they fit; anything else is the first argument, if there is one.
    """
    signature, given = task._signature, request.input
    names = signature.names
    arguments = list(request.arguments or ())
    keywords: dict[str, Any] = {}
    if "input" in names:
        keywords = {"input": given}
    elif isinstance(given, Mapping):
        keywords = signature.pick({**request.params, **given})
    elif not arguments and given is not None and (free := [name for name in names if name != "params"]):
        keywords = {free[0]: given}
    if "params" in names:
        keywords["params"] = request.params
    elif not isinstance(given, Mapping) or "input" in names:
        taken = {*names[: len(arguments)], *keywords}
        more = signature.pick({name: value for name, value in request.params.items() if name in names})
        keywords |= {name: value for name, value in more.items() if name not in taken}
    return signature.restore(arguments, keywords)


log = get_logger("service")

_MOST_KEPT = 1_000
"""Answers that are kept for repeated requests."""
_MOST_BYTES = 64_000_000
_WAITING = 10
"""How many requests for each that is worked on may wait for their turn."""
_LONGEST_DETAIL = 4_000


class Busy(Exception):
    """There is more to do than this process should take."""


class Said(NamedTuple):
    """An answer, ready to be sent."""

    status: int
    body: bytes


class Executions:
    """Running requests, and recent answers."""

    def __init__(self, concurrency: int, largest: int) -> None:
        self._concurrency = concurrency
        self._largest = largest
        self._turns = asyncio.Semaphore(concurrency)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="service")
        self._under_way: dict[tuple[str, str], asyncio.Task[Said]] = {}
        self._unnamed: set[asyncio.Task[Said]] = set()
        self._in_threads: set[tuple[str, str]] = set()
        """Those that cannot be ended."""
        self._kept: OrderedDict[tuple[str, str], Said] = OrderedDict()
        self._bytes = 0

    @property
    def load(self) -> int:
        """How many requests are worked on, or wait."""
        return len(self._under_way) + len(self._unnamed)

    async def do(self, task: Task[..., Any], request: ServiceRequest) -> Said:
        """Return the answer to a request; the work goes on if its client has gone."""
        key = task.name, request.request_id
        if request.request_id:
            if (kept := self._kept.get(key)) is not None:
                return kept
            if (going := self._under_way.get(key)) is not None:
                return await _outcome(going)
        if self.load >= self._concurrency * (1 + _WAITING):
            raise Busy
        going = asyncio.create_task(self._answer(task, request))
        if request.request_id:
            self._under_way[key] = going
            going.add_done_callback(partial(self._keep, key))
        else:
            self._unnamed.add(going)
            going.add_done_callback(self._unnamed.discard)
        return await _outcome(going)

    def cancel(self, service: str, request_id: str) -> bool:
        """Cancel a request; False if there is none, or if it runs in a thread and cannot be ended."""
        key = service, request_id
        going = self._under_way.get(key)
        return going is not None and key not in self._in_threads and going.cancel()

    async def finish(self) -> None:
        """Return when everything that is under way has been done."""
        while going := [*self._under_way.values(), *self._unnamed]:
            await asyncio.wait(going)
        self._threads.shutdown(wait=False)

    def _keep(self, key: tuple[str, str], done: asyncio.Task[Said]) -> None:
        del self._under_way[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[key] = done.result()
        self._bytes += len(done.result().body)
        while len(self._kept) > _MOST_KEPT or self._bytes > _MOST_BYTES:
            self._bytes -= len(self._kept.popitem(last=False)[1].body)

    async def _answer(self, task: Task[..., Any], request: ServiceRequest) -> Said:
        async with self._turns:
            try:
                arguments, keywords = as_call(task, request)
                call = partial(task, *arguments, **keywords)
                key = task.name, request.request_id
                value = await (_in_time(task, call) if task._is_async else self._in_thread(call, key))
                plain = decode_value(encode_value(value, f"The result of {task.name}", self._largest))
                return Said(200, strict_json({"result": plain, "error": ""}, f"What {task.name} returns"))
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


async def _in_time(task: Task[..., Any], call: Callable[[], Awaitable[Any]]) -> Any:
    """Return what an asynchronous function returns, within the timeout of its task.

    What it returns or raises when it was cancelled for that, and has caught it, changes nothing.
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


async def _outcome(going: asyncio.Task[Said]) -> Said:
    """Return what comes of work that others may wait for, too."""
    try:
        return await asyncio.shield(going)
    except asyncio.CancelledError:
        if not going.cancelled():
            raise
        return Said(200, msgspec.json.encode({"result": None, "error": "It was cancelled.", "kind": "Cancelled"}))


def _failed(error: BaseException, *, retryable: bool) -> Said:
    """Return a failure: a text, as everybody expects it, and beside it what our executor can make use of."""
    detail = "" if isinstance(error, OrchestratorError) else "".join(traceback.format_exception(error))
    said = {
        "result": None,
        "error": str(error) or type(error).__name__,
        "kind": type(error).__name__,
        "retryable": retryable,
        "detail": detail[-_LONGEST_DETAIL:],
    }
    return Said(200, msgspec.json.encode(said))
