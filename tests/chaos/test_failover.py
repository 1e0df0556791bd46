"""A leader dies, a leader leaves, everything is restarted one by one: under load, at default settings, and measured.

.venv/bin/pytest tests/chaos/test_failover.py                    what every build checks
.venv/bin/pytest tests/chaos/test_failover.py --kills 10 -s      more leaders, and the figures
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

pytestmark = pytest.mark.timeout(400)  # some 15 s each, and far more where others use the machine
KILLS_OF_A_BUILD = 1
RATE = 50.0
"""Tasks a second."""
RESUMES_WITHIN = 5.0
"""Seconds that the death of a leader may cost."""


@pytest.fixture
def stack(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Stack]:
    """Services without processes, at default settings."""
    with fresh_stack(database_url, redis_url, tmp_path) as stack:
        yield stack


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--kills", None) or KILLS_OF_A_BUILD


class Load:
    """A steady load of tasks that write down when they start."""

    def __init__(self, stack: Stack, path: Path, schema: str = "orchestrator") -> None:
        self._stack = stack
        self._schema = schema
        self._path = path
        self._stopping = threading.Event()
        self.count = 0
        self.others = 0
        """Tasks that a test has enqueued beside these."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enqueue until the block ends, then wait until everything has ended."""
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
            # One in ten is still running when its worker is told to stop.
            project.timed.enqueue(str(self._path), 0.5 if self.count % 10 == 0 else 0.0)
            self.count += 1
            due += 1 / RATE

    def starts(self) -> list[float]:
        return sorted(float(line) for line in self._path.read_text().split()) if self._path.exists() else []

    def wait_for_starts(self) -> None:
        """Wait until tasks of this moment, not those of a backlog, have started again."""
        expected = self.count + 20
        eventually(lambda: self._path.exists() and self._path.read_bytes().count(b"\n") >= expected, "tasks start")

    def longest_gap(self, since: float, until: float) -> float:
        """Return the longest time, from one moment to another, in which no task started."""
        moments = [since, *(start for start in self.starts() if since <= start <= until), until]
        return max(later - earlier for earlier, later in pairwise(moments))

    def check(self) -> None:
        """Every task succeeded, at once: no attempt failed, none was lost."""
        ended = "SELECT status, count(*), sum(failures + losses)::int FROM orchestrator.ended_tasks GROUP BY status"
        assert self._stack.sql(ended) == [("success", self.count, 0)]


def gap_after(stack: Stack, load: Load, strike: str) -> float:
    """Kill or stop the leader under load; return how long nothing started, and bring another standby."""
    leader = stack.leader()
    began = time.monotonic()
    if strike == "kill":
        leader.kill()
    else:
        assert leader.stop() == 0
    load.wait_for_starts()
    gap = load.longest_gap(began, time.monotonic())
    standby = stack.scheduler()
    eventually(lambda: standby is not stack.leader(), "the new one stands by")
    return gap


def gaps_after(stack: Stack, load: Load, strike: str, wanted: int, limit: float) -> list[float]:
    """Strike until so many gaps were short, at most three times as often: others may use the machine in any of them."""
    gaps: list[float] = []
    while sum(gap < limit for gap in gaps) < wanted and len(gaps) < 3 * wanted:
        gaps.append(gap_after(stack, load, strike))
    return gaps


def tell(what: str, seconds: list[float]) -> None:
    figures = " ".join(f"{gap:.2f}" for gap in seconds)
    print(f"\n{what}: {figures}; median {sorted(seconds)[len(seconds) // 2]:.2f} s, longest {max(seconds):.2f} s")


def test_dispatch_resumes_soon_after_the_death_of_a_leader(stack: Stack, tmp_path: Path, kills: int) -> None:
    load = Load(stack, tmp_path / "starts")
    stack.scheduler()
    stack.worker(processes=2)
    stack.scheduler()
    with load.running():
        gaps = gaps_after(stack, load, "kill", kills, RESUMES_WITHIN)
    tell("no task started after the leader was killed for", gaps)
    load.check()
    assert sum(gap < RESUMES_WITHIN for gap in gaps) == kills, gaps


def test_a_leader_that_is_told_to_stop_hands_over_at_once(stack: Stack, tmp_path: Path, kills: int) -> None:
    load = Load(stack, tmp_path / "starts")
    stack.scheduler()
    stack.worker(processes=2)
    stack.scheduler()
    with load.running():
        gaps = gaps_after(stack, load, "stop", kills, stack.settings.lease)
    tell("no task started after the leader was told to stop for", gaps)
    load.check()
    assert sum(gap < stack.settings.lease for gap in gaps) == kills, gaps


def test_a_rolling_restart_fails_nothing_and_delays_little(stack: Stack, tmp_path: Path) -> None:
    load, lease = Load(stack, tmp_path / "starts"), stack.settings.lease
    schedulers = [stack.scheduler(), stack.scheduler()]
    workers = [stack.worker(processes=2), stack.worker(processes=2)]
    waits = [lease]
    with load.running():
        while waits[-1] >= lease and len(waits) <= 3:  # others may use the machine during a roll
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
    """Stop one in good order, then start its successor, and return that."""
    assert old.stop() == 0
    new = start()
    load.wait_for_starts()
    return new
