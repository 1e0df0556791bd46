"""Shards: several leaders in one database, each with a schema of its own, so that no statement knows of them.

    NAMESPACE        shard 0, and the tables that all shards use (`SHARED` in `namespaces.py`)
    NAMESPACE/1      the tasks, runs, requests and lease of shard 1, and so on
    NAMESPACE/all    views of all shards together, for those that read

`upgrade` makes as many as the settings say. Beyond these, it moves what a shard remembers to shard 0 and drops the
shard, once nothing is open in it and it has no leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, text

from orchestrator.settings import Settings
from orchestrator.store import database
from orchestrator.store.namespaces import ALL, SHARED
from orchestrator.store.sql import Statement
from orchestrator.store.tables import metadata

_OWN = [table for table in metadata.sorted_tables if table.name not in SHARED]
"""The tables that each shard has."""
_OF_LEADERS = frozenset(("leases", "cursors", "workers", "drains"))
"""Those of them that are about nothing but the shard."""
_IDS = ("tasks", "ended_tasks", "runs")
_NUMBERS = Statement[str]("""
SELECT /* shards.numbers */ nspname::text FROM pg_namespace WHERE starts_with(nspname, %(prefix)s)
""")


def upgrade(settings: Settings) -> list[str]:
    """Bring a namespace and its shards to the newest revision, and make as many shards as the settings say.

    Return what there is to say of it.
    """
    url, root = settings.require_database(), settings.root
    engine = database.engine_for(url, name="orchestrator db", namespace=root)
    try:
        with engine.begin() as connection:
            numbers = _numbers(connection, root)
            if numbers and (database.current_revision(connection) or "") < database.REVISION:
                connection.execute(text(f'DROP SCHEMA IF EXISTS "{root}{ALL}" CASCADE'))  # it keeps columns from change
        if newer := database.upgrade(url, namespace=root):
            return [f"{newer} Nothing to do."]
        notes = [f"The database is at revision {database.REVISION}."]
        numbers |= {*range(1, settings.shards)}
        for number in sorted(numbers):
            database.upgrade(url, namespace=f"{root}/{number}")
        if not numbers:
            return notes
        with engine.begin() as connection:
            database.lock_upgrades(connection)
            for number in sorted(number for number in numbers if number >= settings.shards):
                notes.append(_dissolve(connection, root, number))
            _make_views(connection, root, _numbers(connection, root))
        return notes
    finally:
        engine.dispose()


def _numbers(connection: Connection, root: str) -> set[int]:
    """Return the shards beside the first that the database has."""
    names = (name.rpartition("/")[2] for name in _NUMBERS(connection, prefix=f"{root}/"))
    return {int(name) for name in names if name.isdecimal()}


def _schema(root: str, number: int) -> str:
    return f'"{root}/{number}"' if number else f'"{root}"'


def _make_views(connection: Connection, root: str, numbers: Iterable[int]) -> None:
    """Make the views of all shards anew; none where there is one shard."""
    connection.execute(text(f'DROP SCHEMA IF EXISTS "{root}{ALL}" CASCADE'))
    schemas = {number: _schema(root, number) for number in (0, *sorted(numbers))}
    if len(schemas) == 1:
        return
    views = {table.name: [column.name for column in table.columns] for table in _OWN}
    selects = {
        name: [f"SELECT {', '.join(columns)} FROM {schema}.{name}" for schema in schemas.values()]
        for name, columns in views.items()
    }
    for name in ("leases", "cursors"):
        others = ", ".join(views[name][1:])
        selects[name] = [f"SELECT {number} AS shard, {others} FROM {schemas[number]}.{name}" for number in schemas]
    selects["places"] = [
        f"SELECT id, {number} AS shard FROM {schema}.{name}" for number, schema in schemas.items() for name in _IDS
    ]
    selects["shards"] = [
        f"SELECT {number} AS shard, {_IS_OPEN.format(schema)} AS is_open, (SELECT address FROM {schema}.leases "
        f"WHERE expires_at > clock_timestamp()) AS leader"
        for number, schema in schemas.items()
    ]
    connection.execute(text(f'CREATE SCHEMA "{root}{ALL}"'))
    for name, parts in selects.items():
        connection.execute(text(f'CREATE VIEW "{root}{ALL}".{name} AS {" UNION ALL ".join(parts)}'))


_IS_OPEN = (
    "(EXISTS (SELECT FROM {0}.tasks) OR EXISTS (SELECT FROM {0}.inbox) "
    "OR EXISTS (SELECT FROM {0}.runs WHERE ended_at IS NULL))"
)


def _dissolve(connection: Connection, root: str, number: int) -> str:
    """Move what a shard remembers to the first one, and drop it, if nothing is open there; say what was done."""
    schema = _schema(root, number)
    lease = connection.execute(
        text(f"SELECT address FROM {schema}.leases WHERE expires_at > clock_timestamp()")
    ).scalar()
    if lease is not None:
        return f"Shard {number} stays: scheduler {lease} leads it. Restart schedulers with fewer shards."
    connection.execute(text(f"LOCK TABLE {schema}.tasks, {schema}.runs, {schema}.inbox IN ACCESS EXCLUSIVE MODE"))
    if connection.execute(text(f"SELECT {_IS_OPEN.format(schema)}")).scalar():
        return f"Shard {number} stays: it has open work. Run a scheduler and workers with more shards until it is done."
    for table in _OWN:
        if table.name not in _OF_LEADERS:
            columns = ", ".join(column.name for column in table.columns if column.identity is None)
            connection.execute(
                text(
                    f"INSERT INTO {_schema(root, 0)}.{table.name} ({columns}) "
                    f"SELECT {columns} FROM {schema}.{table.name} ON CONFLICT DO NOTHING"
                )
            )
    connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    return f"Shard {number} was empty, and is gone; shard 0 has what it remembered."


# -- where things are: on connections that read all shards

_LOCATE = Statement[tuple[bytes, int]]("""
SELECT /* shards.locate */ uuid_send(id), shard FROM orchestrator.places WHERE id = ANY(%(ids)s::uuid[])
""")


def locate(connection: Connection, ids: Sequence[bytes]) -> dict[bytes, int]:
    """Return the shards of those of these tasks and runs that exist."""
    return {bytes(id): shard for id, shard in _LOCATE(connection, ids=ids)}


class ShardView(NamedTuple):
    """One shard."""

    shard: int
    is_open: bool
    """It has open tasks, runs or requests."""
    leader: str | None
    """The scheduler that leads it, if one does."""


_LIST = Statement[ShardView]("SELECT /* shards.list */ shard, is_open, leader FROM orchestrator.shards ORDER BY shard")


def list_shards(connection: Connection) -> list[ShardView]:
    """Return all shards of the database."""
    return _LIST(connection)
