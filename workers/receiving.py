"""How tasks come into a worker process: read from its queues, given to the pool, or handed back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from orchestrator.domain.tasks.task import Returned
from orchestrator.settings import Settings
from orchestrator.telemetry import Outage, get_logger
from orchestrator.transport.codec import LARGEST_BUNDLE
from orchestrator.transport.connection import UNAVAILABLE, connect, describe
from orchestrator.transport.keys import Keys, private_queue
from orchestrator.transport.worker import Received, StreamsGone, WorkerStreams
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.parent.messages import Leaving
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.running.job import Bundle, Job, ReceivedJobs
from orchestrator.workers.running.pool import Pool

log = get_logger("worker")

_WAIT = 1.0
"""Seconds that a read waits before the process looks whether it should stop."""
_TOO_LATE = 2 * _WAIT
"""Seconds after which what a read brings may have been given to others: no heartbeat has listed it all that time."""
_UNHEARD_PAUSE = 0.1
"""Seconds between two looks for a sign of life of the parent."""
_LAST_PAUSE = 0.02
"""Seconds between two looks for tasks of this worker alone."""
_MOST_MESSAGES = 100


class Receiver:
    """Receives tasks and gives them to the pool, until it is closed."""

    def __init__(
        self,
        settings: Settings,
        worker: str,
        queues: Sequence[str],
        *,
        held: HeldAttempts,
        reporter: Reporter,
        pool: Pool,
        age: Age,
    ) -> None:
        self._settings = settings
        self._worker = worker
        self._own = private_queue(worker)
        self._queues = (*queues, self._own)
        self._held = held
        self._reporter = reporter
        self._pool = pool
        self._age = age
        self._streams = self._connect()
        self._redis = Outage(log, "Redis", "no tasks are received")
        self._joined = ""
        self._executing: threading.Thread | None = None
        """Receives executions, from the first of them on: they need none of the slots that tasks wait for."""
        self._full = False
        self._bundle = 1.0
        self._closed = threading.Event()
        self._may_start = threading.Event()
        self._may_start.set()

    def _connect(self) -> WorkerStreams:
        return WorkerStreams(connect(self._settings.require_redis()), Keys.of(self._settings))

    # -- what others say

    def pause(self) -> None:
        """Start nothing until further notice."""
        self._may_start.clear()

    def resume(self) -> None:
        """Go on after a pause."""
        self._may_start.set()

    def close(self) -> None:
        """Take no more, ever."""
        self._closed.set()
        self._may_start.set()

    def is_led(self, within: float) -> bool:
        """Say whether Redis has heard of a leader within so many seconds."""
        return self._streams.is_led(within)

    # -- receiving

    def run(self) -> int:
        """Receive until closed; return how much was handed back because the worker stops."""
        handed_back = 0
        while not self._closed.is_set():
            self._held.shrink()
            if not self._may_start.wait(_WAIT):
                continue
            if self._pool.is_unheard():
                self._closed.wait(_UNHEARD_PAUSE)
                continue
            if self._age.left() <= 0:
                self._age.check()
                self._closed.wait(_UNHEARD_PAUSE)
                continue
            room = self._pool.received.wait_for_room(_WAIT) if self._has_space() else 0
            room = min(room, self._age.left())
            if room > 0 and not self._closed.is_set():
                asked_at = time.monotonic()
                handed_back += self._take_in(self._receive(room), asked_at)
            elif not self._closed.is_set():  # executions need no slot
                self._follow()
                if self._executing is None:
                    handed_back += self._take_in(self._left_over(), time.monotonic())
            self._age.check()
        handed_back += self._pool.let_go()
        if self._executing is not None:
            self._executing.join(2 * _WAIT)
        return handed_back + self._pool.hand_back_waiting() + self._give_back(self._left_over(), "worker stops")

    def _has_space(self) -> bool:
        """Say whether a message fits the table of what is held; if not, no leader has applied a report for long."""
        was_full, self._full = self._full, self._held.room < LARGEST_BUNDLE
        if self._full and not was_full:
            log.warning(
                "worker.reports_full reports=%d: no tasks are received until a leader applies them", self._held.capacity
            )
        if self._full:
            self._closed.wait(0.2)
        return not self._full

    def _receive(self, room: int) -> list[Received]:
        try:
            generation = self._join()
            if not generation:
                return []
            fits = self._held.room // LARGEST_BUNDLE
            count = max(1, min(_MOST_MESSAGES, fits, int(room / self._bundle)))
            is_last = (
                self._pool.standstill.sends_away
            )  # a read that waits in Redis has what comes before this process looks
            received = self._streams.take(generation, self._worker, self._queues, count, 0.0 if is_last else _WAIT)
            self._redis.worked()
            if is_last and not received:
                self._closed.wait(_LAST_PAUSE)
            if not received and self._streams.generation() != generation:
                self._joined = ""  # its streams may stay: the leader of the next generation need not have known of it
            return received
        except StreamsGone:
            self._joined = ""
            self._closed.wait(0.1)
        except UNAVAILABLE as error:
            self._redis.failed(describe(error))
            self._joined = ""  # it may come back as another server, with messages of before in its streams
            self._closed.wait(0.5)
        return []

    def _join(self) -> str:
        """Make sure that the queues of the current generation can be read; return the generation."""
        if self._joined and self._joined == self._reporter.generation:
            return self._joined
        generation = self._streams.generation()
        if generation is None:
            self._closed.wait(0.2)  # no leader has begun yet
            return ""
        self._streams.join(generation, self._queues)
        self._joined = generation
        if not self._reporter.generation:
            self._reporter.generation = generation
        elif self._reporter.generation != generation:
            self._reporter.look()  # it may have nothing to report, and yet something to send again
        return generation

    def _follow(self) -> None:
        """Join another generation that has begun while nothing is received here: its executions need no slot."""
        try:
            if self._streams.generation() != self._joined:
                self._joined = ""
                self._join()
            self._redis.worked()
        except UNAVAILABLE as error:
            self._redis.failed(describe(error))
            self._joined = ""

    def _left_over(self) -> list[Received]:
        """Receive the messages of this worker's own stream."""
        try:
            if self._joined:
                return self._streams.take(self._joined, self._worker, [self._own], _MOST_MESSAGES, 0.001)
        except (StreamsGone, *UNAVAILABLE) as error:
            log.debug("worker.orders_unreturned error=%s: the leader finds them", error)
        return []

    def _receive_executions(self) -> None:
        """Receive what was sent to this worker alone, whether slots are free or not; in a thread of its own."""
        streams, driver = self._connect(), self._pool.driver
        assert driver is not None
        while not self._closed.is_set():
            if not self._may_start.wait(_WAIT):
                continue
            room = min(driver.wait_for_room(_WAIT), self._held.room // LARGEST_BUNDLE)
            generation = self._joined
            if self._pool.is_unheard() or not generation or room <= 0:
                self._closed.wait(_UNHEARD_PAUSE)
                continue
            asked_at = time.monotonic()
            try:
                received = streams.take(generation, self._worker, [self._own], min(_MOST_MESSAGES, room), _WAIT)
            except (StreamsGone, *UNAVAILABLE):  # of which the other thread takes note
                self._closed.wait(0.5)
                continue
            self._take_in(received, asked_at)

    # -- taking in

    def _take_in(self, received: list[Received], asked_at: float) -> int:
        """Run what was received, unless it comes too late; return how much is handed back because the worker stops."""
        if self._closed.is_set():
            return self._give_back(received, "worker stops")
        if time.monotonic() - asked_at > _TOO_LATE:
            self._give_back(received, "received too late")
        else:
            self._accept(received)
        return 0

    def _accept(self, received: list[Received]) -> None:
        jobs: list[Job] = []
        executions: list[Job] = []
        left = self._age.left()
        for job in self._jobs_of(received):
            if job.options.executor is not None:
                executions.append(job)
            elif len(jobs) < left:
                jobs.append(job)
            else:
                self._return(job, "its process has run enough")
        if executions:
            self._pool.execute(executions)
            if self._executing is None:
                self._executing = threading.Thread(target=self._receive_executions, name="executions", daemon=True)
                self._executing.start()
        if jobs:
            self._bundle = 0.5 * self._bundle + 0.5 * len(jobs) / len(received)
            self._pool.submit(jobs)
            if not self._may_start.is_set():
                self._pool.hand_back_waiting()

    def _give_back(self, received: list[Received], reason: str) -> int:
        """Start nothing of what came when this process was to take no more, or came long ago; return how many."""
        jobs = self._jobs_of(received)
        for job in jobs:
            self._return(job, reason)
        return len(jobs)

    def _jobs_of(self, received: list[Received]) -> list[Job]:
        """Hold what was received, from now on."""
        now = time.monotonic()
        jobs = []
        for generation, queue, entry, tasks in received:
            bundle = Bundle(generation, queue, entry, len(tasks))
            slots = self._held.add_all([(task.id, task.attempt) for task in tasks])
            jobs += [Job(task, bundle, slot, now) for task, slot in zip(tasks, slots, strict=True)]
        return jobs

    def _return(self, job: Job, reason: str) -> None:
        self._reporter.report(Returned(job.dispatch.id, job.dispatch.attempt, reason), job)


# -- how many tasks a worker process may run before another takes its place (`--max-tasks-per-process`)

_NO_LIMIT = 1_000_000
"""More than there is ever room for."""
_SUCCESSION = 3.0
"""Seconds that a successor takes to be ready, roughly."""


class Age:
    """Counts what a process has used up of `most`, and has the parent start a successor in time."""

    def __init__(self, most: int | None, received: ReceivedJobs, notify_parent: Callable[[Leaving], None]) -> None:
        self._most = most
        self._received = received
        self._notify_parent = notify_parent
        self._is_leaving = False
        self._is_spent = False
        """It has received as many tasks as it may run."""

    def stay(self) -> None:
        """Go on all the same: there is no successor."""
        self._most = None

    def left(self) -> int:
        """Return how many tasks this process may still take."""
        return _NO_LIMIT if self._most is None else max(0, self._most - self._received.used)

    def check(self) -> None:
        """Have a successor ready by the time that this process has run all it may; then take no more."""
        most = self._most
        if most is None or self._is_spent:
            return
        left = max(0, most - self._received.used)
        if left == 0:
            self._is_spent = True
            self._notify_parent(Leaving(f"it has run {most} tasks", at_once=True, is_last=False))
        elif not self._is_leaving and left <= min(most / 2, max(most / 5, self._received.pace.rate * _SUCCESSION)):
            self._is_leaving = True
            self._notify_parent(Leaving(f"it has run {self._received.ended} tasks of {most}", at_once=False))
