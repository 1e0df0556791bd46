"""`orchestrator runs` for workflows as code: tell them, ask them, look at their histories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import indent
from typing import Any
from uuid import UUID

import click
import msgspec

from orchestrator.cli.terminal.ids import run_argument, runs_argument
from orchestrator.cli.terminal.options import certain_option, json_option, yes_option
from orchestrator.cli.terminal.output import (
    confirm,
    confirm_if_asked,
    counted,
    data_text,
    echo,
    echo_json,
    hidden,
    parse_value,
    print_json,
    print_table,
    stored_value,
)
from orchestrator.cli.terminal.reading import ask_each, sending
from orchestrator.domain.code.history import Event
from orchestrator.domain.code.resets import preview
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import error_text
from orchestrator.errors import did_you_mean
from orchestrator.sdk.code.recording import ID_FIELDS
from orchestrator.sdk.values.payload import decode_value, encode_value
from orchestrator.sdk.waiting.steps import complete

_LONGEST = 120
_TRACEBACK = "\n\n"
"""Stands between an error and its traceback."""
_why_option = click.option("--why", default="", help="Why, for people: it stands in the audit log.")
_text_option = click.option("--text", is_flag=True, help="The value is a string, also where it reads as JSON.")


@click.command()
@run_argument
@click.argument("name")
@click.argument("value", required=False)
@_text_option
def signal(run: UUID, name: str, value: str | None, text: bool) -> None:
    """Send a signal to a workflow; it waits until the code takes it. The value is JSON if it reads as JSON, else a
    string; whether it fits is seen when the code takes it, which raises PayloadError there if not.

    \b
    Example:
      orchestrator runs signal 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 add '{"item": "pear"}'
    """
    with sending() as app:
        app.workflow_run(run).signal(name, value if text else _value(value))
        echo(f"Sent {name!r} to run {run}.")


@click.command()
@run_argument
@click.argument("promise")
@click.argument("value", required=False)
@_text_option
@_why_option
def resolve(run: UUID, promise: str, value: str | None, text: bool, why: str) -> None:
    """Resolve the oldest open promise of a name, or the first that there will be.

    The value is JSON if it reads as JSON, else a string. Whether it fits is seen when the code takes it, which raises
    PayloadError there if not.

    \b
    Example:
      orchestrator runs resolve 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 approval '{"by": "Ada"}' --why "a good customer"
    """
    with sending() as app:
        data = encode_value(value if text else _value(value), f"Promise {promise!r}", app.settings.max_payload)
        others = decode_value(complete(app._client.backend.code.resolve(run.bytes, promise, data, why)))
    echo(f"Resolved {promise!r} of run {run}." if others is None else _kept(run, promise, others))


@click.command()
@run_argument
@click.argument("promise")
@click.argument("reason")
@_why_option
def reject(run: UUID, promise: str, reason: str, why: str) -> None:
    """Reject the oldest open promise of a name, or the first that there will be; its code is told the reason.

    \b
    Example:
      orchestrator runs reject 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 approval "over budget"
    """
    with sending() as app:
        others = decode_value(complete(app._client.backend.code.reject(run.bytes, promise, reason, why)))
    echo(f"Rejected {promise!r} of run {run}." if others is None else _kept(run, promise, others))


def _kept(run: UUID, promise: str, others: Sequence[str]) -> str:
    """Say that nobody waits for what somebody has settled, and what is waited for."""
    instead = f"it waits for {', '.join(map(repr, others))}" if others else "it waits for none"
    return (
        f"Kept for later: run {run} waits for no promise {promise!r} now; {instead}.{did_you_mean(promise, others)} "
        f"The first promise of that name that its code makes will have it."
    )


@click.command()
@run_argument
@click.argument("name")
@click.argument("arguments", nargs=-1)
def query(run: UUID, name: str, arguments: tuple[str, ...]) -> None:
    """Ask a workflow's code something, and print the answer as JSON.

    \b
    Example:
      orchestrator runs query 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 items
    """
    with sending() as app:
        echo_json(data_text(app.workflow_run(run).query(name, *map(parse_value, arguments))))


@click.command()
@run_argument
@click.argument("name")
@click.argument("arguments", nargs=-1)
def update(run: UUID, name: str, arguments: tuple[str, ...]) -> None:
    """Ask a workflow's code to do something, and print the answer as JSON.

    \b
    Example:
      orchestrator runs update 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 set_limit 500
    """
    with sending() as app:
        echo_json(data_text(app.workflow_run(run).update(name, *map(parse_value, arguments))))


@click.command()
@runs_argument
@certain_option
def terminate(runs: tuple[UUID, ...], yes: bool) -> None:
    """End runs of workflows as code at once, without asking the code. To let it tidy up: runs cancel.

    \b
    Example:
      orchestrator runs terminate 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    confirm_if_asked(f"End {counted(len(runs), 'run')} at once, without letting the code tidy up?", yes=yes)
    ask_each(runs, lambda app, run: app.workflow_run(run).terminate(), "Asked to terminate run {}.")


@click.command()
@run_argument
@click.option("--to", type=int, required=True, metavar="EVENT", help="The last event to keep; see: runs history ID")
@click.option("--reason", default="", help="Why, for those who look at the history.")
@click.option("--dry-run", is_flag=True, help="Only show what would become of everything.")
@yes_option
@json_option
def reset(run: UUID, to: int, reason: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Start a run that repeats a run of a workflow as code up to an event, and print its id.

    What had ended by then is kept, and all else is done again. If the run is open, it ends, and goes on as the new one.

    \b
    Example:
      orchestrator runs history 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
      orchestrator runs reset 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 --to 12 --reason "the rate was wrong"
    """
    with sending() as app:
        handle = app.workflow_run(run)
        lines = preview(run.bytes, handle.history().events, to)
        if not as_json and (dry_run or not yes):
            print_table(("number>", "what…", "fate…"), lines, empty="Nothing has happened but its start.")
        confirm(f"Reset run {run} to event {to}?", yes=yes or dry_run, err=True)
        new = None if dry_run else handle.reset(to=to, reason=reason).id
    if as_json:
        print_json({"run": new, "reset_from": str(run), "to": to, "preview": [line._asdict() for line in lines]})
    elif new is not None:
        echo(new)


@click.command()
@run_argument
@click.option("--full", is_flag=True, help="Values and tracebacks as they are, a few lines for each event.")
@json_option
def history(run: UUID, full: bool, as_json: bool) -> None:
    """Show everything that happened in a run of a workflow as code. With --json, as a test can replay it.

    Long values are cut, unless they say why something failed; --full cuts nothing.

    \b
    Example:
      orchestrator runs history 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 --json > history.json
    """
    with sending() as app:
        recording = app.workflow_run(run).history()
    if as_json:
        echo_json(recording.to_json(hidden()))
        return
    begun = recording.events[0].at if recording.events else 0.0
    if full:
        for event in recording.events:
            echo(f"{event.number}  {event.at - begun:.3f}  {_kind(event)}")
            for field, text in _fields(event):
                echo(indent(f"{field} = {text}", "    "))
        return
    rows = [(event.number, f"{event.at - begun:.3f}", _kind(event), _about(event)) for event in recording.events]
    print_table(("number>", "seconds>", "event", "about…"), rows, empty="Nothing has happened yet.")


COMMANDS = (signal, resolve, reject, query, update, terminate, reset, history)


def _value(word: str | None) -> Any:
    return None if word is None else parse_value(word)


def _kind(event: Event) -> str:
    return str(event.what.__struct_config__.tag).replace("_", " ")


def _about(event: Event) -> str:
    """Return what an event is about, in a line; values are cut."""
    return " ".join(
        f"{field}={text.partition(_TRACEBACK)[0]}" if field == "error" else f"{field}={text}"[:_LONGEST]
        for field, text in _fields(event)
    )


def _fields(event: Event) -> Iterator[tuple[str, str]]:
    """Yield what an event says, in the words of people."""
    for field in event.what.__struct_fields__:
        found = getattr(event.what, field)
        if (
            found in (None, "", {}) or found is False or field in ("digest", "otherwise", "attribute")
        ):  # which mean nothing to people
            continue
        if field == "attributes":
            found = data_text(hidden().shown(msgspec.json.decode(found)))
        elif isinstance(found, bytes):
            found = to_text(found) if field in ID_FIELDS else _shown(found)
        elif hasattr(found, "kind"):
            found = error_text(found.kind, found.message) + (
                _TRACEBACK + found.traceback.rstrip() if found.traceback else ""
            )
        yield field, str(found)


def _shown(data: bytes) -> str:
    found = stored_value(data)
    return f"{len(data):,} bytes" if found is data else data_text(found)
