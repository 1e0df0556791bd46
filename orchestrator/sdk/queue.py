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

_LOOK_AGAIN = 0.25


def refuse_unnamed(name: str, known: Iterable[str], *, nor: str = "", if_new: str = "") -> None:
    """Refuse an unknown queue, and suggest the nearest: it is a typing error more often than a new one.

    `nor` says where else was looked, and `if_new` how to create one.
    """
    known = {*known}
    if name not in known:
        looked = f"no task, worker, workflow or setting{f', nor {nor}' if nor else ''}"
        hint = f" If it is one to come: {if_new}" if if_new else ""
        raise NotFound(f"Nobody has named a queue {name!r}: {looked}.{did_you_mean(name, known)}{hint}")


class Queue:
    """One queue of an application. What is set for it stands in Postgres and holds for the whole fleet."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = check_name("queue", name)
        """Its name."""

    def __repr__(self) -> str:
        return f"<Queue {self.name}{self._client.via}>"

    def pause(self) -> None:
        """Hand out nothing more of it; what is with the workers goes on."""
        self._client.backend.queues.pause(self.name, True)

    def resume(self) -> None:
        """Hand its tasks out again."""
        self._client.backend.queues.pause(self.name, False)

    def limit(self, *, concurrency: int | None = None, rate: str | Rate | None = None) -> None:
        """Set how many of its tasks may run at once, and how often one may start; None lifts a limit.

        A rate is a text such as `10/s` or `100/minute`, or a `Rate`.
        """
        if concurrency is not None and (isinstance(concurrency, bool) or concurrency < 1):
            raise InvalidTask(f"Option concurrency: expected a whole number above zero, found {concurrency!r}.")
        self._client.backend.queues.limit(self.name, concurrency, check_rate("rate", rate))

    def retain(self, *, success: float | timedelta | None = None, failed: float | timedelta | None = None) -> None:
        """Set how long its tasks are kept after they have succeeded, or ended otherwise.

        0 keeps them for ever; None leaves it to the settings. Tasks of a run are kept as long as their run.
        """
        self._client.backend.queues.retain(
            self.name, check_retention("success", success), check_retention("failed", failed)
        )

    def purge(self) -> None:
        """Cancel everything that waits in it now."""
        self._client.backend.queues.purge(self.name)

    def open(self) -> int:
        """Return how many of its tasks have not ended."""
        return self._client.backend.queues.open_tasks(self.name)

    @blocking
    def drain(self, timeout: float | None = None, *, show: Callable[[int], None] = lambda _: None) -> Steps[None]:
        """Wait until all of its tasks have ended; `show` is called with how many are still open."""
        limit = time_limit(timeout)
        while True:
            with limit:
                left = self.open()
            show(left)
            if not left:
                return
            if limit.is_up:
                with limit:
                    raise ResultTimeout(self._still_holds(left, timeout))
            yield Pause(_LOOK_AGAIN)

    def _still_holds(self, left: int, timeout: float | None) -> str:
        count, first = self._client.backend.queues.delayed(self.name)
        what = f"Queue {self.name!r} still holds {left:,} tasks after {timeout:g} s."
        if first is None:
            return what
        moment = first.astimezone().isoformat(" ", "seconds")
        return f"{what} Of these {count:,} wait for their time, the first until {moment}."

    apause = async_variant(pause)
    aresume = async_variant(resume)
    alimit = async_variant(limit)
    aretain = async_variant(retain)
    apurge = async_variant(purge)
    aopen = async_variant(open)
    adrain = async_variant(drain)
