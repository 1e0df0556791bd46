"""`orchestrator top`."""

from __future__ import annotations

import shutil
import sys

import click

from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import console, on_terminal, print_json
from orchestrator.cli.top.frame import Size, draw
from orchestrator.cli.top.sampling import Sampler
from orchestrator.cli.top.view import SORTS, View
from orchestrator.settings import load_settings


@click.command("top", context_settings={"show_default": True})
@click.option("--interval", type=click.FloatRange(0.2, 60), default=1.0, help="Seconds between two refreshes.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="ready", help="How queues are sorted.")
@click.option("--filter", "matching", default="", metavar="TEXT", help="Only rows whose name contains this.")
@click.option("--once", is_flag=True, help="Print once and exit, as without a terminal.")
@json_option
def command(interval: float, sort: str, matching: str, once: bool, as_json: bool) -> None:
    """Watch the system live: queues, running tasks, workers, failures and runs.

    Keys move, sort, filter, pause a queue, open a task and cancel it; ? lists them. Each refresh reads a bounded number
    of rows through indexes. Nothing is written unless you ask for it.

    \b
    Example:
      orchestrator top
      orchestrator top --once --filter mail
      orchestrator top --json | jq '.queues[] | {queue, ready, oldest, rate}'
    """
    settings = load_settings()
    view = View(sort=sort, matching=matching)
    if not (as_json or once) and on_terminal() and sys.stdin.isatty():
        from orchestrator.cli.top.live import Live  # needs a terminal and modules that not every system has

        Live(settings, interval, view).run()
        return
    data = Sampler(settings, interval).sample_once()
    if as_json:
        print_json(data)
        return
    out, width = console(), shutil.get_terminal_size((100, 24)).columns
    height = 12 + len(data.queues) + max(len(data.running), len(data.workers), len(data.failures), len(data.runs))
    for line in draw(data, view, Size(width, height * 2))[:-1]:
        line.rstrip()
        out.print(line, no_wrap=True, overflow="crop")
