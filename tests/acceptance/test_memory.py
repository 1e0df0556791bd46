"""The memory of a scheduler, a worker and its processes, and modules that a worker process does not load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import weighing

from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Process, Stack, using

NOT_LOADED = {
    "sqlalchemy",
    "psycopg2",
    "psycopg",
    "alembic",
    "croniter",
    "dateutil",
    "starlette",
    "uvicorn",
    "jinja2",
} | {
    "orchestrator.store",
    "orchestrator.scheduler",
    "orchestrator.api",
}
"""Modules that a worker process does not load, unless the application does."""
MOST = {"scheduler": 62.0, "parent": 24.0, "process": 32.0}
"""Megabytes, each process with its part of shared memory (PSS): a fifth more than docs/performance.md has."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux says what is shared")


@pytest.fixture(scope="module")
def stack(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack, using(weighing.app, stack):
        stack.environment["PYTHONHASHSEED"] = "0"  # so that the processes are separate programs, and not forks of one
        yield stack


@pytest.fixture(scope="module")
def scheduler(stack: Stack) -> Process:
    return stack.scheduler()


@pytest.fixture(scope="module")
def worker(stack: Stack, scheduler: Process) -> Process:
    return stack.worker("--app", "weighing:app", processes=2)


def processes(worker: Process) -> list[psutil.Process]:
    return list(psutil.Process(worker.pid).children())


def megabytes(process: psutil.Process, kind: str = "pss") -> float:
    return float(getattr(process.memory_full_info(), kind)) / 1e6


@pytest.mark.usefixtures("worker")
def test_a_worker_process_loads_no_unneeded_modules() -> None:
    names = weighing.loaded.enqueue().result(60)
    assert {name for name in names if name in NOT_LOADED} == set()


def test_processes_share_most_memory_after_garbage_collections(worker: Process) -> None:
    """A garbage collection writes to each tracked object, and so would copy what was loaded before the fork."""
    found = processes(worker)
    collected: set[int] = set()
    while collected != {process.pid for process in found}:
        collected |= {handle.result(60) for handle in weighing.app.enqueue_many(weighing.collect, [()] * 20)}
    assert max(megabytes(process, "uss") / megabytes(process, "rss") for process in found) < 0.5


def test_each_process_stays_within_its_memory_limit(scheduler: Process, worker: Process) -> None:
    for handle in weighing.app.enqueue_many(weighing.noop, [(number,) for number in range(5_000)]):
        handle.result(60)
    assert megabytes(psutil.Process(scheduler.pid)) < MOST["scheduler"]
    assert megabytes(psutil.Process(worker.pid)) < MOST["parent"]
    assert max(map(megabytes, processes(worker))) < MOST["process"]
