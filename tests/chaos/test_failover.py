"""The death of a leader, its graceful end, and a rolling restart: under load, at default settings, and measured.

.venv/bin/pytest tests/chaos/test_failover.py                    the checks of every build
.venv/bin/pytest tests/chaos/test_failover.py --kills 10 -s      more leaders, with figures
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Process, Stack
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)  # some 15 s each, and far more on a busy machine
KILLS_OF_A_BUILD = 1
RATE = 50.0
"""Tasks per second."""
RESUMES_WITHIN = 5.0
"""Seconds without task starts that the death of a leader may cause."""


@pytest.fixture
def stack(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Stack]:
    """A stack without processes, at default settings."""
    with fresh_stack(database_url, redis_url, tmp_path) as stack:
        yield stack


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--kills", None) or KILLS_OF_A_BUILD


class Load:
    """A steady load of tasks that record their start times."""

    def __init__(self, stack: Stack, path: Path, schema: str = "orchestrator") -> None:
        self._stack = stack
        self._schema = schema
        self._path = path
        self._stopping = threading.Event()
        self.count = 0
        self.others = 0
        """Number of tasks that a test enqueues besides the load."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enqueue within the block, then wait until all tasks have ended."""
        thread = threading.Thread(target=self._enqueue, name="load")
        thread.start()
        try:
            self.wait_for_starts()
            yield
        finally:
            self._stopping.set()
            thread.join()
        eventually(lambda: self._stack.scalar(f'SELECT count(*) FROM "{self._schema}".tasks') == 0, "everything ends")

    def _enqueue(self) -> None:
        due = time.monotonic()
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            # One in ten tasks is still running when its worker is told to stop.
            project.timed.enqueue(str(self._path), 0.5 if self.count % 10 == 0 else 0.0)
            self.count += 1
            due += 1 / RATE

    def starts(self) -> list[float]:
        return sorted(float(line) for line in self._path.read_text().split()) if self._path.exists() else []

    def wait_for_starts(self) -> None:
        """Wait until tasks enqueued from now on have started."""
        expected = self.count + 20
        eventually(lambda: self._path.exists() and self._path.read_bytes().count(b"\n") >= expected, "tasks start")

    def longest_gap(self, since: float, until: float) -> float:
        """Return the longest period without a start between two moments."""
        moments = [since, *(start for start in self.starts() if since <= start <= until), until]
        return max(later - earlier for earlier, later in pairwise(moments))

    def check(self) -> None:
        """Check that every task succeeded without a failure or loss."""
        ended = "SELECT status, count(*), sum(failures + losses)::int FROM orchestrator.ended_tasks GROUP BY status"
        assert self._stack.sql(ended) == [("success", self.count, 0)]


def gap_after(stack: Stack, load: Load, how: str) -> float:
    """Kill or stop the leader under load; return the longest period without starts, and start another standby."""
    leader = stack.leader()
    began = time.monotonic()
    if how == "kill":
        leader.kill()
    else:
        assert leader.stop() == 0
    load.wait_for_starts()
    gap = load.longest_gap(began, time.monotonic())
    standby = stack.scheduler()
    eventually(lambda: standby is not stack.leader(), "the new one stands by")
    return gap


def gaps_after(stack: Stack, load: Load, how: str, required: int, limit: float) -> list[float]:
    """Repeat until `required` gaps are below the limit, at most three times as often: the machine may be busy."""
    gaps: list[float] = []
    while sum(gap < limit for gap in gaps) < required and len(gaps) < 3 * required:
        gaps.append(gap_after(stack, load, how))
    return gaps


def print_gaps(title: str, seconds: list[float]) -> None:
    figures = " ".join(f"{gap:.2f}" for gap in seconds)
    print(f"\n{title}: {figures}; median {sorted(seconds)[len(seconds) // 2]:.2f} s, longest {max(seconds):.2f} s")


def test_dispatch_resumes_soon_after_the_death_of_a_leader(stack: Stack, tmp_path: Path, kills: int) -> None:
    load = Load(stack, tmp_path / "starts")
    stack.scheduler()
    stack.worker(processes=2)
    stack.scheduler()
    with load.running():
        gaps = gaps_after(stack, load, "kill", kills, RESUMES_WITHIN)
    print_gaps("no task started after the leader was killed for", gaps)
    load.check()
    assert sum(gap < RESUMES_WITHIN for gap in gaps) == kills, gaps


def test_a_stopped_leader_hands_over_at_once(stack: Stack, tmp_path: Path, kills: int) -> None:
    load = Load(stack, tmp_path / "starts")
    stack.scheduler()
    stack.worker(processes=2)
    stack.scheduler()
    with load.running():
        gaps = gaps_after(stack, load, "stop", kills, stack.settings.lease)
    print_gaps("no task started after the leader was told to stop for", gaps)
    load.check()
    assert sum(gap < stack.settings.lease for gap in gaps) == kills, gaps


def test_a_rolling_restart_fails_no_task_and_adds_little_delay(stack: Stack, tmp_path: Path) -> None:
    load, lease = Load(stack, tmp_path / "starts"), stack.settings.lease
    schedulers = [stack.scheduler(), stack.scheduler()]
    workers = [stack.worker(processes=2), stack.worker(processes=2)]
    waits = [lease]
    with load.running():
        while waits[-1] >= lease and len(waits) <= 3:  # the machine may be busy during a restart
            began, since = time.monotonic(), stack.scalar("SELECT now()")
            schedulers = [restart(load, old, stack.scheduler) for old in schedulers]
            workers = [restart(load, old, lambda: stack.worker(processes=2)) for old in workers]
            longest, median = stack.sql(_WAITED, since=since)[0]
            lasted = time.monotonic() - began
            print(
                f"\na roll of {lasted:.1f} s: tasks waited {1000 * median:.0f} ms (median), {longest:.2f} s (longest)"
            )
            waits.append(longest)
    load.check()
    assert waits[-1] < lease, waits


_WAITED = """
SELECT max(waited)::float, percentile_cont(0.5) WITHIN GROUP (ORDER BY waited)::float
  FROM (SELECT extract(epoch FROM started_at - created_at) AS waited
          FROM orchestrator.ended_tasks WHERE created_at > :since) AS tasks
"""


def restart(load: Load, old: Process, start: Callable[[], Process]) -> Process:
    """Stop a process gracefully, start its successor, and return the successor."""
    assert old.stop() == 0
    new = start()
    load.wait_for_starts()
    return new
