"""A payload store that is unreachable, that some workers lack, or that outsiders may read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import storing

from orchestrator import Unavailable
from orchestrator.scheduler.upkeep import PayloadCollection
from tests.acceptance.stack import Stack
from tests.acceptance.storehouse import DATA_KEY, LARGE, WORKER, objects, start, storing_stack
from tests.waiting import eventually


@pytest.fixture
def stack(database_url: str, redis_url: str, tmp_path: Path, settings: dict[str, Any]) -> Iterator[Stack]:
    """Services without processes."""
    with storing_stack(database_url, redis_url, tmp_path, **settings) as stack:
        yield stack


def test_payloads_within_the_grace_period_are_not_collected(stack: Stack) -> None:
    handle = storing.length.enqueue(LARGE)
    stack.sql("DELETE FROM orchestrator.tasks RETURNING 1")
    by = PayloadCollection(stack.engine, stack.settings, threading.Event())
    with stack.engine.connect() as connection:
        assert list(by.steps(connection)) == []
    assert len(objects(stack)) == 1, handle


@pytest.mark.parametrize("is_mount_point", [False, True])
def test_an_outage_of_the_store_counts_as_no_failure(stack: Stack, is_mount_point: bool) -> None:
    stack.scheduler()
    handle, asynchronous = storing.echo.enqueue(LARGE), storing.echo_async.enqueue(LARGE)
    root = Path(stack.settings.payload_store)
    away = root.with_name("away")
    root.rename(away)
    if is_mount_point:
        (root / stack.settings.namespace).mkdir(parents=True)
    worker = stack.worker(*WORKER)
    eventually(lambda: worker.logged("task.returned"), "it is handed back")
    tried = "SELECT 1 FROM orchestrator.tasks WHERE attempt > 1"
    eventually(lambda: len(stack.sql(tried)) == 2, "both are tried again")
    if is_mount_point:
        root.rename(root.with_name("bare"))
    away.rename(root)
    assert handle.result(60) == LARGE
    assert asynchronous.result(60) == LARGE
    assert stack.scalar("SELECT max(failures) FROM orchestrator.ended_tasks") == 0


@pytest.mark.long
def test_an_outage_of_the_store_fails_no_workflow(stack: Stack) -> None:
    stack.scheduler()
    first = stack.worker(*WORKER)
    courier = storing.courier.start(LARGE, 0)
    shown = "SELECT 1 FROM orchestrator.runs WHERE shown > 0"
    eventually(lambda: stack.sql(shown), "its code waits for a signal", 60)
    first.kill()
    courier.signal("told", LARGE)
    root = Path(stack.settings.payload_store)
    away = root.with_name("away")
    root.rename(away)
    worker = stack.worker(*WORKER)
    eventually(lambda: worker.logged("task.returned"), "it is handed back", 60)
    away.rename(root)
    assert courier.result(60) == f"{LARGE}op{LARGE}"
    assert stack.scalar("SELECT max(failures) FROM orchestrator.ended_tasks") == 0


def test_a_client_gets_an_error_and_enqueues_nothing_during_an_outage(stack: Stack) -> None:
    Path(stack.settings.payload_store).touch()
    for call in (storing.length.enqueue, storing.porter.start):
        with pytest.raises(Unavailable, match="The payload store .* cannot be used: .*Not a directory"):
            call(LARGE)
    assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 0


def test_a_worker_without_a_store_gets_no_stored_payloads(stack: Stack) -> None:
    stack.scheduler()
    has_store, stack.environment = stack.environment, {**stack.environment}
    del stack.environment["ORCHESTRATOR_PAYLOAD_STORE"]
    stack.worker(*WORKER)
    small, large = storing.length.enqueue("abc"), storing.length.enqueue(LARGE)
    assert small.result(60) == 3
    held = "SELECT hold FROM orchestrator.tasks"
    eventually(lambda: stack.sql(held) == [("no data key: @payload-store",)], "it is kept back")
    obstacles = storing.app._client.backend.tasks.obstacles
    eventually(lambda: "(setting payload_store)" in str(obstacles(large._id)), "it is said what it waits for")
    stack.environment = has_store
    stack.worker(*WORKER)
    assert large.result(60) == len(LARGE)
    assert storing.app.start_many(storing.length, [(LARGE,)] * 20).results(60) == [len(LARGE)] * 20
    assert stack.scalar("SELECT max(attempt) FROM orchestrator.ended_tasks WHERE run_id IS NOT NULL") < 100


@pytest.mark.parametrize("settings", [{"data_keys": DATA_KEY}])
def test_stored_payloads_are_sealed(stack: Stack) -> None:
    start(stack)
    assert storing.echo.enqueue(LARGE).result(60) == LARGE
    assert storing.app.start_many(storing.length, [(LARGE,)]).results(60) == [len(LARGE)]
    courier = storing.courier.starting(id="one", signal=("told", LARGE)).start(LARGE, 1)
    assert courier.result(60) == f"{LARGE}nop{LARGE}"
    assert len(objects(stack)) == 3 + 9
    for path in objects(stack):
        assert b"secret" not in path.read_bytes()
