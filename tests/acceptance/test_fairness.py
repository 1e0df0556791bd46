"""Two tenants share one fleet."""

from __future__ import annotations

import time

import project

from orchestrator import gather
from tests.acceptance.stack import Stack
from tests.waiting import eventually


def test_ten_tasks_do_not_wait_for_another_tenants_twenty_thousand(stack: Stack) -> None:
    """The large tenant came first, and is far from done when the small one is."""
    work = project.noop
    project.app.enqueue_many(work.options(concurrency_key="large"), [()] * 20_000)
    stack.scheduler()
    stack.worker(processes=2)
    eventually(
        lambda: stack.scalar("SELECT count(*) FROM orchestrator.ended_tasks") > 500, "the large one is being served"
    )
    began = time.monotonic()
    small = project.app.enqueue_many(work.options(concurrency_key="small"), [()] * 10)
    gather(small, timeout=30)
    seconds = time.monotonic() - began
    left = stack.scalar("SELECT count(*) FROM orchestrator.tasks WHERE lane = '|large'")
    assert left > 5_000, f"the ten took {seconds:.2f} s, and by then only {left} of the others were left"
