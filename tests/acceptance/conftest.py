"""Stacks of real processes on empty tables and an empty Redis; everything is stopped afterwards."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.stack import HERE, Stack, stop, using
from tests.acceptance.ways import Way, take

sys.path.insert(0, str(HERE))  # as the workers see it: `project` is a top-level module

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
    """Settings that differ from the defaults; a test overrides this."""
    return {}


@pytest.fixture(scope="module")
def way() -> Way:
    """How programs reach the orchestrator, unless a module takes both ways."""
    return "database"


@contextmanager
def fresh_stack(database_url: str, redis_url: str, folder: Path, **settings: float | str) -> Iterator[Stack]:
    """Yield services without processes, and stop whatever a test has started."""
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
    """Services without processes."""
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
    """A scheduler for all tests of a module, which says for which `application` and with which `SETTINGS`."""
    folder, settings = tmp_path_factory.mktemp("stack"), getattr(request.module, "SETTINGS", {})
    with (
        fresh_stack(database_url, redis_url, folder, **settings) as stack,
        using(request.module.application, stack),
    ):
        stack.scheduler()
        take(way, stack, project.app, request.module.application)
        yield stack


@pytest.fixture
def life(leading: Stack) -> Iterator[Stack]:
    """The same, for a test that brings its own workers; they are stopped after it."""
    before = len(leading.processes)
    yield leading
    stop(*leading.processes[before:])


@pytest.fixture(scope="module")
def running(way: Way, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A scheduler and a worker of two processes, for all tests of a module that disturb nothing."""
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.worker(processes=2)
        take(way, stack, project.app)
        yield stack


@pytest.fixture
def sharded(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Stack]:
    """Two shards in a namespace of their own, without processes."""
    with sharded_stack(database_url, redis_url, tmp_path, f"shards_{uuid.uuid4().hex[:8]}", SHARDS) as stack:
        yield stack


@contextmanager
def sharded_stack(
    database_url: str, redis_url: str, folder: Path, namespace: str, number: int, **settings: float | str
) -> Iterator[Stack]:
    """Yield services with so many shards, without processes, and remove what a test has left."""
    stack = Stack(database_url, redis_url, folder, namespace=namespace, shards=number, **settings)
    shards.upgrade(stack.settings)
    with using(project.app, stack), using(sharing.app, stack):
        try:
            yield stack
        finally:
            stack.close()
            for schema in ("all", *range(1, 4)):
                stack.sql_of(f'DROP SCHEMA IF EXISTS "{namespace}/{schema}" CASCADE')
            stack.sql_of(f'DROP SCHEMA IF EXISTS "{namespace}" CASCADE')
