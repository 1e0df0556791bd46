"""`orchestrator scheduler`."""

from __future__ import annotations

import sys

import click

from orchestrator.cli.dev.parent import follow_parent
from orchestrator.cli.terminal.options import log_options, metrics_option
from orchestrator.environment import hide_environment
from orchestrator.scheduler.process import run_scheduler
from orchestrator.settings import load_settings
from orchestrator.telemetry import configure_logging


@click.command("scheduler")
@metrics_option
@log_options
def command(log_level: str | None, log_format: str | None, metrics: str | None) -> None:
    """Run a scheduler.

    One scheduler leads. Start another, on another machine if you like, and it stands by to take over within
    seconds. SIGTERM and Ctrl-C finish the tick that is under way and hand the lead over.

    \b
    Example:
      orchestrator scheduler
      orchestrator scheduler --metrics 9464
    """
    follow_parent()
    settings = load_settings(log_level=log_level, log_format=log_format, metrics=metrics)
    configure_logging(settings.log_level, settings.log_format)
    hide_environment()
    sys.exit(run_scheduler(settings))
