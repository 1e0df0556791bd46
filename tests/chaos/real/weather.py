"""What a caller may see while Postgres is away; anything else is a defect."""

from __future__ import annotations

from sqlalchemy import exc

from orchestrator import OrchestratorError

_WEATHER = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)


def is_weather(error: Exception) -> bool:
    """Say whether an error comes from outside: the database's own, or ours with that as its cause."""
    return isinstance(error, _WEATHER) or (
        isinstance(error, OrchestratorError) and isinstance(error.__cause__, _WEATHER)
    )
