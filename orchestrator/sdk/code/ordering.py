"""Where asyncio itself puts things into sets: inside workflows, those have an order that is the same in every process.

Tasks and futures of a workflow hash by their place in the order of creation (`loop.py`). What asyncio makes by itself,
or puts into a set before the loop hears of it, is seen to here. Outside of workflows everything is as ever.
"""

from __future__ import annotations

import asyncio
from asyncio import tasks
from collections.abc import Iterable
from typing import Any

from orchestrator.errors import NotDeterministic
from orchestrator.sdk.code.loop import Loop

_as_completed = asyncio.as_completed
_wait = asyncio.wait
_all_tasks = asyncio.all_tasks
_BY_ADDRESS = asyncio.Future.__hash__


class OrderedGathering(tasks._GatheringFuture):  # type: ignore[name-defined, misc]
    """The future of `asyncio.gather`; in a workflow, it knows its position in the order of creation."""

    def __init__(self, children: Any, *, loop: asyncio.AbstractEventLoop) -> None:
        self._place = loop.next_place() if isinstance(loop, Loop) else None
        super().__init__(children, loop=loop)

    def __hash__(self) -> int:
        return _BY_ADDRESS(self) if self._place is None else self._place


def _running() -> Loop | None:
    loop = asyncio._get_running_loop()
    return loop if isinstance(loop, Loop) else None


def _ordered_as_completed(fs: Any, **options: Any) -> Any:
    """Do as `asyncio.as_completed` does; in a workflow, start coroutines in the order in which they are given."""
    if _running() is not None:
        fs = _in_order(asyncio.ensure_future(one) for one in fs)
    return _as_completed(fs, **options)


async def _ordered_wait(fs: Any, **options: Any) -> Any:
    """Do as `asyncio.wait` does; in a workflow, refuse futures that have no order."""
    if _running() is not None and not asyncio.isfuture(fs) and not asyncio.iscoroutine(fs):
        fs = _in_order(fs)
    return await _wait(fs, **options)


def _in_order(futures: Iterable[Any]) -> list[Any]:
    found = list(futures)
    for future in found:
        if asyncio.isfuture(future) and type(future).__hash__ is _BY_ADDRESS:
            raise NotDeterministic(
                f"{type(future).__name__}() was made by hand, and a set of such has another order in every process. "
                f"Inside a workflow, use asyncio.get_running_loop().create_future(), or asyncio.create_task(…)."
            )
    return found


def _ordered_all_tasks(loop: asyncio.AbstractEventLoop | None = None) -> set[asyncio.Task[Any]]:
    """Do as `asyncio.all_tasks` does; those of a workflow go into the set in the order of their creation."""
    mine = _running() if loop is None else loop
    return set(mine.open_tasks) if isinstance(mine, Loop) else _all_tasks(loop)


def keep_order() -> None:
    """Make asyncio keep the order of what it is given inside workflows."""
    asyncio.as_completed = tasks.as_completed = _ordered_as_completed
    asyncio.wait = tasks.wait = _ordered_wait
    asyncio.all_tasks = tasks.all_tasks = _ordered_all_tasks
    tasks._GatheringFuture = OrderedGathering  # type: ignore[attr-defined]
