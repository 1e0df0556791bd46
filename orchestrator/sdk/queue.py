"""A queue: pause, limits, purge, retention and drain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta

from orchestrator.domain.limits.buckets import Rate
from orchestrator.errors import InvalidTask, NotFound, ResultTimeout, did_you_mean
from orchestrator.sdk.checks import check_name, check_rate, check_retention
from orchestrator.sdk.client import Client
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Pause, Steps, time_limit

_POLL_INTERVAL = 0.25
"""Seconds between two polls of a queue that drains."""


def refuse_unnamed(name: str, known: Iterable[str], *, nor: str = "", if_new: str = "") -> None:
    """Refuse an unknown queue, which is a typing error more often than a new queue, and suggest the nearest name.

    `nor` names further places that were searched, and `if_new` says how to create a queue.
    """
    known = {*known}
    if name not in known:
        searched = f"no task, worker, workflow or setting names it{f', nor does {nor}' if nor else ''}"
        hint = f" If it is a new queue, add {if_new}" if if_new else ""
        raise NotFound(f"There is no queue {name!r}: {searched}.{did_you_mean(name, known)}{hint}")


class Queue:
    """One queue of an application. Its settings are stored in Postgres and apply to the whole fleet."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = check_name("queue", name)
        """The name of the queue."""

    def __repr__(self) -> str:
        return f"<Queue {self.name}{self._client.via}>"

    def pause(self) -> None:
        """Pause the queue: dispatch no more of its tasks. Tasks that workers already have continue."""
        self._client.backend.queues.pause(self.name, True)

    def resume(self) -> None:
        """Dispatch the tasks of the queue again."""
        self._client.backend.queues.pause(self.name, False)

    def limit(self, *, concurrency: int | None = None, rate: str | Rate | None = None) -> None:
        """Set how many tasks of the queue may run at once, and how often a task may start. None removes a limit.

        A rate is a text such as `10/s` or `100/minute`, or a `Rate`.
        """
        if concurrency is not None and (isinstance(concurrency, bool) or concurrency < 1):
            raise InvalidTask(f"Option concurrency: expected a whole number above zero, found {concurrency!r}.")
        self._client.backend.queues.limit(self.name, concurrency, check_rate("rate", rate))

    def retain(self, *, success: float | timedelta | None = None, failed: float | timedelta | None = None) -> None:
        """Set how long tasks are kept, in seconds: `success` for successful tasks, `failed` for all other ended tasks.

        0 keeps tasks forever; None applies the settings. Tasks of a run are kept as long as the run.
        """
        self._client.backend.queues.retain(
            self.name, check_retention("success", success), check_retention("failed", failed)
        )

    def purge(self) -> None:
        """Cancel all tasks that wait in the queue now."""
        self._client.backend.queues.purge(self.name)

    def open(self) -> int:
        """Return the number of tasks in the queue that have not ended."""
        return self._client.backend.queues.open_tasks(self.name)

    @blocking
    def drain(self, timeout: float | None = None, *, show: Callable[[int], None] = lambda _: None) -> Steps[None]:
        """Wait until all tasks of the queue have ended. Each poll calls `show` with the number of open tasks."""
        limit = time_limit(timeout)
        while True:
            with limit:
                open_tasks = self.open()
            show(open_tasks)
            if not open_tasks:
                return
            if limit.is_up:
                with limit:
                    raise ResultTimeout(self._still_holds(open_tasks, timeout))
            yield Pause(_POLL_INTERVAL)

    def _still_holds(self, open_tasks: int, timeout: float | None) -> str:
        count, first = self._client.backend.queues.delayed(self.name)
        message = f"Queue {self.name!r} still holds {open_tasks:,} tasks after {timeout:g} s."
        if first is None:
            return message
        moment = first.astimezone().isoformat(" ", "seconds")
        return f"{message} {count:,} of them are delayed, the first until {moment}."

    apause = async_variant(pause)
    aresume = async_variant(resume)
    alimit = async_variant(limit)
    aretain = async_variant(retain)
    apurge = async_variant(purge)
    aopen = async_variant(open)
    adrain = async_variant(drain)
