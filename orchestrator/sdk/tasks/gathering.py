"""Waiting for many tasks at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

from orchestrator.errors import OrchestratorError, ResultTimeout
from orchestrator.sdk.tasks.context import refuse_inside_task
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.sdk.waiting.steps import Pause, Steps, Stream, check_timeout, complete, iterate, time_limit
from orchestrator.sdk.waiting.threads import Threads
from orchestrator.time_limits import TimeLimit

R = TypeVar("R")


class Completions(Generic[R]):
    """Handles in the order in which their tasks end: `for handle in …`, or `async for handle in …`."""

    def __init__(self, stream: Stream[Handle[R]], threads: Threads) -> None:
        self._stream = stream
        self._items: Iterator[Handle[R]] | None = None
        self._threads = threads

    def __iter__(self) -> Iterator[Handle[R]]:
        return self

    def __next__(self) -> Handle[R]:
        self._items = self._items or iterate(self._stream)
        return next(self._items)

    def __aiter__(self) -> AsyncIterator[Handle[R]]:
        return self._threads.iterate(self._stream)


def as_completed(handles: Iterable[Handle[R]], timeout: float | None = None) -> Completions[R]:
    """Yield handles as their tasks end, whatever the end; ResultTimeout if some have not ended by then.

    Iterate over it with `for` or, where an event loop must not be blocked, with `async for`.
    """
    check_timeout(timeout)
    asked = _handles(handles)
    return Completions(_completions(asked, timeout), asked[0]._client.threads if asked else Threads())


def _completions(
    handles: Iterable[Handle[R]], timeout: float | None, limit: TimeLimit | None = None
) -> Stream[Handle[R]]:
    refuse_inside_task("another task")
    limit = limit or time_limit(timeout)
    left = {handle._id: handle for handle in handles}
    if not left:
        return
    tasks = next(iter(left.values()))._client.backend.tasks
    for ended in tasks.wait_each(list(left), limit):
        if isinstance(ended, Pause):
            yield ended
            continue
        handle = left.pop(ended.id)
        handle._heard(ended)
        yield handle
    if left:
        raise ResultTimeout(
            f"{len(left):,} tasks had not ended after {timeout} s, {next(iter(left.values()))!r} first."
        )


def _handles(given: Iterable[Handle[R]]) -> list[Handle[R]]:
    handles = list(given)
    for one in handles:
        if not isinstance(one, Handle):
            raise TypeError(
                f"as_completed and gather: expected handles, as `task.enqueue(…)` returns them, found {one!r:.200}"
            )
        if one._client is not handles[0]._client:
            raise ValueError(f"as_completed and gather: {one!r} is of another cell than {handles[0]!r}. Ask each cell.")
    return handles


@overload
def gather(handles: Iterable[Handle[R]], timeout: float | None = None) -> list[R]: ...
@overload
def gather(
    handles: Iterable[Handle[R]], timeout: float | None = None, *, return_exceptions: bool
) -> list[R | OrchestratorError]: ...


def gather(
    handles: Iterable[Handle[R]], timeout: float | None = None, *, return_exceptions: bool = False
) -> list[R] | list[R | OrchestratorError]:
    """Wait for all and return their results in order; the first failure is raised, unless it is to be returned.

    With `return_exceptions`, the error stands in the place of each task that has no result.
    """
    return complete(_gather(_handles(handles), timeout, return_exceptions))


@overload
async def agather(handles: Iterable[Handle[R]], timeout: float | None = None) -> list[R]: ...
@overload
async def agather(
    handles: Iterable[Handle[R]], timeout: float | None = None, *, return_exceptions: bool
) -> list[R | OrchestratorError]: ...


async def agather(
    handles: Iterable[Handle[R]], timeout: float | None = None, *, return_exceptions: bool = False
) -> list[R] | list[R | OrchestratorError]:
    """Do the same as `gather` without blocking the event loop."""
    asked = _handles(handles)
    if not asked:
        return []
    return await asked[0]._client.threads.complete(_gather(asked, timeout, return_exceptions))


def _gather(
    handles: Sequence[Handle[R]], timeout: float | None, return_exceptions: bool
) -> Steps[list[R | OrchestratorError]]:
    limit = time_limit(timeout)
    for ended in _completions(handles, timeout, limit):
        if isinstance(ended, Pause):
            yield ended
        elif not return_exceptions:
            ended._value((yield from ended._ended(limit.left)))
    results: list[R | OrchestratorError] = []
    for handle in handles:
        try:
            results.append(handle._value((yield from handle._ended(limit.left))))
        except OrchestratorError as error:
            if not return_exceptions:
                raise
            results.append(error)
    return results
