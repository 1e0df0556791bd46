"""Under load: a Redis Cluster with moving slots and dying nodes, and a master that Sentinels replace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest

from orchestrator.transport.changes import Follower
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from tests.acceptance.conftest import fresh_stack, project, sharded_stack
from tests.acceptance.stack import Stack
from tests.chaos.redis_servers import cluster, sentinels
from tests.chaos.test_failover import Load
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)
SETTINGS = {"worker_ttl": 5.0}


@contextmanager
def under_load(database_url: str, redis_url: str, folder: Path) -> Iterator[tuple[Stack, Load]]:
    """Yield a stack under load; check at the end that every task ran once."""
    with fresh_stack(database_url, redis_url, folder, **SETTINGS) as stack, steady_load(stack) as load:
        yield stack, load


@contextmanager
def steady_load(stack: Stack, schema: str = "orchestrator", shards: int = 1) -> Iterator[Load]:
    """Keep processes under load within the block."""
    stack.scheduler()
    stack.worker(processes=shards)
    load = Load(stack, stack.folder / "starts", schema)
    with load.running():
        yield load
    ends = f'SELECT status, losses, count(*) FROM "{schema}".ended_tasks GROUP BY 1, 2'
    assert stack.sql(ends) == [("success", 0, load.count + load.others)]
    assert len(load.starts()) == load.count, "each ran once"
    assert all(process.is_running() for process in stack.processes)


def test_tasks_survive_a_slot_migration_and_a_node_failure(database_url: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as servers, under_load(database_url, servers.url, tmp_path) as (stack, load):
        first = servers.owners[0]
        for _ in range(2):  # to another node, and back to the node with the replica
            servers.move_slot()
            load.wait_for_starts()
        assert servers.owners == [first]
        first.kill()
        load.wait_for_starts()
        assert servers.replica.info("replication")["role"] == "master"
        assert "redis" in stack.output_of("status")


def check_shared_features(stack: Stack, load: Load) -> None:
    """Check that logs, progress and live changes of tasks arrive from every shard."""
    go = stack.folder / "go"
    go.touch()
    follower = Follower(connect(stack.settings.require_redis()), Keys.of(stack.settings))
    follower.begin()
    generations: set[str] = set()

    def all_shards_published() -> bool:
        generations.update(entry.changes.generation for entry in follower.wait().entries if entry.changes.tasks)
        return len(generations) == stack.settings.shards

    eventually(all_shards_published, "changes of all shards are published")
    handles = [
        project.narrates.enqueue(str(go)) for _ in range(30)
    ]  # shards are chosen by hash: twelve tasks missed a shard once in forty runs
    load.others += len(handles)
    for handle in handles:
        handle.result(timeout=60)
        eventually(handle.logs, "its lines are stored")
    assert any(handle.progress() for handle in handles), "some may be lost with a connection"
    places = f'SELECT count(DISTINCT shard) FROM "{stack.settings.root}".places WHERE id = ANY(:ids)'
    assert stack.scalar(places, ids=[UUID(handle.id) for handle in handles]) == stack.settings.shards


def test_shards_survive_slot_migrations_and_a_node_failure(database_url: str, tmp_path: Path) -> None:
    """Shards 0, 1 and 2 of the namespace are on three nodes."""
    namespaces = ("apart", "apart/1", "apart/2")
    with cluster(tmp_path, *namespaces) as servers:
        assert len({*map(id, servers.owners)}) == 3
        with sharded_stack(database_url, servers.url, tmp_path, "apart", 3, **SETTINGS) as stack:
            with steady_load(stack, "apart/all", 3) as load:
                for index in (1, 2, 1, 0):
                    servers.move_slot(index)
                    load.wait_for_starts()
                check_shared_features(stack, load)
                servers.move_slot()
                servers.owners[0].kill()
                load.wait_for_starts()
                promoted = lambda: servers.replica.info("replication")["role"] == "master"  # noqa: E731
                eventually(promoted, "the replica is promoted; other shards have gone on meanwhile")
                load.wait_for_starts()
            assert all(stack.scalar(f'SELECT count(*) FROM "{one}".ended_tasks') for one in namespaces)
            assert "redis" in stack.output_of("status")


def test_status_and_doctor_check_the_redis_of_every_shard(database_url: str, tmp_path: Path) -> None:
    with (
        cluster(tmp_path, "apart", "apart/1", "apart/2") as servers,
        sharded_stack(database_url, servers.url, tmp_path, "apart", 3, **SETTINGS) as stack,
    ):
        assert len({*map(id, servers.owners)}) == 3
        stack.scheduler()
        stack.scheduler()

        def levels() -> dict[str, str]:
            return {
                one["check"]: one["level"] for one in json.loads(stack.command("doctor", "--json").stdout)["checks"]
            }

        def has_standby() -> bool:
            return bool(json.loads(stack.output_of("status", "--json"))["standbys"])

        eventually(has_standby, "a scheduler that stands by is seen", every=0.5)
        status = stack.output_of("status")
        assert "MB used" in status
        assert "Redis cannot be reached" not in status
        found = levels()
        assert (found["redis"], found["scheduler"]) == ("ok", "ok")
        assert "redis away" not in found
        servers.owners[2]("SET", Keys("apart/2").quarantine, "taken")
        servers.owners[0]("SET", Keys("apart").services, "taken")
        taken = {one["key"] for one in json.loads(stack.output_of("status", "--json"))["redis"]["foreign_keys"]}
        assert taken == {Keys("apart/2").quarantine, Keys("apart").services}
        servers.owners[1].kill()
        found = levels()
        assert (found["redis"], found["redis away"]) == ("fail", "fail")
        assert "Redis cannot be reached" in stack.output_of("status")


def test_tasks_survive_a_sentinel_failover(database_url: str, tmp_path: Path) -> None:
    with sentinels(tmp_path) as servers, under_load(database_url, servers.url, tmp_path) as (stack, load):
        servers.sentinels[0].kill()
        servers.master.kill()
        load.wait_for_starts()
        assert servers.replica.info("replication")["role"] == "master"
        assert "redis" in stack.output_of("status")
