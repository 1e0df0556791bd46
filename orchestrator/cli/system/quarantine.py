"""`orchestrator quarantine`."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import click
import msgspec

from orchestrator.cli.terminal.options import json_option, yes_option
from orchestrator.cli.terminal.output import confirm, counted, data_text, echo, print_fields, print_json, print_table
from orchestrator.cli.terminal.reading import open_app
from orchestrator.errors import NotFound
from orchestrator.monitoring.times import ago, present, when
from orchestrator.transport.quarantine import SetAside
from orchestrator.transport.signing import OFF

_EXCERPT = 200
"""Characters of a message that a list shows, at most."""


class EntryId(click.ParamType):  # type: ignore[type-arg]  # see `IdOf`
    """A click parameter: the id of an entry of a Redis stream."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        milliseconds, _, sequence = str(value).partition("-")
        parts = (milliseconds, sequence or "0")
        if not all(part.isascii() and part.isdecimal() and len(part) < 20 for part in parts):
            self.fail(f"{value!r} is not the id of a message: expected one such as 1731600000000-0.", param, ctx)
        return "-".join(parts)


@click.group("quarantine")
def command() -> None:
    """Show and delete messages that could not be decoded or applied.

    Nothing waits for these messages. The scheduler finds the tasks that they were about and runs them again. Messages
    from `lost commits` are different: they list tasks that Postgres has lost. The last thousand messages are kept.

    \b
    Example:
      orchestrator quarantine list
    """


@command.command("list")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many to show.")
@json_option
def list_(limit: int, as_json: bool) -> None:
    """List quarantined messages, newest first.

    \b
    Example:
      orchestrator quarantine list
      orchestrator quarantine list --json | jq -r '.messages[].error'
    """
    with open_app() as app:
        messages = app._client.backend.quarantine.newest(limit)
    if as_json:
        print_json({"messages": [_document(message) for message in messages]})
        return
    now = present()
    print_table(
        ("id", "set aside", "error…", "content…", "stood in…?", "bytes>?"),
        [
            (
                message.id,
                ago(message.at, now),
                message.error.partition("\n")[0],
                _content(message.body)[:_EXCERPT],
                message.source,
                message.size,
            )
            for message in messages
        ],
        empty="The quarantine is empty.",
    )


@command.command()
@click.argument("message", type=EntryId(), metavar="ID")
@json_option
def show(message: str, as_json: bool) -> None:
    """Show one message: its stream, why it was refused, and its content.

    \b
    Example:
      orchestrator quarantine show 1731600000000-0
      orchestrator quarantine show 1731600000000-0 --json | jq -r .body | base64 -d
    """
    with open_app() as app:
        entry = app._client.backend.quarantine.find(message)
    if entry is None:
        raise NotFound(
            f"There is no message {message} in the quarantine. It may have been cleared, or evicted by later messages."
        )
    if as_json:
        print_json(_document(entry))
        return
    print_fields(
        {
            "message": entry.id,
            "set aside": when(entry.at, present()),
            "stood in": entry.source,
            "bytes": f"{entry.size:,}"
            + (f", the first {len(entry.body):,} kept" if entry.size > len(entry.body) else ""),
            "error": entry.error,
            "content": _content(entry.body),
        }
    )


@command.command()
@yes_option
def clear(yes: bool) -> None:
    """Delete all quarantined messages.

    \b
    Example:
      orchestrator quarantine clear --yes
    """
    confirm("Delete all messages in the quarantine?", yes=yes)
    with open_app() as app:
        echo(f"Dropped {counted(app._client.backend.quarantine.clear(), 'message')}.")


def _document(message: SetAside) -> dict[str, Any]:
    """Return a message as JSON data, with its body in base 64."""
    return dataclasses.asdict(message) | {"body": base64.b64encode(message.body).decode()}


def _content(body: bytes) -> str:
    """Return a decoded body as text, or as Python's `repr` of the bytes if it cannot be decoded."""
    try:
        return data_text(msgspec.msgpack.decode(OFF.body("", body)))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return repr(body)
