"""Threads for the async twins of calls that block.

They are our own: where Postgres hangs, the calls that wait for it hold up each other, and never what else the program
hands to the threads of its event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from orchestrator.sdk.per_process import PerProcess

P = ParamSpec("P")
R = TypeVar("R")
_MOST = 16
"""Calls that block at the same time; others wait for a thread."""


class Threads:
    """A few threads, started as they are needed."""

    def __init__(self) -> None:
        self._pool = PerProcess(lambda: ThreadPoolExecutor(_MOST, "orchestrator-client"))

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking call beside the event loop, in the caller's context."""
        call = partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool(), call)

    def close(self) -> None:
        """Let the threads end with what they do now."""
        pool = self._pool.take()
        if pool is not None:
            pool.shutdown(wait=False)
