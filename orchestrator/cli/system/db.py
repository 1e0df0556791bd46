"""`orchestrator db`."""

from __future__ import annotations

import sys

import click

from orchestrator.cli.terminal.options import json_option, yes_option
from orchestrator.cli.terminal.output import confirm, echo, print_json
from orchestrator.errors import SchemaError
from orchestrator.settings import load_settings
from orchestrator.store import database, shards
from orchestrator.store.insights import server


@click.group("db")
def command() -> None:
    """Prepare and check the database.

    \b
    Example:
      orchestrator db upgrade
    """


@command.command()
def upgrade() -> None:
    """Create the tables, or migrate them to the revision that this release needs.

    It is safe to run at any time, also concurrently.

    \b
    Example:
      ORCHESTRATOR_DATABASE_URL=postgresql://… orchestrator db upgrade
    """
    settings = load_settings()
    for note in shards.upgrade(settings):
        echo(note)
    warning = server.misplaced_tables(settings.require_database(), settings.namespace)
    if warning:
        echo(f"Warning: {warning}", err=True)


@command.command()
@click.option("--to", "revision", metavar="REVISION", help="The revision to go back to. Default: the previous one.")
@yes_option
def downgrade(revision: str | None, yes: bool) -> None:
    """Undo the newest migration, if nothing uses it.

    A rollback does not need this: earlier releases that the schema supports can use it as it is. Run it with the
    release that upgraded the database, after all of that release's processes have stopped.

    \b
    Example:
      orchestrator db downgrade --yes
    """
    settings = load_settings()
    confirm(f"Bring the database from revision {database.REVISION} back to {revision or 'the one before'}?", yes=yes)
    current = database.downgrade(settings.require_database(), revision, namespace=settings.namespace)
    echo(f"The database is at revision {current}.")


@command.command()
@json_option
def check(as_json: bool) -> None:
    """Check whether this release can use the database; exit with 1 if not.

    \b
    Example:
      orchestrator db check || orchestrator db upgrade
    """
    settings = load_settings()
    engine = database.engine_for(
        settings.require_database(), name="orchestrator db check", namespace=settings.namespace
    )
    try:
        with engine.connect() as connection:
            current = database.current_revision(connection)
            try:
                warning = database.check_schema(connection)
                found_shards = shards.list_shards(connection) if shards.are_there(connection) else ()
                warning = warning or shards.mismatch(found_shards, settings.shards)
                if settings.shards > max(1, len(found_shards)):
                    raise SchemaError(warning)
            except SchemaError:
                if not as_json:
                    raise
                print_json({"revision": current, "needed": database.REVISION, "ok": False})
                sys.exit(1)
    finally:
        engine.dispose()
    if as_json:
        print_json({"revision": current, "needed": database.REVISION, "ok": True})
    else:
        echo(warning or f"The database is at revision {current}, as this release needs it.")
