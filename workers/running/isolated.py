"""Runs tasks in child processes that can be killed: `isolation="process"`, and tasks whose earlier attempt was lost.

A child runs one task at a time and is reused. An idle child is ended after a while, since it holds as much memory as a
worker process. Parent and child exchange messages over a pipe:

    worker → child   [run, dispatch]                      worker ← child   [ready, None] when the app is loaded
                     [handed, key holders] or [uncertain, why]             [begun, None] before the task's code
                     [page, page] or [gone, None]                          [enqueue, tasks]
                                                                           [page, number]
                                                                           [mark | log | lines | leave, content]
                                                                           [report, report]

The timeout of a task starts with `begun`. If a child dies before `begun`, the task is not charged.
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
from orchestrator.workers.parent.processes import describe_exit, format_memory, resident_memory
from orchestrator.workers.running.job import Job
from orchestrator.workers.running.task_runtime import Outbox, interruption
from orchestrator.workers.spec import WorkerSpec

log = get_logger("worker")

_IDLE_TIMEOUT = 30.0
"""Seconds after which an idle child is ended."""
_START_TIMEOUT = 300.0
"""Seconds that a child may take to start and import the application."""
_MAX_STARTING = max(1, (os.cpu_count() or 1) // 2)
"""Children of a worker process that may start at the same time."""
_RESTART_DELAY = 5.0
"""Seconds before a task whose child could not start is dispatched again, perhaps to another worker."""
_POLL_INTERVAL = 0.05
"""Seconds between two checks of whether a job that waits for a child was interrupted."""
_DEATH_PAUSE = 0.1
"""Seconds to wait before reporting a dead child: if the whole machine is going down, the task must not be blamed."""


class Isolation:
    """The child processes of a worker process, started on demand and reused."""

    def __init__(
        self,
        spec: WorkerSpec,
        outbox: Outbox,
        *,
        shard: str | None = None,
        kept_warm: float = _IDLE_TIMEOUT,
        start_limit: float = _START_TIMEOUT,
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
        """Idle children, the longest idle first. The last is used first, so that superfluous ones time out."""
        self._retiring = False

    def run(self, job: Job, start_clock: Callable[[Job], None]) -> AttemptReport:
        """Run a job in a child process, and wait for it. Raises the exception by which the job was interrupted.

        `start_clock` is called when the code of the task begins.
        """
        child = self._idle_child(job) or self._start()
        # The child raises a soft timeout itself.
        job.interruptible(lambda reason: None if reason is SoftTimeout else child.kill())
        try:
            self._wait_until_ready(child)
            child.send("run", encode(msgspec.structs.replace(job.dispatch, trace=job.trace)))
            report = self._serve(child, job, start_clock)
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
        """Return an idle child, or None if this job may start one.

        Only a few children start at a time. More would compete for the processor, and with short tasks the first child
        can do the work of all.
        """
        while True:
            with self._changed:
                if not self._idle:
                    if self._starting < _MAX_STARTING:
                        self._starting += 1
                        return None
                    self._changed.wait(_POLL_INTERVAL)
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
        max_tasks, memory = self._spec.max_tasks_per_process, self._spec.max_memory
        return (max_tasks is not None and child.runs >= max_tasks) or (memory is not None and child.memory() > memory)

    def close(self) -> None:
        """End the idle children."""
        with self._lock:
            for child in self._idle:
                child.end()

    def _keep(self, child: _Child) -> None:
        """Keep a child for the next job, and start the thread that ends idle children."""
        child.idle_since = time.monotonic()
        with self._changed:
            self._idle.append(child)
            self._changed.notify()
            if self._retiring:
                return
            self._retiring = True
        threading.Thread(target=self._retire, name="retirement", daemon=True).start()

    def _retire(self) -> None:
        """End children that have been idle for too long, until none is idle."""
        has_idle = True
        while has_idle:
            threading.Event().wait(self._kept_warm / 2)
            too_long = time.monotonic() - self._kept_warm
            with self._lock:
                retired = [child for child in self._idle if child.idle_since < too_long]
                self._idle = [child for child in self._idle if child.idle_since >= too_long]
                has_idle = self._retiring = bool(self._idle)
            for child in retired:
                child.end()

    def _serve(self, child: _Child, job: Job, start_clock: Callable[[Job], None]) -> AttemptReport:
        while True:
            verb, data = child.receive()
            if verb == "report":
                return decode(list[EndReport], data)[0]
            if verb == "begun":
                start_clock(job)
            elif verb == "enqueue":
                child.send(*self._hand_over(decode(list[NewTask], data)))
            elif verb == "page":
                page = self._outbox.page(job, decode(int, data))
                child.send("gone" if page is None else "page", page or b"")
            elif verb == "mark":
                self._outbox.publish_progress(job.dispatch.id, decode(ProgressMark, data))
            elif verb == "log":
                job.label, line = decode(tuple[str, LogLine], data)
                self._outbox.log(job, line)
            elif verb == "lines":
                job.label, line = decode(tuple[str, LogLine], data)
                self._outbox.log_lines(job, line)
            elif verb == "leave":
                self._outbox.save_details(job, data)

    def _hand_over(self, tasks: list[NewTask]) -> tuple[str, bytes]:
        try:
            return "handed", encode(self._outbox.send_tasks(tasks) or {})
        except Uncertain as error:
            return "uncertain", str(error).encode()

    def _died(self, job: Job, error: EOFError | OSError, child: _Child) -> Lost | Returned:
        dispatch, code = job.dispatch, child.end()
        reason = job.interrupted_by
        if reason is not None and reason is not SoftTimeout:
            raise interruption(job, reason)
        if job.starting:
            reason_text = str(error) or "the process ended before it was ready"
            log.error("task.process_not_started error=%s", reason_text, extra=job.fields)
            return Returned(dispatch.id, dispatch.attempt, "its process could not be started", _RESTART_DELAY)
        threading.Event().wait(_DEATH_PAUSE)
        reason_text = f"{describe_exit(code)} in process {child.pid} on {socket.gethostname()}{child.memory_used()}"
        text = f"The process of this attempt died: {reason_text}."
        self._outbox.log(job, LogLine(time.time(), dispatch.attempt, "error", text))
        return Lost(dispatch.id, dispatch.attempt, alone=True, reason=reason_text)


class _Child:
    def __init__(self, spec: WorkerSpec, shard: str | None) -> None:
        parent_pipe, child_pipe = Pipe()
        self._pipe = parent_pipe
        self.is_ready = False
        self.idle_since = 0.0
        self.runs = 0
        os.set_inheritable(child_pipe.fileno(), True)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "orchestrator.workers.running.isolated_child",
                spec.app,
                str(child_pipe.fileno()),
                str(os.getpid()),
                "database" if spec.database else "",
                "hidden" if spec.commands else "",
                spec.log_level,
                spec.log_format,
                shard or "",
                *spec.allow,
            ],
            pass_fds=[child_pipe.fileno()],
            stdin=subprocess.DEVNULL,
        )
        child_pipe.close()
        self.pid = self._process.pid
        self._peak = 0

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def memory(self) -> int:
        return resident_memory(self._process.pid)

    def send(self, verb: str, data: bytes) -> None:
        self._pipe.send_bytes(encode((verb, data)))

    def receive(self) -> tuple[str, bytes]:
        return decode(tuple[str, bytes], self._pipe.recv_bytes())

    def wait_until_ready(self, limit: float) -> None:
        if self.is_ready:
            return
        if not self._pipe.poll(limit):
            raise TimeoutError(f"the process was not ready after {limit:g} s")
        self.receive()
        self.is_ready = True

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Kill the child unless it has ended. Return its exit code."""
        self._pipe.close()
        if self._process.returncode is None:
            with suppress(ProcessLookupError, ChildProcessError):  # already waited for
                os.kill(self.pid, signal.SIGKILL)  # `Popen.kill` would wait for the child and lose its resource usage
                _, status, usage = os.wait4(self.pid, 0)
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return self._process.wait()

    def memory_used(self) -> str:
        """Describe the peak memory of an ended child, if that is known."""
        return f", which used up to {format_memory(self._peak)} of memory" if self._peak else ""
