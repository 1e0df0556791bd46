"""Calls of the functions that `ctx.run` gets: plain ones or coroutines, with a limit of time or without."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def call(function: Callable[[], Any], timeout: float | None) -> Any:
    """Call a function and return its value, or that of its coroutine; TimeoutError if that takes too long."""
    value = function() if timeout is None else _within(timeout, function)
    if inspect.iscoroutine(value):
        return _in_thread(value if timeout is None else _limited(timeout, value))
    return value


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own and return its value."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="operation", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise  # its own
        raise _too_long(seconds) from None


async def _limited(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine, and cancel it if it takes too long."""
    task = asyncio.ensure_future(coroutine)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if done:
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    raise _too_long(seconds)


def _too_long(seconds: float) -> TimeoutError:
    return TimeoutError(f"It took longer than {seconds:g} s.")


def _in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop and in a thread of its own, and wait for it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
