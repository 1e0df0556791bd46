"""What is due starts when it is due: rates and delays, by the clock of Postgres."""

from __future__ import annotations

import statistics

import pytest

from orchestrator import Task
from tests.acceptance.conftest import project
from tests.acceptance.stack import Stack
from tests.waiting import eventually

_PACE = """
SELECT (count(*) - 1) / extract(epoch FROM max(started_at) - min(started_at))
  FROM orchestrator.ended_tasks WHERE name = :name
"""
_WAITED = """
SELECT extract(epoch FROM started_at - created_at)::float FROM orchestrator.ended_tasks
 WHERE name = 'project.noop' ORDER BY created_at
"""


def done(stack: Stack, name: str, count: int) -> None:
    ended = "SELECT count(*) FROM orchestrator.ended_tasks WHERE name = :name AND status = 'success'"
    eventually(lambda: stack.scalar(ended, name=name) == count, f"{count} of {name}", 60)


@pytest.mark.parametrize(("task", "pace"), [(project.ten_a_second, 10), (project.hundred_a_second, 100)])
def test_a_burst_of_one_gives_the_whole_rate(running: Stack, task: Task[[], None], pace: int) -> None:
    project.app.enqueue_many(task, [()] * (2 * pace + 1))
    done(running, task.name, 2 * pace + 1)
    found = float(str(running.scalar(_PACE, name=task.name)))
    print(f"{found:.1f} a second")
    assert 0.7 * pace < found < 1.05 * pace  # as it is on a machine that has other things to do


def test_what_is_delayed_starts_when_its_time_has_come(running: Stack) -> None:
    delays = [0.2 + 0.037 * number for number in range(40)]
    for delay in delays:
        project.noop.options(delay=delay).enqueue()
    done(running, "project.noop", len(delays))
    waits = [float(str(row[0])) for row in running.sql(_WAITED)]
    late = [waited - delay for waited, delay in zip(waits, delays, strict=True)]
    print(f"late by {1000 * statistics.median(late):.1f} ms (median), {1000 * max(late):.1f} ms (most)")
    assert min(late) >= 0
    assert statistics.median(late) < 0.035  # Redis's own timer would make that fifty, on any machine
