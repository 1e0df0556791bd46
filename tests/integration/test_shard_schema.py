"""The schemas of shards: created, upgraded, read together, and removed when they are empty."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from orchestrator.errors import SchemaError
from orchestrator.settings import Settings
from orchestrator.store import database, insights, shards
from orchestrator.store.insights import server
from orchestrator.store.tables.all_tables import metadata
from tests.integration.test_schema import empty_url
from tests.waiting import eventually

__all__ = ["empty_url"]

TASK = "INSERT INTO {}.tasks (id, name, queue, payload) VALUES (gen_random_uuid(), 'job', 'default', '') RETURNING id"
ENDED = """
INSERT INTO {}.ended_tasks (id, seq, name, queue, priority, attempt, payload, created_at, status, failures, losses,
                            ended_at)
VALUES (gen_random_uuid(), 1, 'job', 'default', 0, 1, '', now(), 'success', 0, 0, now()) RETURNING id
"""


@pytest.fixture
def settings(empty_url: str) -> Settings:
    return Settings(database_url=empty_url, shards=3)


@pytest.fixture
def plain(settings: Settings) -> Iterator[Engine]:
    engine = database.engine_for(settings.database_url, autocommit=True)
    yield engine
    engine.dispose()


@pytest.fixture
def whole(settings: Settings) -> Iterator[Engine]:
    engine = database.engine_for(settings.database_url, autocommit=True, namespace="orchestrator/all")
    yield engine
    engine.dispose()


def schemas(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.execute(text("SELECT nspname FROM pg_namespace WHERE nspname ~ '^orch'")).scalars())


def run(engine: Engine, sql: str) -> uuid.UUID:
    with engine.connect() as connection:
        found: uuid.UUID = connection.exec_driver_sql(sql).scalar_one()
        return found


def test_a_single_shard_uses_one_schema(settings: Settings, plain: Engine) -> None:
    assert shards.upgrade(replace(settings, shards=1)) == [f"The database is at revision {database.REVISION}."]
    assert schemas(plain) == {"orchestrator"}


def test_shards_are_made_once_and_read_together(settings: Settings, plain: Engine, whole: Engine) -> None:
    for _ in range(2):
        assert len(shards.upgrade(settings)) == 1
        assert schemas(plain) == {"orchestrator", "orchestrator/1", "orchestrator/2", "orchestrator/all"}
    ids = [run(plain, TASK.format(f'"{one}"')) for one in ("orchestrator", "orchestrator/1", "orchestrator/2")]
    with whole.connect() as connection:
        database.check_schema(connection)
        assert sum(insights.overview(connection).open.values()) == 3
        found = shards.locate(connection, [*(one.bytes for one in ids), uuid.uuid4().bytes])
        assert found == {ids[0].bytes: 0, ids[1].bytes: 1, ids[2].bytes: 2}
        assert shards.list_shards(connection) == [
            shards.ShardView(shard=number, is_open=True, leader=None, is_closing=False) for number in range(3)
        ]


def test_a_list_over_all_shards_uses_their_indexes(settings: Settings, whole: Engine) -> None:
    shards.upgrade(settings)
    with whole.connect() as connection:
        connection.exec_driver_sql("SET enable_seqscan = off; SET enable_sort = off; SET enable_bitmapscan = off")
        plan = connection.exec_driver_sql(
            "EXPLAIN SELECT id FROM orchestrator.tasks WHERE id < gen_random_uuid() ORDER BY id DESC LIMIT 10"
        )
        said = "\n".join(plan.scalars())
    assert "Merge Append" in said
    assert said.count("Index Only Scan Backward using tasks_pkey") == 3


def test_an_upgrade_migrates_every_shard(settings: Settings, plain: Engine, whole: Engine) -> None:
    for namespace in ("orchestrator", "orchestrator/1"):
        database.upgrade(settings.database_url, namespace=namespace)
        database.downgrade(settings.database_url, "0037", namespace=namespace)
    with pytest.raises(SchemaError, match="revision 0037"), whole.connect() as connection:
        database.check_schema(connection)
    shards.upgrade(settings)
    for namespace in ("orchestrator", "orchestrator/1", "orchestrator/2"):
        engine = database.engine_for(settings.database_url, namespace=namespace)
        with engine.connect() as connection:
            assert database.check_schema(connection) is None
        engine.dispose()
    columns = (
        "SELECT count(*) FROM information_schema.columns WHERE table_schema = '{}' AND table_name <> 'alembic_version'"
    )
    expected = sum(len(table.columns) for table in metadata.sorted_tables)
    assert run(plain, columns.format("orchestrator/1")) == expected


def test_an_empty_shard_is_removed_and_its_ended_tasks_are_kept(settings: Settings, plain: Engine) -> None:
    shards.upgrade(settings)
    ended = run(plain, ENDED.format('"orchestrator/2"'))
    task = run(plain, TASK.format('"orchestrator/1"'))
    for said in (
        "stays: it is empty, and processes may still use it for some seconds.",
        "was empty and has been removed",
    ):
        _, first, second = shards.upgrade(replace(settings, shards=1))
        assert first.startswith("Shard 1 stays: it has open work.")
        assert second.startswith(f"Shard 2 {said}")
    assert schemas(plain) == {"orchestrator", "orchestrator/1", "orchestrator/all"}
    assert run(plain, "SELECT id FROM orchestrator.ended_tasks") == ended
    with plain.connect() as connection:
        connection.execute(text('DELETE FROM "orchestrator/1".tasks WHERE id = :id'), {"id": task})
        connection.exec_driver_sql("""INSERT INTO "orchestrator/1".leases (shard, owner, term, expires_at, address)
            VALUES (0, gen_random_uuid(), 1, now() + interval '1 hour', 'web1:7')""")
        assert "scheduler web1:7 leads it" in shards.upgrade(replace(settings, shards=1))[1]
        connection.exec_driver_sql('UPDATE "orchestrator/1".leases SET expires_at = now()')
    shards.upgrade(replace(settings, shards=1))
    assert schemas(plain) == {"orchestrator", "orchestrator/all"}, "for clients that have not been started again"
    shards.upgrade(replace(settings, shards=1))
    assert schemas(plain) == {"orchestrator"}
    assert run(plain, "SELECT to_regclass('orchestrator.places') IS NULL")


def test_open_work_is_the_first_reason_to_keep_a_shard(settings: Settings, plain: Engine) -> None:
    """The message used to advise fewer shards for the schedulers, which stranded the open work."""
    shards.upgrade(settings)
    run(plain, TASK.format('"orchestrator/2"'))
    lease = (
        "(shard, owner, term, expires_at, address) VALUES (0, gen_random_uuid(), 1, now() + interval '1 hour', 'w:7')"
    )
    for number in (1, 2):
        run(plain, f'INSERT INTO "orchestrator/{number}".leases {lease} RETURNING owner')
    _, first, second = shards.upgrade(replace(settings, shards=1))
    assert first.startswith("Shard 1 stays: it is empty, and scheduler w:7 leads it.")
    assert second.startswith("Shard 2 stays: it has open work.")


def test_table_statistics_cover_all_shards(settings: Settings, plain: Engine, whole: Engine) -> None:
    shards.upgrade(settings)
    with plain.connect() as one, whole.connect() as all_, plain.connect() as locking:
        size = one.exec_driver_sql("SELECT pg_total_relation_size('orchestrator.tasks')").scalar_one()
        assert insights.overview(all_).storage.tables["tasks"] == 3 * size
        assert insights.dead_rows(all_) == insights.dead_rows(one) == 0
        locking.exec_driver_sql("BEGIN")
        locking.exec_driver_sql('LOCK TABLE "orchestrator/1".tasks')
        assert len(server.lock_holders(all_)) == 1
        locking.exec_driver_sql("ROLLBACK")


def test_reading_while_a_shard_is_removed_does_not_deadlock(settings: Settings, plain: Engine) -> None:
    """The upgrade locked the shard and waited for the view, and the client locked the view and waited for the shard."""
    for number in (3, 2):
        shards.upgrade(replace(settings, shards=number))
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with plain.connect() as between, ThreadPoolExecutor(2) as pool:
        between.exec_driver_sql("BEGIN")
        between.exec_driver_sql('LOCK TABLE "orchestrator/1".tasks')
        client = pool.submit(run, plain, "SELECT count(*) FROM orchestrator.places")
        eventually(lambda: between.exec_driver_sql(waiting).scalar_one() == 1, "the client has the view")
        upgrade = pool.submit(shards.upgrade, replace(settings, shards=2))
        eventually(lambda: between.exec_driver_sql(waiting).scalar_one() == 2, "the upgrade wants the view")
        between.exec_driver_sql("ROLLBACK")
        client.result(60)
        assert upgrade.result(60)[1].startswith("Shard 2 was empty and has been removed")


RUN = """
INSERT INTO {0}.runs (id, name, status, total, open, success, failed, cancelled, skipped, ended_at)
VALUES ('{1}', 'many', 'success', 2, 0, 2, 0, 0, 0, now());
INSERT INTO {0}.ended_tasks (id, seq, name, queue, priority, attempt, payload, created_at, status, failures, losses,
                             ended_at, run_id)
SELECT gen_random_uuid(), 1, 'job', 'default', 0, 1, '', now(), 'success', 0, 0, now(), '{1}'
  FROM generate_series(1, 2);
INSERT INTO {0}.attempts (task_id, attempt, outcome, ended_at)
SELECT id, 1, 'failed', now() FROM {0}.ended_tasks WHERE run_id = '{1}';
INSERT INTO {0}.task_logs (task_id, attempt, part, run_id, step, lines)
SELECT id, 1, part, '{1}', 'job', part::text::bytea FROM {0}.ended_tasks, generate_series(0, 2) AS part
 WHERE run_id = '{1}';
INSERT INTO {0}.throughput SELECT '2030-01-01', 'default', 1, 2, 0, 0, 0, 2, 0, 0, '{{}}', '{{}}'
    ON CONFLICT DO NOTHING
"""
REMEMBERED = ("runs", "ended_tasks", "attempts", "task_logs")


def counts(engine: Engine, schema: str) -> list[int]:
    with engine.connect() as connection:
        return [
            connection.exec_driver_sql(f'SELECT count(*) FROM "{schema}".{table}').scalar_one() for table in REMEMBERED
        ]


def test_ended_runs_of_a_removed_shard_move_in_batches_of_whole_runs(
    settings: Settings, plain: Engine, whole: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may die between any two batches; related runs stay together."""
    for number in (3, 2):
        shards.upgrade(replace(settings, shards=number))
    with plain.connect() as connection:
        for number in range(10):  # two runs of each time
            run_id = uuid.UUID(bytes=bytes([0, 0, 0, 0, 0, number // 2]) + uuid.uuid4().bytes[:10])
            connection.exec_driver_sql(RUN.format('"orchestrator/2"', run_id))
        connection.exec_driver_sql(RUN.format("orchestrator", uuid.uuid4()))
        for _ in range(7):
            connection.exec_driver_sql(ENDED.format('"orchestrator/2"'))
        connection.exec_driver_sql("INSERT INTO orchestrator.lane_use VALUES ('narrow', 2, 1), ('narrow', 1, 1)")
    monkeypatch.setattr(shards, "_BATCH", 3)
    seen: list[list[int]] = []
    for _ in range(20):
        died = True
        move, left = shards._move_some, 1

        def move_one(*args: Any, move: Any = move) -> bool:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            return bool(move(*args))

        with monkeypatch.context() as patched:
            patched.setattr(shards, "_move_some", move_one)
            with suppress(KeyboardInterrupt):
                shards.upgrade(replace(settings, shards=2))
                died = False
        if not died:
            break
        seen.append(counts(plain, "orchestrator/2"))
        assert counts(plain, "orchestrator/all") == [11, 29, 22, 66]
        of_runs, tasks, attempts, logs = seen[-1]
        assert of_runs % 2 == 0
        assert tasks >= attempts == 2 * of_runs
        assert logs == 3 * attempts
    assert len(seen) > 5
    assert "orchestrator/2" not in schemas(plain)
    assert counts(plain, "orchestrator") == [11, 29, 22, 66]
    with plain.connect() as connection:
        parts = connection.exec_driver_sql(
            "SELECT array_agg(part ORDER BY id) FROM orchestrator.task_logs GROUP BY task_id"
        )
        assert {tuple(row[0]) for row in parts} == {(0, 1, 2)}
        assert connection.exec_driver_sql("SELECT sum(success) FROM orchestrator.throughput").scalar_one() == 4
        assert connection.exec_driver_sql("SELECT name, shard FROM orchestrator.lane_use").all() == [("narrow", 1)]


def test_rows_stay_while_a_client_uses_the_shard(settings: Settings, plain: Engine) -> None:
    """The client does not know yet that the shard is closing."""
    shards.upgrade(settings)
    engine = database.engine_for(settings.database_url)
    with plain.connect() as connection:
        connection.exec_driver_sql(RUN.format('"orchestrator/2"', uuid.uuid4()))
    run(plain, TASK.format('"orchestrator/2"'))
    assert not shards._move_some(engine, "orchestrator", 2)
    with engine.begin() as connection:
        assert "used in the meantime" in shards._dissolve(connection, "orchestrator", 2)
    assert counts(plain, "orchestrator/2")[0] == 1
    engine.dispose()


def test_a_database_with_several_shards_is_not_downgraded(settings: Settings) -> None:
    shards.upgrade(settings)
    with pytest.raises(SchemaError, match="needs a database with one shard"):
        database.downgrade(settings.database_url, None)


def test_a_missing_shard_is_reported(settings: Settings) -> None:
    shards.upgrade(replace(settings, shards=2))
    engine = database.engine_for(settings.database_url, namespace="orchestrator/2")
    with pytest.raises(SchemaError, match="no shard 2 of 'orchestrator' yet"), engine.connect() as connection:
        database.check_schema(connection)
    engine.dispose()
