"""Parts that keep something in memory between ticks hear how each transaction ended, all from one place (`term.py`).

What they keep matches what is committed. It changes with a commit; or at once, where the same tick goes on with it, and
is then read again from Postgres after a rollback.
"""

from __future__ import annotations

from orchestrator.scheduler.tick_result import TickResult


class CommitHooks:
    """Keeps something in memory between ticks."""

    def committed(self, tick: TickResult) -> None:
        """A transaction was committed with this result."""

    def rolled_back(self) -> None:
        """A transaction, or a part of one, was rolled back."""
