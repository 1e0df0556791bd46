"""Shared commits: the next commit stores all tasks that coroutines have enqueued during the current commit.

A single call commits at once. No call waits for a running commit longer than 2 ms: then another commit begins in
parallel, on its own connection. Each caller gets the id of its own task, and an error of one task affects no other.
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

_MAX_WAIT = 0.002
"""Seconds that a call waits for a running commit, at most."""
_MAX_COMMITS = 4
"""Parallel commits, each in a thread and on a connection of its own."""
_MAX_SINGLE_INSERTS = 8
"""Parallel inserts of tasks whose unique keys are taken or locked; each may have to wait for the key."""
_MAX_TASKS = 1_000
_MAX_BYTES = 4_000_000
"""Tasks and payload bytes of one commit, at most."""

Outcome = bytes | Exception | None
"""The result for a caller: the id of its task, or an error; None if its task must be inserted alone."""
Alone = Callable[[], bytes]
"""Enqueues the task of one caller with a commit of its own."""
Insert = Callable[[Sequence[NewTask]], set[bytes]]
"""Inserts tasks with one commit, and returns the ids of tasks that must be inserted alone."""


class SharedCommits:
    """Enqueues of the coroutines of this process. Coroutines of one event loop share commits."""

    def __init__(self, connections: Connections, insert: Insert | None = None) -> None:
        self._connections = connections
        self._insert = insert or self._insert_new
        self._batches = PerLoop(lambda loop: _Batches(loop, self._submit, self._submit_alone))
        self._commit_threads = PerProcess(lambda: ThreadPoolExecutor(_MAX_COMMITS, "orchestrator-commits"))
        self._single_threads = PerProcess(lambda: ThreadPoolExecutor(_MAX_SINGLE_INSERTS, "orchestrator-keys"))

    async def enqueue(self, task: NewTask, alone: Alone) -> bytes:
        """Create one task. Return its id, or the id of the task that holds its unique key, once durable."""
        return await self._batches().add(task, alone)

    def close(self) -> None:
        """Stop the threads after their current commits."""
        for pool in (self._commit_threads.take(), self._single_threads.take()):
            if pool is not None:
                pool.shutdown(wait=False)

    # -- in threads

    def _submit(self, tasks: Sequence[NewTask]) -> Future[Sequence[Outcome]]:
        return self._commit_threads().submit(self._store_and_nudge, tasks)

    def _submit_alone(self, calls: Sequence[Alone]) -> Future[Sequence[Outcome]]:
        return self._single_threads().submit(_store_alone, calls)

    def _store_and_nudge(self, tasks: Sequence[NewTask]) -> Sequence[Outcome]:
        outcomes = self._store(tasks)
        if any(isinstance(outcome, bytes) for outcome in outcomes):
            self._connections.nudge(is_task=all(task.is_ready for task in tasks))
        return outcomes

    def _store(self, tasks: Sequence[NewTask]) -> Sequence[Outcome]:
        """Insert tasks in one commit. On an error, bisect the tasks to isolate the one at fault."""
        try:
            excluded = self._insert(tasks)
        except OrchestratorError as error:
            return [error for _ in tasks]
        except Exception as error:  # noqa: BLE001  # the caller of the enqueue raises it
            translated = [self._connections.known_error(error, f"task {to_text(task.id)} was stored") for task in tasks]
            if translated[0] is not None:
                return translated
            if len(tasks) == 1:
                return [error]
            half = len(tasks) // 2
            return [*self._store(tasks[:half]), *self._store(tasks[half:])]
        return [None if task.id in excluded else task.id for task in tasks]

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
        except Exception as error:  # noqa: BLE001  # the caller of the enqueue raises it
            outcomes.append(error)
    return outcomes


class _Call(NamedTuple):
    """A coroutine that waits for its task to be stored."""

    task: NewTask
    alone: Alone
    stored: asyncio.Future[bytes]
    begun: float


class _Batches:
    """The calls of one event loop. All methods run in the thread of the loop."""

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
        """Add a task to the next commit. The future is done when the task is durable."""
        call = _Call(task, alone, self._loop.create_future(), self._loop.time())
        self._waiting.append(call)
        if not self._commits and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._commit)  # after all coroutines that are ready now, which may enqueue too
        elif self._commits and len(self._waiting) == 1:
            self._limit_wait()
        return call.stored

    def _limit_wait(self) -> None:
        """Start a timer that commits the first waiting call after the longest wait."""
        first = self._waiting[0]
        self._loop.call_at(first.begun + _MAX_WAIT, self._hurry, first)

    def _hurry(self, call: _Call) -> None:
        if self._waiting and self._waiting[0] is call and self._commits < _MAX_COMMITS:
            self._commit()

    def _commit(self) -> None:
        self._is_due = False
        calls = self._take()
        if not calls:
            return
        self._commits += 1
        self._begin(partial(self._store, [call.task for call in calls]), calls, self._committed)
        if self._waiting:
            self._limit_wait()

    def _take(self) -> list[_Call]:
        """Return the calls of one commit, oldest first, except cancelled calls."""
        calls: list[_Call] = []
        size = 0
        while self._waiting and len(calls) < _MAX_TASKS and size < _MAX_BYTES:
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
        for same in by_key.values():  # in sequence, in the order of the calls
            self._begin(partial(self._store_alone, [call.alone for call in same]), same, self._settle)

    @staticmethod
    def _settle(calls: Iterable[_Call], outcomes: Iterable[Outcome]) -> None:
        for call, outcome in zip(calls, outcomes, strict=True):
            if call.stored.done() or outcome is None:
                continue
            if isinstance(outcome, bytes):
                call.stored.set_result(outcome)
            else:
                call.stored.set_exception(outcome)
