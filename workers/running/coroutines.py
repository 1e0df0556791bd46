"""An event loop, in a thread of its own, that runs asynchronous tasks side by side.

They share it, so each can spoil it for the others. What one of them does to the tasks of another is undone here: a loop
that is stopped goes on, and nobody cancels what belongs to somebody else. What cannot be undone is noticed (`watch`): a
loop that stands still because a task keeps it, or that somebody has closed.
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

_PING_EVERY = 0.1
"""Seconds between two looks whether the loop turns."""
_LONGEST_STEP = 0.2
"""Seconds that count, at most, between two looks: where the whole process has stood still, the loop is not to blame."""

_job: ContextVar[Job | None] = ContextVar("orchestrator_job", default=None)
"""The job whose code this is, in whatever task or callback of the loop it runs."""


class _JobTask(asyncio.Task[None]):
    """The task of a job, which other jobs cannot cancel."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, job: Job) -> None:
        super().__init__(coroutine, loop=loop)
        self.job = job

    def cancel(self, msg: Any | None = None) -> bool:
        other = _job.get()
        if other is None or other is self.job:
            return super().cancel(msg)
        names = other.dispatch.name, self.job.dispatch.name
        log.error(
            "task.cancel_refused task=%s target=%s: a task cannot cancel another one's coroutine",
            *names,
            extra=other.fields,
        )
        return False


class Coroutines:
    """Starts jobs on the loop; the loop starts with the first of them."""

    def __init__(self, run: Callable[[Job], Awaitable[None]]) -> None:
        self._run = run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[_JobTask] = set()
        self._stopped_by = "a task"
        self._is_dead = False
        """A task has closed the loop: nothing on it will ever end."""
        self._looked_at = 0.0
        self._pinged_at = 0.0
        self._is_pinged = False
        self._standing = 0.0
        """Seconds for which the loop has not answered."""

    def submit(self, jobs: Sequence[Job]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(TaskThreads())
            self._log_stops(self._loop)
            on_fork(self._forked)
            self._thread = threading.Thread(target=self._turn, args=(self._loop,), name="tasks-async", daemon=True)
            self._thread.start()
        with contextlib.suppress(RuntimeError):  # it is closed: they are handed back, like all that have not begun
            self._loop.call_soon_threadsafe(self._start, jobs)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop, once it has been started."""
        return self._loop

    def lost(self) -> set[Job]:
        """Return the jobs that will never end, because the loop is closed."""
        return {task.job for task in list(self._tasks)} if self._is_dead else set()

    def is_blocked(self, seconds: float) -> bool:
        """Say whether the loop does nothing for so many seconds, because a task keeps it from running."""
        if self._loop is None:
            return False
        if self._is_dead:
            return True
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:
            return True
        return not turned.wait(seconds)

    def watch(self, now: float) -> float:
        """Return for how many seconds the loop has not turned; it is asked every few moments."""
        elapsed, self._looked_at = min(now - self._looked_at, _LONGEST_STEP), now
        if self._loop is None:
            return 0.0
        if self._is_dead:
            return float("inf")
        if self._is_pinged:
            self._standing += elapsed
            return self._standing
        self._standing = 0.0
        if now - self._pinged_at >= _PING_EVERY:
            self._pinged_at = now
            self._is_pinged = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._answer)
        return 0.0

    def standstill(self) -> str:
        """Say why the loop does not turn: which task blocks it, and where in the code."""
        if self._is_dead or self._thread is None:
            return "the event loop of this process was closed by a task"
        job = self.blocking()
        frame = sys._current_frames().get(self._thread.ident or 0)
        whose = f"task {job.dispatch.name}[{to_text(job.dispatch.id)}]" if job is not None else "a task"
        return f"{whose} has kept the event loop from running for {self._standing:.0f} s, {_place(frame)}"

    def blocking(self) -> Job | None:
        """Return the job whose code the loop runs at this moment, if that is known."""
        task = asyncio.current_task(self._loop) if self._loop is not None else None
        if isinstance(task, _JobTask):
            return task.job
        if task is not None and sys.version_info >= (3, 12):
            return task.get_context().get(_job)
        return None

    # -- the loop's thread

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep the loop turning, although tasks stop it, or raise an uncaught SystemExit."""
        while True:
            try:
                loop.run_forever()
                if not is_fork():
                    log.error("process.event_loop_stopped by=%r: the loop goes on", self._stopped_by)
            except (SystemExit, KeyboardInterrupt) as error:
                if not is_fork():
                    log.error("process.event_loop_interrupted error=%s: the loop goes on", type(error).__name__)
            except BaseException:
                if not is_fork():
                    log.exception("process.event_loop_failed")
                    self._is_dead = True
            if is_fork():
                _end_copy()
            if self._is_dead or loop.is_closed():
                self._is_dead = True
                return

    def _start(self, jobs: Sequence[Job]) -> None:
        assert self._loop is not None
        for job in jobs:
            task = _JobTask(self._wrap(job), self._loop, job)  # has its own context, so jobs never see each other's
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _wrap(self, job: Job) -> None:
        _job.set(job)
        await self._run(job)

    def _answer(self) -> None:
        self._is_pinged = False

    def _log_stops(self, loop: asyncio.AbstractEventLoop) -> None:
        stop = loop.stop

        def stop_and_log() -> None:
            job = _job.get()
            self._stopped_by = f"task {job.dispatch.name}" if job is not None else "code that a task left behind"
            stop()

        with contextlib.suppress(AttributeError):  # a loop of another make, which cannot be changed
            loop.stop = stop_and_log  # type: ignore[method-assign]

    # -- forks

    def _forked(self) -> None:
        """In a copy of this process that a task has made on the loop: run nothing but the rest of that task's step."""
        if self._loop is None or self._thread is None or threading.current_thread() is not self._thread:
            return
        getattr(self._loop, "_ready", []).clear()
        self._loop.stop()


def _end_copy() -> None:
    """End a fork whose code awaits something: the loop, and all that is on it, belongs to the process that forked."""
    with contextlib.suppress(Exception):
        text = "A process that was forked inside an asynchronous task cannot await anything; it ends here."
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


_LIBRARIES = tuple(path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib"))


def _place(frame: FrameType | None) -> str:
    """Say where a thread is: the innermost line that is not a library's, or else the innermost."""
    found = frame
    while found is not None and found.f_code.co_filename.startswith(_LIBRARIES):
        found = found.f_back
    found = found or frame
    if found is None:
        return "nobody knows where"
    return f"in {found.f_code.co_name} ({found.f_code.co_filename}:{found.f_lineno})"
