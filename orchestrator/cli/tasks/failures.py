"""`orchestrator failures`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

from orchestrator.cli.terminal.options import json_option, moment
from orchestrator.cli.terminal.output import echo, print_json, print_table
from orchestrator.cli.terminal.reading import open_calls
from orchestrator.domain.durations import parse_duration
from orchestrator.domain.tasks.task import error_text
from orchestrator.errors import NotFound, did_you_mean
from orchestrator.monitoring.times import ago, present
from orchestrator.sdk.calls.insights import HandlingAct
from orchestrator.store.insights.failures import FailureGroup

F = TypeVar("F", bound=Callable[..., Any])

since_option = click.option(
    "--since", type=moment, default="1d", show_default=True, metavar="TIME", help="Failed since: 2h (ago), or a time."
)


@click.group("failures", invoke_without_command=True)
@since_option
@json_option
@click.pass_context
def command(context: click.Context, since: datetime, as_json: bool) -> None:
    """Show failed tasks by task and error, the largest groups first; acknowledge and snooze groups.

    `first` and `last` cover the given period only; `release` is the one in which a group was first seen.

    \b
    Example:
      orchestrator failures --since 2h
      orchestrator failures ack shop.mail.send ConnectionError
      orchestrator failures snooze shop.mail.send ConnectionError --for 8h
    """
    if context.invoked_subcommand is None:
        _show(since, as_json)


@command.command("list")
@since_option
@json_option
def list_(since: datetime, as_json: bool) -> None:
    """Show failed tasks by task and error, as `orchestrator failures` alone does.

    \b
    Example:
      orchestrator failures list --since 2h
    """
    _show(since, as_json)


def _show(since: datetime, as_json: bool) -> None:
    with open_calls() as calls:
        failures = calls.insights.failures(since)
    if as_json:
        groups = [group._asdict() | {"handled": group.handled and group.handled._asdict()} for group in failures.groups]
        print_json({"groups": groups, "looked_at": failures.looked_at})
        return
    now = present()
    print_table(
        ("task…", "error…", "queue…", "tasks>", "first", "last", "state…", "release…?"),
        [
            (
                group.name,
                error_text(group.kind, group.example).partition("\n")[0],
                group.queue,
                group.tasks,
                ago(group.first_at, now),
                ago(group.last_at, now),
                _state(group, now),
                group.first_release,
            )
            for group in failures.groups
        ],
        empty="Nothing has failed in this time.",
    )
    if failures.looked_at:
        echo(f"Counts cover the last {failures.looked_at:,} failures.", err=True)


def _state(group: FailureGroup, now: datetime) -> str:
    """Return the decision about a group and its author."""
    state = group.handled.state(now, group.last_at) if group.handled is not None else ""
    return f"{state} by {group.handled.who}" if group.handled is not None and state else ""


def _period(value: str) -> timedelta:
    seconds = parse_duration(value)
    if not seconds:
        raise click.BadParameter(f"{value!r} is not a duration such as 8h.")
    return timedelta(seconds=seconds)


def group_options(command: F) -> F:
    """Add the arguments that select failure groups: task, error (its type or a group's id), queue and period."""
    command = click.option("--queue", help="Only failures in this queue.")(since_option(command))
    return click.argument("name", metavar="TASK")(click.argument("error")(command))


@command.command("ack")
@group_options
def acknowledge(**group: Any) -> None:
    """Acknowledge failures, by the name of the task and the type of its error.

    \b
    Example:
      orchestrator failures ack shop.mail.send ConnectionError
    """
    _decide("acknowledge", "acknowledged", **group)


@command.command()
@group_options
@click.option("--for", "period", type=_period, default="1d", show_default=True, help="How long: 8h, 3d.")
def snooze(period: timedelta, **group: Any) -> None:
    """Hide failures from the overview for some time.

    \b
    Example:
      orchestrator failures snooze shop.mail.send ConnectionError --for 8h
    """
    until = present() + period
    _decide("snooze", f"snoozed until {until:%Y-%m-%d %H:%M} UTC", until, **group)


@command.command()
@group_options
def reopen(**group: Any) -> None:
    """Show acknowledged or snoozed failures again.

    \b
    Example:
      orchestrator failures reopen shop.mail.send ConnectionError
    """
    _decide("reopen", "reopened", **group)


def _decide(
    act: HandlingAct,
    outcome: str,
    until: datetime | None = None,
    *,
    name: str,
    error: str,
    queue: str | None,
    since: datetime,
) -> None:
    """Apply a decision to the failures of a task with a type of error, in every queue that has them."""
    with open_calls() as calls:
        groups = calls.insights.failures(since).groups
        of_task = [group for group in groups if group.name == name and queue in (None, group.queue)]
        matching = [group for group in of_task if error in (group.id, group.kind, group.kind.rpartition(".")[2])]
        if not matching:
            candidates = [group.kind for group in of_task] if of_task else [group.name for group in groups]
            suggestion = did_you_mean(error if of_task else name, candidates)
            raise NotFound(f"No task {name!r} has failed with {error!r} since {since:%Y-%m-%d %H:%M} UTC.{suggestion}")
        for group in matching:
            calls.insights.handle_failures(group.name, group.queue, group.id, act, until)
            echo(f"Failures of {group.name} with {group.id} in queue {group.queue}: {outcome}.")
