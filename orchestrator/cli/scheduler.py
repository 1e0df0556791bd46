"""`orchestrator scheduler`."""

from __future__ import annotations

import sys

import click

from orchestrator.cli.parent import follow_parent
from orchestrator.scheduler.process import run_scheduler
from orchestrator.settings import load_settings
from orchestrator.telemetry import configure_logging


@click.command("scheduler")
def command() -> None:
    """Run a scheduler.

    One scheduler leads. Start another, on another machine if you like, and it stands by to take over within
    seconds. SIGTERM and Ctrl-C finish the tick that is under way and hand the lead over.

    \b
    Example:
      orchestrator scheduler
    """
    follow_parent()
    configure_logging()
    sys.exit(run_scheduler(load_settings()))
