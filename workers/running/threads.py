"""Threads that run synchronous tasks.

Waking a thread costs more than a short task, so short ones are run one after another by a thread that is awake
already. Which tasks are short is measured. Should one take longer than expected, `relieve` wakes another thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from orchestrator.telemetry import get_logger
from orchestrator.workers.running.job import Job

log = get_logger("worker")


def start_critical_thread(name: str, run: Callable[[], None]) -> None:
    """Start a thread that a worker process cannot do without; if it fails, end the process.

    It would go on to receive tasks that it never runs or never reports, and its parent would go on to beat for it.
    The parent of a process that ends reports what it held as lost, and starts another.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException:
            log.exception("process.thread_failed thread=%s: a defect; the process is replaced", name)
            os._exit(1)

    threading.Thread(target=guarded, name=name, daemon=True).start()


_QUICK = 0.001
"""Seconds; a task that takes less is not worth a thread of its own."""


class Threads:
    """At most `size` threads, started as they are needed. `run` is told whether others of its kind are short."""

    def __init__(self, size: int, run: Callable[[Job, bool], float]) -> None:
        self._size = size
        self._run = run
        self._lock = threading.Lock()
        self.backlog: deque[Job] = deque()
        self._resting: list[threading.Lock] = []
        """What idle threads wait for; the last that came is woken first, for what it needs is still in the caches."""
        self._started = 0
        self._sprinting = 0
        """Threads that are running short jobs, and so will soon come for the next."""
        self._pace: dict[str, float] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Run these jobs as soon as threads are free."""
        self.backlog.extend(jobs)
        pace = self._pace.get
        slow = sum(pace(job.dispatch.name, 1.0) >= _QUICK for job in jobs)
        with self._lock:
            self._wake_up(slow + (1 if not self._sprinting and slow < len(jobs) else 0))

    def relieve(self) -> None:
        """Wake one more thread if jobs are waiting."""
        if self.backlog:
            with self._lock:
                self._wake_up(1)

    def _wake_up(self, count: int) -> None:
        woken = min(count, len(self._resting))
        for _ in range(woken):
            self._resting.pop().release()
        for _ in range(min(count - woken, self._size - self._started)):
            self._started += 1
            threading.Thread(target=self._work, name=f"task-{self._started}", daemon=True).start()

    def _work(self) -> None:
        bell = threading.Lock()
        bell.acquire()
        sprinting, pace = False, self._pace
        while True:
            try:
                job: Job | None = self.backlog.popleft()
            except IndexError:
                job = None
            quick = job is not None and pace.get(job.dispatch.name, 1.0) < _QUICK
            if quick is not sprinting:
                with self._lock:
                    self._sprinting += 1 if quick else -1
                sprinting = quick
            if job is None:
                self._rest(bell)
            else:
                duration, name = self._run(job, quick), job.dispatch.name
                pace[name] = 0.8 * pace.get(name, duration) + 0.2 * duration

    def _rest(self, bell: threading.Lock) -> None:
        with self._lock:
            if self.backlog:
                return
            self._resting.append(bell)
        bell.acquire()
