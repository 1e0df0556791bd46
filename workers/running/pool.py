"""The pool of a worker process: runs jobs and watches their time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from orchestrator.domain.code.activation import Activated
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, Failed, Returned, Started
from orchestrator.errors import TaskAborted, TaskTimeout
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
from orchestrator.workers.running.job import CHECK_INTERVAL, Job, ReceivedJobs, Stage
from orchestrator.workers.running.large_results import in_thread
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.standstill import BLOCKED_FOR, Standstill
from orchestrator.workers.running.task_runtime import interruption
from orchestrator.workers.running.threads import Threads, start_critical_thread
from orchestrator.workers.running.turns import Turns

log = get_logger("worker")

_ANNOUNCE_AFTER = 0.05
"""Seconds after which a running task is reported as started; most tasks have ended by then."""
_MAX_BATCH_DELAY = 0.005
"""Seconds that reports of short tasks are batched, while tasks run one after another."""
_IDLE_INTERVAL = 1.0
"""Seconds between two beats of an idle process, which show the parent that its clock thread runs."""


class Pool:
    """Runs jobs, watches their time, and reports how they end.

    `on_stuck` is called with the name of a task whose code did not stop, `on_standstill` with the reason why the event
    loop is blocked.
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
        """Watches executions outside this process; None if the process has no driver."""
        self._threads = Threads(concurrency, self._run)
        self._coroutines = Coroutines(self._run_async)
        self.standstill = Standstill(self._coroutines, held, on_standstill, blocked_for)
        self.received = ReceivedJobs(concurrency, held)
        self.task_log = TaskLog()
        self._busy = threading.Event()
        self._parent_alive_until = 0.0
        """Time until which the parent's last known heartbeat is valid (monotonic clock)."""
        self._sent_at = 0.0

    def start(self) -> None:
        """Start the thread that watches the time.

        Write the first beat here: the first task may hold the interpreter (GIL) and keep that thread from ever running.
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
            if not job.is_turn and not self._runner.is_registered(job):
                self._held.mark_begun(job.slot)  # importing its function may end the process
            task = None if job.is_turn else self._runner.find(job)
            if task is not None and task._is_async and not job.is_isolated:
                job.on_loop = True
                on_loop.append(job)
        if in_threads := [job for job in jobs if not job.on_loop] if on_loop else jobs:
            self._threads.submit(in_threads)
        if on_loop:
            self._coroutines.submit(on_loop)

    def execute(self, jobs: Sequence[Job]) -> None:
        """Pass executions to the driver, and hand back those for which it has no room."""
        driver = self.driver
        accepted: list[Job] = []
        for job in jobs:
            if driver is not None and driver.room > 0 and not self.is_parent_silent():
                self._held.mark_begun(job.slot)
                driver.accept(job)
                accepted.append(job)
            elif job.take_back():
                reason = "no room for executions" if driver is None or driver.room <= 0 else "its worker is cut off"
                self._reporter.report(Returned(job.dispatch.id, job.dispatch.attempt, reason), job)
        self.task_log.received(accepted)
        self._held.write_executing(0 if driver is None else len(driver))
        self._coroutines.submit(accepted)

    # -- running

    def _run(self, job: Job, is_quick: bool = False) -> float:
        """Run a job in the current thread. Return how many seconds it took.

        Reports of short jobs are batched. This thread sends them before it becomes idle.
        """
        if not self._begin(job):
            return 0.0
        is_traced = job.trace is not None or self._spans.exports
        token = self._spans.begin(job) if is_traced else None
        try:
            if job.is_isolated:
                report = self._isolation.run(job, self._start_clock)
            else:
                report = self._runner.run(job)
        except BaseException as reason:
            if job.interrupted_by is None:
                raise
            job.uninterruptible()  # its child process was killed, or the code had just ended
            report = self._runner.failures.failure(job, reason.with_traceback(None))
        turn = None if job.dispatch.run_id is None or is_traced else self._follow(job, report)
        now = time.monotonic()
        sends_itself = is_quick or len(self.received.jobs) == 1
        self._end(job, report, turn, later=sends_itself)
        if is_traced:
            self._spans.leave(job, token)
        if sends_itself and not (is_quick and self._threads.backlog and now < self._sent_at + _MAX_BATCH_DELAY):
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

    def is_parent_silent(self) -> bool:
        """Return whether the parent has sent no heartbeat for so long that other workers may have the attempts."""
        return self._is_parent_silent(time.monotonic())

    def _is_parent_silent(self, now: float) -> bool:
        remaining = self._ttl - self._held.parent_silence(now)
        self._parent_alive_until = now + remaining
        return remaining < 0

    def _begin(self, job: Job) -> bool:
        now = time.monotonic()
        if now > self._parent_alive_until and self._is_parent_silent(now):
            self._hand_back(job, "its worker is cut off")
            return False
        if not job.begin(now, starting=job.is_isolated):
            return False
        self._held.mark_begun(job.slot)
        if job.deadline is not None:
            self._limit(job)
        elif job.is_turn and not job.is_isolated:
            self._held.mark_turn(job.slot, threading.get_native_id())
        if job.options is not DEFAULT_OPTIONS:
            self._announce_if_rated(job, now)
        return True

    def _announce_if_rated(self, job: Job, now: float) -> None:
        """Report at once that a task with a rate limit has begun: until then, the leader holds back others of that
        rate."""
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
        self._announce_if_rated(job, now)

    def _limit(self, job: Job) -> None:
        if job.deadline is not None and job.options.timeout is not None:
            self._held.limit(job.slot, job.deadline, job.options.timeout, retryable=retries_timeouts(job))

    def _follow(self, job: Job, report: AttemptReport) -> Activated | None:
        """Run the turn that follows the success of a job, if its workflow is here, outside of the job's timeout."""
        if not self._runner.may_follow(job, report):
            return None
        if job.deadline is not None:
            self._held.unlimit(job.slot)
            job.deadline = job.soft_deadline = None
        turn = self._runner.follow(job, report)
        self._turns.verdict(job)  # dropped: if the turn took too long, the leader's activation will, too
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
            self._busy.wait(_IDLE_INTERVAL)
            now = time.monotonic()
            self._held.beat(now, self.received.pace.load)
            if self.driver is not None:
                self._held.write_executing(len(self.driver))
            self.task_log.flush_due(now)
            DELIVERY.deliver_pending()
            if not self.received.jobs:
                self._busy.clear()
                self._held.write_running(0)
                self.standstill.reset()
                if self.received.jobs:
                    self._busy.set()
                self.received.pace.measure(now, 0)
                continue
            self._check_all(now)
            threading.Event().wait(CHECK_INTERVAL)

    def _check_all(self, now: float) -> None:
        running = 0
        stale = False
        waiting: list[Job] = []
        jobs = self.received.snapshot()
        self.standstill.check(now)
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
            self._hand_back_loop_jobs(waiting, now)
        self._held.write_running(running)
        if not stale:
            self._threads.relieve()
        self._reporter.wake()
        self.received.pace.measure(now, len(jobs))

    def _hand_back_loop_jobs(self, jobs: Sequence[Job], now: float) -> None:
        """Hand back the jobs that wait for the event loop. Keep one that only this worker takes, if a slot is free."""
        has_room = len(self.received.jobs) - len(jobs) + 1 < self.concurrency
        for job in jobs:
            task = job.dispatch.id
            if has_room and self.standstill.may_stay(task, now - job.received_at):
                has_room = False
            else:
                self._hand_back(job, "the event loop is blocked", self.standstill.delay(task, now))

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
        """End an attempt whose code does not stop. The code keeps its slot in the table of held attempts."""
        reason = job.interrupted_by
        assert reason is not None
        stack = None if job.on_loop or job.is_isolated else stack_of(job.thread)
        if not job.finish(lingers=True):
            return  # it has just ended
        report = self._turns.verdict(job) or self._runner.failures.failure(
            job, interruption(job, reason).with_traceback(stack)
        )
        if isinstance(report, Failed):  # an attempt that had completed in its transaction has succeeded
            report = msgspec.structs.replace(report, lingering=True)
        self._report_end(job, report)
        self.received.freed.set()
        log.warning(
            "task.still_running: the task was told to stop but still runs; this process is replaced", extra=job.fields
        )
        self._on_stuck(job.dispatch.name)

    # -- handing back

    def revoke(self, attempts: Iterable[tuple[bytes, int]], moved: Iterable[tuple[bytes, int]] = ()) -> None:
        """Stop attempts that no longer count. The leader ignores their reports."""
        revoked = set(attempts)
        if self.driver is not None:
            self.driver.revoke(revoked, set(moved))
        now = time.monotonic()
        for job in self.received.among(revoked):
            job.stop_with(TaskAborted, now)
            self._hand_back(job, "cancelled")
        for job in self._reporter.succeeded(revoked):
            self.task_log.dropped(job)

    def spare(self, attempts: Iterable[tuple[bytes, int]]) -> None:
        """Hand back those of the attempts that have not begun: other workers with free slots can run them."""
        for job in self.received.among(set(attempts)):
            self._hand_back(job, "other workers have free slots")

    def hand_back_waiting(self) -> int:
        """Hand back all jobs that have not begun. Return how many."""
        return sum(self._hand_back(job, "worker stops") for job in self.received.snapshot())

    def hand_back_executions(self) -> int:
        """Hand back executions, which go on under another worker. Return how many."""
        return 0 if self.driver is None else self.driver.hand_back_all("worker stops")

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of asynchronous tasks; None before the first of them."""
        return self._coroutines.loop

    def release(self, timeout: float) -> None:
        """Clean up the leftovers of ended executions before the process ends."""
        if self.driver is not None and self.loop is not None:
            self.driver.finish(self.loop, timeout)

    def send_notes(self) -> None:
        """Send the notes that running tasks have left for their next attempts: the process ends before the tasks do."""
        for job in self.received.snapshot():
            self._reporter.note(job)

    def _hand_back(self, job: Job, reason: str, delay: float = 0.0) -> bool:
        if not job.take_back():
            return False
        self._reporter.report(Returned(job.dispatch.id, job.dispatch.attempt, reason, delay), job)
        self.received.remove(job)
        return True
