"""The leader forgets what has ended."""

from __future__ import annotations

import gc
import tracemalloc

from orchestrator import Retry, Workflow
from tests.integration.stage import System

ALLOWED = 100_000
"""Bytes that caches and free lists may use; a leak of one small object per task would exceed them."""


def in_use() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_thousands_of_tasks_leave_nothing_behind_in_the_leader(system: System) -> None:
    job = system.job.options(retries=Retry(max=3, base=0.001))
    mail = system.app.task(name="mail", concurrency=2, concurrency_key=lambda customer: customer)(
        lambda customer: customer
    )
    worker = system.worker(knows=["job", "mail"], slots=200)
    system.settle()

    def work(rounds: int) -> None:
        for number in range(rounds):
            system.app.enqueue_many(job, [(place,) for place in range(100)])
            system.app.enqueue_many(mail, [(f"{number}-{place}",) for place in range(20)])
            system.pass_seconds()
            for _ in range(4):
                tasks = worker.take()
                worker.fail(*tasks[:5])
                worker.succeed(*tasks[5:])
                system.tick()

    tracemalloc.start()
    try:
        work(10)
        before = in_use()
        work(20)
        assert in_use() - before < ALLOWED
    finally:
        tracemalloc.stop()


def test_runs_that_ended_and_versions_that_nobody_runs_leave_nothing_behind(system: System) -> None:
    """A plan of these takes some 40 kB, and a definition more than half a megabyte."""
    worker = system.worker(slots=10)
    system.settle()

    def work(versions: range) -> None:
        for version in versions:
            flow = Workflow("wide", tags=[f"v{version}"])
            first = flow.task("first", system.job)
            for number in range(150):
                flow.task(f"s{number}", system.job, depends_on=[first], when="${false}")
            system.app.workflows.apply(flow)
            runs = [system.app.workflows["wide"].start() for _ in range(4)]
            system.pass_seconds()
            worker.succeed(*worker.take())
            system.pass_seconds()
            assert [run.progress().status for run in runs] == ["success"] * 4

    work(range(1))
    tracemalloc.start()
    try:
        system.scheduler.term.dags._compiled._max_weight = 300
        work(range(1, 4))
        before = in_use()
        work(range(4, 9))
        assert in_use() - before < ALLOWED
    finally:
        tracemalloc.stop()
