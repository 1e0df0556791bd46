"""`orchestrator schedules`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, TypeVar, get_args

import click
import msgspec
from rich.text import Text

from orchestrator.cli.schedules import backfilling
from orchestrator.cli.schedules.backfilling import key_argument
from orchestrator.cli.terminal.options import app_option, json_option, require_app, yes_option
from orchestrator.cli.terminal.output import (
    confirm,
    counted,
    echo,
    hidden,
    parse_value,
    print_fields,
    print_json,
    print_table,
    short_text,
    state,
)
from orchestrator.cli.terminal.reading import ask_each, open_app, open_calls
from orchestrator.domain.schedules.schedule import Overlap, Schedule, from_data
from orchestrator.monitoring.times import ago, present
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.backend.schedules import upcoming
from orchestrator.sdk.dag.schedule_fields import checked_schedule
from orchestrator.sdk.schedules import pages
from orchestrator.settings import load_settings
from orchestrator.store.schedules.definitions import StoredSchedule
from orchestrator.workers.functions import load_app

F = TypeVar("F", bound=Callable[..., Any])
_PAGE = 1_000
"""Schedules per page of `list --all`."""

times_options: tuple[Callable[[F], F], ...] = (
    click.option("--cron", help="Five fields, or six with seconds first: '0 3 * * *'."),
    click.option("--every", metavar="DURATION", help="An interval, in elapsed time: 10m, 1h30m."),
    click.option("--at", metavar="TIME", help="Once: 2026-07-01T09:00."),
    click.option("--start", metavar="TIME", help="Not before this moment: 2026-07-01, in its time zone."),
    click.option("--end", metavar="TIME", help="Only before this moment."),
    click.option("--timezone", metavar="ZONE", help="The schedule's time zone: Europe/Berlin.  [default: UTC]"),
)


def times(command: F) -> F:
    """Add the options for when a schedule fires."""
    for option in reversed(times_options):
        command = option(command)
    return command


@click.group("schedules")
def command() -> None:
    """Set when workflows start automatically; pause, trigger and backfill.

    \b
    Example:
      orchestrator schedules list
      orchestrator schedules set nightly --cron '0 3 * * *' --timezone Europe/Berlin
      orchestrator schedules backfill nightly --from 2026-01-01 --to 2026-02-01 --concurrency 4 --watch
    """


@command.command("list")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many to show.")
@click.option("--after", metavar="KEY", help="Continue after this schedule.")
@click.option("--all", "everything", is_flag=True, help="Show all, page by page; with --json, one document per page.")
@json_option
def list_(limit: int, after: str | None, everything: bool, as_json: bool) -> None:
    """List schedules by name, with their next fire in their own time zone.

    \b
    Example:
      orchestrator schedules list
      orchestrator schedules list --all --json | jq -r '.schedules[] | select(.error) | .key'
    """
    with open_calls() as calls:
        while True:
            schedules, more = calls.schedules.page(limit=_PAGE if everything else limit, after=after)
            if as_json:
                print_json({"schedules": [_document(stored) for stored in schedules], "next": more})
            elif schedules or after is None:
                _print(schedules)
            if more is None or not everything:
                break
            after = more
    if more and not as_json:
        echo(f"More of them: add --after {more}, or --all", err=True)


def _print(schedules: Sequence[StoredSchedule]) -> None:
    now = present()
    print_table(
        ("schedule…", "when…", "next", "note…?", "last run?", "next fire?", "last fire?", "overlap?"),
        [
            (
                _short(stored),
                stored.schedule.description(),
                _soon(stored, now),
                _note(stored),
                state(stored.last_state) if stored.last_state else "",
                _local(stored.next_fire, stored.schedule) if stored.next_fire and not stored.paused else "",
                ago(stored.last_fire, now),
                stored.schedule.overlap,
            )
            for stored in schedules
        ],
        empty="There is no schedule yet. Set one: orchestrator schedules set WORKFLOW --cron '0 3 * * *'",
    )


@command.command()
@key_argument
@json_option
def show(key: str, as_json: bool) -> None:
    """Show one schedule: its settings, its state and its next fires.

    \b
    Example:
      orchestrator schedules show nightly
    """
    with open_app() as app:
        stored = app._client.backend.schedules.find(key)
    if as_json:
        print_json(_document(stored))
        return
    now = present()
    schedule = stored.schedule
    print_fields(
        {
            "schedule": _short(stored),
            "starts": _started(stored),
            "when": f"{schedule.description()}, {schedule.timezone}",
            "overlap": schedule.overlap,
            "catch up": schedule.catch_up,
            "jitter": f"up to {schedule.jitter:g}s" if schedule.jitter else None,
            "params": ", ".join(
                f"{name}={short_text(value)}" for name, value in hidden().redacted(schedule.params).items()
            ),
            "set by": _origin(stored),
            "next fire": _next(stored, now),
            "last fire": f"{_local(stored.last_fire, schedule)} ({ago(stored.last_fire, now)})"
            if stored.last_fire
            else "",
            "last run": f"{stored.last_run} {stored.last_state}" if stored.last_run else None,
            "fired": f"{counted(stored.fired, 'run')}, {stored.skipped:,} skipped because a run was open",
            "error": Text(stored.error, style="red") if stored.error else None,
        }
    )


@command.command("next")
@click.argument("key", metavar="[WORKFLOW[/NAME]]", required=False)
@times
@click.option("-n", "--count", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many fires.")
@json_option
def next_(key: str | None, count: int, as_json: bool, **all_options: str | None) -> None:
    """Preview the next fires of a stored schedule, or of the given options without any services.

    \b
    Example:
      orchestrator schedules next nightly -n 10
      orchestrator schedules next --cron '30 2 * * *' --timezone Europe/Berlin
    """
    schedule_options = {name: value for name, value in all_options.items() if value is not None}
    if (key is None) is (not schedule_options):
        raise click.UsageError("Give either a schedule, or --cron, --every or --at with --timezone.")
    if key is None:
        schedule = from_data(checked_schedule(schedule_options))
        fires = upcoming(schedule, present(), count)
    else:
        with open_app() as app:
            schedule = app.schedules[key].status().schedule
            fires = app.schedules[key].next(count)
    if as_json:
        print_json({"timezone": schedule.timezone, "fires": [fire.astimezone(schedule.zone) for fire in fires]})
        return
    now = present()
    for fire in fires:
        echo(f"{_local(fire, schedule)}  {fire:%Y-%m-%dT%H:%M:%SZ}  {ago(fire, now)}")
    if not fires:
        echo("It will not fire again.")


@command.command("set")
@click.argument("workflow")
@click.option("--name", default="default", show_default=True, help="The schedule's name, among those of the workflow.")
@times
@click.option(
    "--overlap", type=click.Choice(get_args(Overlap)), help="For a fire while a run is open.  [default: skip]"
)
@click.option("--catch-up", metavar="POLICY", help="Late fires to run: none, latest, all, all(10).  [default: latest]")
@click.option("--jitter", metavar="DURATION", help="Delay all fires by a fixed time up to this, to spread schedules.")
@click.option("--param", "params", multiple=True, metavar="KEY=VALUE", help="A parameter of the runs; may be repeated.")
@click.option("--paused", is_flag=True, default=None, help="Set the schedule paused.")
@click.option("--version", type=click.IntRange(1), help="The version of a flow.  [default: the newest at each fire]")
def set_(workflow: str, params: tuple[str, ...], version: int | None, **given: Any) -> None:
    """Set a schedule of a workflow or a flow. The same name again replaces it, but a pause stays.

    \b
    Example:
      orchestrator schedules set nightly --cron '0 3 * * *' --timezone Europe/Berlin --overlap queue
      orchestrator schedules set import --name half-hourly --every 30m --param 'day=${run.fire_time}'
      orchestrator schedules set order-flow --every 1h --version 3
    """
    data = {name: value for name, value in given.items() if value is not None} | {"params": _params(params)}
    with open_app() as app:
        stored = app._client.backend.schedules.set(workflow, data, version)
    echo(f"{stored.key}: next fire {_next(stored, present())}")


@command.command()
@app_option
@click.option("--prune", is_flag=True, help="Delete schedules that this application no longer declares.")
@click.option("--quiet", is_flag=True, help="Print changes only, and no error of the application.")
@json_option
def apply(app: str | None, prune: bool, quiet: bool, as_json: bool) -> None:
    """Store the schedules that the application declares with @app.schedule. Run it with every deploy.

    Unchanged schedules are left alone, and pauses stay. A schedule that this application applied earlier and no longer
    declares is named here, in `schedules list` and in `status`; it fires until it is deleted.

    \b
    Example:
      orchestrator schedules apply --app shop.tasks:app
      orchestrator schedules apply --app shop.tasks:app --prune
    """
    where = require_app(load_settings(app=app))
    try:
        application = load_app(where)
    except Exception:
        if quiet:  # `dev` runs this; its worker loads the same application and reports the error
            sys.exit(1)
        raise
    with closing(application):
        before = _declared_by(application, where) if quiet else {}
        names = application.schedules.apply()
        forgotten = application.schedules.forget(where, prune=prune)
        applied = [application.schedules[application.schedules._declared[name].key].status() for name in names]
        if as_json:
            gone = {"deleted" if prune else "forgotten": forgotten}
            print_json({"applied": [_document(stored) for stored in applied], **gone})
            return
        for name, stored in zip(names, applied, strict=True):
            if stored.key not in before or before[stored.key].schedule != stored.schedule:
                echo(f"{name}: next fire {_next(stored, present())}")
    for key in forgotten:
        if key in before and before[key].forgotten_at and not prune:
            continue  # already reported
        rest = "deleted." if prune else f"it still fires. Delete it: orchestrator schedules delete {key}, or --prune."
        echo(f"{key}: no longer in the code of {where}; {rest}")
    if not names and not quiet:
        echo("The application declares no schedule. Declare one: @app.schedule(...) above @app.task or @app.workflow.")


@command.command()
@click.argument("keys", metavar="WORKFLOW[/NAME]…", nargs=-1, required=True)
def pause(keys: tuple[str, ...]) -> None:
    """Pause schedules until they are resumed. Applying a definition again does not end the pause.

    \b
    Example:
      orchestrator schedules pause nightly
    """
    ask_each(keys, lambda app, key: app.schedules[key].pause(), "Paused {}. Runs in progress continue.")


@command.command()
@click.argument("keys", metavar="WORKFLOW[/NAME]…", nargs=-1, required=True)
def resume(keys: tuple[str, ...]) -> None:
    """Resume paused schedules; fires that were missed during the pause are not made up for.

    \b
    Example:
      orchestrator schedules resume nightly
    """
    with open_app() as app:
        for key in keys:
            app.schedules[key].resume()
            echo(f"Resumed {key}: next fire {_next(app.schedules[key].status(), present())}")


@command.command()
@key_argument
def trigger(key: str) -> None:
    """Start a run of a schedule now, and print its id. Open runs do not prevent it.

    \b
    Example:
      orchestrator runs watch $(orchestrator schedules trigger nightly)
    """
    with open_app() as app:
        echo(app.schedules[key].trigger().id)


@command.command()
@key_argument
@yes_option
def delete(key: str, yes: bool) -> None:
    """Delete a schedule; its runs stay. A schedule declared by a definition or by code returns when that is applied.

    \b
    Example:
      orchestrator schedules delete import/half-hourly --yes
    """
    with open_app() as app:
        stored = app.schedules[key].status()
        confirm(f"Delete schedule {stored.key}, {stored.schedule.description()}?", yes=yes)
        app.schedules[stored.key].delete()
    echo(f"Deleted schedule {stored.key}.")


for _backfill in backfilling.COMMANDS:
    command.add_command(_backfill)


def _declared_by(application: Orchestrator, origin: str) -> dict[str, StoredSchedule]:
    stored = (schedule for page in pages(application._client.backend.schedules) for schedule in page)
    return {schedule.key: schedule for schedule in stored if schedule.origin == origin}


# -- printing


def _params(arguments: Sequence[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in arguments]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise click.UsageError(f"--param {name!r}: expected KEY=VALUE.")
    return {name: parse_value(text) for name, _, text in pairs}


def _started(stored: StoredSchedule) -> str | None:
    """Return which flow, in which version, the schedule starts; None for a workflow."""
    if not stored.flow:
        return None
    version = "its newest published version" if stored.flow_version is None else f"version {stored.flow_version}"
    return f"flow {stored.workflow}, {version}"


def _origin(stored: StoredSchedule) -> str:
    if not stored.declared:
        return "a person"
    if stored.origin is None:
        return "the workflow's definition"
    return f"the code of {stored.origin}{', which no longer has it' if stored.forgotten_at else ''}"


def _note(stored: StoredSchedule) -> Text:
    if stored.error:
        return Text(stored.error.partition("\n")[0], style="red")
    return Text(f"no longer in the code of {stored.origin}" if stored.forgotten_at else "", style="yellow")


def _short(stored: StoredSchedule) -> str:
    return stored.workflow if stored.name == "default" else stored.key


def _local(moment: datetime, schedule: Schedule) -> str:
    return f"{moment.astimezone(schedule.zone):%a %Y-%m-%d %H:%M:%S %Z}"


def _soon(stored: StoredSchedule, now: datetime) -> str:
    if stored.paused:
        return "paused"
    return ago(stored.due_at or stored.next_fire, now) if stored.next_fire else "never again"


def _next(stored: StoredSchedule, now: datetime) -> str:
    soon = _soon(stored, now)
    return (
        soon if stored.paused or stored.next_fire is None else f"{_local(stored.next_fire, stored.schedule)} ({soon})"
    )


def _document(stored: StoredSchedule) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(stored, builtin_types=(datetime,))
    definition = document.pop("schedule") | {"overlap": stored.schedule.overlap, "catch_up": stored.schedule.catch_up}
    definition["params"] = hidden().redacted(stored.schedule.params)
    return {"key": stored.key} | document | {"timezone": stored.schedule.timezone, "definition": definition}
