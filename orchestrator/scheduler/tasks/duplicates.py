"""Get rid of open tasks that have ended before, so that they do not run for ever."""

from __future__ import annotations

from orchestrator.domain.ids import to_text
from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.tasks import duplicates
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

_MOST = 1_000
"""That are removed at once."""
_NAMED = 10
"""Of those, how many are named in the log."""


def remove_duplicates(tx: Transaction, error: Exception) -> bool:
    """Remove open tasks that have ended, if an error says that there is one; say whether there was.

    What they came to when they ended stays, and whoever waits for them is told that.
    """
    task = duplicates.named_in(error)
    if task is None:
        return False
    removed = duplicates.remove(tx.connection, task, _MOST)
    if not removed:
        return False
    tx.result.note(removed)
    tx.result.outgoing.revoked.extend(double for double in removed if double.before in IN_FLIGHT_STATES)
    log.error(
        "task.duplicates_removed tasks=%d: tasks that had ended were open as well and could not end again. The open "
        "rows are removed, the results stay: %s%s",
        len(removed),
        ", ".join(to_text(double.id) for double in removed[:_NAMED]),
        " …" if len(removed) > _NAMED else "",
        extra={"task_id": to_text(removed[0].id)},
    )
    return True
