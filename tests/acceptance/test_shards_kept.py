"""Pages, retention, deletion and key rotation with two and with four shards."""

from __future__ import annotations

import base64
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import project
import pytest
import sharing
import storing

from orchestrator.payloads import keeping
from orchestrator.scheduler.process import _engine_of_all_shards
from orchestrator.scheduler.upkeep import PayloadCollection
from orchestrator.sdk.dag.definitions import loads
from orchestrator.store import shards
from tests.acceptance.stack import Stack, using
from tests.acceptance.storehouse import LARGE, objects
from tests.waiting import eventually

FIRST, SECOND = (f"{name}:{base64.b64encode(name[0].encode() * 32).decode()}" for name in ("first", "second"))
DAG = """
name: steps
tasks:
  one: {task: sharing.fails_or_not, input: {fails: false}}
  two: {task: sharing.fails_or_not, depends_on: [one], input: {fails: false}}
"""
Making = Callable[..., AbstractContextManager[Stack]]


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.long)])
def making(request: pytest.FixtureRequest, database_url: str, redis_url: str, tmp_path: Path) -> Making:
    """A function that starts processes on several shards, in a namespace of their own."""

    @contextmanager
    def make(*worker: str, **settings: Any) -> Iterator[Stack]:
        namespace = f"kept_{uuid.uuid4().hex[:8]}"
        stack = Stack(database_url, redis_url, tmp_path, namespace=namespace, shards=request.param, **settings)
        shards.upgrade(stack.settings)
        with using(project.app, stack), using(sharing.app, stack), using(storing.app, stack):
            try:
                stack.scheduler()
                if worker:
                    stack.worker(*worker, processes=request.param)
                yield stack
            finally:
                stack.close()
                for number in ("all", *range(1, request.param)):
                    stack.execute_sql(f'DROP SCHEMA IF EXISTS "{namespace}/{number}" CASCADE')
                stack.execute_sql(f'DROP SCHEMA IF EXISTS "{namespace}" CASCADE')

    return make


def per_shard(stack: Stack, table: str) -> list[int]:
    schemas = [stack.settings.of_shard(number).namespace for number in range(stack.settings.shards)]
    return [stack.scalar(f'SELECT count(*) FROM "{schema}".{table}') for schema in schemas]


def test_every_page_of_the_dashboard_shows_all_shards(making: Making) -> None:
    with making("--app", "sharing:app") as stack:
        sharing.app.workflows.apply(loads(DAG))
        stack.output_of("queues", "pause", "default")
        runs = [sharing.app.workflows["steps"].start() for _ in range(8 * stack.settings.shards)]
        tasks = [sharing.fails_or_not.enqueue(fails=number % 2 > 0) for number in range(8 * stack.settings.shards)]
        waiting = [sharing.listens.start() for _ in range(3 * stack.settings.shards)]
        stack.output_of("queues", "resume", "default")
        for run in runs:
            assert run.wait_ended(120) == "success"
        eventually(lambda: all(task.status() in ("success", "failed") for task in tasks), "all have ended")
        assert min(per_shard(stack, "runs")) > 0
        assert min(per_shard(stack, "ended_tasks")) > 0
        seen = crawl(stack.api(), [f"/ui/tasks/{task.id}" for task in tasks] + [f"/ui/runs/{run.id}" for run in runs])
        for page in ("queues", "tasks", "runs", "workers", "failures", "workflows", "schedules", "approvals", "audit"):
            assert f"/ui/{page}" in seen
        assert {task.id for task in tasks} <= set(re.findall(r"/ui/tasks/([-\w]+)", " ".join(seen.values())))
        assert {run.id for run in (*runs, *waiting)} <= set(re.findall(r"/ui/runs/([-\w]+)", " ".join(seen.values())))
        failed = sum(number % 2 for number in range(len(tasks)))
        assert f"{failed}" in seen["/ui/failures"]


def crawl(address: str, paths: list[str]) -> dict[str, str]:
    """Read these pages and all pages that they link to; return them by path."""
    seen: dict[str, str] = {}
    left = ["/ui", *paths]
    with httpx.Client(base_url=address, timeout=30.0, follow_redirects=True) as browser:
        while left and len(seen) < 250:
            path = left.pop(0)
            if path.partition("?")[0] in seen:
                continue
            answer = browser.get(path)
            assert answer.status_code == 200, (path, answer.text)
            seen[path.partition("?")[0]] = answer.text
            left += re.findall(r'href="(/ui[^"#]*)"', answer.text.replace("&amp;", "&"))
    return seen


def test_deletion_and_retention_cover_every_shard(making: Making) -> None:
    with making("--app", "sharing:app", retention_success=60.0) as stack:
        sharing.app.workflows.apply(loads(DAG))
        runs = [sharing.app.workflows["steps"].start() for _ in range(6 * stack.settings.shards)]
        for run in runs:
            assert run.wait_ended(120) == "success"
        deleted = runs[: 3 * stack.settings.shards]
        stack.output_of("runs", "delete", "--yes", *(run.id for run in deleted))
        left = len(runs) - len(deleted)
        eventually(lambda: sum(per_shard(stack, "runs")) == left, "they are deleted")
        eventually(lambda: sum(per_shard(stack, "ended_tasks")) == 2 * left, "and so are their tasks")
        single = [sharing.fails_or_not.enqueue(fails=False) for _ in range(4 * stack.settings.shards)]
        for task in single:
            task.result(timeout=60)
        assert min(per_shard(stack, "ended_tasks")) > 0
        for number in range(stack.settings.shards):
            for table in ("runs", "ended_tasks"):
                schema = stack.settings.of_shard(number).namespace
                stack.execute_sql(f"UPDATE \"{schema}\".{table} SET ended_at = now() - interval '2 hours'")
        eventually(lambda: sum(per_shard(stack, "runs")) == 0, "old runs are forgotten", timeout=60)
        eventually(lambda: sum(per_shard(stack, "ended_tasks")) == 0, "old tasks are forgotten", timeout=60)
        assert json.loads(stack.output_of("runs", "list", "--json"))["runs"] == []


def test_payloads_of_every_shard_are_kept_while_in_use(making: Making, tmp_path: Path) -> None:
    keeping._openers.clear()  # stores of other tests
    keeping._known.clear()
    with making("--app", "storing:app", payload_store=str(tmp_path / "payloads")) as stack:
        handles = [storing.echo.enqueue(f"{LARGE}{number}") for number in range(5 * stack.settings.shards)]
        for number, handle in enumerate(handles):
            assert handle.result(timeout=60) == f"{LARGE}{number}"
        assert min(per_shard(stack, "ended_tasks")) > 0
        stored = len(objects(stack))
        assert stored >= 2 * len(handles)
        collect(stack)
        assert len(objects(stack)) == stored
        assert [storing.app.handle(handle.id).result(60) for handle in handles][3] == f"{LARGE}3"
        last = stack.settings.of_shard(stack.settings.shards - 1).namespace
        kept = sum(per_shard(stack, "ended_tasks")[:-1])
        stack.execute_sql(f'DELETE FROM "{last}".ended_tasks')
        collect(stack)
        assert len(objects(stack)) == 2 * kept


def collect(stack: Stack) -> None:
    """Run one payload collection, as the leader of the first shard does, without a grace period."""
    engine = _engine_of_all_shards(stack.settings)
    assert engine is not None
    by = PayloadCollection(engine, replace(stack.settings, payload_grace=1e-9), threading.Event())
    with engine.connect() as connection:
        for _ in by.steps(connection):
            pass
    engine.dispose()


def test_key_rotation_covers_every_shard(making: Making) -> None:
    with making(data_keys=FIRST) as stack:
        later = [storing.echo.options(delay=3600.0).enqueue(f"word {number}") for number in range(30)]
        assert min(per_shard(stack, "tasks")) > 0
        stack.environment["ORCHESTRATOR_DATA_KEYS"] = f"{SECOND},{FIRST}"
        assert "Sealed 30 values with key second." in stack.output_of("keys", "rotate-data")
        assert "Sealed 0 values" in stack.output_of("keys", "rotate-data")
        stack.environment["ORCHESTRATOR_DATA_KEYS"] = SECOND
        for handle in later:
            assert "word" in stack.output_of("tasks", "show", handle.id)
