"""SQL statements in the schema of a shard, and the settings of a shard."""

from typing import Any

import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.settings import load_settings
from orchestrator.store.namespaces import NOT_SHARED, in_namespace
from orchestrator.transport.keys import Keys

SQL = "INSERT INTO orchestrator.tasks SELECT FROM orchestrator.unique_keys, orchestrator.tasks_of"
LOCK = "hashtextextended('orchestrator.' || key, 0)"


def test_a_shard_has_its_own_tables_and_some_shared_tables() -> None:
    assert in_namespace(SQL, "orchestrator") == SQL
    assert in_namespace(SQL, "shop") == 'INSERT INTO "shop".tasks SELECT FROM "shop".unique_keys, "shop".tasks_of'
    assert in_namespace(SQL, "shop/1") == (
        'INSERT INTO "shop/1".tasks SELECT FROM "shop".unique_keys, "shop/1".tasks_of'
    )
    assert in_namespace(SQL, "orchestrator/2") == (
        'INSERT INTO "orchestrator/2".tasks SELECT FROM orchestrator.unique_keys, "orchestrator/2".tasks_of'
    )


def test_all_shards_use_the_same_lock_for_a_key() -> None:
    assert in_namespace(LOCK, "orchestrator/1") == LOCK
    assert in_namespace(LOCK, "shop/1") == in_namespace(LOCK, "shop")


def test_a_migration_of_a_shard_uses_only_its_own_schema() -> None:
    assert in_namespace("ALTER TABLE orchestrator.queues", "orchestrator/1", NOT_SHARED) == (
        'ALTER TABLE "orchestrator/1".queues'
    )


def test_queries_over_all_shards_read_the_first_shards_revision() -> None:
    sql = "SELECT FROM orchestrator.alembic_version, orchestrator.runs"
    assert in_namespace(sql, "shop/all") == 'SELECT FROM "shop".alembic_version, "shop/all".runs'
    assert in_namespace(sql, "shop/1") == 'SELECT FROM "shop/1".alembic_version, "shop/1".runs'


def test_a_shard_has_its_own_namespace() -> None:
    settings = load_settings(environ={}, namespace="shop", shards=2)
    assert settings.of_shard(0) == settings
    assert settings.of_shard(1).namespace == "shop/1"
    assert settings.of_shard(1).of_shard("all").namespace == "shop/all"
    assert settings.of_shard(1).root == "shop"


def test_each_shard_has_its_own_slot_in_a_redis_cluster() -> None:
    settings = load_settings(environ={}, namespace="shop", shards=2, redis_url="redis+cluster://a,b")
    assert settings.require_redis() == "redis+cluster://a,b#shop"
    assert settings.of_shard(1).require_redis() == "redis+cluster://a,b#shop/1"
    assert Keys.of(settings.of_shard(1)).nudges == "{shop/1:0}:nudges"
    assert Keys.of(settings.of_shard(1)).changes == Keys.of(settings).changes == "{shop:0}:changes"


@pytest.mark.parametrize("given", [{"shards": 0}, {"shards": 65}])
def test_invalid_numbers_of_shards_are_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Setting shards"):
        load_settings(environ={}, **given)
