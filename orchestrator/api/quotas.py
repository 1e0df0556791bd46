"""Applies quotas, of each caller and of all callers together, before a request is served and before tasks are stored.

Requests do not read Postgres for this. A background task counts the open tasks of a queue, every ten seconds at most,
and only after this process has added a tenth of a quota to the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio.to_thread
import msgspec
from sqlalchemy import Connection
from starlette.types import Message, Receive

from orchestrator.api.access import Caller
from orchestrator.api.context import Api
from orchestrator.api.key_scope import with_followers
from orchestrator.api.problems import Problem, Refused, refused
from orchestrator.domain.quotas import COUNT_INTERVAL, EVERY_QUEUE, Exceeded, Usage, parse_quotas
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE
from orchestrator.store.limits import queues

_MAX_CALLERS = 10_000
"""Callers whose usage is kept, at most."""
_MAX_QUEUES = 100_000
"""Queues whose counts are kept, at most."""
_RECOUNT_SHARE = 10
"""A queue is counted again after 1/10 of a quota was added to it."""


class CountedReceive:
    """Wraps `receive`, and counts the bytes of bodies."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.size = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self.size += len(message.get("body", b""))
        return message


class Meter:
    """The usage of every caller, in this process."""

    def __init__(self, api: Api) -> None:
        self._api = api
        quotas = [word for word in api.settings.api_quotas.split(",") if word.strip()]
        self._all = Usage(parse_quotas(quotas)) if quotas else None
        """The usage of all callers together."""
        self._used: dict[str, Usage] = {}
        self._open: dict[str, int] = {}
        """Open tasks of queues when they were last counted."""
        self._added: Counter[str] = Counter()
        """Tasks that this process has added since."""
        self._due: dict[str, int] = {}
        """Queues to count, and the number at which to stop."""
        self._read_at = -math.inf
        self._reader: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def request(self, caller: Caller, received: CountedReceive) -> Iterator[None]:
        """Count a caller's request and its bytes while it is in flight, or reject it."""
        self._count_due()
        with contextlib.ExitStack() as cleanup:
            for used in self._usages(caller):
                if exceeded := used.begin(time.monotonic()):
                    raise _refusal(exceeded)
                cleanup.callback(lambda used: used.end(received.size), used)
            yield

    @contextlib.contextmanager
    def stream(self, caller: Caller) -> Iterator[None]:
        """Count a caller's event stream while it is open, or reject it."""
        with contextlib.ExitStack() as cleanup:
            for used in self._usages(caller):
                if exceeded := used.listen():
                    raise _refusal(exceeded)
                cleanup.callback(used.leave)
            yield

    def check_tasks(self, caller: Caller, body: Any) -> None:
        """Reject tasks that exceed a quota."""
        usages = self._usages(caller)
        if not usages or not (new_tasks := _tasks(body)):
            return
        if len(self._added) > _MAX_QUEUES:
            self._added, self._open = Counter(), {}
        by_queue, total = Counter(map(_queue, new_tasks)), Counter({EVERY_QUEUE: len(new_tasks)})
        shares = [(used, total if used is self._all else by_queue) for used in usages]
        open_tasks = {queue: self._open.get(queue, 0) + self._added[queue] for _, counts in shares for queue in counts}
        highest, now = max(map(_priority, new_tasks)), time.monotonic()
        exceeded = next(
            (found for used, counts in shares if (found := used.enqueue(counts, highest, open_tasks, now))), None
        )
        for used, counts in shares:
            most = used.quotas.open_tasks
            for queue, count in counts.items():
                self._added[queue] += 0 if exceeded else count
                if self._added[queue] * _RECOUNT_SHARE >= most or open_tasks[queue] + count > most:
                    self._due[queue] = max(most, self._due.get(queue, 0))
        if exceeded:
            raise _refusal(exceeded)

    def _count_due(self) -> None:
        """Start to count, in the background, the queues to which many tasks were added."""
        if (
            self._due
            and time.monotonic() - self._read_at > COUNT_INTERVAL
            and (self._reader is None or self._reader.done())
        ):
            self._read_at = time.monotonic()
            self._reader = asyncio.ensure_future(self._read(dict(self._due), Counter(self._added)))

    async def _read(self, due: dict[str, int], before: Counter[str]) -> None:
        with contextlib.suppress(OrchestratorError):  # Postgres is down: the next count reads them
            for queue, count in (await anyio.to_thread.run_sync(self._count, due)).items():
                self._open[queue] = count
                self._added[queue] -= before[queue]  # tasks added during the count may be missing from it
                if not self._added[queue]:
                    del self._added[queue]
                self._due.pop(queue, None)

    def _count(self, due: dict[str, int]) -> dict[str, int]:
        with self._api.reading() as connection:
            return {queue: _count_open(connection, queue, most) for queue, most in due.items()}

    def _usages(self, caller: Caller) -> list[Usage]:
        """Return the usage of a caller and of all callers; empty while no key is needed."""
        if caller.quotas is None:
            return []
        name = caller.key or caller.actor.who
        used = self._used.get(name)
        if used is None or used.quotas != caller.quotas:
            if len(self._used) >= _MAX_CALLERS:
                self._used = {name: usage for name, usage in self._used.items() if usage.in_flight or usage.streams}
            used = self._used[name] = Usage(caller.quotas)
        return [used] if self._all is None else [used, self._all]


def _count_open(connection: Connection, queue: str, most: int) -> int:
    if queue == EVERY_QUEUE:
        return queues.count_all_open(connection, most)
    return queues.count_open(connection, queue, most)


def _tasks(body: Any) -> list[Any]:
    """Return the tasks in a body: of the Python client, or of calls by name."""
    task, tasks = getattr(body, "task", None), getattr(body, "tasks", None)
    if isinstance(task, NewTask):
        return [task]
    if isinstance(tasks, list):
        return [task for task in tasks if hasattr(task, "priority")]
    return [body] if hasattr(body, "priority") and hasattr(body, "queue") else []


def _queue(task: Any) -> str:
    return DEFAULT_QUEUE if task.queue is msgspec.UNSET else str(task.queue)


def _priority(task: Any) -> int:
    """Return the highest priority of a task and its callbacks."""
    if isinstance(task, NewTask):
        return max(new_task.priority for new_task in with_followers([task]))
    return 0 if task.priority is msgspec.UNSET else int(task.priority)


def _refusal(exceeded: Exceeded) -> Refused:
    if exceeded.retry_after is None:
        return refused(403, "The key does not allow this", exceeded.detail)
    problem = Problem(title="The quota is used up", status=429, detail=exceeded.detail)
    return Refused(problem, {"Retry-After": str(math.ceil(exceeded.retry_after))})
