"""`orchestrator worker`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import click

from orchestrator.cli.dev.parent import begin_process
from orchestrator.cli.fleet.shards import run_shards
from orchestrator.cli.terminal.options import app_option, log_options, metrics_option, require_app
from orchestrator.environment import forbid_inspection
from orchestrator.sdk.checks import check_name
from orchestrator.workers.parent.processes import parse_memory
from orchestrator.workers.parent.supervisor import run_worker
from orchestrator.workers.spec import EVERY_QUEUE, WorkerSpec

_MIN_MEMORY = 32 * 2**20
"""The least --max-memory, in bytes; even a new process uses more."""


@click.command("worker", context_settings={"show_default": True})
@app_option
@click.option(
    *("-A", "-Q", "-c", "-P", "of_celery"),
    hidden=True,
    help="Options of Celery, which have other names here.",
    expose_value=False,
    callback=lambda _context, _option, value: value and _refuse_celery_options(),
)
@click.option(
    "--queues",
    metavar="A,B",
    help="The queues to serve; '*' is every queue that the application names, in tasks, workflows as code and "
    "routes.  [default: default]",
)
@click.option("--processes", type=click.IntRange(1), show_default="one per CPU", help="How many processes to run.")
@click.option(
    "--autoscale",
    metavar="MIN,MAX",
    callback=lambda _context, _option, value: value and _bounds(value),
    help="Instead of --processes: scale up while all slots are busy and tasks wait, and down when idle.",
)
@click.option("--concurrency", type=click.IntRange(1), default=10, help="How many tasks each process runs at once.")
@click.option(
    "--max-tasks-per-process",
    type=click.IntRange(1),
    help="Replace a process after about this many tasks, without a pause in the work.",
)
@click.option(
    "--max-memory",
    metavar="SIZE",
    callback=lambda _context, _option, value: value and _memory(value),
    help="Replace a process that uses more memory than this, e.g. 512MB, without a pause in the work.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="MODULE|FILE|FOLDER",
    help="Let workflows run public functions that are defined here by name (module:function, file.py:function). May be "
    "repeated.",
)
@click.option(
    "--allow-command",
    "commands",
    multiple=True,
    metavar="PROGRAM",
    help="Let the executor process run this program, e.g. convert, /opt/jobs/* or '*'; nothing by default. May be "
    "repeated.",
)
@click.option(
    "--executions",
    type=click.IntRange(0, 15_000),
    default=1_000,
    help="How many executions of executors other than Python each process watches at once.",
)
@click.option(
    "--database", is_flag=True, help="Let tasks use ctx.transaction(): give them the database (setting database_url)."
)
@click.option("--burst", is_flag=True, help="Work until the queues are empty, then exit.")
@click.option("--reload", is_flag=True, help="Restart when a *.py file under this folder changes; for development.")
@metrics_option
@log_options
def command(queues: str | None, processes: int | None, autoscale: tuple[int, int] | None, **options: Any) -> None:
    """Run tasks.

    A worker needs Redis and the application, but no database unless its tasks use ctx.transaction(). SIGTERM and Ctrl-C
    drain it: running tasks finish, and tasks that have not started are returned.

    \b
    Example:
      orchestrator worker --app shop.tasks:app --queues default,mail --processes 4
      orchestrator worker --autoscale 1,8 --max-memory 512MB
      orchestrator worker --burst
    """
    if autoscale is not None and processes is not None:
        raise click.UsageError("--autoscale sets the number of processes; it cannot be combined with --processes.")
    settings = begin_process(**{name: options.pop(name) for name in ("app", "log_level", "log_format", "metrics")})
    spec = WorkerSpec(
        app=require_app(settings),
        queues=tuple(_queue(name.strip()) for name in queues.split(",")) if queues is not None else (),
        processes=processes or os.cpu_count() or 1,
        autoscale=autoscale,
        log_level=settings.log_level,
        log_format=settings.log_format,
        **options,
    )
    if spec.commands:
        forbid_inspection()
    if settings.shards > 1:
        spec = _of_shard(spec, settings.shards)
    sys.exit(run_shards(settings, partial(run_worker, spec)))


def _of_shard(spec: WorkerSpec, shards: int) -> WorkerSpec:
    """Return the spec for one shard, with its share of the processes."""
    if spec.burst:
        raise click.UsageError(
            "--burst works with one shard only: a task may enqueue another in a shard whose worker has finished."
        )
    bounds = spec.autoscale and (-(-spec.autoscale[0] // shards), -(-spec.autoscale[1] // shards))
    return replace(spec, processes=-(-spec.processes // shards), autoscale=bounds)


def _refuse_celery_options() -> NoReturn:
    raise click.UsageError(
        "-A, -Q, -c and -P are options of Celery: use --app, --queues, --processes and --concurrency, or "
        "`orchestrator celery -A proj worker -Q … -c …`."
    )


def _queue(name: str) -> str:
    return name if name == EVERY_QUEUE else check_name("queue", name)


def _bounds(value: str) -> tuple[int, int]:
    """Parse the minimum and maximum number of processes."""
    minimum, comma, maximum = value.partition(",")
    try:
        bounds = int(minimum), int(maximum)
    except ValueError:
        bounds = 0, 0
    if not comma or not 1 <= bounds[0] <= bounds[1]:
        raise click.BadParameter(f"{value!r} is not a minimum and maximum number of processes, such as 1,8.")
    return bounds


def _memory(value: str) -> int:
    size = parse_memory(value)
    if size is None or size < _MIN_MEMORY:
        raise click.BadParameter(f"{value!r} is not an amount of memory of 32MB or more, such as 512MB or 2GB.")
    return size
