"""Shared commits: what coroutines enqueue while a commit is under way is stored together by the next one.

A lone call goes at once. No call waits for others longer than 2 ms: by then another commit begins beside the first, on
a connection of its own. Each caller gets the id of its own task, and a refused task is refused alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.waiting.per_process import PerLoop, PerProcess

_LONGEST_WAIT = 0.002
"""Seconds that a call waits while others are being committed."""
_COMMITS = 4
"""Commits at the same time, each in a thread and on a connection of its own."""
_ALONE = 8
"""Tasks at the same time whose keys others have, or are about to take; each may have to wait for that."""
_MOST_TASKS = 1_000
_MOST_BYTES = 4_000_000
"""Of one commit."""

Outcome = bytes | Exception | None
"""The answer to a caller: the id of its task, or the error; None if its task must be tried alone."""
Alone = Callable[[], bytes]
"""Enqueues the task of one caller by itself."""
Insert = Callable[[Sequence[NewTask]], set[bytes]]
"""Stores tasks with one commit, and returns those that have to be tried alone."""


class SharedCommits:
    """Enqueues of the coroutines of this process; those of one event loop share commits."""

    def __init__(self, connections: Connections, insert: Insert | None = None) -> None:
        self._connections = connections
        self._insert = insert or self._insert_new
        self._gathering = PerLoop(lambda loop: _Gathering(loop, self._submit, self._submit_alone))
        self._committing = PerProcess(lambda: ThreadPoolExecutor(_COMMITS, "orchestrator-commits"))
        self._waiting = PerProcess(lambda: ThreadPoolExecutor(_ALONE, "orchestrator-keys"))

    async def enqueue(self, task: NewTask, alone: Alone) -> bytes:
        """Create one task; return its id, or that of the task which has its key, when that is durable."""
        return await self._gathering().add(task, alone)

    def close(self) -> None:
        """Let the threads end with what they do now."""
        for pool in (self._committing.take(), self._waiting.take()):
            if pool is not None:
                pool.shutdown(wait=False)

    # -- in threads

    def _submit(self, tasks: Sequence[NewTask]) -> Future[Sequence[Outcome]]:
        return self._committing().submit(self._store_and_nudge, tasks)

    def _submit_alone(self, calls: Sequence[Alone]) -> Future[Sequence[Outcome]]:
        return self._waiting().submit(_store_alone, calls)

    def _store_and_nudge(self, tasks: Sequence[NewTask]) -> Sequence[Outcome]:
        outcomes = self._store(tasks)
        if any(isinstance(outcome, bytes) for outcome in outcomes):
            self._connections.nudge(is_task=all(task.is_ready for task in tasks))
        return outcomes

    def _store(self, tasks: Sequence[NewTask]) -> Sequence[Outcome]:
        """Store tasks in one commit; if one of them will not do, in as many as it takes to find which."""
        try:
            left = self._insert(tasks)
        except OrchestratorError as error:
            return [error for _ in tasks]
        except Exception as error:  # noqa: BLE001  # it is raised where the task was enqueued
            known = [self._connections.known(error, f"task {to_text(task.id)} was stored") for task in tasks]
            if known[0] is not None:
                return known
            if len(tasks) == 1:
                return [error]
            half = len(tasks) // 2
            return [*self._store(tasks[:half]), *self._store(tasks[half:])]
        return [None if task.id in left else task.id for task in tasks]

    def _insert_new(self, tasks: Sequence[NewTask]) -> set[bytes]:
        if len(tasks) > 1 or tasks[0].unique is not None:
            return self._connections.insert_shared(tasks)
        self._connections.insert(tasks[0])
        return set()


def _store_alone(calls: Sequence[Alone]) -> Sequence[Outcome]:
    outcomes: list[Outcome] = []
    for call in calls:
        try:
            outcomes.append(call())
        except Exception as error:  # noqa: BLE001  # it is raised where the task was enqueued
            outcomes.append(error)
    return outcomes


class _Call(NamedTuple):
    """One coroutine that waits for its task to be stored."""

    task: NewTask
    alone: Alone
    stored: asyncio.Future[bytes]
    begun: float


class _Gathering:
    """The calls of one event loop. All of this happens in the thread of that loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Callable[[Sequence[NewTask]], Future[Sequence[Outcome]]],
        store_alone: Callable[[Sequence[Alone]], Future[Sequence[Outcome]]],
    ) -> None:
        self._loop = loop
        self._store = store
        self._store_alone = store_alone
        self._waiting: deque[_Call] = deque()
        self._commits = 0
        self._is_due = False

    def add(self, task: NewTask, alone: Alone) -> asyncio.Future[bytes]:
        """Have a task stored with the next commit; the future is done when it is durable."""
        call = _Call(task, alone, self._loop.create_future(), self._loop.time())
        self._waiting.append(call)
        if not self._commits and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._commit)  # after all that is ready now, and may enqueue too
        elif self._commits and len(self._waiting) == 1:
            self._limit_wait()
        return call.stored

    def _limit_wait(self) -> None:
        """See that the first one that waits does not do so for long."""
        first = self._waiting[0]
        self._loop.call_at(first.begun + _LONGEST_WAIT, self._hurry, first)

    def _hurry(self, call: _Call) -> None:
        if self._waiting and self._waiting[0] is call and self._commits < _COMMITS:
            self._commit()

    def _commit(self) -> None:
        """Begin a commit of the waiting calls."""
        self._is_due = False
        calls = self._take()
        if not calls:
            return
        self._commits += 1
        self._begin(partial(self._store, [call.task for call in calls]), calls, self._committed)
        if self._waiting:
            self._limit_wait()

    def _take(self) -> list[_Call]:
        """Return the calls of one commit, oldest first, without cancelled ones."""
        calls: list[_Call] = []
        size = 0
        while self._waiting and len(calls) < _MOST_TASKS and size < _MOST_BYTES:
            call = self._waiting.popleft()
            if not call.stored.done():
                calls.append(call)
                size += len(call.task.payload)
        return calls

    def _begin(
        self,
        store: Callable[[], Future[Sequence[Outcome]]],
        calls: list[_Call],
        then: Callable[[list[_Call], Sequence[Outcome]], None],
    ) -> None:
        def end(done: Future[Sequence[Outcome]]) -> None:
            error = done.exception()
            outcomes = done.result() if error is None else [RuntimeError(repr(error)) for _ in calls]
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no call waits any more
                self._loop.call_soon_threadsafe(then, calls, outcomes)

        try:
            store().add_done_callback(end)
        except RuntimeError as error:  # the interpreter is about to end, or there are too many threads
            self._loop.call_soon(then, calls, [RuntimeError(str(error)) for _ in calls])

    def _committed(self, calls: list[_Call], outcomes: Sequence[Outcome]) -> None:
        self._commits -= 1
        if self._waiting and not self._is_due:
            self._commit()
        self._settle(calls, outcomes)
        by_key: dict[str, list[_Call]] = {}
        for call, outcome in zip(calls, outcomes, strict=True):
            if outcome is None and call.task.unique is not None:
                by_key.setdefault(call.task.unique.key, []).append(call)
        for same in by_key.values():  # one after the other, as they came
            self._begin(partial(self._store_alone, [call.alone for call in same]), same, self._settle)

    @staticmethod
    def _settle(calls: Iterable[_Call], outcomes: Iterable[Outcome]) -> None:
        """Answer the callers that still wait."""
        for call, outcome in zip(calls, outcomes, strict=True):
            if call.stored.done() or outcome is None:
                continue
            if isinstance(outcome, bytes):
                call.stored.set_result(outcome)
            else:
                call.stored.set_exception(outcome)
