"""`orchestrator quarantine`."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import click
import msgspec

from orchestrator.cli.terminal.options import json_option, yes_option
from orchestrator.cli.terminal.output import confirm, counted, data_text, echo, print_fields, print_json, print_table
from orchestrator.cli.terminal.reading import sending
from orchestrator.errors import NotFound
from orchestrator.monitoring.times import ago, present, when
from orchestrator.transport.quarantine import SetAside
from orchestrator.transport.signing import OFF

_EXCERPT = 200
"""Characters of a message that a list shows."""


class EntryId(click.ParamType):  # type: ignore[type-arg]  # see `IdOf`
    """The id of an entry of a stream."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        milliseconds, _, sequence = str(value).partition("-")
        parts = (milliseconds, sequence or "0")
        if not all(part.isascii() and part.isdecimal() and len(part) < 20 for part in parts):
            self.fail(f"{value!r} is not the id of a message: expected one such as 1731600000000-0.", param, ctx)
        return "-".join(parts)


@click.group("quarantine")
def command() -> None:
    """Look at messages that could not be understood or applied, and clear them away.

    Nothing waits for them. The tasks that they were about, if any, are found by the scheduler and run again. Messages
    from `lost commits` are different: they list tasks that Postgres has lost. The last thousand are kept.

    \b
    Example:
      orchestrator quarantine list
    """


@command.command("list")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many to show.")
@json_option
def list_(limit: int, as_json: bool) -> None:
    """List what was set aside, newest first.

    \b
    Example:
      orchestrator quarantine list
      orchestrator quarantine list --json | jq -r '.messages[].error'
    """
    with sending() as app:
        found = app._client.backend.quarantine.newest(limit)
    if as_json:
        print_json({"messages": [_document(message) for message in found]})
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
            for message in found
        ],
        empty="Nothing has been set aside.",
    )


@command.command()
@click.argument("message", type=EntryId(), metavar="ID")
@json_option
def show(message: str, as_json: bool) -> None:
    """Show one message: where it stood, why it was refused, and what is in it.

    \b
    Example:
      orchestrator quarantine show 1731600000000-0
      orchestrator quarantine show 1731600000000-0 --json | jq -r .body | base64 -d
    """
    with sending() as app:
        found = app._client.backend.quarantine.find(message)
    if found is None:
        raise NotFound(f"Nothing was set aside under {message}. It may have been cleared, or made room for later ones.")
    if as_json:
        print_json(_document(found))
        return
    print_fields(
        {
            "message": found.id,
            "set aside": when(found.at, present()),
            "stood in": found.source,
            "bytes": f"{found.size:,}"
            + (f", the first {len(found.body):,} kept" if found.size > len(found.body) else ""),
            "error": found.error,
            "content": _content(found.body),
        }
    )


@command.command()
@yes_option
def clear(yes: bool) -> None:
    """Drop everything that was set aside.

    \b
    Example:
      orchestrator quarantine clear --yes
    """
    confirm("Drop everything that was set aside?", yes=yes)
    with sending() as app:
        echo(f"Dropped {counted(app._client.backend.quarantine.clear(), 'message')}.")


def _document(message: SetAside) -> dict[str, Any]:
    """Return a message with its body in base 64, which any bytes can be written in."""
    return dataclasses.asdict(message) | {"body": base64.b64encode(message.body).decode()}


def _content(body: bytes) -> str:
    """Return a body as data if it is such, else as Python writes bytes."""
    try:
        return data_text(msgspec.msgpack.decode(OFF.body("", body)))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return repr(body)
