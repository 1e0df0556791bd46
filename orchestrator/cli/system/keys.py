"""`orchestrator keys`."""

from __future__ import annotations

import base64
import secrets
from datetime import datetime, timedelta

import click
import msgspec

from orchestrator.cli.system.rotation import rotate_data
from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import echo, print_json, print_table
from orchestrator.cli.terminal.reading import reading, writing
from orchestrator.domain.access import Key, Scope, Secret
from orchestrator.domain.durations import parse_duration
from orchestrator.domain.quotas import Quotas, parse_quotas
from orchestrator.errors import NotFound
from orchestrator.monitoring.times import ago, present
from orchestrator.sdk.checks import check_label, check_name
from orchestrator.sealing import check_key_id
from orchestrator.store import keys

_SHOWN = ("id", "name", "created_at", "expires_at", "revoked_at", "queues", "workflows", "tasks")
_LONGEST = 100 * 365 * 86_400


@click.group("keys")
def command() -> None:
    """Make, list and revoke keys of the HTTP API. As soon as there is one, the API asks everybody for one.

    Secrets that are no keys of the API are made here too: with `generate-…`, for settings.

    \b
    Example:
      orchestrator keys create grafana --scope read --expires 90d
    """


@command.command()
@click.argument("name")
@click.option(
    "--scope",
    type=click.Choice([str(scope) for scope in Scope]),
    default=str(Scope.ENQUEUE),
    show_default=True,
    help="What it may do: read; also enqueue; also operate (cancel, retry, pause, apply); also admin.",
)
@click.option("--expires", metavar="TIME", help="How long it is good for: 12h, 90d.  [default: for ever]")
@click.option("--queues", metavar="PREFIX", help="Only for queues whose names begin so, and for no workflow.")
@click.option("--workflows", metavar="PREFIX", help="Only for workflows whose names begin so, and for no queue.")
@click.option(
    "--tasks",
    metavar="PREFIX",
    multiple=True,
    help="Enqueue only tasks whose names begin so; repeat it for more. Built-in tasks need it, or operate.",
)
@click.option(
    "--quota",
    "quotas",
    metavar="NAME=VALUE",
    multiple=True,
    help=f"Allow less or more than usual: {', '.join(Quotas.__struct_fields__)}; repeat it for more.",
)
@json_option
def create(
    name: str,
    scope: str,
    expires: str | None,
    queues: str | None,
    workflows: str | None,
    tasks: tuple[str, ...],
    quotas: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a key, and print it: it is shown this once, and only a hash of it is kept.

    With both --queues and --workflows it is good for these queues and for these workflows.

    \b
    Example:
      orchestrator keys create webshop --scope enqueue
      orchestrator keys create mailers --scope operate --queues mail. --workflows mail-
      orchestrator keys create notifier --tasks mail. --tasks orchestrator.webhook
      orchestrator keys create guest --quota rate=10 --quota priority=0
    """
    for option, prefix in (("--queues", queues), ("--workflows", workflows), *(("--tasks", one) for one in tasks)):
        if prefix:
            check_name(option, prefix)
    chosen = parse_quotas(quotas)
    secret = Secret(secrets.token_hex(6), secrets.token_urlsafe(32))
    until = None if expires is None else present() + _period(expires)
    with writing() as (connection, record):
        label = check_label("name", name)
        bounds = {"queues": queues, "workflows": workflows, "tasks": ",".join(tasks) or None}
        key = keys.add(connection, secret, label, Scope(scope), until, **bounds, quotas=chosen)
        record("create", "key", key.id, name=label, scope=scope, **bounds, quotas=", ".join(quotas) or None)
    if as_json:
        print_json(_document(key, present()) | {"key": str(secret)})
        return
    echo(str(secret))
    echo(f"Key {key.id} may {key.scope}{_bounds(key)}. It is not shown again.", err=True)


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List keys, and whether they are good.

    \b
    Example:
      orchestrator keys list
    """
    with reading() as connection:
        found = keys.list_all(connection)
    now = present()
    if as_json:
        print_json({"keys": [_document(key, now) for key in found]})
        return
    print_table(
        ("id", "name…", "scope", "state", "created", "for…"),
        [
            (key.id, key.name, str(key.scope), _state(key, now), ago(key.created_at, now), _bounds(key).strip())
            for key in found
        ],
        empty="There is no key, so the API serves this machine only. Make one: orchestrator keys create NAME",
    )


@command.command("generate-signing")
def generate_signing() -> None:
    """Print a new secret for signing messages in Redis, for the setting signing_keys. It is kept nowhere.

    \b
    Example:
      orchestrator keys generate-signing
    """
    echo(base64.b64encode(secrets.token_bytes(32)).decode())


@command.command("generate-data")
@click.argument("id", default="")
def generate_data(id: str) -> None:
    """Print a new key that seals data at rest, for the setting data_keys. It is kept nowhere: lose it, and what it
    has sealed is lost.

    \b
    Example:
      orchestrator keys generate-data 2026-11
    """
    echo(f"{check_key_id(id or secrets.token_hex(4))}:{base64.b64encode(secrets.token_bytes(32)).decode()}")


@command.command()
@click.argument("id")
def revoke(id: str) -> None:
    """Let a key open nothing any more; servers know it within a second.

    \b
    Example:
      orchestrator keys revoke 3f9a5c1b2d4e
    """
    with writing() as (connection, record):
        if not keys.revoke(connection, id):
            raise NotFound(f"There is no key {id!r}. See: orchestrator keys list")
        record("revoke", "key", id)
    echo(f"Key {id} opens nothing any more.")


command.add_command(rotate_data)


def _period(text: str) -> timedelta:
    seconds = parse_duration(text)
    if not seconds or seconds > _LONGEST:
        raise click.UsageError(f"--expires: expected how long, such as 12h or 90d, up to 100 years; found {text!r}.")
    return timedelta(seconds=seconds)


def _bounds(key: Key) -> str:
    """Say what a key is bound to, if it is."""
    prefixes = (("queues", key.queues), ("workflows", key.workflows), ("tasks", key.tasks))
    parts = [f"{kind} {prefix.replace(',', '*, ')}*" for kind, prefix in prefixes if prefix is not None]
    return f" {' and '.join(parts)}" if parts else ""


def _state(key: Key, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "good"


def _document(key: Key, now: datetime) -> dict[str, object]:
    shown = {name: getattr(key, name) for name in _SHOWN}
    quotas = msgspec.structs.asdict(key.quotas)
    return shown | {"scope": str(key.scope), "state": _state(key, now), "quotas": quotas}
