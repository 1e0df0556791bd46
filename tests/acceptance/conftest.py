"""Stacks of real processes on empty tables and an empty Redis. All processes are stopped after the test."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.stack import HERE, Stack, stop, using
from tests.acceptance.ways import Way, use_route

sys.path.insert(0, str(HERE))  # as workers import it: `project` is a top-level module

import project
import sharing

from orchestrator.store import shards
from tests.emptying import empty

__all__ = [
    "fresh_stack",
    "leading",
    "life",
    "project",
    "running",
    "settings",
    "sharded",
    "sharded_stack",
    "stack",
    "way",
]

SHARDS = 2


@pytest.fixture
def settings() -> dict[str, float]:
    """Settings that differ from the defaults; tests override this fixture."""
    return {}


@pytest.fixture(scope="module")
def way() -> Way:
    """How programs reach the orchestrator, unless a module runs over both routes."""
    return "database"


@contextmanager
def fresh_stack(database_url: str, redis_url: str, folder: Path, **settings: float | str) -> Iterator[Stack]:
    """Yield a stack without processes, and stop all processes that a test has started."""
    stack = Stack(database_url, redis_url, folder, **settings)
    stack.redis.flushall()
    with stack.engine.connect() as connection:
        empty(connection)
    with using(project.app, stack):
        try:
            yield stack
        finally:
            stack.close()


@pytest.fixture
def stack(database_url: str, redis_url: str, tmp_path: Path, settings: dict[str, float]) -> Iterator[Stack]:
    """A stack without processes."""
    with fresh_stack(database_url, redis_url, tmp_path, **settings) as stack:
        yield stack


@pytest.fixture(scope="module")
def leading(
    request: pytest.FixtureRequest,
    way: Way,
    database_url: str,
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """A stack with a scheduler, shared by a module that defines `application`, and optionally `SETTINGS`."""
    folder, settings = tmp_path_factory.mktemp("stack"), getattr(request.module, "SETTINGS", {})
    with (
        fresh_stack(database_url, redis_url, folder, **settings) as stack,
        using(request.module.application, stack),
    ):
        stack.scheduler()
        use_route(way, stack, project.app, request.module.application)
        yield stack


@pytest.fixture
def life(leading: Stack) -> Iterator[Stack]:
    """The stack of `leading`, for a test with its own workers; they are stopped after the test."""
    before = len(leading.processes)
    yield leading
    stop(*leading.processes[before:])


@pytest.fixture(scope="module")
def running(way: Way, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with a scheduler and a worker of two processes, shared by tests that do not disturb each other."""
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.worker(processes=2)
        use_route(way, stack, project.app)
        yield stack


@pytest.fixture
def sharded(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Stack]:
    """A stack with two shards in a namespace of its own, without processes."""
    with sharded_stack(database_url, redis_url, tmp_path, f"shards_{uuid.uuid4().hex[:8]}", SHARDS) as stack:
        yield stack


@contextmanager
def sharded_stack(
    database_url: str, redis_url: str, folder: Path, namespace: str, number: int, **settings: float | str
) -> Iterator[Stack]:
    """Yield a stack with several shards, without processes, and drop its schemas afterwards."""
    stack = Stack(database_url, redis_url, folder, namespace=namespace, shards=number, **settings)
    shards.upgrade(stack.settings)
    with using(project.app, stack), using(sharing.app, stack):
        try:
            yield stack
        finally:
            stack.close()
            for schema in ("all", *range(1, 4)):
                stack.execute_sql(f'DROP SCHEMA IF EXISTS "{namespace}/{schema}" CASCADE')
            stack.execute_sql(f'DROP SCHEMA IF EXISTS "{namespace}" CASCADE')
