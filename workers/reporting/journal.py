"""Pass on what running tasks say of themselves, a few times a second and in a thread of its own.

Lossy on purpose: of a task's progress only the newest counts, of too many lines some are dropped and counted, and what
cannot be written is forgotten. A chatty task costs neither its neighbours' reports nor the leader anything.
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

_PAUSE = 0.2
"""Seconds between two writes."""
_LOOK_EVERY = 5.0
"""Seconds between two looks at Redis's memory."""
_LIMIT = 1_000_000
_NO_ROOM = "nobody stored what was said as fast as it came"


class Journal:
    """Gathers words, and writes them down."""

    def __init__(self, redis: Redis, keys: Keys, limit: int = _LIMIT, shared: Redis | None = None) -> None:
        """`shared` has the keys of all shards, if that is another server."""
        self._redis = redis
        self._shared = shared or redis
        self._keys = keys
        self._lock = threading.Lock()
        self._marks: dict[bytes, ProgressMark] = {}
        self._lines = Lines(limit, keys.vault)
        self._something = threading.Event()
        self._started = False
        self._check_at = 0.0
        self._full = False

    def mark(self, task: bytes, mark: ProgressMark) -> None:
        """Note how far a task has come; a fork that it has made has no say."""
        if is_fork():
            return
        with self._lock:
            self._marks[task] = mark
        self._wake()

    def log(self, job: Job, line: LogLine) -> None:
        """Note what a task says."""
        if is_fork():
            return
        self._lines.add(job, line)
        self._wake()

    def log_lines(self, job: Job, lines: LogLine) -> None:
        """Note what a task says in many lines."""
        if is_fork():
            return
        self._lines.add_many(job, lines)
        self._wake()

    def end(self, job: Job) -> None:
        """Note that an attempt has ended."""
        if self._lines.end(job):
            self._wake()

    def flush(self) -> None:
        """Write what there is, or forget it."""
        with self._lock:
            marks, self._marks = self._marks, {}
        taken = self._lines.take()
        if not marks and not taken.chunks:
            return
        sent = 0
        why = "Redis was nearly full"
        try:
            if not self._is_full():
                why = _NO_ROOM
                if marks:
                    with suppress(*journal.LOSSES):  # of another server, perhaps
                        journal.write(self._shared, self._keys, marks)
                if taken.chunks:
                    sent = journal.send_lines(self._redis, self._keys, taken.chunks)
        except journal.LOSSES as error:
            why = "Redis could not be used"
            log.debug("worker.logs_dropped error=%s", error)
        self._lines.lose(taken, sent, why)

    def _wake(self) -> None:
        if not self._started:
            with self._lock:
                if not self._started:
                    self._started = True
                    threading.Thread(target=self._run, name="journal", daemon=True).start()
        self._something.set()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._something.wait()
            self._something.clear()
            self.flush()
            pause.wait(_PAUSE)

    def _is_full(self) -> bool:
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + _LOOK_EVERY
            was, self._full = self._full, journal.is_full(self._redis)
            if self._full and not was:
                log.warning("redis.nearly_full: progress and logs of tasks are not written")
        return self._full
