"""`orchestrator keys`."""

from __future__ import annotations

import base64
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta

import click
import msgspec

from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import counted, echo, print_json, print_table
from orchestrator.cli.terminal.reading import reading, writing
from orchestrator.domain.access import Key, Scope, Secret
from orchestrator.domain.durations import parse_duration
from orchestrator.domain.quotas import Quotas, parse_quotas
from orchestrator.errors import ConfigurationError, NotFound, OrchestratorError
from orchestrator.monitoring.times import ago, present
from orchestrator.sdk.checks import check_label, check_name
from orchestrator.sealing import Vault, check_key_id, key_name, vault_of
from orchestrator.settings import Settings, load_settings
from orchestrator.store import insights, keys, rotation

_MAX_PASSES = 5
_WORKING_STATES = ("live", "draining", "still")
_MAX_NAMED = 5
"""Workers that a warning lists, at most."""


@click.command("rotate-data")
def rotate_data() -> None:
    """Encrypt all stored data with the first of the data keys: data under older keys, and plaintext.

    The system keeps running. The command can be interrupted at any time and continues when it is run again. Afterwards
    only messages in flight may need the older keys: remove them from data_keys an hour later.

    \b
    Example:
      orchestrator keys rotate-data
    """
    settings = load_settings()
    vault = vault_of(settings)
    if vault is None:
        raise ConfigurationError(
            "Setting data_keys: there is no key to seal with. Make one with: orchestrator keys generate-data"
        )
    _warn_of_workers(vault)
    changed = 0
    for _ in range(_MAX_PASSES):
        skipped, problem = 0, ""
        for shard in range(settings.shards):
            done, skipped_here, problem_here = _pass(vault, replace(settings.of_shard(shard), shards=1))
            changed, skipped, problem = changed + done, skipped + skipped_here, problem_here or problem
        if not skipped:
            break
    echo(f"Sealed {counted(changed, 'value')} with key {vault.key}.")
    if skipped:
        raise OrchestratorError(
            f"{counted(skipped, 'value')} could not be sealed: they were changed or locked meanwhile, or no key "
            f"opens them. Run this command again.{f' The last: {problem}' if problem else ''}"
        )


def _warn_of_workers(vault: Vault) -> None:
    """Warn about live workers without the new key: they cannot run tasks that are encrypted with it."""
    with reading() as connection:
        workers = insights.list_workers(connection)
    name = key_name(vault.key)
    lacking = [worker for worker in workers if worker.state in _WORKING_STATES and name not in worker.names]
    if not lacking:
        return
    listed = ", ".join(f"{worker.host} pid {worker.pid}" for worker in lacking[:_MAX_NAMED])
    more = f" and {len(lacking) - _MAX_NAMED:,} more" if len(lacking) > _MAX_NAMED else ""
    echo(
        f"Warning: {counted(len(lacking), 'live worker')} without the key {vault.key}: {listed}{more}. Tasks "
        "that are sealed with it wait until a worker of their queue has it. Add the key to data_keys of every "
        "worker, in any position, restart them, and run this command again when all have it.",
        err=True,
        colour="yellow",
    )


def _pass(vault: Vault, settings: Settings) -> tuple[int, int, str]:
    changed = skipped = 0
    problem = ""
    with reading(settings) as connection, _progress(rotation.estimate(connection)) as advance:
        for step in rotation.rotate(connection, vault):
            changed, skipped, problem = changed + step.changed, skipped + step.skipped, step.problem or problem
            advance(step.table, step.seen)
    return changed, skipped, problem


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that advances a progress bar on a terminal; elsewhere it does nothing."""
    if not sys.stderr.isatty():
        yield lambda _table, _rows: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("looking", total=max(1, total))
        yield lambda table, rows: bar.update(task, description=table, advance=rows)


_FIELDS = ("id", "name", "created_at", "expires_at", "revoked_at", "queues", "workflows", "tasks")
_MAX_PERIOD = 100 * 365 * 86_400


@click.group("keys")
def command() -> None:
    """Create, list and revoke keys of the HTTP API. Once a key exists, every request to the API needs one.

    The `generate-…` commands print secrets for settings; these are not API keys.

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
    help="The permissions of the key: read; also enqueue; also operate (cancel, retry, pause, apply); also admin.",
)
@click.option("--expires", metavar="TIME", help="How long the key is valid: 12h, 90d.  [default: forever]")
@click.option("--queues", metavar="PREFIX", help="Only for queues with this prefix, and for no workflows.")
@click.option("--workflows", metavar="PREFIX", help="Only for workflows with this prefix, and for no queues.")
@click.option(
    "--tasks",
    metavar="PREFIX",
    multiple=True,
    help="Enqueue only tasks with this prefix; may be repeated. Required for built-in tasks, except with operate.",
)
@click.option(
    "--quota",
    "quotas",
    metavar="NAME=VALUE",
    multiple=True,
    help=f"Change a default quota: {', '.join(Quotas.__struct_fields__)}; may be repeated.",
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
    """Create a key and print it. It is shown only once; only its hash is stored.

    With both --queues and --workflows, the key is valid for these queues and these workflows.

    \b
    Example:
      orchestrator keys create webshop --scope enqueue
      orchestrator keys create mailers --scope operate --queues mail. --workflows mail-
      orchestrator keys create notifier --tasks mail. --tasks orchestrator.webhook
      orchestrator keys create guest --quota rate=10 --quota priority=0
    """
    for option, prefix in (("--queues", queues), ("--workflows", workflows), *(("--tasks", p) for p in tasks)):
        if prefix:
            check_name(option, prefix)
    parsed_quotas = parse_quotas(quotas)
    secret = Secret(secrets.token_hex(6), secrets.token_urlsafe(32))
    expires_at = None if expires is None else present() + _period(expires)
    with writing() as (connection, record):
        label = check_label("name", name)
        bounds = {"queues": queues, "workflows": workflows, "tasks": ",".join(tasks) or None}
        key = keys.add(connection, secret, label, Scope(scope), expires_at, **bounds, quotas=parsed_quotas)
        record("create", "key", key.id, name=label, scope=scope, **bounds, quotas=", ".join(quotas) or None)
    if as_json:
        print_json(_document(key, present()) | {"key": str(secret)})
        return
    echo(str(secret))
    echo(f"Key {key.id} may {key.scope}{_bounds_text(key)}. It is not shown again.", err=True)


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List keys and their states.

    \b
    Example:
      orchestrator keys list
    """
    with reading() as connection:
        all_keys = keys.list_all(connection)
    now = present()
    if as_json:
        print_json({"keys": [_document(key, now) for key in all_keys]})
        return
    print_table(
        ("id", "name…", "scope", "state", "created", "for…"),
        [
            (key.id, key.name, str(key.scope), _state(key, now), ago(key.created_at, now), _bounds_text(key).strip())
            for key in all_keys
        ],
        empty="There is no key, so the API serves this machine only. Make one: orchestrator keys create NAME",
    )


@command.command("generate-signing")
def generate_signing() -> None:
    """Print a new secret for signing messages in Redis, for the setting signing_keys. It is not stored.

    \b
    Example:
      orchestrator keys generate-signing
    """
    echo(base64.b64encode(secrets.token_bytes(32)).decode())


@command.command("generate-data")
@click.argument("id", default="")
def generate_data(id: str) -> None:
    """Print a new key for encrypting data at rest, for the setting data_keys. It is not stored: if you lose it, the
    data that it encrypted is lost.

    \b
    Example:
      orchestrator keys generate-data 2026-11
    """
    echo(f"{check_key_id(id or secrets.token_hex(4))}:{base64.b64encode(secrets.token_bytes(32)).decode()}")


@command.command()
@click.argument("id")
def revoke(id: str) -> None:
    """Revoke a key; servers refuse it within a second.

    \b
    Example:
      orchestrator keys revoke 3f9a5c1b2d4e
    """
    with writing() as (connection, record):
        if not keys.revoke(connection, id):
            raise NotFound(f"There is no key {id!r}. See: orchestrator keys list")
        record("revoke", "key", id)
    echo(f"Key {id} is no longer valid.")


command.add_command(rotate_data)


def _period(text: str) -> timedelta:
    seconds = parse_duration(text)
    if not seconds or seconds > _MAX_PERIOD:
        raise click.UsageError(f"--expires: expected how long, such as 12h or 90d, up to 100 years; found {text!r}.")
    return timedelta(seconds=seconds)


def _bounds_text(key: Key) -> str:
    """Return the prefixes that limit a key, as text."""
    prefixes = (("queues", key.queues), ("workflows", key.workflows), ("tasks", key.tasks))
    parts = [f"{kind} {prefix.replace(',', '*, ')}*" for kind, prefix in prefixes if prefix is not None]
    return f" {' and '.join(parts)}" if parts else ""


def _state(key: Key, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "good"


def _document(key: Key, now: datetime) -> dict[str, object]:
    document = {name: getattr(key, name) for name in _FIELDS}
    quotas = msgspec.structs.asdict(key.quotas)
    return document | {"scope": str(key.scope), "state": _state(key, now), "quotas": quotas}
