"""The command line. Each command lives in its own module, which is imported when the command is called.

So a worker never imports SQLAlchemy or a database driver.
"""

from __future__ import annotations

import os

import click

from orchestrator.cli.dev import FOLLOW
from orchestrator.cli.terminal.lazy import LazyGroup
from orchestrator.settings import misspelt

COMMANDS = {
    "dev": ("dev.command", "Run everything here, with its own Postgres and Redis."),
    "scheduler": ("fleet.scheduler", "Run a scheduler."),
    "worker": ("fleet.worker", "Run tasks."),
    "api": ("system.api", "Serve the HTTP API."),
    "run-task": ("fleet.run_task", "Run one task, as the command of a container."),
    "serve": ("fleet.serve", "Serve an application's tasks over HTTP."),
    "keys": ("system.keys", "Create, list and revoke keys of the HTTP API."),
    "audit": ("system.audit", "Show who did what."),
    "db": ("system.db", "Prepare and check the database."),
    "doctor": ("system.doctor", "Check settings, servers and processes, and say what to change."),
    "enqueue": ("tasks.enqueue", "Enqueue a task."),
    "tasks": ("tasks.commands", "List, watch, cancel and retry tasks."),
    "failures": ("tasks.failures", "Show failures by task and error; acknowledge and snooze them."),
    "workflows": ("dag", "Check, apply and show workflow definitions."),
    "flows": ("flow.commands", "Check, publish and start flow graphs; signal, approve and watch their runs."),
    "runs": ("runs.commands", "Start, list, show, watch, cancel, retry and delete runs."),
    "schedules": ("schedules.commands", "Set when workflows start automatically; pause, trigger and backfill."),
    "events": ("dag:events", "Post events that workflows wait for."),
    "queues": ("limits", "Show queues; pause, limit and empty them."),
    "rq": ("tasks.rq", "Run programs written for RQ, and import the waiting jobs of an RQ fleet."),
    "migrate": ("system.migrate", "Move programs that use Celery, RQ or Dramatiq."),
    "bridge": ("tasks.bridge", "Run the tasks that Celery producers send, while the producers migrate."),
    "celery": ("fleet.celery", "Run Celery's commands: worker, beat, inspect, call."),
    "workers": ("fleet.workers", "Show the fleet."),
    "status": ("system.status", "Show the state of the system, and its problems."),
    "top": ("top.command", "Watch the system live: queues, tasks, workers, failures, runs."),
    "search": ("system.status:search", "Find tasks and runs by id, name, tag or error."),
    "quarantine": ("system.quarantine", "Show messages that could not be decoded or applied."),
}


@click.group(
    cls=LazyGroup, package=__name__, modules=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="durable-orchestrator", prog_name="orchestrator")
@click.option("--api-url", metavar="URL", help="Use this HTTP API instead of Postgres and Redis.")
def main(api_url: str | None) -> None:
    """A durable task queue and workflow engine.

    \b
    Example:
      orchestrator dev --app shop.tasks:app        everything in one terminal
      orchestrator enqueue resize a.png --wait     and in another one
      orchestrator status

    Settings come from ORCHESTRATOR_… in the environment, from [tool.orchestrator] in pyproject.toml, or
    from an `orchestrator dev` that runs in this folder. With ORCHESTRATOR_API_URL and ORCHESTRATOR_API_KEY, or
    --api-url, commands work over HTTP; those that need the stores themselves say so.
    """
    if api_url is not None:
        os.environ["ORCHESTRATOR_API_URL"] = api_url
    if FOLLOW not in os.environ:  # the parent process has already printed the warnings
        for remark in misspelt(os.environ):
            from orchestrator.cli.terminal.output import echo  # rarely needed, and slow to import

            echo(f"Warning: {remark}", err=True)
