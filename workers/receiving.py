"""Receiving tasks in a worker process: read messages from the queues, pass tasks to the pool, or hand them back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from orchestrator.domain.tasks.task import Returned
from orchestrator.settings import Settings
from orchestrator.telemetry import Outage, get_logger
from orchestrator.transport.codec import MAX_BUNDLE
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
"""Seconds that a read blocks before the process checks whether it should stop."""
_MAX_READ_AGE = 2 * _WAIT
"""Seconds after which a read is discarded: no heartbeat listed its tasks meanwhile, so they may run elsewhere."""
_PAUSE = 0.1
"""Seconds between two checks of the heartbeat or of the successor process."""
_PRIVATE_PAUSE = 0.02
"""Seconds between two reads of the worker's private stream."""
_MAX_MESSAGES = 100


class Receiver:
    """Receives tasks and submits them to the pool, until it is closed."""

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
        self._private = private_queue(worker)
        self._queues = (*queues, self._private)
        self._held = held
        self._reporter = reporter
        self._pool = pool
        self._age = age
        self._streams = self._connect()
        self._redis = Outage(log, "Redis", "no tasks are received")
        self._joined = ""
        self._executing: threading.Thread | None = None
        """The thread that receives executions, started with the first execution. Executions need no slots of tasks."""
        self._is_full = False
        self._tasks_per_message = 1.0
        self._closed = threading.Event()
        self._may_start = threading.Event()
        self._may_start.set()

    def _connect(self) -> WorkerStreams:
        return WorkerStreams(connect(self._settings.require_redis()), Keys.of(self._settings))

    # -- control by the process

    def pause(self) -> None:
        """Start no tasks until `resume`."""
        self._may_start.clear()

    def resume(self) -> None:
        """Start tasks again after `pause`."""
        self._may_start.set()

    def close(self) -> None:
        """Stop receiving for good."""
        self._closed.set()
        self._may_start.set()

    def is_led(self, within: float) -> bool:
        """Return whether a leader has written to Redis within so many seconds."""
        return self._streams.is_led(within)

    # -- receiving

    def run(self) -> int:
        """Receive until closed. Return how many tasks were handed back because the worker stops."""
        handed_back = 0
        while not self._closed.is_set():
            self._held.shrink()
            if not self._may_start.wait(_WAIT):
                continue
            if self._pool.is_parent_silent():
                self._closed.wait(_PAUSE)
                continue
            if self._age.remaining() <= 0:
                self._age.check()
                self._closed.wait(_PAUSE)
                continue
            room = self._pool.received.wait_for_room(_WAIT) if self._has_space() else 0
            room = min(room, self._age.remaining())
            if room > 0 and not self._closed.is_set():
                read_began_at = time.monotonic()
                handed_back += self._accept_or_return(self._receive(room), read_began_at)
            elif not self._closed.is_set():  # executions need no slot
                self._join_new_generation()
                if self._executing is None:
                    handed_back += self._accept_or_return(self._take_private(), time.monotonic())
            self._age.check()
        handed_back += self._pool.hand_back_executions()
        if self._executing is not None:
            self._executing.join(2 * _WAIT)
        return handed_back + self._pool.hand_back_waiting() + self._hand_back_all(self._take_private(), "worker stops")

    def _has_space(self) -> bool:
        """Return whether the table of held attempts has room. It fills up if no leader applies reports."""
        was_full, self._is_full = self._is_full, self._held.room < MAX_BUNDLE
        if self._is_full and not was_full:
            log.warning(
                "worker.reports_full reports=%d: no tasks are received until a leader applies them", self._held.capacity
            )
        if self._is_full:
            self._closed.wait(0.2)
        return not self._is_full

    def _receive(self, room: int) -> list[Received]:
        try:
            generation = self._join()
            if not generation:
                return []
            fits = self._held.room // MAX_BUNDLE
            count = max(1, min(_MAX_MESSAGES, fits, int(room / self._tasks_per_message)))
            # A read that blocks in Redis would get messages that arrive before this process checks its event loop.
            is_last = self._pool.standstill.hands_back
            received = self._streams.take(generation, self._worker, self._queues, count, 0.0 if is_last else _WAIT)
            self._redis.worked()
            if is_last and not received:
                self._closed.wait(_PRIVATE_PAUSE)
            if not received and self._streams.generation() != generation:
                self._joined = ""  # the streams may remain, if the new leader did not know of them
            return received
        except StreamsGone:
            self._joined = ""
            self._closed.wait(0.1)
        except UNAVAILABLE as error:
            self._redis.failed(describe(error))
            self._joined = ""  # Redis may come back as another server, with old messages in its streams
            self._closed.wait(0.5)
        return []

    def _join(self) -> str:
        """Create the consumer groups of the current generation where they are missing. Return the generation."""
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
            self._reporter.check_generation()  # there may be no new reports, but some to send again
        return generation

    def _join_new_generation(self) -> None:
        """Join a new generation while no slot is free: executions of the new generation need no slot."""
        try:
            if self._streams.generation() != self._joined:
                self._joined = ""
                self._join()
            self._redis.worked()
        except UNAVAILABLE as error:
            self._redis.failed(describe(error))
            self._joined = ""

    def _take_private(self) -> list[Received]:
        """Read the messages of this worker's private stream without blocking."""
        try:
            if self._joined:
                return self._streams.take(self._joined, self._worker, [self._private], _MAX_MESSAGES, 0.001)
        except (StreamsGone, *UNAVAILABLE) as error:
            log.debug(
                "worker.orders_unreturned error=%s: tasks sent only to this process stay unread until the "
                "leader finds them",
                error,
            )
        return []

    def _receive_executions(self) -> None:
        """Receive executions from the private stream, whether slots are free or not. Runs in a thread of its own."""
        streams, driver = self._connect(), self._pool.driver
        assert driver is not None
        while not self._closed.is_set():
            if not self._may_start.wait(_WAIT):
                continue
            room = min(driver.wait_for_room(_WAIT), self._held.room // MAX_BUNDLE)
            generation = self._joined
            if self._pool.is_parent_silent() or not generation or room <= 0:
                self._closed.wait(_PAUSE)
                continue
            read_began_at = time.monotonic()
            try:
                received = streams.take(generation, self._worker, [self._private], min(_MAX_MESSAGES, room), _WAIT)
            except (StreamsGone, *UNAVAILABLE):  # the other thread logs the outage
                self._closed.wait(0.5)
                continue
            self._accept_or_return(received, read_began_at)

    # -- taking in

    def _accept_or_return(self, received: list[Received], read_began_at: float) -> int:
        """Submit received tasks, unless too late. Return how many are handed back because the worker stops."""
        if self._closed.is_set():
            return self._hand_back_all(received, "worker stops")
        if time.monotonic() - read_began_at > _MAX_READ_AGE:
            self._hand_back_all(received, "received too late")
        else:
            self._accept(received)
        return 0

    def _accept(self, received: list[Received]) -> None:
        jobs: list[Job] = []
        executions: list[Job] = []
        remaining = self._age.remaining()
        for job in self._hold(received):
            if job.options.executor is not None:
                executions.append(job)
            elif len(jobs) < remaining:
                jobs.append(job)
            else:
                self._return(job, "its process reached its task limit")
        if executions:
            self._pool.execute(executions)
            if self._executing is None:
                self._executing = threading.Thread(target=self._receive_executions, name="executions", daemon=True)
                self._executing.start()
        if jobs:
            self._tasks_per_message = 0.5 * self._tasks_per_message + 0.5 * len(jobs) / len(received)
            self._pool.submit(jobs)
            if not self._may_start.is_set():
                self._pool.hand_back_waiting()

    def _hand_back_all(self, received: list[Received], reason: str) -> int:
        """Hand back all tasks of these messages. Return how many."""
        jobs = self._hold(received)
        for job in jobs:
            self._return(job, reason)
        return len(jobs)

    def _hold(self, received: list[Received]) -> list[Job]:
        """Record the received tasks in the table of held attempts, and return their jobs."""
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
"""Stands for no limit: more than there is ever room for."""
_LEAD_TIME = 3.0
"""Seconds until a successor process is ready, roughly."""


class Age:
    """Counts the tasks of a process against `--max-tasks-per-process`, and requests a successor in time."""

    def __init__(self, max_tasks: int | None, received: ReceivedJobs, notify_parent: Callable[[Leaving], None]) -> None:
        self._max_tasks = max_tasks
        self._received = received
        self._notify_parent = notify_parent
        self._is_leaving = False
        self._is_spent = False
        """The process has received as many tasks as it may run."""

    def remove_limit(self) -> None:
        """Drop the limit, because there is no successor."""
        self._max_tasks = None

    def remaining(self) -> int:
        """Return how many more tasks this process may receive."""
        return _NO_LIMIT if self._max_tasks is None else max(0, self._max_tasks - self._received.used)

    def check(self) -> None:
        """Request a successor before the limit is reached, and an immediate replacement once it is."""
        limit = self._max_tasks
        if limit is None or self._is_spent:
            return
        left = max(0, limit - self._received.used)
        if left == 0:
            self._is_spent = True
            self._notify_parent(Leaving(f"it has run {limit} tasks", at_once=True, is_last=False))
        elif not self._is_leaving and left <= min(limit / 2, max(limit / 5, self._received.pace.rate * _LEAD_TIME)):
            self._is_leaving = True
            self._notify_parent(Leaving(f"it has run {self._received.ended} tasks of {limit}", at_once=False))
