"""Tasks in child processes that can be killed: `isolation="process"`, and tasks that took a worker down before.

A child runs one task at a time and is used again for the next; one that nobody has needed for a while is ended, since
it holds as much memory as a worker process. The two talk over a pair of pipes:

    worker → child   [run, dispatch]                      worker ← child   [ready, None] once the application is loaded
                     [handed, holders of keys] or [uncertain, why]         [begun, None] as the first word about a task
                     [page, page] or [gone, None]                          [enqueue, tasks]
                                                                           [page, number]
                                                                           [mark | log | lines | leave, what it says]
                                                                           [report, report]

A task's time begins with `begun`. A child that ends before it has said so is no fault of the task.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe

import msgspec

from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import Lost, NewTask, Returned
from orchestrator.errors import SoftTimeout, Uncertain
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import EndReport, LogLine, ProgressMark, decode, encode
from orchestrator.workers.parent.processes import ending, format_memory, resident_memory
from orchestrator.workers.running.job import Job
from orchestrator.workers.running.task_runtime import Outbox, interruption
from orchestrator.workers.spec import WorkerSpec

log = get_logger("worker")

_KEPT_WARM = 30.0
"""Seconds after which a child without work is ended."""
_START_LIMIT = 300.0
"""Seconds that a child may take to start and to import the application."""
_STARTING = max(1, (os.cpu_count() or 1) // 2)
"""Children of a worker process that start at the same time."""
_START_AGAIN = 5.0
"""Seconds before a task whose child could not start is tried again, perhaps elsewhere."""
_LOOK = 0.05
"""Seconds between two looks at whether a job that waits for a child is still wanted."""
_DYING_TOGETHER = 0.1
"""Seconds to outlive a child by, before its death is held against its task: all on this machine may be dying."""


class Isolation:
    """Child processes for one worker process, started as they are needed and kept warm for a while."""

    def __init__(
        self,
        spec: WorkerSpec,
        outbox: Outbox,
        *,
        shard: str | None = None,
        kept_warm: float = _KEPT_WARM,
        start_limit: float = _START_LIMIT,
    ) -> None:
        self._spec = spec
        self._shard = shard
        self._outbox = outbox
        self._kept_warm = kept_warm
        self._start_limit = start_limit
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._starting = 0
        self._idle: list[_Child] = []
        """The longest idle first; the last is the next to be used, so that those too many grow old."""
        self._retiring = False

    def run(self, job: Job, start_clock: Callable[[Job], None]) -> AttemptReport:
        """Run a job in a child process; called in a thread that waits for it. Raises what it was interrupted with.

        `start_clock` is called when the code of the task begins.
        """
        child = self._idle_child(job) or self._start()
        # A soft timeout is raised by the child itself.
        job.interruptible(lambda reason: None if reason is SoftTimeout else child.kill())
        try:
            self._wait_until_ready(child)
            child.send("run", encode(msgspec.structs.replace(job.dispatch, trace=job.trace)))
            report = self._converse(child, job, start_clock)
        except (EOFError, OSError) as error:
            return self._died(job, error, child)
        finally:
            job.uninterruptible()
        child.runs += 1
        if self._is_worn(child):
            child.end()
        else:
            self._keep(child)
        return report

    def _idle_child(self, job: Job) -> _Child | None:
        """Return a child that waits for work; None if it is this job's turn to start one.

        Only a few start at a time: they would take the processor from each other, and where tasks are short, the first
        of them can do the work of all.
        """
        while True:
            with self._changed:
                if not self._idle:
                    if self._starting < _STARTING:
                        self._starting += 1
                        return None
                    self._changed.wait(_LOOK)
                    if job.interrupted_by is not None:
                        raise interruption(job, job.interrupted_by)
                    continue
                child = self._idle.pop()
            if child.is_alive():
                return child
            child.end()

    def _start(self) -> _Child:
        try:
            return _Child(self._spec, self._shard)
        except BaseException:
            self._has_started()
            raise

    def _wait_until_ready(self, child: _Child) -> None:
        if child.is_ready:
            return
        try:
            child.wait_until_ready(self._start_limit)
        finally:
            self._has_started()

    def _has_started(self) -> None:
        with self._changed:
            self._starting -= 1
            self._changed.notify()

    def _is_worn(self, child: _Child) -> bool:
        most, memory = self._spec.max_tasks_per_process, self._spec.max_memory
        return (most is not None and child.runs >= most) or (memory is not None and child.memory() > memory)

    def close(self) -> None:
        """Stop the children that wait for work."""
        with self._lock:
            for child in self._idle:
                child.end()

    def _keep(self, child: _Child) -> None:
        """Keep a child for the next job, and see that it is not kept for ever."""
        child.idle_since = time.monotonic()
        with self._changed:
            self._idle.append(child)
            self._changed.notify()
            if self._retiring:
                return
            self._retiring = True
        threading.Thread(target=self._retire, name="retirement", daemon=True).start()

    def _retire(self) -> None:
        """End children that have been idle for long, until none is idle."""
        some_left = True
        while some_left:
            threading.Event().wait(self._kept_warm / 2)
            too_long = time.monotonic() - self._kept_warm
            with self._lock:
                retired = [child for child in self._idle if child.idle_since < too_long]
                self._idle = [child for child in self._idle if child.idle_since >= too_long]
                some_left = self._retiring = bool(self._idle)
            for child in retired:
                child.end()

    def _converse(self, child: _Child, job: Job, start_clock: Callable[[Job], None]) -> AttemptReport:
        while True:
            word, data = child.receive()
            if word == "report":
                return decode(list[EndReport], data)[0]
            if word == "begun":
                start_clock(job)
            elif word == "enqueue":
                child.send(*self._hand_over(decode(list[NewTask], data)))
            elif word == "page":
                page = self._outbox.page(job, decode(int, data))
                child.send("gone" if page is None else "page", page or b"")
            elif word == "mark":
                self._outbox.mark(job.dispatch.id, decode(ProgressMark, data))
            elif word == "log":
                job.label, line = decode(tuple[str, LogLine], data)
                self._outbox.log(job, line)
            elif word == "lines":
                job.label, line = decode(tuple[str, LogLine], data)
                self._outbox.log_lines(job, line)
            elif word == "leave":
                self._outbox.leave(job, data)

    def _hand_over(self, tasks: list[NewTask]) -> tuple[str, bytes]:
        try:
            return "handed", encode(self._outbox.hand_over(tasks) or {})
        except Uncertain as error:
            return "uncertain", str(error).encode()

    def _died(self, job: Job, error: EOFError | OSError, child: _Child) -> Lost | Returned:
        dispatch, code = job.dispatch, child.end()
        reason = job.interrupted_by
        if reason is not None and reason is not SoftTimeout:
            raise interruption(job, reason)
        if job.starting:
            why = str(error) or "it ended before it was ready"
            log.error("task.process_not_started error=%s", why, extra=job.fields)
            return Returned(dispatch.id, dispatch.attempt, "its process could not be started", _START_AGAIN)
        threading.Event().wait(_DYING_TOGETHER)
        why = f"{ending(code)} in process {child.pid} on {socket.gethostname()}{child.used()}"
        text = f"The process of this attempt died: {why}."
        self._outbox.log(job, LogLine(time.time(), dispatch.attempt, "error", text))
        return Lost(dispatch.id, dispatch.attempt, alone=True, reason=why)


class _Child:
    def __init__(self, spec: WorkerSpec, shard: str | None) -> None:
        ours, theirs = Pipe()
        self._pipe = ours
        self.is_ready = False
        self.idle_since = 0.0
        self.runs = 0
        os.set_inheritable(theirs.fileno(), True)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "orchestrator.workers.running.isolated_child",
                spec.app,
                str(theirs.fileno()),
                str(os.getpid()),
                "database" if spec.database else "",
                "hidden" if spec.commands else "",
                spec.log_level,
                spec.log_format,
                shard or "",
                *spec.allow,
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.pid = self._process.pid
        self._peak = 0

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def memory(self) -> int:
        return resident_memory(self._process.pid)

    def send(self, word: str, data: bytes) -> None:
        self._pipe.send_bytes(encode((word, data)))

    def receive(self) -> tuple[str, bytes]:
        return decode(tuple[str, bytes], self._pipe.recv_bytes())

    def wait_until_ready(self, limit: float) -> None:
        if self.is_ready:
            return
        if not self._pipe.poll(limit):
            raise TimeoutError(f"it was not ready after {limit:g} s")
        self.receive()
        self.is_ready = True

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Kill it, unless it has ended; return its exit code."""
        self._pipe.close()
        if self._process.returncode is None:
            with suppress(ProcessLookupError, ChildProcessError):  # it was waited for meanwhile
                os.kill(self.pid, signal.SIGKILL)  # `Popen.kill` would wait for it, and not learn what it has used
                _, status, usage = os.wait4(self.pid, 0)
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return self._process.wait()

    def used(self) -> str:
        """Say how much memory it has used, once it has ended, if that is known."""
        return f", which used up to {format_memory(self._peak)} of memory" if self._peak else ""
