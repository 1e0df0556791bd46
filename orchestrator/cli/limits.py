"""Commands for queues."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import click

from orchestrator.cli.terminal.options import json_option, yes_option
from orchestrator.cli.terminal.output import confirm, counted, counting_bar, echo, on_terminal, print_json, print_table
from orchestrator.cli.terminal.reading import looking, sending
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
    """Show what stands in each queue and who serves it; pause, limit and empty queues, and say how long they keep.

    \b
    Example:
      orchestrator queues
      orchestrator queues --json | jq '.queues[] | select(.is_led and .workers == 0)'
      orchestrator queues pause mail
    """
    if context.invoked_subcommand is None:
        _show(as_json)


def _show(as_json: bool) -> None:
    with looking() as calls:
        found = calls.insights.list_queues()
    if as_json:
        print_json({"queues": found})
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
            for queue in found
        ],
        empty="No queue holds a task or has a worker. Start one: orchestrator worker --app module:app",
    )


def _count(queue: QueueCounts, *kinds: str) -> int | str:
    """Return how many there are; with `+` where there are more than were counted."""
    number: int = sum(getattr(queue, kind) for kind in kinds)
    return f"{number:,}+" if any(kind in queue.least for kind in kinds) else number


def _settings(queue: QueueCounts) -> str:
    """Return what people have set for a queue, in a few words."""
    said = ["paused"] if queue.paused else []
    if queue.concurrency is not None:
        said.append(f"{queue.concurrency} at once")
    if queue.rate is not None:
        said.append(f"{queue.rate:g}/s")
    for kind, kept in (("success", queue.retention_success), ("failed", queue.retention_failed)):
        if kept is not None:
            said.append(f"{kind} {duration(kept) if kept else 'kept for ever'}")
    return ", ".join(said)


new_option = click.option("--new", is_flag=True, help="Accept a queue that nobody has named yet.")


def check_named(name: str, new: bool | None = None) -> None:
    """Refuse a queue that nothing has ever named, neither what is stored nor the application, unless that is meant.

    A command that has no use for one to come does not say whether it is `new`.
    """
    if new:
        return
    check_name("queue", name)
    with looking() as calls:
        known = {*calls.queues.named()}
    if name in known:
        return
    where = load_settings().app
    if where:
        with closing(load_app(where)) as application:
            known |= {*application.queues()}
    refuse_unnamed(name, known, nor=where or "", if_new="" if new is None else "--new")


@command.command("pause")
@click.argument("name")
@new_option
def pause(name: str, new: bool) -> None:
    """Hand out nothing more of a queue. What is with the workers goes on.

    \b
    Example:
      orchestrator queues pause mail
    """
    check_named(name, new)
    with sending() as app:
        app.queue(name).pause()
    echo(f"Queue {name} is paused.")


@command.command("resume")
@click.argument("name")
def resume(name: str) -> None:
    """Hand the tasks of a paused queue out again.

    \b
    Example:
      orchestrator queues resume mail
    """
    check_named(name)
    with sending() as app:
        app.queue(name).resume()
    echo(f"Queue {name} is resumed.")


@command.command("limit")
@click.argument("name")
@click.option(
    "--concurrency", type=click.IntRange(1), metavar="N", help="How many may run at once, in the whole fleet."
)
@click.option("--rate", metavar="RATE", help="How often one may start: 10/s, 100/m, 5/10s.")
@click.option("--none", "lift", is_flag=True, help="Lift both limits.")
@new_option
def limit(name: str, concurrency: int | None, rate: str | None, lift: bool, new: bool) -> None:
    """Limit a queue. What is not given is not limited.

    \b
    Example:
      orchestrator queues limit mail --concurrency 20 --rate 100/s
      orchestrator queues limit mail --none
    """
    if lift == (concurrency is not None or rate is not None):
        raise click.UsageError("Give --concurrency, --rate or both; or --none.")
    check_named(name, new)
    with sending() as app:
        app.queue(name).limit(concurrency=concurrency, rate=rate)
    echo(f"Queue {name} has no limits." if lift else f"Queue {name} is limited.")


class _Retention(click.ParamType):  # type: ignore[type-arg]  # see `IdOf`
    """How long: `1h`, `30d`, `forever`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = 0.0 if value == "forever" else parse_duration(value)
        if seconds is None:
            self.fail(f"{value!r} is neither a length of time such as 1h or 30d nor the word forever.", param, ctx)
        return seconds


@command.command("retain")
@click.argument("name")
@click.option("--success", type=_Retention(), metavar="TIME", help="Keep what succeeded so long: 1h, 30d, forever.")
@click.option("--failed", type=_Retention(), metavar="TIME", help="Keep what failed or was cancelled or skipped.")
@click.option("--none", "lift", is_flag=True, help="Leave both to the settings again.")
@new_option
def retain(name: str, success: float | None, failed: float | None, lift: bool, new: bool) -> None:
    """Set how long a queue's tasks are kept after they have ended. What is not given is left to the settings.

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
    with sending() as app:
        app.queue(name).retain(success=success, failed=failed)
    said = [
        f"{kind} {duration(kept) if kept else 'for ever'}"
        for kind, kept in (("success", success), ("failed", failed))
        if kept is not None
    ]
    echo(f"Queue {name} keeps {', '.join(said)}." if said else f"Queue {name} keeps tasks as long as the settings say.")


@command.command("purge")
@click.argument("name")
@yes_option
def purge(name: str, yes: bool) -> None:
    """Cancel everything that waits in a queue.

    \b
    Example:
      orchestrator queues purge mail --yes
    """
    check_named(name)
    with looking() as calls:
        found = next((queue for queue in calls.insights.list_queues() if queue.queue == name), empty_queue(name))
        waiting = found.ready + found.delayed + found.unknown + found.blocked
        more = "at least " if found.least and waiting else ""
        if not waiting:  # or they were not counted, where very many are open elsewhere
            waiting = max(0, calls.queues.open_tasks(name) - found.dispatched - found.running)
    if not waiting:
        echo(f"Nothing waits in queue {name}.")
        return
    confirm(f"Cancel {more}{counted(waiting, 'task')} waiting in queue {name}?", yes=yes)
    with sending() as app:
        app.queue(name).purge()
    echo(f"The scheduler cancels {more}{counted(waiting, 'task')}.")


@command.command("drain")
@click.argument("name")
@click.option("--timeout", type=float, metavar="SECONDS", help="Give up after so many seconds.")
@new_option
def drain(name: str, timeout: float | None, new: bool) -> None:
    """Wait until every task of a queue has ended.

    \b
    Example:
      orchestrator queues drain mail --timeout 600
    """
    check_named(name, new)
    with sending() as app:
        queue = app.queue(name)
        if on_terminal():
            _drain_with_bar(queue, timeout)
        else:
            queue.drain(timeout)
    echo(f"Queue {name} is empty.")


def _drain_with_bar(queue: Queue, timeout: float | None) -> None:
    with counting_bar() as progress:
        bar = progress.add_task(queue.name, total=None)
        most = 0

        def show(left: int) -> None:
            nonlocal most
            most = max(most, left)  # more may be enqueued meanwhile
            progress.update(bar, total=most, completed=most - left)

        queue.drain(timeout, show=show)
