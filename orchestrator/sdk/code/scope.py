"""The state of a thread while it runs the code of a workflow, and while it does not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from orchestrator.sdk.code.commander import Commander, enter
from orchestrator.sdk.code.guards import guarded


@contextmanager
def inside(commander: Commander, *, watched: bool = True) -> Iterator[None]:
    """Be in a workflow: its loop is the running one, and its calls are watched."""
    before, loop, hooks = enter(commander), asyncio._get_running_loop(), sys.get_asyncgen_hooks()
    asyncio._set_running_loop(commander.loop)
    sys.set_asyncgen_hooks(firstiter=commander.loop.keep_generator, finalizer=_ignore)
    try:
        with guarded() if watched else ExitStack():
            yield
    finally:
        sys.set_asyncgen_hooks(*hooks)
        asyncio._set_running_loop(loop)
        enter(before)


@contextmanager
def outside() -> Iterator[None]:
    """Be out of the workflow for a while: run something in its thread that is not its code."""
    before, loop, profile = enter(None), asyncio._get_running_loop(), sys.getprofile()
    sys.setprofile(None)
    asyncio._set_running_loop(None)
    if before is not None:
        before.is_away = True
    try:
        yield
    finally:
        if before is not None:
            before.is_away = False
            before.step += 1
        asyncio._set_running_loop(loop)
        enter(before)
        sys.setprofile(profile)


def _ignore(_: object) -> None:
    """Do nothing when an asynchronous generator is collected: the loop keeps it until the flow is evicted."""
