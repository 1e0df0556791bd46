"""Whoever remembers something between ticks hears what came of each transaction, all from one place (`term.py`).

What is remembered is true of what is committed. So it changes with the news of a commit; or it changes at once, where
the same tick goes on with it, and is read again from Postgres after a rollback.
"""

from __future__ import annotations

from orchestrator.scheduler.news import News


class Remembering:
    """Remembers something between ticks."""

    def committed(self, news: News) -> None:
        """A transaction stands, and this is what it has brought about."""

    def rolled_back(self) -> None:
        """A transaction, or a part of one, did not happen."""
