"""Stacks with a payload store, and helpers to inspect the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import storing

from orchestrator.payloads import keeping
from orchestrator.payloads.stores import MARK
from orchestrator.scheduler.upkeep import PayloadCollection
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack, using

WORKER = ("--app", "storing:app")
LARGE = "large and secret " * 10_000
DATA_KEY = "first:MTExMTExMTExMTExMTExMTExMTExMTExMTExMTExMTE="


@contextmanager
def storing_stack(database_url: str, redis_url: str, folder: Path, **settings: Any) -> Iterator[Stack]:
    """Yield a stack without processes, with a payload store in a folder."""
    keeping._openers.clear()  # drop the stores of earlier tests
    keeping._known.clear()
    all_settings: dict[str, Any] = {"payload_store": str(folder / "payloads"), "unknown_task_timeout": 60.0} | settings
    with fresh_stack(database_url, redis_url, folder, **all_settings) as stack, using(storing.app, stack):
        yield stack


def objects(stack: Stack) -> list[Path]:
    return [path for path in Path(stack.settings.payload_store).rglob("*") if path.is_file() and path.name != MARK]


def collect(stack: Stack, **settings: Any) -> None:
    """Run one payload collection as the leader does, without a grace period."""
    collection = PayloadCollection(
        stack.engine, replace(stack.settings, payload_grace=1e-9, **settings), threading.Event()
    )
    with stack.engine.connect() as connection:
        for _ in collection.steps(connection):
            pass


def start(stack: Stack) -> None:
    stack.scheduler()
    stack.worker(*WORKER)


def largest_rows(stack: Stack) -> int:
    return int(
        stack.scalar("""
        SELECT max(size) FROM (
            SELECT max(length(payload) + coalesce(length(result), 0)) AS size FROM orchestrator.ended_tasks
            UNION ALL SELECT max(length(data)) FROM orchestrator.histories) AS sizes""")
    )
