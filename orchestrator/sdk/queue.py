"""A queue, to be paused, limited or emptied, and told how long to keep what has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from orchestrator.domain.limits import Rate
from orchestrator.errors import InvalidTask, ResultTimeout
from orchestrator.sdk.options import check_name, check_rate, check_retention

if TYPE_CHECKING:
    from orchestrator.sdk.app import Orchestrator

_LOOK_AGAIN = 0.25


class Queue:
    """One queue of an application. What is set for it stands in Postgres and holds for the whole fleet."""

    def __init__(self, app: Orchestrator, name: str) -> None:
        self._app = app
        self.name = check_name("queue", name)

    def __repr__(self) -> str:
        return f"<Queue {self.name}>"

    def pause(self) -> None:
        """Hand out nothing more of it; what is with the workers goes on."""
        self._app.backend.queues.pause(self.name, True)

    def resume(self) -> None:
        """Hand its tasks out again."""
        self._app.backend.queues.pause(self.name, False)

    def limit(self, *, concurrency: int | None = None, rate: str | Rate | None = None) -> None:
        """Set how many of its tasks may run at once, and how often one may start; None lifts a limit."""
        if concurrency is not None and (isinstance(concurrency, bool) or concurrency < 1):
            raise InvalidTask(f"Option concurrency: expected a whole number above zero, found {concurrency!r}.")
        self._app.backend.queues.limit(self.name, concurrency, check_rate("rate", rate))

    def retain(self, *, success: float | timedelta | None = None, failed: float | timedelta | None = None) -> None:
        """Set how long its tasks are kept after they have succeeded, or ended otherwise.

        0 keeps them for ever; None leaves it to the settings. Tasks of a run are kept as long as their run.
        """
        self._app.backend.queues.retain(
            self.name, check_retention("success", success), check_retention("failed", failed)
        )

    def purge(self) -> None:
        """Cancel everything that waits in it now."""
        self._app.backend.queues.purge(self.name)

    def open(self) -> int:
        """Return how many of its tasks have not ended."""
        return self._app.backend.queues.open_tasks(self.name)

    def drain(self, timeout: float | None = None, *, show: Callable[[int], None] = lambda _: None) -> None:
        """Wait until all of its tasks have ended; `show` is called with how many are still open."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while left := self.open():
            show(left)
            if deadline is not None and time.monotonic() >= deadline:
                raise ResultTimeout(f"Queue {self.name!r} still holds {left:,} tasks after {timeout:g} s.")
            time.sleep(_LOOK_AGAIN)
        show(0)
