"""Whether what was started can do work: a scheduler leads, and it sees workers."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError

from orchestrator.cli.terminal.reading import reading
from orchestrator.errors import OrchestratorError
from orchestrator.settings import Settings
from orchestrator.store import insights


def is_ready(settings: Settings, *, workers: int) -> bool:
    """Say whether a scheduler leads and at least so many worker processes are live."""
    try:
        with reading(settings) as connection:
            overview = insights.overview(connection)
    except (OrchestratorError, SQLAlchemyError):
        return False  # the scheduler says itself what is wrong
    return overview.leader is not None and overview.workers >= workers
