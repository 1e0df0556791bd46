"""Sends the progress and log lines of running tasks to Redis, a few times a second, in a thread of its own.

Lossy on purpose: only the newest progress of a task counts, excess lines are dropped and counted, and lines that cannot
be written are forgotten. A chatty task delays neither the reports of other tasks nor the leader.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from orchestrator.telemetry import get_logger
from orchestrator.transport import journal
from orchestrator.transport.codec import LogLine, ProgressMark
from orchestrator.transport.keys import Keys
from orchestrator.workers.reporting.lines import Lines
from orchestrator.workers.running.forks import is_fork
from orchestrator.workers.running.job import Job

if TYPE_CHECKING:
    from redis import Redis

log = get_logger("worker")

_WRITE_INTERVAL = 0.2
"""Seconds between two writes."""
_MEMORY_CHECK_INTERVAL = 5.0
"""Seconds between two checks of Redis's memory."""
_LIMIT = 1_000_000
_TOO_FAST = "it came faster than it could be stored"


class Journal:
    """Buffers progress and log lines, and writes them."""

    def __init__(self, redis: Redis, keys: Keys, limit: int = _LIMIT, shared: Redis | None = None) -> None:
        """`shared` is the Redis server with the keys of all shards, if that is another one."""
        self._redis = redis
        self._shared = shared or redis
        self._keys = keys
        self._lock = threading.Lock()
        self._marks: dict[bytes, ProgressMark] = {}
        self._lines = Lines(limit, keys.vault)
        self._has_work = threading.Event()
        self._started = False
        self._check_at = 0.0
        self._is_near_full = False

    def publish_progress(self, task: bytes, mark: ProgressMark) -> None:
        """Record the progress of a task. Ignored in a fork made by the task."""
        if is_fork():
            return
        with self._lock:
            self._marks[task] = mark
        self._wake()

    def log(self, job: Job, line: LogLine) -> None:
        """Add a log line of a task."""
        if is_fork():
            return
        self._lines.add(job, line)
        self._wake()

    def log_lines(self, job: Job, lines: LogLine) -> None:
        """Add many log lines of a task, in one text."""
        if is_fork():
            return
        self._lines.add_many(job, lines)
        self._wake()

    def end(self, job: Job) -> None:
        """Note that an attempt has ended."""
        if self._lines.end(job):
            self._wake()

    def flush(self) -> None:
        """Write the buffered progress and lines, or drop them if Redis fails."""
        with self._lock:
            marks, self._marks = self._marks, {}
        batch = self._lines.take()
        if not marks and not batch.chunks:
            return
        sent = 0
        reason = "Redis was nearly full"
        try:
            if not self._is_full():
                reason = _TOO_FAST
                if marks:
                    with suppress(*journal.LOSSES):  # may fail alone: `_shared` may be another server
                        journal.write(self._shared, self._keys, marks)
                if batch.chunks:
                    sent = journal.send_lines(self._redis, self._keys, batch.chunks)
        except journal.LOSSES as error:
            reason = "Redis could not be used"
            log.debug("worker.logs_dropped error=%s", error)
        self._lines.drop_unsent(batch, sent, reason)

    def _wake(self) -> None:
        if not self._started:
            with self._lock:
                if not self._started:
                    self._started = True
                    threading.Thread(target=self._run, name="journal", daemon=True).start()
        self._has_work.set()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._has_work.wait()
            self._has_work.clear()
            self.flush()
            pause.wait(_WRITE_INTERVAL)

    def _is_full(self) -> bool:
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + _MEMORY_CHECK_INTERVAL
            was_near_full, self._is_near_full = self._is_near_full, journal.is_full(self._redis)
            if self._is_near_full and not was_near_full:
                log.warning("redis.nearly_full: progress and logs of tasks are not written")
        return self._is_near_full
