"""Everything that a worker process is running, and what runs it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from orchestrator.domain.code.activation import Activated
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, Failed, Returned, Started
from orchestrator.errors import SoftTimeout, TaskAborted, TaskTimeout
from orchestrator.sdk.code.endings import EndTurn
from orchestrator.telemetry import get_logger
from orchestrator.workers.executors.driving import Driver
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.reporting.task_log import TaskLog
from orchestrator.workers.running.coroutines import Coroutines
from orchestrator.workers.running.delivery import DELIVERY, stack_of
from orchestrator.workers.running.failures import retries_timeouts
from orchestrator.workers.running.hooks import AttemptSpans
from orchestrator.workers.running.isolated import Isolation
from orchestrator.workers.running.job import LOOK, Job, ReceivedJobs, Stage
from orchestrator.workers.running.large_results import in_thread
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.standstill import BLOCKED_FOR, Standstill
from orchestrator.workers.running.task_runtime import interruption
from orchestrator.workers.running.threads import Threads, start_critical_thread
from orchestrator.workers.running.turns import Turns

log = get_logger("worker")

_ANNOUNCE_AFTER = 0.05
"""Seconds after which a run is worth a report of its own; most tasks have ended by then."""
_LATEST = 0.005
"""Seconds in which reports of short tasks gather, while one is run after another."""
_IDLE_LOOK = 1.0
"""Seconds between two looks while nothing is here: the parent wants to see that the clock ticks."""
_INTERRUPTIONS = (SoftTimeout, TaskTimeout, TaskAborted, EndTurn)


class Pool:
    """Runs jobs, watches their time, and reports how they end.

    `on_stuck` is called with the name of a task whose code did not stop, `on_standstill` with the reason why the event
    loop runs no more.
    """

    def __init__(
        self,
        runner: Runner,
        isolation: Isolation,
        reporter: Reporter,
        held: HeldAttempts,
        *,
        concurrency: int,
        ttl: float,
        stop_grace: float,
        on_stuck: Callable[[str], None],
        turn_timeout: float = 2.0,
        on_standstill: Callable[[str], None] = lambda _: None,
        spans: AttemptSpans | None = None,
        blocked_for: float = BLOCKED_FOR,
    ) -> None:
        self.runner = self._runner = runner
        self._isolation = isolation
        self._reporter = reporter
        self._held = held
        self.concurrency = concurrency
        self._ttl = ttl
        self._stop_grace = stop_grace
        self._on_stuck = on_stuck
        self._turns = Turns(turn_timeout)
        self._spans = spans or AttemptSpans()
        self.driver: Driver | None = None
        """Watches executions outside this process, if there are any."""
        self._threads = Threads(concurrency, self._run)
        self._coroutines = Coroutines(self._run_async)
        self.standstill = Standstill(self._coroutines, held, on_standstill, blocked_for)
        self.received = ReceivedJobs(concurrency, held)
        self.task_log = TaskLog()
        self._busy = threading.Event()
        self._heard_until = 0.0
        """Until when the last sign of life of the parent that was looked at lasts."""
        self._sent_at = 0.0

    def start(self) -> None:
        """Begin to watch the time, in a thread of its own.

        The first beat is here: the very first task may keep the interpreter from that thread for ever.
        """
        self._held.beat(time.monotonic(), self.received.pace.load)
        start_critical_thread("timekeeper", self._keep_time)

    # -- taking in

    def submit(self, jobs: Sequence[Job]) -> None:
        self.received.jobs.update(zip(map(id, jobs), jobs, strict=True))
        self.task_log.received(jobs)
        if not self._busy.is_set():
            self._busy.set()
        on_loop: list[Job] = []
        for job in jobs:
            if not job.is_turn and not self._runner.has(job):
                self._held.mark_begun(job.slot)  # what is imported to find it may end the process
            task = None if job.is_turn else self._runner.find(job)
            if task is not None and task._is_async and not job.is_isolated:
                job.on_loop = True
                on_loop.append(job)
        if in_threads := [job for job in jobs if not job.on_loop] if on_loop else jobs:
            self._threads.submit(in_threads)
        if on_loop:
            self._coroutines.submit(on_loop)

    def execute(self, jobs: Sequence[Job]) -> None:
        """Have these done by their executors, as far as there is room."""
        driver = self.driver
        taken: list[Job] = []
        for job in jobs:
            if driver is not None and driver.room > 0 and not self.is_unheard():
                self._held.mark_begun(job.slot)
                driver.accept(job)
                taken.append(job)
            elif job.take_back():
                reason = "no room for executions" if driver is None or driver.room <= 0 else "it cannot be heard"
                self._reporter.report(Returned(job.dispatch.id, job.dispatch.attempt, reason), job)
        self.task_log.received(taken)
        self._held.show_executing(0 if driver is None else len(driver))
        self._coroutines.submit(taken)

    # -- running

    def _run(self, job: Job, is_quick: bool = False) -> float:
        """Run a job in the current thread; return how long it took.

        The reports of short jobs go together, sent by this thread before it has nothing to run.
        """
        if not self._begin(job):
            return 0.0
        is_traced = job.trace is not None or self._spans.makes_any
        token = self._spans.begin(job) if is_traced else None
        try:
            if job.is_isolated:
                report = self._isolation.run(job, self._start_clock)
            else:
                report = self._runner.run(job)
        except _INTERRUPTIONS as reason:  # its process was killed, or the code had just ended
            job.uninterruptible()
            report = self._runner.failures.failure(job, reason.with_traceback(None))
        turn = None if job.dispatch.run_id is None or is_traced else self._follow(job, report)
        now = time.monotonic()
        sends_itself = is_quick or len(self.received.jobs) == 1
        self._end(job, report, turn, later=sends_itself)
        if is_traced:
            self._spans.leave(job, token)
        if sends_itself and not (is_quick and self._threads.backlog and now < self._sent_at + _LATEST):
            self._sent_at = now
            self._reporter.send()
        return now - job.started_at

    async def _run_async(self, job: Job) -> None:
        if job.options.executor is not None and self.driver is not None:
            await self.driver.drive(job)
        elif self._begin(job):
            token = self._spans.begin(job)
            report, turn = await self._runner.run_async(job), None
            if job.dispatch.run_id is not None and token is None and self._runner.may_follow(job, report):
                turn = await in_thread(lambda: self._follow(job, report))
            self._end(job, report, turn)
            self._spans.leave(job, token)

    def is_unheard(self) -> bool:
        """Say whether heartbeats of this process have failed for so long that others may have its attempts."""
        return self._is_unheard(time.monotonic())

    def _is_unheard(self, now: float) -> bool:
        left = self._ttl - self._held.unheard(now)
        self._heard_until = now + left
        return left < 0

    def _begin(self, job: Job) -> bool:
        now = time.monotonic()
        if now > self._heard_until and self._is_unheard(now):
            self._hand_back(job, "its worker cannot be heard")
            return False
        if not job.begin(now, starting=job.is_isolated):
            return False
        self._held.mark_begun(job.slot)
        if job.deadline is not None:
            self._limit(job)
        elif job.is_turn and not job.is_isolated:
            self._held.show_turn(job.slot, threading.get_native_id())
        if job.options is not DEFAULT_OPTIONS:
            self._announce_rated(job, now)
        return True

    def _announce_rated(self, job: Job, now: float) -> None:
        """Say at once that a task with a rate has begun, once its code does: the leader waits for it with others."""
        options = job.options
        if not job.starting and (options.rate is not None or options.total_rate is not None):
            self._announce(job, now)

    def _announce(self, job: Job, now: float) -> None:
        job.announced = True
        self._reporter.report(Started(job.dispatch.id, job.dispatch.attempt, now - job.started_at))

    def _start_clock(self, job: Job) -> None:
        now = time.monotonic()
        job.start_clock(now)
        self._limit(job)
        self._announce_rated(job, now)

    def _limit(self, job: Job) -> None:
        if job.deadline is not None and job.options.timeout is not None:
            self._held.limit(job.slot, job.deadline, job.options.timeout, retryable=retries_timeouts(job))

    def _follow(self, job: Job, report: AttemptReport) -> Activated | None:
        """Take the turn that follows the success of a job, if its run is here. The time of the job is not used up."""
        if not self._runner.may_follow(job, report):
            return None
        if job.deadline is not None:
            self._held.unlimit(job.slot)
            job.deadline = job.soft_deadline = None
        turn = self._runner.follow(job, report)
        self._turns.verdict(job)  # if it took too long, so does the turn that the leader sends
        return turn

    def _end(self, job: Job, report: AttemptReport, turn: Activated | None = None, *, later: bool = False) -> None:
        if job.dispatch.run_id is not None:
            report = self._turns.verdict(job) or report
        if job.finish():
            self._report_end(job, report, turn, later=later)
        else:
            self._reporter.code_ended(job)
        self.received.ended += not job.is_isolated
        self.received.remove(job)

    def _report_end(
        self, job: Job, report: AttemptReport, turn: Activated | None = None, *, later: bool = False
    ) -> None:
        if job.deadline is not None or job.is_turn:
            self._held.unlimit(job.slot)
        if job.span is not None:
            self._spans.ended(job, report)
        self.task_log.ended(job, report)
        self._reporter.report(report, job, turn=turn, later=later)
        if self._runner.client.middleware is not None:
            self._runner.ended(job, report)

    # -- the clock

    def _keep_time(self) -> None:
        while True:
            self._busy.wait(_IDLE_LOOK)
            now = time.monotonic()
            self._held.beat(now, self.received.pace.load)
            if self.driver is not None:
                self._held.show_executing(len(self.driver))
            self.task_log.flush_due(now)
            DELIVERY.look()
            if not self.received.jobs:
                self._busy.clear()
                self._held.show_running(0)
                self.standstill.rest()
                if self.received.jobs:
                    self._busy.set()
                self.received.pace.measure(now, 0)
                continue
            self._check_all(now)
            threading.Event().wait(LOOK)

    def _check_all(self, now: float) -> None:
        running = 0
        stale = False
        waiting: list[Job] = []
        jobs = self.received.snapshot()
        self.standstill.look(now)
        for job in jobs:
            if job.stage is Stage.RUNNING:
                running += 1
                self._check_running(job, now)
            elif job.lingers:
                running += 1
            elif now - job.received_at > self.standstill.patience(job):
                if job.on_loop:
                    waiting.append(job)
                else:
                    stale = True
                    self._hand_back(job, "no free slot")
        if waiting:
            self._send_away(waiting, now)
        self._held.show_running(running)
        if not stale:
            self._threads.relieve()
        self._reporter.hurry()
        self.received.pace.measure(now, len(jobs))

    def _send_away(self, jobs: Sequence[Job], now: float) -> None:
        """Hand back the jobs that wait for the event loop, but for one that only this worker takes, if that leaves a
        slot."""
        has_room = len(self.received.jobs) - len(jobs) + 1 < self.concurrency
        for job in jobs:
            task = job.dispatch.id
            if has_room and self.standstill.may_stay(task, now - job.received_at):
                has_room = False
            else:
                self._hand_back(job, "the event loop does not turn", self.standstill.delay(task, now))

    def _check_running(self, job: Job, now: float) -> None:
        if not job.announced and not job.starting and now - job.started_at > _ANNOUNCE_AFTER:
            self._announce(job, now)
        self._reporter.note(job)
        if job.soft_deadline is not None and now > job.soft_deadline:
            job.warn()
        if job.deadline is not None and now > job.deadline:
            job.stop_with(TaskTimeout, now)
        if job.is_turn or job.next_turn:
            running = self._runner.running(job)
            if running is not None or job.is_turn:
                self._turns.check(running, job, now)
        if job.outlives_stop(now, self._stop_grace):
            self._give_up(job)

    def _give_up(self, job: Job) -> None:
        """End an attempt whose code does not end. It stays in the table of what is held until the code has."""
        reason = job.interrupted_by
        assert reason is not None
        stack = None if job.on_loop or job.is_isolated else stack_of(job.thread)
        if not job.finish(lingers=True):
            return  # it has ended at this very moment
        report = self._turns.verdict(job) or self._runner.failures.failure(
            job, interruption(job, reason).with_traceback(stack)
        )
        if isinstance(report, Failed):  # one that had completed in its transaction has succeeded
            report = msgspec.structs.replace(report, lingering=True)
        self._report_end(job, report)
        self.received.freed.set()
        log.warning(
            "task.still_running: the task was told to stop and goes on; this process is replaced", extra=job.fields
        )
        self._on_stuck(job.dispatch.name)

    # -- giving back

    def revoke(self, attempts: Iterable[tuple[bytes, int]], moved: Iterable[tuple[bytes, int]] = ()) -> None:
        """Stop attempts that no longer count; whatever they still report is ignored by the leader."""
        wanted = set(attempts)
        if self.driver is not None:
            self.driver.revoke(wanted, set(moved))
        now = time.monotonic()
        for job in self.received.among(wanted):
            job.stop_with(TaskAborted, now)
            self._hand_back(job, "cancelled")
        for job in self._reporter.succeeded(wanted):
            self.task_log.dropped(job)

    def spare(self, attempts: Iterable[tuple[bytes, int]]) -> None:
        """Give these back if they have not begun: others that know them have room."""
        for job in self.received.among(set(attempts)):
            self._hand_back(job, "others have room")

    def hand_back_waiting(self) -> int:
        """Give back what has not begun; return how many."""
        return sum(self._hand_back(job, "worker stops") for job in self.received.snapshot())

    def let_go(self) -> int:
        """Hand executions back, which go on elsewhere; return how many."""
        return 0 if self.driver is None else self.driver.let_go_all("worker stops")

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of asynchronous tasks, once there was one."""
        return self._coroutines.loop

    def release(self, timeout: float) -> None:
        """Clear away what is left of executions that are over: the process ends."""
        if self.driver is not None and self.loop is not None:
            self.driver.finish(self.loop, timeout)

    def send_notes(self) -> None:
        """Send what running tasks have left for their next attempts: the process ends before they do."""
        for job in self.received.snapshot():
            self._reporter.note(job)

    def _hand_back(self, job: Job, reason: str, delay: float = 0.0) -> bool:
        if not job.take_back():
            return False
        self._reporter.report(Returned(job.dispatch.id, job.dispatch.attempt, reason, delay), job)
        self.received.remove(job)
        return True
