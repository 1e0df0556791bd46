"""Two tenants share one fleet."""

from __future__ import annotations

import project

from orchestrator import gather
from tests.acceptance.stack import Stack
from tests.waiting import eventually

_AHEAD = """
SELECT count(*) FROM orchestrator.ended_tasks AS large,
       (SELECT min(created_at) AS came, max(ended_at) AS went
          FROM orchestrator.ended_tasks WHERE lane = '|small') AS small
 WHERE large.lane = '|large' AND large.ended_at > came AND large.ended_at < went
"""
"""Those of the large tenant that were served while the small one waited, however long that was."""


def test_ten_tasks_do_not_wait_for_another_tenants_twenty_thousand(stack: Stack) -> None:
    """The large tenant came first, and is far from done when the small one is."""
    work = project.noop
    project.app.enqueue_many(work.options(concurrency_key="large"), [()] * 20_000)
    stack.scheduler()
    stack.worker(processes=2)
    eventually(
        lambda: stack.scalar("SELECT count(*) FROM orchestrator.ended_tasks") > 500, "the large one is being served"
    )
    small = project.app.enqueue_many(work.options(concurrency_key="small"), [()] * 10)
    gather(small, timeout=60)
    ahead = stack.scalar(_AHEAD)
    assert ahead < 12_000, f"the ten waited for {ahead} of the others"
