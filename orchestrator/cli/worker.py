"""`orchestrator worker`."""

from __future__ import annotations

import os
import sys

import click

from orchestrator.cli.options import app_option, require_app
from orchestrator.cli.parent import follow_parent
from orchestrator.sdk.options import check_name
from orchestrator.settings import load_settings
from orchestrator.telemetry import configure_logging
from orchestrator.workers.spec import WorkerSpec
from orchestrator.workers.supervisor import run_worker


@click.command("worker", context_settings={"show_default": True})
@app_option
@click.option("--queues", default="default", metavar="A,B", help="The queues to serve.")
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=lambda: os.cpu_count() or 1,
    show_default="one per CPU",
    help="How many processes to run.",
)
@click.option("--concurrency", type=click.IntRange(1), default=10, help="How many tasks each process runs at once.")
@click.option(
    "--allow",
    multiple=True,
    metavar="MODULE|FILE|FOLDER",
    help="Let workflows run plain functions from here by name (module:function, file.py:function). May be repeated.",
)
@click.option(
    "--database", is_flag=True, help="Let tasks use ctx.transaction(): give them the database (setting database_url)."
)
@click.option("--burst", is_flag=True, help="Work until the queues are empty, then exit.")
def command(
    app: str | None,
    queues: str,
    processes: int,
    concurrency: int,
    allow: tuple[str, ...],
    database: bool,
    burst: bool,
) -> None:
    """Run tasks.

    A worker needs Redis and the application, and no database unless its tasks complete in transactions. SIGTERM and
    Ctrl-C drain it: what runs is finished, and what has not started is handed back.

    \b
    Example:
      orchestrator worker --app shop.tasks:app --queues default,mail --processes 4
      orchestrator worker --burst
    """
    settings = load_settings(app=app)
    spec = WorkerSpec(
        app=require_app(settings),
        queues=tuple(check_name("queue", queue.strip()) for queue in queues.split(",")),
        processes=processes,
        concurrency=concurrency,
        allow=allow,
        database=database,
        burst=burst,
    )
    follow_parent()
    configure_logging()
    sys.exit(run_worker(spec, settings))
