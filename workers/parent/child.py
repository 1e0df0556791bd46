"""One worker process, as its parent sees it."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from typing import Any

from orchestrator.domain.executors.registry import plugin_of
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.outcomes import Report
from orchestrator.domain.tasks.task import Failed, Lost, Returned, TaskError
from orchestrator.entry_points import EXECUTORS, own_plugins
from orchestrator.errors import TaskTimeout
from orchestrator.memory import settle
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.failure import describe
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import Attempt, Heartbeat, Malformed, decode, digest_of, encode, names_digest
from orchestrator.workers.parent.held import Farewell, HeldAttempts, Limit
from orchestrator.workers.parent.messages import Command, FirstToReport, Hello, Leaving
from orchestrator.workers.parent.processes import die_with, thread_time
from orchestrator.workers.parent.scaling import ChildState
from orchestrator.workers.process import end_process
from orchestrator.workers.process import main as run_process
from orchestrator.workers.running.forks import watch_forks
from orchestrator.workers.spec import WorkerSpec

log = get_logger("worker")

_KEPT_FOR = 1.0
"""Seconds of processor time that a turn uses while its process stands still, if it is the one that keeps it."""
_STOPPED = "the code of a neighbour stopped its process"


@dataclass
class ParentProcess:
    """The parent process of a worker: its id and its memory."""

    id: bytes = field(default_factory=new_id)
    """Of this life of it; a process that later has its number has another."""
    memory: int = 0
    """Bytes that it had in RAM with the last heartbeat."""


class Child:
    """A process that was forked, and what its parent knows of it."""

    def __init__(self, worker: str, pid: int, pipe: Connection[Any, Any], held: HeldAttempts) -> None:
        self.worker = worker
        self.pid = pid
        self.pipe = pipe
        self.held = held
        self.started_at = time.time()
        self.memory = 0
        """Bytes that it had in RAM with the last heartbeat."""
        self.names: list[str] | None = None
        """The tasks that it knows; None until it is ready."""
        self.queues: list[str] = []
        """The queues that it serves."""
        self.release = ""
        """The release of its application."""
        self.parameters = b""
        """The parameters of its tasks, encoded."""
        self.doubtful = False
        self.worn = False
        self.draining = False
        self.spent = False
        """It takes no more tasks, and ends when its successor is ready."""
        self.dismissed = False
        """It was killed on purpose, without a log line."""
        self.is_closed = False
        """Its end of the pipe is closed."""
        self._closed_checks = 0
        self._stopping: dict[tuple[bytes, int], float] = {}
        """Attempts that must stop, and since when."""
        self._frozen_looks = 0
        self._still_checks = 0
        self._still = 0.0
        """Seconds for which it has stood still, if it does."""
        self._left_at = 0.0
        """When it was ordered to end, if it was."""
        self._overdue: list[Limit] = []
        self._turn_times: dict[tuple[bytes, int], float] = {}
        """The processor time of the threads of turns, as it was when the process was first seen to stand still."""
        self._kept_by: set[tuple[bytes, int]] = set()
        """The turns whose code keeps the interpreter to itself."""

    @property
    def state(self) -> ChildState:
        if self.draining or self.spent or self.dismissed:
            return ChildState.DRAINING
        if self.names is None:
            return ChildState.LOADING
        return ChildState.WORN if self.worn else ChildState.WORKING

    @property
    def is_still(self) -> bool:
        return self._still > 0.0

    def hear(self) -> list[Hello | Leaving]:
        """Return what the process has said since."""
        heard: list[Hello | Leaving] = []
        try:
            while not self.is_closed and self.pipe.poll():
                heard.append(decode(Hello | Leaving, self.pipe.recv_bytes()))  # type: ignore[arg-type]
        except (EOFError, OSError, Malformed):
            self.is_closed = True  # it has died, and is reaped in a moment
        return heard

    def send(self, command: Command) -> None:
        """Send a command; a child that is dead is dealt with elsewhere."""
        try:
            self.pipe.send_bytes(encode(command))
        except OSError:
            log.debug("process.gone pid=%d", self.pid)

    def stop(self, attempts: list[Attempt], now: float, moved: list[Attempt] | None = None) -> None:
        for attempt in attempts:
            self._stopping.setdefault((attempt.id, attempt.attempt), now)
        self.send(Command("stop", attempts, moved or []))

    def leave(self, verb: Command) -> None:
        """Have it take no more tasks and end."""
        self.draining = True
        self._left_at = self._left_at or time.monotonic()
        self.send(verb)

    def dismiss(self) -> None:
        """Kill it on purpose: what it held is handed back, and its death is no death."""
        self.dismissed = True
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)

    def heartbeat(self, spec: WorkerSpec, number: int, own: ParentProcess, *, hungry: bool) -> Heartbeat:
        """Return what is published of it, and of its parent's own process."""
        held, running = self.held.snapshot()
        return Heartbeat(
            worker=self.worker,
            host=socket.gethostname(),
            pid=self.pid,
            queues=self.queues,
            slots=spec.concurrency,
            names=names_digest(self.names or []),
            generation="",
            started_at=self.started_at,
            held=held,
            running=running,
            doubtful=self.doubtful,
            burst=spec.burst,
            draining=self.draining or self.spent,
            number=number,
            hungry=hungry,
            still=self._still,
            executions=spec.executions,
            executing=self.held.executing,
            parent=own.id,
            memory=self.memory,
            parent_memory=own.memory,
            release=self.release,
            parameters=digest_of(self.parameters) if self.parameters else "",
        )

    # -- code that stops the whole process

    def is_somebody_else(self) -> bool:
        """Say whether the process lives and is ours no more: it has closed the pipe, or become another program.

        It is asked with each heartbeat; one that has just died is reaped before the second time.
        """
        self._closed_checks += self.is_closed
        return self._closed_checks > 1

    def stands_still(self, now: float, grace: float) -> bool:
        """Say, once each time, that the process has done nothing for so long: one task keeps it, or it is stopped."""
        pulse, _ = self.held.pulse()
        self._still_checks = self._still_checks + 1 if pulse > 0.0 and now - pulse > grace else 0
        self._still = now - pulse if self._still_checks > 1 else 0.0
        return self._still_checks == 2

    def is_beyond_drain(self, now: float, grace: float) -> bool:
        """Say whether it was to end long ago, and stands still instead."""
        return bool(self._left_at) and now - self._left_at > grace and self._still_checks > 1

    def is_beyond_help(self, now: float, grace: float) -> bool:
        """Say whether an attempt must end and only killing the process can do it.

        A process ends its attempts itself, unless one of them keeps the interpreter to itself: then its clock stands.
        Two looks in a row must find it so, because the whole machine may have been asleep.
        """
        pulse, _ = self.held.pulse()
        held = set(self.held.unended())
        self._stopping = {attempt: since for attempt, since in self._stopping.items() if attempt in held}
        self._overdue = self.held.overdue(now - grace)
        must_end = self._overdue or any(now - since > grace for since in self._stopping.values())
        is_frozen = pulse > 0.0 and now - pulse > grace
        self._frozen_looks = self._frozen_looks + 1 if must_end and is_frozen else 0
        return self._frozen_looks > 1

    def is_kept_by_a_turn(self) -> bool:
        """Say whether the process stands still because code of a workflow keeps the interpreter to itself.

        A task may compute for as long as it likes, a turn may not; what its process cannot interrupt ends with it. The
        thread that uses the processor while the clock of the process stands is the cause: all others wait for it.
        """
        if not self.is_still:
            self._turn_times.clear()
            return False
        for id, attempt, thread in self.held.turns():
            used = thread_time(self.pid, thread)
            if used - self._turn_times.setdefault((id, attempt), used) >= _KEPT_FOR:
                self._kept_by.add((id, attempt))
        return bool(self._kept_by)

    # -- its end

    def final_reports(self, now: float, died_of: str) -> list[Report]:
        """Return the report of a process that has ended and still held attempts.

        No attempt is charged for its death: others may have been in it. One that had not begun is handed back if
        another had: where none had, it may have died of what came with them.
        """
        left, begun = self.held.unended(), self.held.begun()
        if self._kept_by:
            return [
                Lost(*attempt, alone=False, reason="the code of its workflow kept the whole process to itself")
                if attempt in self._kept_by
                else Returned(*attempt, _STOPPED, begun=attempt in begun)
                for attempt in left
            ]
        if self._frozen_looks > 1:
            overdue = {(limit.id, limit.attempt): limit for limit in self._overdue}
            return [
                _timed_out(overdue[attempt], now)
                if attempt in overdue
                else Returned(*attempt, _STOPPED, begun=attempt in begun)
                for attempt in left
            ]
        if self.held.farewell is Farewell.UNFINISHED or self.dismissed:
            blocking = self.held.blocking()
            return [
                Lost(*attempt, alone=False, reason="the event loop that it ran on was blocked or closed")
                if attempt in blocking
                else Returned(*attempt, "worker stops", begun=attempt in begun)
                for attempt in left
            ]
        return [
            Lost(*attempt, alone=False, reason=died_of)
            if attempt in begun or begun.isdisjoint(left)
            else Returned(*attempt, f"its process died before it began: {died_of}")
            for attempt in left
        ]


def _timed_out(limit: Limit, now: float) -> Failed:
    error: TaskError = describe(TaskTimeout(f"ran longer than its timeout of {limit.timeout:g} s"))
    whose = {"task_id": to_text(limit.id), "attempt": limit.attempt}
    log.error("task.killed error=%s: its process was killed with it", error.message, extra=whose)
    return Failed(limit.id, limit.attempt, now - limit.deadline + limit.timeout, error, limit.retryable)


def prepare_forks(spec: WorkerSpec) -> None:
    """Load what every process uses, so that they share it, and let no collection write to it and so copy it."""
    import_module("orchestrator.public")
    if spec.executions:
        for name in own_plugins(EXECUTORS):
            plugin_of(name)
    settle()


def start_child(
    spec: WorkerSpec, settings: Settings, after_fork: Callable[[], None], first_to_report: FirstToReport
) -> Child:
    """Fork a worker process; `after_fork` is called in it first."""
    held = HeldAttempts()
    ours, theirs = Pipe()
    worker = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(4)}"
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        farewell = Farewell.NONE
        try:
            after_fork()
            ours.close()
            die_with(parent)
            watch_forks()
            farewell = run_process(spec, settings, worker, held, theirs, first_to_report)
        except BaseException:
            log.exception("process.failed")
        finally:
            end_process(held, farewell)
    theirs.close()
    return Child(worker, pid, ours, held)
