"""The errors that a caller may get while Postgres is down; any other error is a defect."""

from __future__ import annotations

from sqlalchemy import exc

from orchestrator import OrchestratorError

_OUTAGE_ERRORS = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)


def is_weather(error: Exception) -> bool:
    """Return whether the database driver raised the error, directly or as the cause of an orchestrator error."""
    return isinstance(error, _OUTAGE_ERRORS) or (
        isinstance(error, OrchestratorError) and isinstance(error.__cause__, _OUTAGE_ERRORS)
    )
