"""Commands for queues."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import click

from orchestrator.cli.terminal.options import json_option, yes_option
from orchestrator.cli.terminal.output import confirm, counted, counting_bar, echo, on_terminal, print_json, print_table
from orchestrator.cli.terminal.reading import open_app, open_calls
from orchestrator.domain.durations import parse_duration
from orchestrator.monitoring.times import duration
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.queue import Queue, refuse_unnamed
from orchestrator.settings import load_settings
from orchestrator.store.insights import QueueCounts
from orchestrator.store.insights.fleet import empty_queue
from orchestrator.workers.functions import load_app

_HEADERS = (
    *("queue…", "ready>", "in flight>", "workers>", "set…?"),
    *("delayed>?", "waiting>?", "unknown>?", "oldest>?", "slots>?"),
)


@click.group("queues", invoke_without_command=True)
@json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Show the contents and the workers of each queue; pause, limit and empty queues, and set their retention.

    \b
    Example:
      orchestrator queues
      orchestrator queues --json | jq '.queues[] | select(.is_led and .workers == 0)'
      orchestrator queues pause mail
    """
    if context.invoked_subcommand is None:
        _show(as_json)


def _show(as_json: bool) -> None:
    with open_calls() as calls:
        queues = calls.insights.list_queues()
    if as_json:
        print_json({"queues": queues})
        return
    print_table(
        _HEADERS,
        [
            (
                queue.queue,
                _count(queue, "ready"),
                _count(queue, "dispatched", "running"),
                queue.workers if queue.is_led else "unknown",
                _settings(queue),
                _count(queue, "delayed"),
                _count(queue, "blocked"),
                _count(queue, "unknown"),
                duration(queue.oldest_ready),
                queue.slots if queue.is_led else "unknown",
            )
            for queue in queues
        ],
        empty="No queue holds a task or has a worker. Start one: orchestrator worker --app module:app",
    )


def _count(queue: QueueCounts, *kinds: str) -> int | str:
    """Return the number of tasks of these kinds; with `+` if the count stopped at its limit."""
    number: int = sum(getattr(queue, kind) for kind in kinds)
    return f"{number:,}+" if any(kind in queue.least for kind in kinds) else number


def _settings(queue: QueueCounts) -> str:
    """Return a short summary of what people have set for a queue."""
    parts = ["paused"] if queue.paused else []
    if queue.concurrency is not None:
        parts.append(f"{queue.concurrency} at once")
    if queue.rate is not None:
        parts.append(f"{queue.rate:g}/s")
    for kind, seconds in (("success", queue.retention_success), ("failed", queue.retention_failed)):
        if seconds is not None:
            parts.append(f"{kind} {duration(seconds) if seconds else 'kept forever'}")
    return ", ".join(parts)


new_option = click.option("--new", is_flag=True, help="Accept a queue that is not known yet.")


def check_named(name: str, new: bool | None = None) -> None:
    """Refuse a queue that neither the database nor the application knows, unless `new` is set.

    `new` is None for commands that have no `--new` option.
    """
    if new:
        return
    check_name("queue", name)
    with open_calls() as calls:
        existing = {*calls.queues.named()}
    if name in existing:
        return
    app_path = load_settings().app
    if app_path:
        with closing(load_app(app_path)) as application:
            existing |= {*application.queues()}
    refuse_unnamed(name, existing, nor=app_path or "", if_new="" if new is None else "--new")


@command.command("pause")
@click.argument("name")
@new_option
def pause(name: str, new: bool) -> None:
    """Pause a queue: dispatch no more of its tasks. Tasks that workers already hold continue.

    \b
    Example:
      orchestrator queues pause mail
    """
    check_named(name, new)
    with open_app() as app:
        app.queue(name).pause()
    echo(f"Queue {name} is paused.")


@command.command("resume")
@click.argument("name")
def resume(name: str) -> None:
    """Dispatch the tasks of a paused queue again.

    \b
    Example:
      orchestrator queues resume mail
    """
    check_named(name)
    with open_app() as app:
        app.queue(name).resume()
    echo(f"Queue {name} is resumed.")


@command.command("limit")
@click.argument("name")
@click.option(
    "--concurrency", type=click.IntRange(1), metavar="N", help="How many tasks may run at once, in the whole fleet."
)
@click.option("--rate", metavar="RATE", help="How often a task may start: 10/s, 100/m, 5/10s.")
@click.option("--none", "lift", is_flag=True, help="Lift both limits.")
@new_option
def limit(name: str, concurrency: int | None, rate: str | None, lift: bool, new: bool) -> None:
    """Limit a queue. A limit that is not given is removed.

    \b
    Example:
      orchestrator queues limit mail --concurrency 20 --rate 100/s
      orchestrator queues limit mail --none
    """
    if lift == (concurrency is not None or rate is not None):
        raise click.UsageError("Give --concurrency, --rate or both; or --none.")
    check_named(name, new)
    with open_app() as app:
        app.queue(name).limit(concurrency=concurrency, rate=rate)
    echo(f"Queue {name} has no limits." if lift else f"Queue {name} is limited.")


class _Retention(click.ParamType):  # type: ignore[type-arg]  # see `IdOf`
    """A duration (`1h`, `30d`) or `forever`, in seconds; 0 is forever."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = 0.0 if value == "forever" else parse_duration(value)
        if seconds is None:
            self.fail(f"{value!r} is not a duration such as 1h or 30d, nor the word forever.", param, ctx)
        return seconds


@command.command("retain")
@click.argument("name")
@click.option("--success", type=_Retention(), metavar="TIME", help="Retention of succeeded tasks: 1h, 30d, forever.")
@click.option("--failed", type=_Retention(), metavar="TIME", help="Retention of failed, cancelled and skipped tasks.")
@click.option("--none", "lift", is_flag=True, help="Use the settings for both again.")
@new_option
def retain(name: str, success: float | None, failed: float | None, lift: bool, new: bool) -> None:
    """Set how long a queue's ended tasks are kept. An option that is not given falls back to the settings.

    Tasks that belong to a run are kept as long as their run.

    \b
    Example:
      orchestrator queues retain mail --success 1h --failed 30d
      orchestrator queues retain audit --success forever --failed forever
      orchestrator queues retain mail --none
    """
    if lift == (success is not None or failed is not None):
        raise click.UsageError("Give --success, --failed or both; or --none.")
    check_named(name, new)
    with open_app() as app:
        app.queue(name).retain(success=success, failed=failed)
    kept = [
        f"{kind} {duration(seconds) if seconds else 'forever'}"
        for kind, seconds in (("success", success), ("failed", failed))
        if seconds is not None
    ]
    echo(f"Queue {name} keeps {', '.join(kept)}." if kept else f"Queue {name} keeps tasks as long as the settings say.")


@command.command("purge")
@click.argument("name")
@yes_option
def purge(name: str, yes: bool) -> None:
    """Cancel all waiting tasks of a queue.

    \b
    Example:
      orchestrator queues purge mail --yes
    """
    check_named(name)
    with open_calls() as calls:
        counts = next((queue for queue in calls.insights.list_queues() if queue.queue == name), empty_queue(name))
        waiting = counts.ready + counts.delayed + counts.unknown + counts.blocked
        more = "at least " if counts.least and waiting else ""
        if not waiting:  # or the counts are incomplete, because very many tasks are open elsewhere
            waiting = max(0, calls.queues.open_tasks(name) - counts.dispatched - counts.running)
    if not waiting:
        echo(f"No task waits in queue {name}.")
        return
    confirm(f"Cancel {more}{counted(waiting, 'task')} waiting in queue {name}?", yes=yes)
    with open_app() as app:
        app.queue(name).purge()
    echo(f"The scheduler cancels {more}{counted(waiting, 'task')}.")


@command.command("drain")
@click.argument("name")
@click.option("--timeout", type=float, metavar="SECONDS", help="Seconds after which to give up.")
@new_option
def drain(name: str, timeout: float | None, new: bool) -> None:
    """Wait until every task of a queue has ended.

    \b
    Example:
      orchestrator queues drain mail --timeout 600
    """
    check_named(name, new)
    with open_app() as app:
        queue = app.queue(name)
        if on_terminal():
            _drain_with_bar(queue, timeout)
        else:
            queue.drain(timeout)
    echo(f"Queue {name} is empty.")


def _drain_with_bar(queue: Queue, timeout: float | None) -> None:
    with counting_bar() as progress:
        bar = progress.add_task(queue.name, total=None)
        largest = 0

        def show(remaining: int) -> None:
            nonlocal largest
            largest = max(largest, remaining)  # the queue grows when tasks are enqueued meanwhile
            progress.update(bar, total=largest, completed=largest - remaining)

        queue.drain(timeout, show=show)
