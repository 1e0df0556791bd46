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
from orchestrator.memory import freeze_before_fork
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

_BLOCKING_TURN_TIME = 1.0
"""Seconds of processor time that a turn uses while its process is stalled, before the turn is taken for the cause."""
_STOPPED = "another task blocked its process"


@dataclass
class ParentProcess:
    """Identifies the parent process of a worker, with its memory."""

    id: bytes = field(default_factory=new_id)
    """Id of this process; unlike a pid, it is never reused."""
    memory: int = 0
    """Bytes of resident memory at the last heartbeat."""


class Child:
    """A forked worker process, as its parent sees it."""

    def __init__(self, worker: str, pid: int, pipe: Connection[Any, Any], held: HeldAttempts) -> None:
        self.worker = worker
        self.pid = pid
        self.pipe = pipe
        self.held = held
        self.started_at = time.time()
        self.memory = 0
        """Bytes of resident memory at the last heartbeat."""
        self.names: list[str] | None = None
        """Names of the tasks that the process can run; None until it is ready."""
        self.queues: list[str] = []
        """The queues that the process serves."""
        self.release = ""
        """The release of the application."""
        self.parameters = b""
        """The parameters of the process's tasks, encoded."""
        self.doubtful = False
        """Whether the process pauses, as the worker was cut off, until the leader says which attempts count."""
        self.worn = False
        """Whether the process is too old or too large, and works only until its successor is ready."""
        self.draining = False
        self.spent = False
        """Whether the process receives no more tasks and ends when its successor is ready."""
        self.dismissed = False
        """Whether the process was killed on purpose, without an error in the log."""
        self.is_closed = False
        """Whether the process has closed its end of the pipe."""
        self._closed_checks = 0
        self._stopping: dict[tuple[bytes, int], float] = {}
        """Attempts ordered to stop, with the time of the order."""
        self._frozen_checks = 0
        self._stalled_checks = 0
        self._stalled_for = 0.0
        """Seconds since the process's clock stopped; 0.0 while it ticks."""
        self._drain_began_at = 0.0
        """Time when the process was ordered to drain; 0.0 before that."""
        self._overdue: list[Limit] = []
        self._turn_times: dict[tuple[bytes, int], float] = {}
        """Processor time of the threads of turns, at the moment when the process was first seen stalled."""
        self._blocking_turns: set[tuple[bytes, int]] = set()
        """The turns whose code never releases the interpreter."""

    @property
    def state(self) -> ChildState:
        if self.draining or self.spent or self.dismissed:
            return ChildState.DRAINING
        if self.names is None:
            return ChildState.LOADING
        return ChildState.WORN if self.worn else ChildState.WORKING

    @property
    def is_stalled(self) -> bool:
        return self._stalled_for > 0.0

    def receive(self) -> list[Hello | Leaving]:
        """Return the new messages of the process."""
        messages: list[Hello | Leaving] = []
        try:
            while not self.is_closed and self.pipe.poll():
                messages.append(decode(Hello | Leaving, self.pipe.recv_bytes()))  # type: ignore[arg-type]
        except (EOFError, OSError, Malformed):
            self.is_closed = True  # the process has died, and is reaped soon
        return messages

    def send(self, command: Command) -> None:
        """Send a command. Ignore a dead process: `_reap` of the supervisor handles it."""
        try:
            self.pipe.send_bytes(encode(command))
        except OSError:
            log.debug("process.gone pid=%d", self.pid)

    def stop(self, attempts: list[Attempt], now: float, moved: list[Attempt] | None = None) -> None:
        for attempt in attempts:
            self._stopping.setdefault((attempt.id, attempt.attempt), now)
        self.send(Command("stop", attempts, moved or []))

    def begin_draining(self, command: Command) -> None:
        """Order the process to receive no more tasks and end."""
        self.draining = True
        self._drain_began_at = self._drain_began_at or time.monotonic()
        self.send(command)

    def dismiss(self) -> None:
        """Kill the process on purpose. Its attempts are handed back, and its end is not logged as a death."""
        self.dismissed = True
        self.kill()

    def kill(self) -> None:
        """Kill the process."""
        os.kill(self.pid, signal.SIGKILL)

    def heartbeat(self, spec: WorkerSpec, number: int, own: ParentProcess, *, hungry: bool) -> Heartbeat:
        """Return the heartbeat of the process, with data of the parent's own process."""
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
            still=self._stalled_for,
            executions=spec.executions,
            executing=self.held.executing,
            parent=own.id,
            memory=self.memory,
            parent_memory=own.memory,
            release=self.release,
            parameters=digest_of(self.parameters) if self.parameters else "",
        )

    # -- code that blocks the whole process

    def is_foreign(self) -> bool:
        """Return whether the process is alive but has closed the pipe or replaced its program.

        This is checked with each heartbeat. A process that has just died is reaped before the second check.
        """
        self._closed_checks += self.is_closed
        return self._closed_checks > 1

    def has_stalled(self, now: float, grace: float) -> bool:
        """Return, once per stall, whether the process's clock has stopped for `grace` seconds: blocked, or paused."""
        pulse, _ = self.held.pulse()
        self._stalled_checks = self._stalled_checks + 1 if pulse > 0.0 and now - pulse > grace else 0
        self._stalled_for = now - pulse if self._stalled_checks > 1 else 0.0
        return self._stalled_checks == 2

    def has_overrun_drain(self, now: float, grace: float) -> bool:
        """Return whether the process should have ended `grace` seconds ago and is stalled."""
        return bool(self._drain_began_at) and now - self._drain_began_at > grace and self._stalled_checks > 1

    def must_be_killed(self, now: float, grace: float) -> bool:
        """Return whether an attempt must stop, and only killing the process can stop it.

        A process stops its attempts on its own, unless code that never releases the interpreter blocks its clock. Two
        checks in a row must find that, because the whole machine may have been suspended.
        """
        pulse, _ = self.held.pulse()
        held = set(self.held.unended())
        self._stopping = {attempt: since for attempt, since in self._stopping.items() if attempt in held}
        self._overdue = self.held.overdue(now - grace)
        must_end = self._overdue or any(now - since > grace for since in self._stopping.values())
        is_frozen = pulse > 0.0 and now - pulse > grace
        self._frozen_checks = self._frozen_checks + 1 if must_end and is_frozen else 0
        return self._frozen_checks > 1

    def is_blocked_by_turn(self) -> bool:
        """Return whether the process is stalled because workflow code never releases the interpreter.

        A task may compute for as long as it likes, a turn may not. A turn that cannot be interrupted ends with its
        process. The cause is the thread that uses the processor while the process is stalled: all others wait for it.
        """
        if not self.is_stalled:
            self._turn_times.clear()
            return False
        for id, attempt, thread in self.held.turns():
            used = thread_time(self.pid, thread)
            if used - self._turn_times.setdefault((id, attempt), used) >= _BLOCKING_TURN_TIME:
                self._blocking_turns.add((id, attempt))
        return bool(self._blocking_turns)

    # -- the end of the process

    def final_reports(self, now: float, died_of: str) -> list[Report]:
        """Return the reports for the attempts that an ended process still held.

        No attempt is charged for the death, because another one may have caused it. Attempts that had begun are lost,
        the others are handed back. If none had begun, receiving one may have caused the death, so all are lost.
        """
        remaining, begun = self.held.unended(), self.held.begun()
        if self._blocking_turns:
            return [
                Lost(*attempt, alone=False, reason="the code of its workflow blocked the whole process")
                if attempt in self._blocking_turns
                else Returned(*attempt, _STOPPED, begun=attempt in begun)
                for attempt in remaining
            ]
        if self._frozen_checks > 1:
            overdue = {(limit.id, limit.attempt): limit for limit in self._overdue}
            return [
                _timed_out(overdue[attempt], now)
                if attempt in overdue
                else Returned(*attempt, _STOPPED, begun=attempt in begun)
                for attempt in remaining
            ]
        if self.held.farewell is Farewell.UNFINISHED or self.dismissed:
            blocking = self.held.blocking()
            return [
                Lost(*attempt, alone=False, reason="the event loop that it ran on was blocked or closed")
                if attempt in blocking
                else Returned(*attempt, "worker stops", begun=attempt in begun)
                for attempt in remaining
            ]
        return [
            Lost(*attempt, alone=False, reason=died_of)
            if attempt in begun or begun.isdisjoint(remaining)
            else Returned(*attempt, f"its process died before it began: {died_of}")
            for attempt in remaining
        ]


def _timed_out(limit: Limit, now: float) -> Failed:
    error: TaskError = describe(TaskTimeout(f"ran longer than its timeout of {limit.timeout:g} s"))
    fields = {"task_id": to_text(limit.id), "attempt": limit.attempt}
    log.error("task.killed error=%s: its process was killed with it", error.message, extra=fields)
    return Failed(limit.id, limit.attempt, now - limit.deadline + limit.timeout, error, limit.retryable)


def prepare_forks(spec: WorkerSpec) -> None:
    """Import what every process uses, and freeze it for garbage collection, so that forks share the memory."""
    import_module("orchestrator.public")
    if spec.executions:
        for name in own_plugins(EXECUTORS):
            plugin_of(name)
    freeze_before_fork()


def start_child(
    spec: WorkerSpec, settings: Settings, after_fork: Callable[[], None], first_to_report: FirstToReport
) -> Child:
    """Fork a worker process. `after_fork` is called first in the new process."""
    held = HeldAttempts()
    parent_pipe, child_pipe = Pipe()
    worker = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(4)}"
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        farewell = Farewell.NONE
        try:
            after_fork()
            parent_pipe.close()
            die_with(parent)
            watch_forks()
            farewell = run_process(spec, settings, worker, held, child_pipe, first_to_report)
        except BaseException:
            log.exception("process.failed")
        finally:
            end_process(held, farewell)
    child_pipe.close()
    return Child(worker, pid, parent_pipe, held)
