"""Real workers of two versions of an application, on the same queue: a rolling deploy that takes its time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import Orchestrator, WorkflowContext, WorkflowHandle
from orchestrator.sdk.code.workflow import CodeWorkflow
from tests.acceptance.stack import Process, Stack
from tests.waiting import eventually

COMMON = """
import time
from pathlib import Path

from orchestrator import Orchestrator, WorkflowContext

app = Orchestrator()


@app.task(name="common")
def common(number: int) -> str:
    return VERSION


@app.task(name="hold")
def hold(until: str) -> None:
    while not Path(until).exists():
        time.sleep(0.05)
"""
ONE = f"""
VERSION = "one"
{COMMON}

@app.workflow(name="order", version=1)
async def order(ctx: WorkflowContext) -> str:
    await common.schedule(1)
    await ctx.promise("approval")
    return VERSION
"""
TWO = f"""
VERSION = "two"
{COMMON}

@app.task(name="fresh")
def fresh(number: int) -> str:
    return VERSION


@app.workflow(name="order", version=2)
async def order(ctx: WorkflowContext) -> str:
    await fresh.schedule(1)
    await common.schedule(1)
    return VERSION
"""


@pytest.fixture
def settings() -> dict[str, float]:
    return {"worker_ttl": 3.0, "lease": 3.0}


class Deploy:
    """Two releases of an application, and a client that knows what both of them have."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack = stack
        for name, text in (("one", ONE), ("two", TWO)):
            (folder / name).mkdir()
            (folder / name / "project.py").write_text(text, encoding="utf-8")
        self._folder = folder
        self.app = Orchestrator(stack.settings)
        for name in ("common", "fresh", "hold"):
            self.app.task(name=name)(lambda argument: str(argument))

        @self.app.workflow(name="order", version=1)
        async def order(ctx: WorkflowContext) -> str:
            return ""

        self.order: CodeWorkflow[..., str] = order

    def worker(self, version: str, *options: str, processes: int = 1) -> Process:
        return self.stack.worker(*options, processes=processes, folder=self._folder / version)

    def waiting(self, count: int) -> list[WorkflowHandle[Any]]:
        """Start runs of version one, and wait until all of them wait for a person."""
        handles = [self.order.start() for _ in range(count)]
        promises = "SELECT count(*) FROM orchestrator.promises"
        eventually(lambda: self.stack.scalar(promises) == count, "all runs wait for a person")
        return handles


@pytest.fixture
def deploy(stack: Stack, tmp_path: Path) -> Iterator[Deploy]:
    stack.scheduler()
    found = Deploy(stack, tmp_path)
    yield found
    found.app.close()


def test_tasks_that_half_of_the_workers_know_do_not_go_round(deploy: Deploy) -> None:
    deploy.worker("one", processes=2)
    deploy.worker("two")
    fresh = deploy.app.enqueue_many(deploy.app.tasks["fresh"], [(number,) for number in range(3_000)])
    common = deploy.app.enqueue_many(deploy.app.tasks["common"], [(number,) for number in range(300)])
    for handle in (*common, *fresh):
        handle.result(90)
    attempts = "SELECT max(attempt), sum(attempt) FROM orchestrator.ended_tasks WHERE name = 'fresh'"
    most, all_ = deploy.stack.sql(attempts)[0]
    assert int(str(most)) <= 5
    assert int(str(all_)) <= 2 * len(fresh)
    assert {handle.result(0) for handle in fresh} == {"two"}


@pytest.mark.long
def test_a_task_waits_at_the_worker_that_knows_it_and_leaves_when_another_has_room(
    deploy: Deploy, tmp_path: Path
) -> None:
    """Before, it was handed back and sent there again about every second for as long as that worker was busy."""
    stack, done = deploy.stack, tmp_path / "done"
    deploy.worker("two", "--concurrency", "1")
    held = deploy.app.enqueue("hold", str(done))
    eventually(lambda: held.status() == "running", "its only slot is taken")
    deploy.worker("one", "--concurrency", "4")
    fresh = deploy.app.tasks["fresh"].enqueue(1)
    eventually(lambda: fresh.status() == "dispatched", "it was sent to the busy worker")
    common = deploy.app.enqueue_many(deploy.app.tasks["common"], [(number,) for number in range(2_000)])
    assert {handle.result(60) for handle in common} == {"one"}
    deploy.worker("two", "--concurrency", "1")
    assert fresh.result(60) == "two"
    assert held.status() == "running"
    most = stack.scalar("SELECT max(attempt) FROM orchestrator.ended_tasks WHERE name = 'fresh'")
    assert int(str(most)) <= 4
    done.touch()
    held.result(60)


def test_runs_go_on_with_the_version_that_they_began_with(deploy: Deploy) -> None:
    victim = deploy.worker("one")
    handles = deploy.waiting(20)
    deploy.worker("two", processes=2)
    deploy.worker("one")
    victim.kill()  # so that nobody has the runs in memory any more
    for handle in handles:
        handle.resolve("approval")
    assert {handle.result(60) for handle in handles} == {"one"}


def test_a_stuck_run_frees_itself_when_its_version_is_back(deploy: Deploy) -> None:
    old = deploy.worker("one")
    (handle,) = deploy.waiting(1)
    deploy.worker("two")
    assert old.stop() == 0
    handle.resolve("approval")
    eventually(lambda: handle.status() == "stuck", "the other version's code does not fit")
    deploy.worker("one")
    assert handle.result(60) == "one"
