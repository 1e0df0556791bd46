"""One task that a worker process has received, on its way through the process."""

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
    """How far a job has come in this process."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


_WAITING, _RUNNING, _DONE = Stage
"""By names of their own, which Python 3.11 finds three times as fast as members of an enumeration."""


@dataclass(slots=True, eq=False)
class Bundle:
    """A message: dropped from the stream when all its tasks have been reported."""

    generation: str
    queue: str
    entry: str
    size: int
    reported: set[int] = field(default_factory=set)
    """Slots of the tasks that have been reported."""


class Job(msgspec.Struct, eq=False):
    """A received task. The first to move it on wins: its runner, the clock, a drain, or an order to stop."""

    dispatch: Dispatch
    bundle: Bundle
    slot: int
    received_at: float
    options: TaskOptions = DEFAULT_OPTIONS
    is_isolated: bool = False
    """It runs in a process of its own."""
    is_turn: bool = False
    """It is a turn of a workflow's code."""
    label: str = ""
    """How the lines that it says name it: the task, or the step of a workflow with its place in a fan-out."""
    trace: str | None = None
    """The span that its code belongs to, as a traceparent: its own, where this process makes spans."""
    next_turn: int = 0
    """The turn that follows its success, while its code runs."""
    on_loop: bool = False
    """It runs on the event loop."""
    stage: Stage = _WAITING
    started_at: float = 0.0
    starting: bool = False
    """It waits for a process of its own: its code has not begun, and its time does not run."""
    deadline: float | None = None
    soft_deadline: float | None = None
    announced: bool = False
    applied: bool = False
    """Its report is in Postgres; kept for a job that lingers."""
    lingers: bool = False
    """Its end has been reported, but its code has not ended."""
    interrupted_by: type[BaseException] | None = None
    interrupted_at: float = 0.0
    interrupt: Callable[[type[BaseException]], object] | None = None
    """How the running code is interrupted; set by what runs it."""
    thread: int = 0
    """The thread in which it was said how."""
    step: dict[str, Any] = {}
    """For a step of a workflow: workflow, step, index and count."""
    has_lines: bool = False
    """It has said something that is kept."""
    secrets: tuple[str, ...] = ()
    """Texts of its arguments that are hidden."""
    counter: int = 0
    children: list[NewTask] = []
    noted: bytes | None = None
    """Details for the next attempt that have not been sent."""
    committing: bool = False
    """Its transaction commits now: an order to stop comes too late, and waits for its end."""
    transaction: TaskTransaction | None = None
    """The transaction that will complete it, while that is open."""
    result: bytes = b""
    """The completion that the transaction will record."""
    span: Any = None
    """Its span, from when it begins until its end is reported."""
    output: Output | None = None
    """Where it writes its result, if it has asked for that."""
    store_failure: BaseException | None = None
    """Why its output could not be written, which is no fault of its code."""
    completion: bytes | None = None
    """The result that its transaction has recorded: it has succeeded, whatever its code does now."""
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
        """Know which step of a workflow it is."""
        self.step = step
        self.label = step.get("step", self.label)
        if step.get("count") is not None:
            self.label += f"[{step.get('index')}]"

    @property
    def is_placed(self) -> bool:
        """Say whether it was sent to this worker alone: few others know it, or it is a turn of code."""
        return is_private(self.bundle.queue) and not self.is_turn

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a log line about it (`log_format.TASK_FIELDS`)."""
        known = self._fields
        if known is None or known[0] is not self.trace:
            known = self._fields = self.trace, self._make_fields()
        return known[1]

    def _make_fields(self) -> dict[str, Any]:
        task = self.dispatch
        run = "" if task.run_id is None else to_text(task.run_id)
        fields = dict(zip(TASK_FIELDS, (to_text(task.id), task.name, run, task.attempt, task.queue), strict=True))
        return fields if self.trace is None else fields | fields_of(self.trace)

    def begin(self, now: float, *, starting: bool = False) -> bool:
        """Take the job to run it; False if it was given back or revoked in the meantime."""
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
        """Its code begins now, in the process that it has waited for."""
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
        """Take the job away before it has begun."""
        with _lock:
            if self.stage is not _WAITING:
                return False
            self.stage = _DONE
            return True

    def finish(self, *, lingers: bool = False) -> bool:
        """Claim the right to report the end of the run, of which the code may linger; False if someone else has."""
        with _lock:
            if self.stage is not _RUNNING:
                return False
            self.stage = _DONE
            self.lingers = lingers
            return True

    def stop_with(self, reason: type[BaseException], now: float) -> None:
        """Interrupt the running code with an exception of this type; once is enough."""
        with _lock:
            if self.stage is not _RUNNING or self.interrupted_by not in (None, SoftTimeout):
                return
            self.interrupted_by = reason
            self.interrupted_at = now
            if self.interrupt is not None and not self.committing:
                self.interrupt(reason)

    def warn(self) -> None:
        """Raise SoftTimeout in the running code, once; it may go on."""
        with _lock:
            self.soft_deadline = None
            if self.stage is _RUNNING and self.interrupted_by is None:
                self.interrupted_by = SoftTimeout
                if self.interrupt is not None and not self.committing:
                    self.interrupt(SoftTimeout)

    def interruptible(self, interrupt: Callable[[type[BaseException]], object]) -> None:
        """Say how the code that begins now is interrupted. If someone has wanted that already, it happens at once."""
        with _lock:
            self.interrupt, self.thread = interrupt, threading.get_ident()
            if self.interrupted_by is not None:
                interrupt(self.interrupted_by)

    def uninterruptible(self) -> None:
        """From now on nothing is interrupted: the code has ended, and what follows is ours."""
        if self.interrupt is None:
            return
        with _lock:
            self.interrupt = None

    def may_complete(self) -> bool:
        """Say whether it runs and need not stop; a soft timeout is only a request."""
        return self.stage is _RUNNING and self.interrupted_by in (None, SoftTimeout)

    @contextmanager
    def commit(self) -> Iterator[bool]:
        """Claim the right to commit: False if it has ended or must stop.

        An interruption that comes meanwhile arrives after the commit, never between the commit and its record here.
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
        """Say whether the running code was interrupted more than `grace` seconds ago."""
        stopped = self.interrupted_by is not None and self.interrupted_by is not SoftTimeout
        return stopped and now > self.interrupted_at + grace


# -- the jobs that a worker process has received, how fast they end, and how many more it may receive

_MEMORY = 0.5
"""Seconds that make up most of how full this process has been of late."""


class Pace:
    """Averages over the last looks."""

    def __init__(self, concurrency: int, least: float) -> None:
        self._concurrency = concurrency
        self._least = least
        """Seconds between two looks, at least."""
        self._looked_at = self._measured_at = time.monotonic()
        self._full = 0.0
        """The part of the slots that was taken at the last look."""
        self.load = 0.0
        """How full this process has been of late: 1 where every slot was taken."""
        self.rate = 0.0
        """Tasks that have ended in a second."""
        self.finished = 0
        """Tasks that have ended since the last look."""

    def measure(self, now: float, jobs: int) -> None:
        """Look at how many jobs are here."""
        self.load = self._full + (self.load - self._full) * math.exp((self._looked_at - now) / _MEMORY)
        self._full, self._looked_at = min(1.0, jobs / self._concurrency), now
        elapsed = now - self._measured_at
        if elapsed >= self._least:
            self.rate = 0.5 * self.rate + 0.5 * self.finished / elapsed
            self.finished = 0
            self._measured_at = now


LOOK = 0.05
"""Seconds between two looks at the clock while anything is here."""

_AHEAD = 0.02
"""Seconds of work that may be received ahead of free slots."""
_LEAST_READ = 0.7
"""Share of that for which one reads again: each read costs as much as some tasks."""


class ReceivedJobs:
    """Jobs that were received and whose code has not ended."""

    def __init__(self, concurrency: int, held: HeldAttempts) -> None:
        self._concurrency = concurrency
        self._held = held
        self.jobs: dict[int, Job] = {}
        """By the id of the object."""
        self.freed = threading.Event()
        """There may be room."""
        self.ended = 0
        """How many jobs have run to their end in this very process."""
        self.pace = Pace(concurrency, LOOK)

    def room(self) -> int:
        """Return how many tasks may be received now: free slots, and what is finished in the next 20 ms."""
        return min(self._concurrency + self._ahead() - len(self.jobs), self._held.room)

    def _ahead(self) -> int:
        return min(500, int(self.pace.rate * _AHEAD))

    def _is_worth_a_read(self) -> bool:
        """Say whether there is room, and not only for a few of the many tasks that are received ahead."""
        return self.room() > self._ahead() * _LEAST_READ

    def wait_for_room(self, timeout: float) -> int:
        if not self._is_worth_a_read():
            self.freed.clear()
            if not self._is_worth_a_read():
                self.freed.wait(timeout)
        return max(0, self.room())

    def among(self, wanted: set[tuple[bytes, int]]) -> list[Job]:
        """Return those of these attempts that are here."""
        return [job for job in self.snapshot() if (job.dispatch.id, job.dispatch.attempt) in wanted]

    def snapshot(self) -> list[Job]:
        """Return what waits or runs here."""
        return list(self.jobs.values())

    def remove(self, job: Job) -> None:
        """Let go of a job whose code has ended, or that was handed back."""
        self.jobs.pop(id(job), None)
        self.pace.finished += 1
        # A waiting thread has cleared it before its last look; it would wait again for more than this one place.
        if not self.freed.is_set() and (not self.jobs or self._is_worth_a_read()):
            self.freed.set()

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until nothing is left here but code that does not end."""
        deadline = time.monotonic() + timeout
        while any(not job.lingers for job in self.snapshot()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.freed.clear()
            if any(not job.lingers for job in self.snapshot()):
                self.freed.wait(min(left, 1.0))
        return True

    @property
    def used(self) -> int:
        """Return how many tasks this process has run or received to run; child processes count their own."""
        return self.ended + sum(not job.is_isolated for job in self.snapshot())
