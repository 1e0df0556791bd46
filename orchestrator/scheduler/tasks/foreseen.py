"""Ends that the leader knows before Postgres says so: of tasks of runs that it has created as claimed.

If such an attempt succeeds, what follows can be worked out in memory, and the whole tick is one message to Postgres.
Each of its statements that ends tasks fails unless it ends those that were foreseen; then nothing has happened, and the
tick is done again without foresight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orchestrator.domain.tasks.reports import Report
from orchestrator.domain.tasks.task import Succeeded
from orchestrator.scheduler.tick_result import CommitHooks, TickResult
from orchestrator.store.tasks.transitions import Moved


class Foreseen(CommitHooks):
    """Tasks in flight as they are once they have succeeded."""

    def __init__(self) -> None:
        self._ends: dict[bytes, Moved] = {}

    def ends(self, reports: Iterable[Report]) -> Mapping[bytes, Moved] | None:
        """Return how the tasks of these reports have ended, if all of them are successes of foreseen attempts."""
        found: dict[bytes, Moved] = {}
        for report in reports if self._ends else ():
            if not isinstance(report, Succeeded) or report.children:
                return None
            end = self._ends.get(report.id)
            if end is None or end.attempt != report.attempt:
                return None
            found[end.id] = end
        return found or None

    def committed(self, tick: TickResult) -> None:
        """Foresee the ends of what was created, and forget what has ended."""
        if self._ends:
            for ended in tick.outgoing.ended:
                self._ends.pop(ended.id, None)
        self._ends.update({end.id: end for end in tick.tasks.foreseen})

    def rolled_back(self) -> None:
        """Foresee nothing of what is in flight."""
        self._ends.clear()
