"""Call the functions passed to `ctx.run`: plain functions or coroutines, with or without a timeout."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def call(function: Callable[[], Any], timeout: float | None) -> Any:
    """Call a function and return its value, or its coroutine's. Raise TimeoutError if it takes too long."""
    value = function() if timeout is None else _call_in_thread(timeout, function)
    if inspect.iscoroutine(value):
        return _in_thread(value if timeout is None else _with_timeout(timeout, value))
    return value


def _call_in_thread(seconds: float, function: Callable[[], Any]) -> Any:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # re-raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, name="operation", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise  # raised by the function
        raise _timeout_error(seconds) from None


async def _with_timeout(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(coroutine)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if done:
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    raise _timeout_error(seconds)


def _timeout_error(seconds: float) -> TimeoutError:
    return TimeoutError(f"It took longer than {seconds:g} s.")


def _in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
