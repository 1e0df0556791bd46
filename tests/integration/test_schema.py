"""Migrations and `store/tables` create the same schema, and no process works on the schema of another release."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, exc, text

from orchestrator import Orchestrator, Settings
from orchestrator.embedded import EmbeddedServices
from orchestrator.errors import ConfigurationError, SchemaError
from orchestrator.scheduler.process import run_scheduler
from orchestrator.store import compatibility, database
from orchestrator.store.tables.all_tables import metadata
from orchestrator.store.tables.columns import SCHEMA
from tests.databases import new_database


@pytest.fixture
def empty_url(services: EmbeddedServices) -> Iterator[str]:
    """A database without tables."""
    with new_database(services, "empty") as url:
        yield url


@pytest.fixture
def empty(empty_url: str) -> Iterator[Engine]:
    engine = database.engine_for(empty_url)
    yield engine
    engine.dispose()


@pytest.fixture
def created(database_url: str) -> Iterator[Connection]:
    """A connection to a database created at the newest revision."""
    engine = database.engine_for(database_url)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@pytest.fixture
def migrated(empty: Engine, empty_url: str) -> Iterator[Connection]:
    """A connection to a database upgraded from the oldest supported revision."""
    database.upgrade(empty_url)
    assert database.downgrade(empty_url, compatibility.FIRST) == compatibility.FIRST
    with empty.connect() as connection:
        assert database.current_revision(connection) == compatibility.FIRST
        assert "attributes" not in {row[1] for row in catalogue(connection, "columns")}
    database.upgrade(empty_url)
    with empty.connect() as connection:
        yield connection


# -- migrations and tables


def test_the_migrated_schema_matches_the_table_definitions(migrated: Connection) -> None:
    options = {
        "include_schemas": True,
        "include_name": lambda name, kind, _: kind != "schema" or name == SCHEMA,
        "version_table_schema": SCHEMA,
        "compare_type": True,
        "compare_server_default": True,
    }
    assert compare_metadata(MigrationContext.configure(migrated, opts=options), metadata) == []


CATALOGUE = {
    "columns": """
        SELECT table_name, column_name, data_type, is_nullable, column_default, is_identity, udt_name
          FROM information_schema.columns WHERE table_schema = 'orchestrator'""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'orchestrator'",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)
          FROM pg_constraint WHERE connamespace = 'orchestrator'::regnamespace""",
    "tables": """
        SELECT relname, relkind, reloptions::text, obj_description(oid, 'pg_class')
          FROM pg_class WHERE relnamespace = 'orchestrator'::regnamespace""",
}


def test_created_and_migrated_catalogs_are_equal(migrated: Connection, created: Connection) -> None:
    """Alembic does not compare checks, predicates of partial indexes, or storage parameters."""
    for what in CATALOGUE:
        assert catalogue(created, what)
        assert catalogue(migrated, what) == catalogue(created, what)


def catalogue(connection: Connection, what: str) -> set[tuple[Any, ...]]:
    rows = {tuple(row) for row in connection.execute(text(CATALOGUE[what]))}
    return {row for row in rows if "alembic_version" not in str(row[0])}


def test_the_newest_migration_is_the_required_revision(created: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(database._MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [database.REVISION]
    assert database.current_revision(created) == database.REVISION
    revisions = [script.revision for script in scripts.walk_revisions()][::-1]
    assert revisions == sorted(revisions)  # check_schema compares them as text


def test_a_schema_that_was_dropped_is_created_again(empty: Engine, empty_url: str) -> None:
    database.upgrade(empty_url)
    with empty.begin() as connection:
        database.check_schema(connection)
        connection.execute(text(f"DROP SCHEMA {SCHEMA} CASCADE"))
    database.upgrade(empty_url)
    with empty.connect() as connection:
        database.check_schema(connection)


def test_concurrent_upgrades_succeed(empty: Engine, empty_url: str) -> None:
    failures: list[BaseException] = []

    def upgrade() -> None:
        try:
            database.upgrade(empty_url)
        except Exception as error:  # noqa: BLE001  # the test's thread checks it
            failures.append(error)

    threads = [threading.Thread(target=upgrade) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    with empty.connect() as connection:
        database.check_schema(connection)


def test_a_failed_creation_leaves_no_tables(empty: Engine, empty_url: str) -> None:
    with empty.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}; CREATE TABLE {SCHEMA}.{metadata.sorted_tables[-1].name} ()"))
    with pytest.raises(exc.ProgrammingError, match="already exists"):
        database.upgrade(empty_url)
    with empty.connect() as connection:
        assert len(catalogue(connection, "tables")) == 1


# -- error messages


def test_an_unknown_revision_is_not_upgraded(empty: Engine, empty_url: str) -> None:
    database.upgrade(empty_url)
    with empty.begin() as connection:
        connection.execute(text(f"UPDATE {SCHEMA}.alembic_version SET version_num = '0032'"))
    with pytest.raises(SchemaError, match="^The database is at revision 0032, .* cannot be upgraded: expected 0033"):
        database.upgrade(empty_url)


def test_a_too_old_postgres_is_rejected(empty: Engine, empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "OLDEST_POSTGRES", 99)
    said = r"^Postgres \d+\.\d+ is too old: use 99 or newer\.$"
    with empty.connect() as connection, pytest.raises(SchemaError, match=said):
        database.check_schema(connection)
    with pytest.raises(SchemaError, match=said):
        database.upgrade(empty_url)


def test_a_database_without_tables_is_rejected(empty: Engine) -> None:
    with (
        empty.connect() as connection,
        pytest.raises(SchemaError, match="no orchestrator tables yet.*`orchestrator db up"),
    ):
        database.check_schema(connection)


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ("0000", r"at revision 0000; this release needs .*Run `orchestrator db upgrade`"),
        (
            "9999",
            r"at revision 9999, newer than this release knows \(.*supports releases of revision 9998 and later: use",
        ),
    ],
)
def test_the_schema_of_another_release_is_rejected(created: Connection, revision: str, message: str) -> None:
    with created.begin() as transaction:
        created.execute(text(f"UPDATE {SCHEMA}.alembic_version SET version_num = :to"), {"to": revision})
        compatibility.write_oldest_revision(created, "9998")
        with pytest.raises(SchemaError, match=message):
            database.check_schema(created)
        transaction.rollback()


def test_a_newer_compatible_schema_gives_a_warning(created: Connection) -> None:
    assert database.check_schema(created) is None
    with created.begin_nested() as transaction:
        created.execute(text(f"UPDATE {SCHEMA}.alembic_version SET version_num = '9999'"))
        warning = database.check_schema(created)
        transaction.rollback()
    assert warning is not None
    assert "at revision 9999, newer than this release knows" in warning


_TAKES_AWAY = re.compile(r"drop_(?:column|table)|DROP (?:COLUMN|TABLE)|RENAME|rename_|SET NOT NULL|alter_column")


def test_destructive_migrations_declare_the_oldest_supported_release() -> None:
    scripts = ScriptDirectory(str(database._MIGRATIONS))
    new = [script for script in scripts.walk_revisions() if script.revision > compatibility.FIRST]
    assert [
        script.revision
        for script in new
        if _TAKES_AWAY.search(inspect.getsource(script.module.upgrade)) and not hasattr(script.module, "oldest")
    ] == []


# -- downgrades


USES = {
    "0034": "UPDATE orchestrator.flows SET on_error = 'fail'",
    "0035": "UPDATE orchestrator.api_keys SET quotas = '{}'",
    "0036": "UPDATE orchestrator.runs SET terminates = true",
    "0037": "UPDATE orchestrator.runs SET headers = '{}'",
    "0038": "UPDATE orchestrator.runs SET attributes = '{}'",
    "0039": "INSERT INTO orchestrator.deletions SELECT id FROM orchestrator.runs",
    "0040": "UPDATE orchestrator.worker_releases SET release = 'fail'",
    "0041": "UPDATE orchestrator.runs SET retried_at = now()",
}
ROWS = """
INSERT INTO orchestrator.flows (name, version, hash, definition) VALUES ('f', 1, '', '{}');
INSERT INTO orchestrator.api_keys (id, name, hash, scope) VALUES ('k', 'k', '', 'read');
INSERT INTO orchestrator.runs (id, name, total, open) VALUES (gen_random_uuid(), 'w', 0, 0);
INSERT INTO orchestrator.worker_releases VALUES ('w', '', now(), now());
"""


@pytest.mark.parametrize("revision", USES)
def test_a_revision_with_data_in_use_is_not_downgraded(empty: Engine, empty_url: str, revision: str) -> None:
    database.upgrade(empty_url)
    with empty.begin() as connection:
        connection.execute(text(ROWS))
        connection.execute(text(USES[revision]))
    with pytest.raises(SchemaError, match=rf"^Revision {revision} cannot be undone .* stays at revision {revision}\."):
        database.downgrade(empty_url, compatibility.FIRST)
    with empty.connect() as connection:
        assert database.current_revision(connection) == revision
        looked = re.sub(r"UPDATE (\S+) SET (\S+) =.*", r"SELECT \2 FROM \1", USES[revision])
        changed = connection.execute(text(re.sub(r"INSERT INTO (\S+) .*", r"SELECT true FROM \1", looked)))
        assert changed.scalar() is not None, "what it brought is still there"


def test_destructive_downgrades_refuse_data_loss() -> None:
    new = [one for one in ScriptDirectory(str(database._MIGRATIONS)).walk_revisions() if one.revision > "0033"]
    takes = [one for one in new if _TAKES_AWAY.search(inspect.getsource(one.module.downgrade))]
    assert {one.revision for one in takes} == set(USES)
    assert all("refuse_loss(" in inspect.getsource(one.module.downgrade) for one in takes)


def test_downgrades_reject_unknown_revisions_and_active_leaders(empty: Engine, empty_url: str) -> None:
    database.upgrade(empty_url)
    with pytest.raises(SchemaError, match=f"^Expected a revision from 0033 to .*, found '{database.REVISION}'"):
        database.downgrade(empty_url, database.REVISION)
    lease = "(shard, owner, term, expires_at, address) VALUES (0, gen_random_uuid(), 1, now() + '1 min', 'host:1')"
    with empty.begin() as connection:
        connection.execute(
            text(
                f"INSERT INTO {SCHEMA}.leases {lease} ON CONFLICT (shard) DO UPDATE "
                "SET expires_at = excluded.expires_at, address = excluded.address"
            )
        )
    with pytest.raises(SchemaError, match=r"^The scheduler host:1 leads\. Stop all"):
        database.downgrade(empty_url, None)


def test_an_interrupted_upgrade_counts_as_missing_tables(empty: Engine, empty_url: str) -> None:
    """The version table may exist without a row."""
    database.upgrade(empty_url)
    with empty.begin() as connection:
        connection.execute(text(f"DELETE FROM {SCHEMA}.alembic_version"))
        with pytest.raises(SchemaError, match="no orchestrator tables yet"):
            database.check_schema(connection)


def test_the_scheduler_rejects_an_old_schema(empty_url: str, redis_url: str) -> None:
    with pytest.raises(SchemaError, match="`orchestrator db upgrade`"):
        run_scheduler(Settings(database_url=empty_url, redis_url=redis_url))


def test_enqueueing_without_tables_raises_a_schema_error(empty_url: str, redis_url: str) -> None:
    app = Orchestrator(database_url=empty_url, redis_url=redis_url)
    task = app.task(name="noop")(lambda: None)
    ways = (task.enqueue, task.options(unique_key="only").enqueue)
    for enqueue in (*ways, lambda: app.enqueue_many(task, [()]), lambda: app.start_many(task, [()])):
        with pytest.raises(SchemaError, match="no orchestrator tables yet"):
            enqueue()
    app.close()


@pytest.mark.parametrize("url", ["nonsense", "postgresql://user:x@host:notaport/db"])
def test_an_invalid_database_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigurationError, match="Setting database_url: expected postgresql://"):
        database.engine_for(url)
