"""Several leaders, with real processes: every task runs once wherever it is placed, and people see one system."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import project
import pytest

from orchestrator.store import shards
from tests.acceptance.stack import Stack, using
from tests.waiting import eventually

SHARDS = 2


@pytest.fixture
def sharded(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Stack]:
    """Two shards in a namespace of their own, without processes."""
    namespace = f"shards_{uuid.uuid4().hex[:8]}"
    stack = Stack(database_url, redis_url, tmp_path, namespace=namespace, shards=SHARDS)
    shards.upgrade(stack.settings)
    with using(project.app, stack):
        try:
            yield stack
        finally:
            stack.close()
            for schema in ("all", *range(1, 4)):
                stack.sql_of(f'DROP SCHEMA IF EXISTS "{namespace}/{schema}" CASCADE')
            stack.sql_of(f'DROP SCHEMA IF EXISTS "{namespace}" CASCADE')


def per_shard(stack: Stack, table: str) -> list[int]:
    root = stack.settings.root
    schemas = [root, *(f"{root}/{number}" for number in range(1, SHARDS))]
    return [stack.scalar(f'SELECT count(*) FROM "{schema}".{table}') for schema in schemas]


def leaders(stack: Stack) -> list[tuple[int, str]]:
    return [
        (shard, leader)
        for shard, leader in stack.sql(f'SELECT shard, leader FROM "{stack.settings.root}/all".shards ORDER BY shard')
        if leader
    ]


def start(stack: Stack) -> None:
    stack.scheduler()
    stack.worker(processes=SHARDS)
    eventually(lambda: len(leaders(stack)) == SHARDS, "each shard has a leader")


def test_tasks_of_all_shards_are_run_and_seen_as_one(sharded: Stack) -> None:
    start(sharded)
    handles = [project.add.enqueue(number, 1) for number in range(40)]
    assert [handle.result(timeout=60) for handle in handles] == list(range(1, 41))
    many = project.app.enqueue_many(project.add, [(number, 2) for number in range(10)])
    assert [handle.result(timeout=60) for handle in many] == list(range(2, 12))
    assert min(per_shard(sharded, "ended_tasks")) > 5
    assert len(json.loads(sharded.told("tasks", "list", "--limit", "100", "--json"))["tasks"]) == 50
    for handle in handles[:5]:
        assert json.loads(sharded.told("tasks", "show", handle.id, "--json"))["id"] == handle.id
    status = json.loads(sharded.told("status", "--json"))
    assert status["workers"] == SHARDS
    assert status["ended_last_hour"]["success"] == 50


def test_requests_find_the_shard_of_a_task(sharded: Stack) -> None:
    start(sharded)
    later = [project.add.options(delay=3600.0).enqueue(number, 1) for number in range(10)]
    assert min(per_shard(sharded, "tasks")) > 0
    for handle in later:
        handle.cancel()
    eventually(lambda: {handle.status() for handle in later} == {"cancelled"}, "all are cancelled")
    sharded.told("queues", "pause", "default")
    waiting = [project.add.enqueue(number, 1) for number in range(10)]
    sharded.told("queues", "resume", "default")
    assert [handle.result(timeout=60) for handle in waiting] == list(range(1, 11))


def test_a_key_is_unique_in_all_shards(sharded: Stack) -> None:
    start(sharded)
    sharded.told("queues", "pause", "default")
    ids = {project.add.options(unique_key=f"key {number % 5}").enqueue(number, 1).id for number in range(40)}
    assert len(ids) == 5
    sharded.told("queues", "resume", "default")


def test_a_dead_leader_is_replaced_and_nothing_is_lost_or_doubled(sharded: Stack) -> None:
    start(sharded)
    sharded.scheduler()
    log = sharded.folder / "done"
    handles = [project.total.enqueue([number], str(log), str(number)) for number in range(300)]
    for _, leader in leaders(sharded):
        os.kill(int(leader.rpartition(":")[2]), signal.SIGKILL)
    assert [handle.result(timeout=120) for handle in handles] == list(range(300))
    assert Counter(log.read_text().split()) == Counter(map(str, range(300)))


def test_fewer_shards_again(sharded: Stack) -> None:
    start(sharded)
    handles = [project.add.enqueue(number, 1) for number in range(20)]
    assert [handle.result(timeout=60) for handle in handles] == list(range(1, 21))
    for process in sharded.processes:
        assert process.stop() == 0
    less = replace(sharded.settings, shards=1)
    assert any(note.startswith("Shard 1 was empty") for note in shards.upgrade(less))
    sharded.environment["ORCHESTRATOR_SHARDS"] = "1"
    sharded.settings = less
    with using(project.app, sharded):
        sharded.scheduler()
        sharded.worker()
        assert project.add.enqueue(1, 1).result(timeout=60) == 2
        assert [project.app.handle(handle.id).result() for handle in handles] == list(range(1, 21))
