"""Start of the long-running commands. A child of `orchestrator dev` must not outlive it, even if that is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

from orchestrator.cli.dev import FOLLOW
from orchestrator.environment import hide_environment
from orchestrator.memory import limit_arenas
from orchestrator.settings import Settings, load_settings
from orchestrator.telemetry import configure_logging
from orchestrator.workers.parent.processes import die_with


def begin_process(**values: Any) -> Settings:
    """Load the settings, configure logging, hide the environment from tasks; end with the parent if it asks so."""
    parent = os.environ.pop(FOLLOW, None)
    if parent is not None:
        die_with(int(parent), signal.SIGTERM)
    settings = load_settings(**values)
    configure_logging(settings.log_level, settings.log_format)
    hide_environment()
    limit_arenas()
    return settings
