"""`orchestrator scheduler`."""

from __future__ import annotations

import sys

import click

from orchestrator.cli.dev.parent import begin_process
from orchestrator.cli.fleet.shards import run_shards
from orchestrator.cli.terminal.options import log_options, metrics_option
from orchestrator.scheduler.process import run_scheduler


@click.command("scheduler")
@metrics_option
@log_options
def command(**settings: str | None) -> None:
    """Run a scheduler.

    One scheduler leads. Another one, preferably on another machine, stands by and takes over within seconds. SIGTERM
    and Ctrl-C finish the current tick and hand the lead over.

    \b
    Example:
      orchestrator scheduler
      orchestrator scheduler --metrics 9464
    """
    sys.exit(run_shards(begin_process(**settings), run_scheduler))
