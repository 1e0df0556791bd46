"""The event loop of asynchronous tasks, in a thread of its own.

Tasks share the loop, so one can harm the others. Where possible, the harm is undone: a stopped loop is restarted, and a
task cannot cancel another job's coroutine. Other harm is detected (`measure_stall`): a loop that a task blocks or has
closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import sysconfig
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any

from orchestrator.domain.ids import to_text
from orchestrator.telemetry import get_logger
from orchestrator.workers.running.forks import TaskThreads, is_fork, on_fork
from orchestrator.workers.running.job import Job

log = get_logger("worker")

_PING_INTERVAL = 0.1
"""Seconds between two pings of the loop."""
_MAX_STEP = 0.2
"""Seconds that count, at most, between two checks: if the whole process was suspended, the loop is not to blame."""

_job: ContextVar[Job | None] = ContextVar("orchestrator_job", default=None)
"""The job of the current code, in any task or callback of the loop."""


class _JobTask(asyncio.Task[None]):
    """The asyncio task of a job, which other jobs cannot cancel."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, job: Job) -> None:
        super().__init__(coroutine, loop=loop)
        self.job = job

    def cancel(self, msg: Any | None = None) -> bool:
        other = _job.get()
        if other is None or other is self.job:
            return super().cancel(msg)
        names = other.dispatch.name, self.job.dispatch.name
        log.error(
            "task.cancel_refused task=%s target=%s: a task cannot cancel the coroutine of another task",
            *names,
            extra=other.fields,
        )
        return False


class Coroutines:
    """Starts jobs on the loop. The loop starts with the first job."""

    def __init__(self, run: Callable[[Job], Awaitable[None]]) -> None:
        self._run = run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[_JobTask] = set()
        self._stopped_by = "a task"
        self._is_dead = False
        """Whether a task has closed the loop, so that its jobs never end."""
        self._checked_at = 0.0
        self._pinged_at = 0.0
        self._is_pinged = False
        self._stalled_for = 0.0
        """Seconds since the loop stopped responding."""

    def submit(self, jobs: Sequence[Job]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(TaskThreads())
            self._log_stops(self._loop)
            on_fork(self._forked)
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="tasks-async", daemon=True)
            self._thread.start()
        with contextlib.suppress(RuntimeError):  # a closed loop: the jobs are handed back like others
            self._loop.call_soon_threadsafe(self._start, jobs)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop; None before the first job."""
        return self._loop

    def orphaned(self) -> set[Job]:
        """Return the jobs that will never end, because the loop is closed."""
        return {task.job for task in list(self._tasks)} if self._is_dead else set()

    def is_blocked(self, seconds: float) -> bool:
        """Return whether the loop does not respond within so many seconds, because a task blocks it."""
        if self._loop is None:
            return False
        if self._is_dead:
            return True
        responded = threading.Event()
        try:
            self._loop.call_soon_threadsafe(responded.set)
        except RuntimeError:
            return True
        return not responded.wait(seconds)

    def measure_stall(self, now: float) -> float:
        """Return for how many seconds the loop has not responded. Called several times a second."""
        elapsed, self._checked_at = min(now - self._checked_at, _MAX_STEP), now
        if self._loop is None:
            return 0.0
        if self._is_dead:
            return float("inf")
        if self._is_pinged:
            self._stalled_for += elapsed
            return self._stalled_for
        self._stalled_for = 0.0
        if now - self._pinged_at >= _PING_INTERVAL:
            self._pinged_at = now
            self._is_pinged = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_pong)
        return 0.0

    def describe_block(self) -> str:
        """Describe why the loop does not respond: which task blocks it, and where in the code."""
        if self._is_dead or self._thread is None:
            return "the event loop of this process was closed by a task"
        job = self.blocking()
        frame = sys._current_frames().get(self._thread.ident or 0)
        culprit = f"task {job.dispatch.name}[{to_text(job.dispatch.id)}]" if job is not None else "a task"
        return f"{culprit} has kept the event loop from running for {self._stalled_for:.0f} s, {_location(frame)}"

    def blocking(self) -> Job | None:
        """Return the job whose code the loop is running now, if that can be determined."""
        task = asyncio.current_task(self._loop) if self._loop is not None else None
        if isinstance(task, _JobTask):
            return task.job
        if task is not None and sys.version_info >= (3, 12):
            return task.get_context().get(_job)
        return None

    # -- the loop's thread

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop, and restart it when a task stops it or raises an uncaught SystemExit."""
        while True:
            try:
                loop.run_forever()
                if not is_fork():
                    log.error("process.event_loop_stopped by=%r: the loop continues", self._stopped_by)
            except (SystemExit, KeyboardInterrupt) as error:
                if not is_fork():
                    log.error("process.event_loop_interrupted error=%s: the loop continues", type(error).__name__)
            except BaseException:
                if not is_fork():
                    log.exception("process.event_loop_failed")
                    self._is_dead = True
            if is_fork():
                _end_fork()
            if self._is_dead or loop.is_closed():
                self._is_dead = True
                return

    def _start(self, jobs: Sequence[Job]) -> None:
        assert self._loop is not None
        for job in jobs:
            task = _JobTask(self._wrap(job), self._loop, job)  # with a context of its own
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _wrap(self, job: Job) -> None:
        _job.set(job)
        await self._run(job)

    def _on_pong(self) -> None:
        self._is_pinged = False

    def _log_stops(self, loop: asyncio.AbstractEventLoop) -> None:
        stop = loop.stop

        def stop_and_log() -> None:
            job = _job.get()
            self._stopped_by = f"task {job.dispatch.name}" if job is not None else "code that a task left behind"
            stop()

        with contextlib.suppress(AttributeError):  # a custom loop class that does not allow it
            loop.stop = stop_and_log  # type: ignore[method-assign]

    # -- forks

    def _forked(self) -> None:
        """In a fork made by a task on the loop: stop the copied loop, so that only the task's current step goes on."""
        if self._loop is None or self._thread is None or threading.current_thread() is not self._thread:
            return
        getattr(self._loop, "_ready", []).clear()
        self._loop.stop()


def _end_fork() -> None:
    """End a fork whose code awaits: the loop and its tasks belong to the original process."""
    with contextlib.suppress(Exception):
        text = "A process that was forked inside an asynchronous task cannot await anything; the process ends here."
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


_LIBRARIES = tuple(path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib"))


def _location(frame: FrameType | None) -> str:
    """Return the innermost line of a thread outside of libraries, or the innermost line."""
    own = frame
    while own is not None and own.f_code.co_filename.startswith(_LIBRARIES):
        own = own.f_back
    own = own or frame
    if own is None:
        return "at an unknown location"
    return f"in {own.f_code.co_name} ({own.f_code.co_filename}:{own.f_lineno})"
