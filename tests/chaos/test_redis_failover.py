"""A Redis Cluster whose slots move and whose nodes die, and a master that Sentinels replace: under load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack
from tests.chaos.redis_servers import cluster, sentinels
from tests.chaos.test_failover import Load

pytestmark = pytest.mark.timeout(400)
SETTINGS = {"worker_ttl": 5.0}


@contextmanager
def under_load(database_url: str, redis_url: str, folder: Path) -> Iterator[tuple[Stack, Load]]:
    """Yield a stack that is busy; in the end everything has run, once."""
    with fresh_stack(database_url, redis_url, folder, **SETTINGS) as stack:
        stack.scheduler()
        stack.worker()
        load = Load(stack, folder / "starts")
        with load.running():
            yield stack, load
        ends = "SELECT status, losses, count(*) FROM orchestrator.ended_tasks GROUP BY 1, 2"
        assert stack.sql(ends) == [("success", 0, load.count)]
        assert len(load.starts()) == load.count, "each ran once"
        assert all(process.is_running() for process in stack.processes)


def test_a_slot_moves_and_its_node_dies(database_url: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as servers, under_load(database_url, servers.url, tmp_path) as (stack, load):
        first = servers.owner
        for _ in range(2):  # away, and back to the one that has the replica
            servers.move_slot()
            load.wait_for_starts()
        assert servers.owner is first
        first.kill()
        load.wait_for_starts()
        assert servers.replica.info("replication")["role"] == "master"
        assert "redis" in stack.told("status")


def test_sentinels_promote_a_replica(database_url: str, tmp_path: Path) -> None:
    with sentinels(tmp_path) as servers, under_load(database_url, servers.url, tmp_path) as (stack, load):
        servers.sentinels[0].kill()
        servers.master.kill()
        load.wait_for_starts()
        assert servers.replica.info("replication")["role"] == "master"
        assert "redis" in stack.told("status")
