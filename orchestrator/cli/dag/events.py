"""`orchestrator events`."""

from __future__ import annotations

import json
from typing import Any

import click

from orchestrator.cli.terminal.output import echo
from orchestrator.cli.terminal.reading import sending


@click.group("events")
def command() -> None:
    """Post events that workflows wait for.

    \b
    Example:
      orchestrator events post file.arrived '{"path": "in/a.csv"}'
    """


@command.command()
@click.argument("name")
@click.argument("payload", metavar="[JSON]", required=False)
def post(name: str, payload: str | None) -> None:
    """Post an event. Every workflow with `on: {event: NAME}` whose filter it passes is started.

    \b
    Example:
      orchestrator events post file.arrived '{"path": "in/a.csv", "size": 12}'
      orchestrator events post deployed
    """
    document = None if payload is None else _parse(payload)
    with sending() as app:
        app.post_event(name, document)
        listeners = app._client.backend.workflows.listeners(name)
    if listeners:
        echo(f"Posted {name}. It starts a run of each of these whose filter it passes: {', '.join(listeners)}")
    else:
        echo(f"Posted {name}. No workflow waits for it, so it starts nothing: orchestrator workflows list")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"""The payload is not JSON: {error}. Quote it: '{{"path": "in/a.csv"}}'.""") from None
