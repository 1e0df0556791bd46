"""Functions that wait for many tasks at once."""

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
    """An iterator over handles in the order in which their tasks end, for `for` and `async for`."""

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
    """Yield handles as their tasks end, successfully or not. Raise ResultTimeout if tasks are open after `timeout`.

    Iterate over the result with `for` or, on an event loop, with `async for`.
    """
    check_timeout(timeout)
    checked = _handles(handles)
    return Completions(_completions(checked, timeout), checked[0]._client.threads if checked else Threads())


def _completions(
    handles: Iterable[Handle[R]], timeout: float | None, limit: TimeLimit | None = None
) -> Stream[Handle[R]]:
    refuse_inside_task("another task")
    limit = limit or time_limit(timeout)
    pending = {handle._id: handle for handle in handles}
    if not pending:
        return
    tasks = next(iter(pending.values()))._client.backend.tasks
    for ended in tasks.wait_each(list(pending), limit):
        if isinstance(ended, Pause):
            yield ended
            continue
        handle = pending.pop(ended.id)
        handle._cache_end(ended)
        yield handle
    if pending:
        raise ResultTimeout(
            f"{len(pending):,} tasks had not ended after {timeout} s, among them {next(iter(pending.values()))!r}."
        )


def _handles(iterable: Iterable[Handle[R]]) -> list[Handle[R]]:
    handles = list(iterable)
    for handle in handles:
        if not isinstance(handle, Handle):
            raise TypeError(
                f"as_completed and gather: expected handles, as `task.enqueue(…)` returns them, found {handle!r:.200}"
            )
        if handle._client is not handles[0]._client:
            raise ValueError(
                f"as_completed and gather: {handle!r} belongs to a different cell from {handles[0]!r}. Wait for "
                "each cell separately."
            )
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
    """Wait for all tasks and return their results in order. Raise the first failure as soon as it happens.

    With `return_exceptions`, nothing is raised: the list has the exception of each task without a result.
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
    checked = _handles(handles)
    if not checked:
        return []
    return await checked[0]._client.threads.complete(_gather(checked, timeout, return_exceptions))


def _gather(
    handles: Sequence[Handle[R]], timeout: float | None, return_exceptions: bool
) -> Steps[list[R | OrchestratorError]]:
    limit = time_limit(timeout)
    for ended in _completions(handles, timeout, limit):
        if isinstance(ended, Pause):
            yield ended
        elif not return_exceptions:
            ended._value((yield from ended._ended(limit.remaining)))
    results: list[R | OrchestratorError] = []
    for handle in handles:
        try:
            results.append(handle._value((yield from handle._ended(limit.remaining))))
        except OrchestratorError as error:
            if not return_exceptions:
                raise
            results.append(error)
    return results
