"""`orchestrator runs` for workflows as code: signals, promises, queries, updates, resets and histories."""

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
from orchestrator.cli.terminal.reading import ask_each, open_app
from orchestrator.domain.code.history import Event
from orchestrator.domain.code.resets import preview
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import error_text
from orchestrator.errors import did_you_mean
from orchestrator.sdk.code.recording import ID_FIELDS
from orchestrator.sdk.values.payload import decode_value, encode_value
from orchestrator.sdk.waiting.steps import complete

_MAX_VALUE_LENGTH = 120
_TRACEBACK = "\n\n"
"""Separates an error from its traceback."""
_why_option = click.option("--why", default="", help="The reason, for the audit log.")
_text_option = click.option("--text", is_flag=True, help="The value is a string, even if it parses as JSON.")


@click.command()
@run_argument
@click.argument("name")
@click.argument("value", required=False)
@_text_option
def signal(run: UUID, name: str, value: str | None, text: bool) -> None:
    """Send a signal to a workflow; it is kept until the code receives it. The value is JSON if it parses as JSON, else
    a string. If it has the wrong type, the code gets PayloadError when it receives it.

    \b
    Example:
      orchestrator runs signal 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 add '{"item": "pear"}'
    """
    with open_app() as app:
        app.workflow_run(run).signal(name, value if text else _value(value))
        echo(f"Sent {name!r} to run {run}.")


@click.command()
@run_argument
@click.argument("promise")
@click.argument("value", required=False)
@_text_option
@_why_option
def resolve(run: UUID, promise: str, value: str | None, text: bool, why: str) -> None:
    """Resolve the oldest open promise with a name, or the first one that the code will make.

    The value is JSON if it parses as JSON, else a string. If it has the wrong type, the code gets PayloadError when it
    receives it.

    \b
    Example:
      orchestrator runs resolve 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 approval '{"by": "Ada"}' --why "a good customer"
    """
    with open_app() as app:
        data = encode_value(value if text else _value(value), f"Promise {promise!r}", app.settings.max_payload)
        promises = decode_value(complete(app._client.backend.code.resolve(run.bytes, promise, data, why)))
    echo(f"Resolved {promise!r} of run {run}." if promises is None else _kept_message(run, promise, promises))


@click.command()
@run_argument
@click.argument("promise")
@click.argument("reason")
@_why_option
def reject(run: UUID, promise: str, reason: str, why: str) -> None:
    """Reject the oldest open promise with a name, or the first one that the code will make, with a reason for the code.

    \b
    Example:
      orchestrator runs reject 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 approval "over budget"
    """
    with open_app() as app:
        promises = decode_value(complete(app._client.backend.code.reject(run.bytes, promise, reason, why)))
    echo(f"Rejected {promise!r} of run {run}." if promises is None else _kept_message(run, promise, promises))


def _kept_message(run: UUID, promise: str, promises: Sequence[str]) -> str:
    """Return the message for a resolution of a promise that the run does not have yet, with its open promises."""
    instead = f"it waits for {', '.join(map(repr, promises))}" if promises else "it waits for none"
    return (
        f"Stored for later: run {run} is not waiting for a promise {promise!r} now; "
        f"{instead}.{did_you_mean(promise, promises)} The first promise of that name that its code creates will "
        "receive it."
    )


@click.command()
@run_argument
@click.argument("name")
@click.argument("arguments", nargs=-1)
def query(run: UUID, name: str, arguments: tuple[str, ...]) -> None:
    """Send a query to a workflow's code, and print the answer as JSON.

    \b
    Example:
      orchestrator runs query 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 items
    """
    with open_app() as app:
        echo_json(data_text(app.workflow_run(run).query(name, *map(parse_value, arguments))))


@click.command()
@run_argument
@click.argument("name")
@click.argument("arguments", nargs=-1)
def update(run: UUID, name: str, arguments: tuple[str, ...]) -> None:
    """Send an update to a workflow's code, and print the answer as JSON.

    \b
    Example:
      orchestrator runs update 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 set_limit 500
    """
    with open_app() as app:
        echo_json(data_text(app.workflow_run(run).update(name, *map(parse_value, arguments))))


@click.command()
@runs_argument
@certain_option
def terminate(runs: tuple[UUID, ...], yes: bool) -> None:
    """End runs of workflows as code at once, without cleanup by the code. With cleanup: runs cancel.

    \b
    Example:
      orchestrator runs terminate 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    confirm_if_asked(f"End {counted(len(runs), 'run')} at once, without letting the code tidy up?", yes=yes)
    ask_each(runs, lambda app, run: app.workflow_run(run).terminate(), "Asked to terminate run {}.")


@click.command()
@run_argument
@click.option("--to", type=int, required=True, metavar="EVENT", help="The last event to keep; see: runs history ID")
@click.option("--reason", default="", help="The reason, which the history shows.")
@click.option("--dry-run", is_flag=True, help="Only show the fate of each event.")
@yes_option
@json_option
def reset(run: UUID, to: int, reason: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Start a new run that repeats a run of a workflow as code up to an event, and print its id.

    Results up to that event are kept; everything later is done again. An open run ends and continues as the new one.

    \b
    Example:
      orchestrator runs history 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
      orchestrator runs reset 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 --to 12 --reason "the rate was wrong"
    """
    with open_app() as app:
        handle = app.workflow_run(run)
        lines = preview(run.bytes, handle.history().events, to)
        if not as_json and (dry_run or not yes):
            print_table(("number>", "what…", "fate…"), lines, empty="Nothing has happened since its start.")
        confirm(f"Reset run {run} to event {to}?", yes=yes or dry_run, err=True)
        new = None if dry_run else handle.reset(to=to, reason=reason).id
    if as_json:
        print_json({"run": new, "reset_from": str(run), "to": to, "preview": [line._asdict() for line in lines]})
    elif new is not None:
        echo(new)


@click.command()
@run_argument
@click.option("--full", is_flag=True, help="Complete values and tracebacks, on several lines per event.")
@json_option
def history(run: UUID, full: bool, as_json: bool) -> None:
    """Show every event of a run of a workflow as code. With --json, a test can replay the output.

    Long values are shortened, except errors; --full shows everything.

    \b
    Example:
      orchestrator runs history 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 --json > history.json
    """
    with open_app() as app:
        recording = app.workflow_run(run).history()
    if as_json:
        echo_json(recording.to_json(hidden()))
        return
    started_at = recording.events[0].at if recording.events else 0.0
    if full:
        for event in recording.events:
            echo(f"{event.number}  {event.at - started_at:.3f}  {_kind(event)}")
            for field, text in _fields(event):
                echo(indent(f"{field} = {text}", "    "))
        return
    rows = [(event.number, f"{event.at - started_at:.3f}", _kind(event), _about(event)) for event in recording.events]
    print_table(("number>", "seconds>", "event", "about…"), rows, empty="Nothing has happened yet.")


COMMANDS = (signal, resolve, reject, query, update, terminate, reset, history)


def _value(word: str | None) -> Any:
    return None if word is None else parse_value(word)


def _kind(event: Event) -> str:
    return str(event.what.__struct_config__.tag).replace("_", " ")


def _about(event: Event) -> str:
    """Return an event's fields in one line; long values are cut."""
    return " ".join(
        f"{field}={text.partition(_TRACEBACK)[0]}" if field == "error" else f"{field}={text}"[:_MAX_VALUE_LENGTH]
        for field, text in _fields(event)
    )


def _fields(event: Event) -> Iterator[tuple[str, str]]:
    """Yield an event's fields as readable text."""
    for field in event.what.__struct_fields__:
        value = getattr(event.what, field)
        if (
            value in (None, "", {}) or value is False or field in ("digest", "otherwise", "attribute")
        ):  # internal fields
            continue
        if field == "attributes":
            value = data_text(hidden().redacted(msgspec.json.decode(value)))
        elif isinstance(value, bytes):
            value = to_text(value) if field in ID_FIELDS else _value_text(value)
        elif hasattr(value, "kind"):
            value = error_text(value.kind, value.message) + (
                _TRACEBACK + value.traceback.rstrip() if value.traceback else ""
            )
        yield field, str(value)


def _value_text(data: bytes) -> str:
    value = stored_value(data)
    return f"{len(data):,} bytes" if value is data else data_text(value)
