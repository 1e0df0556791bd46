"""Threads that run synchronous tasks.

Waking a thread costs more than a short task, so a thread that is awake runs short tasks one after another. Durations
are measured per task name. If a task takes longer than expected, `relieve` wakes another thread.
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
    """Start a thread that a worker process cannot work without. If the thread fails, end the process.

    Otherwise the process would receive tasks that it never runs or reports, while its parent sends heartbeats for it.
    When a process ends, its parent reports its attempts as lost and starts another process.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException:
            log.exception("process.thread_failed thread=%s: a bug; the process is replaced", name)
            os._exit(1)

    threading.Thread(target=guarded, name=name, daemon=True).start()


_QUICK_SECONDS = 0.001
"""Duration in seconds below which a task gets no thread of its own."""


class Threads:
    """At most `size` threads, started on demand. `run` gets a job and whether tasks of its name are short."""

    def __init__(self, size: int, run: Callable[[Job, bool], float]) -> None:
        self._size = size
        self._run = run
        self._lock = threading.Lock()
        self.backlog: deque[Job] = deque()
        self._idle: list[threading.Lock] = []
        """Locks that idle threads wait for. The last one is woken first: its thread's data is still in the caches."""
        self._started = 0
        self._quick_threads = 0
        """Number of threads that run short jobs, and so will soon take the next job."""
        self._pace: dict[str, float] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Run these jobs as soon as threads are free."""
        self.backlog.extend(jobs)
        pace = self._pace.get
        slow = sum(pace(job.dispatch.name, 1.0) >= _QUICK_SECONDS for job in jobs)
        with self._lock:
            self._wake_up(slow + (1 if not self._quick_threads and slow < len(jobs) else 0))

    def relieve(self) -> None:
        """Wake one more thread if jobs are waiting."""
        if self.backlog:
            with self._lock:
                self._wake_up(1)

    def _wake_up(self, count: int) -> None:
        woken = min(count, len(self._idle))
        for _ in range(woken):
            self._idle.pop().release()
        for _ in range(min(count - woken, self._size - self._started)):
            self._started += 1
            threading.Thread(target=self._work, name=f"task-{self._started}", daemon=True).start()

    def _work(self) -> None:
        wakeup = threading.Lock()
        wakeup.acquire()
        was_quick, pace = False, self._pace
        while True:
            try:
                job: Job | None = self.backlog.popleft()
            except IndexError:
                job = None
            quick = job is not None and pace.get(job.dispatch.name, 1.0) < _QUICK_SECONDS
            if quick is not was_quick:
                with self._lock:
                    self._quick_threads += 1 if quick else -1
                was_quick = quick
            if job is None:
                self._wait(wakeup)
            else:
                duration, name = self._run(job, quick), job.dispatch.name
                pace[name] = 0.8 * pace.get(name, duration) + 0.2 * duration

    def _wait(self, wakeup: threading.Lock) -> None:
        with self._lock:
            if self.backlog:
                return
            self._idle.append(wakeup)
        wakeup.acquire()
