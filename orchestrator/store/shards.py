"""Shards: several leaders in one database, each with a schema of its own, so that statements need not know of shards.

    NAMESPACE        shard 0, and the tables that all shards use (`SHARED` in `namespaces.py`)
    NAMESPACE/1      the tasks, runs, requests and lease of shard 1, and so on
    NAMESPACE/all    views of all shards together, for readers

`upgrade` makes the number of shards in the settings. Surplus shards are *closing*: clients place nothing there. Once a
closing shard has no open work and no leader, the next `upgrade` moves its history to shard 0 and drops the shard. Each
transaction moves some tasks, or some runs with their rows. So every task and run is complete in exactly one shard at
any time, and after an interruption the next `upgrade` continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from uuid import UUID
from zlib import crc32

from sqlalchemy import Connection, Engine, Table, text

from orchestrator.prerequisites import Prerequisite
from orchestrator.settings import Settings
from orchestrator.store import compatibility, database
from orchestrator.store.inbox import RequestKind
from orchestrator.store.namespaces import ALL, SHARED, namespace_of, root_of
from orchestrator.store.sql import Statement

_NOT_MOVED = frozenset(("leases", "cursors", "workers", "drains"))
"""Tables about the shard itself, which are not moved."""
_BATCH = 1_000
"""Runs, or rows, that one transaction moves."""
_NUMBERS = Statement[str]("""
SELECT /* shards.numbers */ nspname::text FROM pg_namespace WHERE starts_with(nspname, %(prefix)s)
""")


def _shard_tables() -> dict[str, Table]:
    """Return the tables that each shard has, by name."""
    from orchestrator.store.tables.all_tables import metadata  # a slow import that only `upgrade` needs

    return {table.name: table for table in metadata.sorted_tables if table.name not in SHARED}


def ours(schema: str) -> str:
    """Return an SQL condition: `schema` is the namespace `%(root)s` or one of its shards."""
    return f"({schema} = %(root)s::text OR starts_with({schema}, %(root)s::text || '/'))"


def upgrade(settings: Settings) -> list[str]:
    """Upgrade a namespace and its shards to the newest revision, and make the number of shards in the settings.

    Return messages for the user.
    """
    url, root = settings.require_database(), settings.root
    engine = database.engine_for(url, name="orchestrator db", namespace=root)
    try:
        with engine.begin() as connection:
            numbers = _numbers(connection, root)
            known = {one.shard for one in list_shards(connection) if one.is_closing} if are_there(connection) else set()
            if numbers and (database.current_revision(connection) or "") < database.REVISION:
                _drop_views(connection, root)  # views prevent changes of columns
        if newer := database.upgrade(url, namespace=root):
            return [f"{newer} Nothing to do."]
        notes = [f"The database is at revision {database.REVISION}."]
        numbers |= {*range(1, settings.shards)}
        for number in sorted(numbers):
            database.upgrade(url, namespace=f"{root}/{number}")
        closing = sorted(number for number in numbers if number >= settings.shards)
        staying: dict[int, str] = {}
        for number in closing:
            with engine.begin() as connection:
                if reason := _stays_because(connection, _schema(root, number), number, is_known=number in known):
                    staying[number] = reason
            while number not in staying and _move_some(engine, root, number):
                pass
        with engine.begin() as connection:
            if not numbers and not are_there(connection):
                return notes
            database.lock_upgrades(connection)
            _drop_views(connection, root)  # before the tables, because clients lock views first
            notes += [staying.get(number) or _dissolve(connection, root, number) for number in closing]
            if numbers:  # clients may use the views while a second shard exists
                _make_views(connection, root, _numbers(connection, root), settings.shards)
        return notes
    finally:
        engine.dispose()


def _numbers(connection: Connection, root: str) -> set[int]:
    """Return the numbers of the shards in the database, without shard 0."""
    names = (name.rpartition("/")[2] for name in _NUMBERS(connection, prefix=f"{root}/"))
    return {int(name) for name in names if name.isdecimal()}


def count(connection: Connection, root: str) -> int:
    """Return the number of shards in the database, closing ones included."""
    return max(_numbers(connection, root), default=0) + 1


def _schema(root: str, number: int) -> str:
    return f'"{root}/{number}"' if number else f'"{root}"'


def _drop_views(connection: Connection, root: str) -> None:
    connection.execute(text(f'DROP SCHEMA IF EXISTS "{root}{ALL}" CASCADE'))
    for name in _SHARED_VIEWS:
        connection.execute(text(f'DROP VIEW IF EXISTS "{root}".{name}'))


_LANE_USE = """
CREATE TABLE IF NOT EXISTS "{0}".lane_use (name text, shard int, held int NOT NULL, PRIMARY KEY (name, shard))
"""


def _make_views(connection: Connection, root: str, numbers: Iterable[int], wanted: int) -> None:
    """Make the views over all shards. Shards with the number `wanted` or above are closing."""
    schemas = {number: _schema(root, number) for number in (0, *sorted(numbers))}
    connection.execute(text(_LANE_USE.format(root)))
    views = {table.name: [column.name for column in table.columns] for table in _shard_tables().values()}
    selects = {
        name: [f"SELECT {', '.join(columns)} FROM {schema}.{name}" for schema in schemas.values()]
        for name, columns in views.items()
    }
    for name in ("leases", "cursors"):
        column_list = ", ".join(views[name][1:])
        selects[name] = [f"SELECT {number} AS shard, {column_list} FROM {schemas[number]}.{name}" for number in schemas]
    connection.execute(text(f'CREATE SCHEMA "{root}{ALL}"'))
    for name, parts in selects.items():
        connection.execute(text(f'CREATE VIEW "{root}{ALL}".{name} AS {" UNION ALL ".join(parts)}'))
    for name, part in _SHARED_VIEWS.items():
        parts = [part.format(schema, number, number >= wanted) for number, schema in schemas.items()]
        connection.execute(text(f'CREATE VIEW "{root}".{name} AS {" UNION ALL ".join(parts)}'))


_HAS_OPEN = "EXISTS (SELECT FROM {0}.tasks) OR EXISTS (SELECT FROM {0}.runs WHERE ended_at IS NULL)"
_IS_OPEN = f"(EXISTS (SELECT FROM {{0}}.inbox) OR {_HAS_OPEN})"
_SHARED_VIEWS = {
    "places": """
SELECT id, {1} AS shard, true AS is_open, NULL AS workflow, NULL AS key FROM {0}.tasks
 UNION ALL SELECT id, {1}, false, NULL, NULL FROM {0}.ended_tasks
 UNION ALL SELECT id, {1}, ended_at IS NULL, workflow, key FROM {0}.runs""",
    "all_runs": """
SELECT id, lane, lane_limit, parent_run, status, parked, cancelling, ended_at FROM {0}.runs""",
    "shards": f"""
SELECT {{1}} AS shard, {_IS_OPEN} AS is_open,
       (SELECT address FROM {{0}}.leases WHERE expires_at > clock_timestamp()) AS leader, {{2}} AS is_closing""",
}
"""Views beside the shared tables, by name: a leader finds the work of other shards there."""


def _leader(connection: Connection, schema: str) -> str | None:
    """Return the leader of a shard. Without one, lock the shard against use until the transaction ends."""
    leader = text(f"SELECT address FROM {schema}.leases WHERE expires_at > clock_timestamp()")
    if (address := connection.execute(leader).scalar()) is None:
        connection.execute(
            text(f"LOCK TABLE {schema}.leases, {schema}.tasks, {schema}.runs IN SHARE ROW EXCLUSIVE MODE")
        )
        address = connection.execute(leader).scalar()
    return address


def _stays_because(connection: Connection, schema: str, number: int, *, is_known: bool) -> str | None:
    """Return why a shard cannot be dropped; programs use a shard until they know that it is closing."""
    address = _leader(connection, schema)
    if connection.execute(text(f"SELECT {_IS_OPEN.format(schema)}")).scalar():
        return (
            f"Shard {number} stays: it has open work. Run schedulers and workers with more than {number} shards until "
            f"`orchestrator status` shows no open work there."
        )
    if address or not is_known:
        used = f"scheduler {address} leads it" if address else "processes may still use it for some seconds"
        return (
            f"Shard {number} stays: it is empty, and {used}. Restart schedulers and workers with "
            f"fewer shards, then run `orchestrator db upgrade` again."
        )
    return None


_BY_RUN = ("histories", "node_runs", "promises", "resolutions", "timers", "untold", "deletions")
_BY_TASK = ("attempts", "task_logs")


def _move_some(engine: Engine, root: str, number: int) -> bool:
    """Move a batch of a shard's history to shard 0, unless work is open. Return whether more may remain.

    Related runs have ids with the same beginning (`domain/ids.py`), and move together.
    """
    schema, first, tables = _schema(root, number), _schema(root, 0), _shard_tables()
    with engine.begin() as connection:
        if _leader(connection, schema) or connection.execute(text(f"SELECT {_HAS_OPEN.format(schema)}")).scalar():
            return False

        def last_of(table: str) -> UUID | None:
            ids = f"SELECT id FROM {schema}.{table} ORDER BY id LIMIT {_BATCH}"
            return connection.execute(text(f"SELECT id FROM ({ids}) AS next ORDER BY id DESC LIMIT 1")).scalar()

        def move(name: str, which: str, upto: UUID | None = None) -> int:
            table = tables[name]
            values = {column.name: column.name for column in table.columns if column.identity is None}
            if name == "throughput":  # terms of different shards may have the same number
                values["term"] = f"-(64 * term + {number})"
            keys = ", ".join(column.name for column in table.primary_key)
            statement = f"""
                WITH moved AS (DELETE FROM {schema}.{name} WHERE {which} RETURNING *), added AS (
                     INSERT INTO {first}.{name} ({", ".join(values)})
                     SELECT {", ".join(values.values())} FROM moved ORDER BY {keys} ON CONFLICT DO NOTHING)
                SELECT count(*) FROM moved"""
            return int(connection.execute(text(statement), {"upto": upto} if upto else {}).scalar_one())

        if run := last_of("runs"):
            upto = UUID(bytes=run.bytes[:6] + b"\xff" * 10)
            for name in _BY_TASK:
                move(name, f"task_id IN (SELECT id FROM {schema}.ended_tasks WHERE run_id <= :upto)", upto)
            for name in ("ended_tasks", *_BY_RUN):
                move(name, "run_id <= :upto", upto)
            return move("runs", "id <= :upto", upto) > 0
        if task := last_of("ended_tasks"):
            for name in _BY_TASK:
                move(name, "task_id <= :upto", task)
            return move("ended_tasks", "id <= :upto", task) > 0
        remaining_tables = [name for name in tables if name not in (*_NOT_MOVED, "tasks")]
        batch = "ctid = ANY (ARRAY(SELECT ctid FROM {}.{} LIMIT {}))"
        return any(move(name, batch.format(schema, name, _BATCH)) for name in remaining_tables)


def _dissolve(connection: Connection, root: str, number: int) -> str:
    """Drop a shard whose history was moved, unless it was used meanwhile; return a message."""
    schema = _schema(root, number)
    connection.execute(text(f"LOCK TABLE {schema}.tasks, {schema}.runs, {schema}.inbox IN ACCESS EXCLUSIVE MODE"))
    in_use = " OR ".join(f"EXISTS (SELECT FROM {schema}.{name})" for name in ("tasks", "runs", "ended_tasks", "inbox"))
    if connection.execute(text(f"SELECT {in_use}")).scalar() or _leader(connection, schema):
        return f"Shard {number} stays: it was used in the meantime. Run `orchestrator db upgrade` again."
    connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    gone = "true" if not _numbers(connection, root) else f"shard = {number}"  # a single leader stores no use of limits
    connection.execute(text(f"{_LANE_USE.format(root)}; DELETE FROM {_schema(root, 0)}.lane_use WHERE {gone}"))
    return f"Shard {number} was empty and has been removed; shard 0 has its remaining rows."


# -- finding the shard of a task or run


@Statement.function("SELECT /* shards.are_there */ to_regclass('orchestrator.shards') IS NOT NULL")
def are_there(connection: Connection) -> bool:
    """Return whether the database has several shards, or had before the last upgrade."""


_LOCATE = Statement[tuple[bytes, int, bool]]("""
SELECT /* shards.locate */ uuid_send(id), shard, is_open FROM orchestrator.places WHERE id = ANY(%(ids)s::uuid[])
""")


def locate(connection: Connection, ids: Sequence[bytes]) -> dict[bytes, int]:
    """Return the shards of the tasks and runs that exist."""
    return {bytes(id): shard for id, shard, _ in _LOCATE(connection, ids=ids)}


_LED = Statement[int]("SELECT /* shards.led */ shard FROM orchestrator.leases WHERE expires_at > clock_timestamp()")


def without_leader(connection: Connection, ids: Sequence[bytes]) -> dict[bytes, int]:
    """Return the tasks and runs whose shard has no leader, with the shard."""
    led = {*_LED(connection)}
    shard_of = locate(connection, ids) if namespace_of(connection).endswith(ALL) else {}
    return {id: shard_of.get(id, 0) for id in ids if shard_of.get(id, 0) not in led}


def open_elsewhere(connection: Connection, shard: int, ids: Sequence[bytes]) -> dict[bytes, int]:
    """Return the runs that are open in another shard, with the shard."""
    return {bytes(id): other for id, other, is_open in _LOCATE(connection, ids=ids) if is_open and other != shard}


_RUN_OF_KEY = Statement[bytes]("""
SELECT /* shards.run_of_key */ uuid_send(id) FROM orchestrator.places
 WHERE workflow = %(workflow)s AND key = %(key)s AND shard <> %(shard)s
""")


def run_of_key(connection: Connection, shard: int, workflow: str, key: str) -> bytes | None:
    """Return the run with this idempotency key in another shard."""
    found = _RUN_OF_KEY.first(connection, shard=shard, workflow=workflow, key=key)
    return None if found is None else bytes(found)


@cache
def _sending(schema: str) -> Statement[None]:
    return Statement[None](f"""
INSERT /* shards.send {crc32(schema.encode())} */ INTO "{schema}".inbox (kind, target, body)
VALUES (%(kind)s, %(target)s::uuid, %(body)s::jsonb) RETURNING pg_notify('{schema}', '')
""")


def send(connection: Connection, shard: int, kind: RequestKind, target: bytes, body: str) -> None:
    """Insert a request into the inbox of another shard; the commit wakes that shard's leader."""
    root = root_of(connection)
    _sending(f"{root}/{shard}" if shard else root)(connection, kind=str(kind), target=target, body=body)


@dataclass(frozen=True, kw_only=True)
class ShardView:
    """One shard."""

    shard: int
    """The number of the shard."""
    is_open: bool
    """Whether the shard has open tasks, runs or requests."""
    leader: str | None
    """The scheduler that leads the shard; None if there is none."""
    is_closing: bool
    """Whether new tasks and runs go to other shards."""
    idle: float | None = None
    """Seconds since the leader last did all of its work; None if that is unknown here."""
    trouble: str | None = None
    """The problem that keeps the leader from its work, if the leader reports one."""


_LIST = Statement[ShardView]("""
SELECT /* shards.list */ shard, is_open, leader, is_closing,
       extract(epoch FROM clock_timestamp() - lease.useful_at)::double precision AS idle, lease.trouble
  FROM orchestrator.shards
  LEFT JOIN (SELECT shard, useful_at, trouble FROM orchestrator.leases
              WHERE useful_term = term AND expires_at > clock_timestamp()) AS lease USING (shard) ORDER BY shard
""")


def list_shards(connection: Connection) -> list[ShardView]:
    return _LIST(connection)


def mismatch(known_shards: Sequence[ShardView], shards: int) -> str | None:
    """Return a message if the setting `shards` does not fit the database, with advice."""
    there = len(known_shards) or 1
    wanted = there - sum(shard.is_closing for shard in known_shards)
    if wanted <= shards <= there:
        return None
    return (
        f"Setting shards is {shards}, and the database has {there}. A process with this setting sees only these "
        f"shards. Set ORCHESTRATOR_SHARDS={wanted} for every process, or app.at(…, shards={wanted}) for another cell. "
        f"Only to change the database, run `orchestrator db upgrade`."
    )


def prerequisite(engine: Engine, settings: Settings) -> Prerequisite:
    """Return the database as a prerequisite of a scheduler; shard 0 also warns of a pooler or wrong settings."""
    prerequisite = database.prerequisite(engine)

    def check() -> str | None:
        if (warning := prerequisite.check()) or settings.shard:
            return warning
        with engine.connect() as connection:
            if compatibility.is_pooled(connection):
                return (
                    "There is a pooler between this scheduler and Postgres. In transaction mode ticks fail: connect "
                    "schedulers to Postgres directly."
                )
            return mismatch(list_shards(connection) if are_there(connection) else (), settings.shards)

    return prerequisite._replace(check=check)
