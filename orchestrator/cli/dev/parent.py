"""End with the parent: what `orchestrator dev` started must not outlive it, even if it is killed."""

from __future__ import annotations

import os
import signal

from orchestrator.workers.parent.parent_death import die_with

FOLLOW = "ORCHESTRATOR_FOLLOW"
"""The variable in which a parent leaves its process id for processes that end with it."""


def follow_parent() -> None:
    """Stop in good order when the parent dies, if the parent wants that."""
    parent = os.environ.pop(FOLLOW, None)
    if parent is not None:
        die_with(int(parent), signal.SIGTERM)
