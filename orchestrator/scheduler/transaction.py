"""One transaction of the leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Connection

from orchestrator.scheduler.budget import TickBudget
from orchestrator.scheduler.spans import LeaderSpans
from orchestrator.sealing import Vault


def _nobody() -> None:
    """Nobody remembers anything."""


@dataclass
class Transaction:
    """Where statements go, what time it is, and how much may be done."""

    connection: Connection
    now: datetime
    budget: TickBudget = field(default_factory=TickBudget)
    is_careful: bool = False
    """The one before it failed: what belongs to runs is tried, so that the one at fault is found."""
    is_watched: bool = False
    """Somebody listens to what moves."""
    rolled_back: Callable[[], None] = _nobody
    """Tell everyone who remembers something that a part of it was undone."""
    vault: Vault | None = None
    """What seals the values that are made here: the inputs of steps, the parameters of runs."""
    spans: LeaderSpans | None = None
    """Who makes spans of runs, if anybody does."""

    @property
    def has_spans(self) -> bool:
        """Say whether what comes of a run stands below a span of that."""
        return self.spans is not None
