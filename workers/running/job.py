"""A task that a worker process has received, on its way through the process."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, Dispatch, NewTask, TaskOptions, parse_options
from orchestrator.errors import SoftTimeout
from orchestrator.log_format import TASK_FIELDS
from orchestrator.trace_context import fields_of
from orchestrator.transport.keys import is_private
from orchestrator.workers.parent.held import HeldAttempts

if TYPE_CHECKING:
    from orchestrator.payloads.objects import Output
    from orchestrator.sdk.tasks.transaction import TaskTransaction


_lock = threading.Lock()


class Stage(Enum):
    """The stage of a job in this process."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


_WAITING, _RUNNING, _DONE = Stage
"""Module-level names, which Python 3.11 finds three times as fast as members of an enumeration."""


@dataclass(slots=True, eq=False)
class Bundle:
    """A stream message. It is deleted when all its tasks have been reported."""

    generation: str
    queue: str
    entry: str
    size: int
    reported: set[int] = field(default_factory=set)
    """Slots of the tasks that have been reported."""


class Job(msgspec.Struct, eq=False):
    """A received task. The runner, the clock, a drain or an order to stop may change its stage; the first one wins."""

    dispatch: Dispatch
    bundle: Bundle
    slot: int
    received_at: float
    options: TaskOptions = DEFAULT_OPTIONS
    is_isolated: bool = False
    """Whether the job runs in a process of its own."""
    is_turn: bool = False
    """Whether the job is a turn of a workflow's code."""
    label: str = ""
    """Name of the job in its stored log lines: the task, or the workflow step with its index in a fan-out."""
    trace: str | None = None
    """Trace context of the job's code as a traceparent: the job's own span, if this process exports spans."""
    next_turn: int = 0
    """Number of the workflow turn that follows the job's success, while the turn runs."""
    on_loop: bool = False
    """Whether the job runs on the event loop."""
    stage: Stage = _WAITING
    started_at: float = 0.0
    starting: bool = False
    """Whether the job waits for a process of its own: its code has not begun, and its timeout has not started."""
    deadline: float | None = None
    soft_deadline: float | None = None
    announced: bool = False
    applied: bool = False
    """Whether the job's report is in Postgres; kept for a job that lingers."""
    lingers: bool = False
    """Whether the job's end has been reported although its code has not ended."""
    interrupted_by: type[BaseException] | None = None
    interrupted_at: float = 0.0
    interrupt: Callable[[type[BaseException]], object] | None = None
    """Interrupts the running code; set by the code's runner."""
    thread: int = 0
    """The thread that has set `interrupt`."""
    step: dict[str, Any] = {}
    """For a step of a workflow: workflow, step, index and count."""
    has_lines: bool = False
    """Whether the job has log lines to store."""
    secrets: tuple[str, ...] = ()
    """Secret texts in the arguments, which are redacted."""
    counter: int = 0
    children: list[NewTask] = []
    noted: bytes | None = None
    """The note for the next attempt, if it has not been sent."""
    committing: bool = False
    """Whether the job's transaction is committing: an order to stop waits until the commit has ended."""
    transaction: TaskTransaction | None = None
    """The open transaction that will complete the job."""
    span: Any = None
    """The span of the job, from its begin until its end is reported."""
    output: Output | None = None
    """The file that becomes the job's result, if the task has opened one."""
    refusal: BaseException | None = None
    """The error with which the task's result was refused while its code ran: every attempt would raise it again."""
    store_failure: BaseException | None = None
    """The error of the payload store because of which the output could not be written."""
    completion: bytes | None = None
    """The result that the job's transaction has recorded. The job has then succeeded, whatever its code does."""
    _fields: tuple[str | None, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        dispatch = self.dispatch
        if dispatch.options is not None:
            self.options = parse_options(dispatch.options)
        self.is_isolated = dispatch.alone or self.options.isolation == "process"
        self.is_turn = dispatch.run_id == dispatch.id
        self.label = dispatch.name
        self.trace = dispatch.trace

    def set_step(self, step: dict[str, Any]) -> None:
        """Record which workflow step the job is."""
        self.step = step
        self.label = step.get("step", self.label)
        if step.get("count") is not None:
            self.label += f"[{step.get('index')}]"

    @property
    def is_placed(self) -> bool:
        """Whether the job is a task that was sent only to this worker. Workflow turns do not count."""
        return is_private(self.bundle.queue) and not self.is_turn

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of log lines about the job (`log_format.TASK_FIELDS`)."""
        cached = self._fields
        if cached is None or cached[0] is not self.trace:
            cached = self._fields = self.trace, self._make_fields()
        return cached[1]

    def _make_fields(self) -> dict[str, Any]:
        task = self.dispatch
        run = "" if task.run_id is None else to_text(task.run_id)
        fields = dict(zip(TASK_FIELDS, (to_text(task.id), task.name, run, task.attempt, task.queue), strict=True))
        return fields if self.trace is None else fields | fields_of(self.trace)

    def begin(self, now: float, *, starting: bool = False) -> bool:
        """Claim the job for running. Return False if it was handed back or revoked meanwhile."""
        with _lock:
            if self.stage is not _WAITING:
                return False
            self.stage = _RUNNING
            self.started_at = now
            if starting:
                self.starting = True
            elif self.options is not DEFAULT_OPTIONS:
                self._start_clock(now)
            return True

    def start_clock(self, now: float) -> None:
        """Start the timeout of an isolated job: its code begins now."""
        with _lock:
            self.starting = False
            self._start_clock(now)

    def _start_clock(self, now: float) -> None:
        self.started_at = now
        if self.options.timeout is not None:
            self.deadline = now + self.options.timeout
        if self.options.soft_timeout is not None:
            self.soft_deadline = now + self.options.soft_timeout

    def take_back(self) -> bool:
        """Claim the job for handing it back. Return False if it has begun."""
        with _lock:
            if self.stage is not _WAITING:
                return False
            self.stage = _DONE
            return True

    def finish(self, *, lingers: bool = False) -> bool:
        """Claim the right to report the job's end. Return False if it is taken. With `lingers`, the code goes on."""
        with _lock:
            if self.stage is not _RUNNING:
                return False
            self.stage = _DONE
            self.lingers = lingers
            return True

    def stop_with(self, reason: type[BaseException], now: float) -> None:
        """Interrupt the running code with an exception of this type, once."""
        with _lock:
            if self.stage is not _RUNNING or self.interrupted_by not in (None, SoftTimeout):
                return
            self.interrupted_by = reason
            self.interrupted_at = now
            if self.interrupt is not None and not self.committing:
                self.interrupt(reason)

    def warn(self) -> None:
        """Raise SoftTimeout in the running code, once. The code may go on."""
        with _lock:
            self.soft_deadline = None
            if self.stage is _RUNNING and self.interrupted_by is None:
                self.interrupted_by = SoftTimeout
                if self.interrupt is not None and not self.committing:
                    self.interrupt(SoftTimeout)

    def interruptible(self, interrupt: Callable[[type[BaseException]], object]) -> None:
        """Set how the code that begins now is interrupted. If it was interrupted before, interrupt it at once."""
        with _lock:
            self.interrupt, self.thread = interrupt, threading.get_ident()
            if self.interrupted_by is not None:
                interrupt(self.interrupted_by)

    def uninterruptible(self) -> None:
        """End interruptions: the task's code has ended, and what follows is the worker's own."""
        if self.interrupt is None:
            return
        with _lock:
            self.interrupt = None

    def may_complete(self) -> bool:
        """Return whether the job is running and was not ordered to stop. A soft timeout is no such order."""
        return self.stage is _RUNNING and self.interrupted_by in (None, SoftTimeout)

    @contextmanager
    def commit(self) -> Iterator[bool]:
        """Claim the right to commit a transaction. Yield False if the job has ended or must stop.

        An interruption that arrives meanwhile is delivered after the commit, never between the commit and its record.
        """
        with _lock:
            self.committing = self.may_complete()
            before = self.interrupted_by
        try:
            yield self.committing
        finally:
            with _lock:
                self.committing = False
                if self.interrupted_by is not before and self.interrupted_by is not None and self.interrupt is not None:
                    self.interrupt(self.interrupted_by)

    def outlives_stop(self, now: float, grace: float) -> bool:
        """Return whether the code still runs `grace` seconds after it was interrupted."""
        stopped = self.interrupted_by is not None and self.interrupted_by is not SoftTimeout
        return stopped and now > self.interrupted_at + grace


# -- the received jobs of a worker process: their throughput, and the room for more

_LOAD_WINDOW = 0.5
"""Time constant of the load average in seconds."""


class Pace:
    """Averages of the load and throughput of a process."""

    def __init__(self, concurrency: int, min_interval: float) -> None:
        self._concurrency = concurrency
        self._min_interval = min_interval
        """Seconds between two measurements of the rate, at least."""
        self._checked_at = self._measured_at = time.monotonic()
        self._used = 0.0
        """Share of the slots that were in use at the last measurement."""
        self.load = 0.0
        """Recent share of used slots: 1 if all slots were in use."""
        self.rate = 0.0
        """Tasks that end per second."""
        self.finished = 0
        """Tasks that have ended since the last measurement."""

    def measure(self, now: float, jobs: int) -> None:
        """Update the averages with the current number of jobs."""
        self.load = self._used + (self.load - self._used) * math.exp((self._checked_at - now) / _LOAD_WINDOW)
        self._used, self._checked_at = min(1.0, jobs / self._concurrency), now
        elapsed = now - self._measured_at
        if elapsed >= self._min_interval:
            self.rate = 0.5 * self.rate + 0.5 * self.finished / elapsed
            self.finished = 0
            self._measured_at = now


CHECK_INTERVAL = 0.05
"""Seconds between two checks of running jobs."""

_READ_AHEAD = 0.02
"""Seconds of work that may be received ahead of free slots."""
_MIN_READ_SHARE = 0.7
"""Share of the read-ahead that must be free before the next read: each read costs as much as some tasks."""


class ReceivedJobs:
    """Jobs that were received and whose code has not ended."""

    def __init__(self, concurrency: int, held: HeldAttempts) -> None:
        self._concurrency = concurrency
        self._held = held
        self.jobs: dict[int, Job] = {}
        """Jobs by the id of the object."""
        self.freed = threading.Event()
        """Set when there may be room for more jobs."""
        self.ended = 0
        """Number of jobs that have run to their end in this process, not in a child."""
        self.pace = Pace(concurrency, CHECK_INTERVAL)

    def room(self) -> int:
        """Return how many tasks may be received now: the free slots, and the tasks that end within the next 20 ms."""
        return min(self._concurrency + self._ahead() - len(self.jobs), self._held.room)

    def _ahead(self) -> int:
        return min(500, int(self.pace.rate * _READ_AHEAD))

    def _is_worth_a_read(self) -> bool:
        """Return whether there is room for enough tasks to make a read worth its cost."""
        return self.room() > self._ahead() * _MIN_READ_SHARE

    def wait_for_room(self, timeout: float) -> int:
        if not self._is_worth_a_read():
            self.freed.clear()
            if not self._is_worth_a_read():
                self.freed.wait(timeout)
        return max(0, self.room())

    def among(self, attempts: set[tuple[bytes, int]]) -> list[Job]:
        """Return the jobs of these attempts."""
        return [job for job in self.snapshot() if (job.dispatch.id, job.dispatch.attempt) in attempts]

    def snapshot(self) -> list[Job]:
        """Return all jobs that wait or run."""
        return list(self.jobs.values())

    def remove(self, job: Job) -> None:
        """Remove a job whose code has ended, or that was handed back."""
        self.jobs.pop(id(job), None)
        self.pace.finished += 1
        # Wake the waiting thread only for more than a single slot: it has cleared the event before its last check.
        if not self.freed.is_set() and (not self.jobs or self._is_worth_a_read()):
            self.freed.set()

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until all jobs have ended, except those that linger."""
        deadline = time.monotonic() + timeout
        while any(not job.lingers for job in self.snapshot()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            self.freed.clear()
            if any(not job.lingers for job in self.snapshot()):
                self.freed.wait(min(remaining, 1.0))
        return True

    @property
    def used(self) -> int:
        """The number of tasks that this process has run or received to run, without those in child processes."""
        return self.ended + sum(not job.is_isolated for job in self.snapshot())
