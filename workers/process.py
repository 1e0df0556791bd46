"""One worker process: receive, run, report, until its parent says to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec

from orchestrator.domain.tasks.task import Returned
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.modules import ImportFailed
from orchestrator.sdk.values.stores import means as store_means
from orchestrator.sealing import key_names, vault_of
from orchestrator.settings import Settings
from orchestrator.telemetry import Outage, get_logger
from orchestrator.tracing.entry import LAST_SPANS, begin_tracing
from orchestrator.transport.codec import LARGEST_BUNDLE, Attempt, Malformed, decode, encode, prepare
from orchestrator.transport.connection import UNAVAILABLE, connect, describe
from orchestrator.transport.keys import Keys, private_queue
from orchestrator.transport.pages import Pages
from orchestrator.transport.worker import Received, StreamsGone, WorkerStreams
from orchestrator.workers.executors.driving import Driver
from orchestrator.workers.executors.protocol import Setup
from orchestrator.workers.executors.registry import announcements
from orchestrator.workers.functions.allowed import Allowed
from orchestrator.workers.functions.builtin import install
from orchestrator.workers.functions.loading import load_app
from orchestrator.workers.parent.first_word import FirstWord
from orchestrator.workers.parent.held import Farewell, HeldAttempts
from orchestrator.workers.reporting.journal import Journal
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.reporting.task_output import capture_output, share_log
from orchestrator.workers.running.critical_thread import start_critical_thread
from orchestrator.workers.running.forks import end_fork
from orchestrator.workers.running.isolated import Isolation
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.pool import Pool
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.spans import AttemptSpans
from orchestrator.workers.running.task_runtime import ProcessOutbox
from orchestrator.workers.spec import WorkerSpec

log = get_logger("worker")

_WAIT = 1.0
"""Seconds that a read waits before the process looks whether it should stop."""
_TOO_LATE = 2 * _WAIT
"""Seconds after which what a read brings may have been given to others: no heartbeat has listed it all that time."""
_LAST_REPORTS = 5.0
"""Seconds that the last reports have at least, even if running tasks have used up the time to drain."""
_LAST_RELEASES = 2.0
"""Seconds in which what executions leave behind is cleared away when the process ends."""
_UNHEARD_PAUSE = 0.1
"""Seconds between two looks for a sign of life of the parent."""
_MOST_MESSAGES = 100
_MOST_TASKS = 1_000_000
"""More than there is ever room for."""
_SUCCESSION = 3.0
"""Seconds that a successor takes to be ready, roughly."""
_LEADERLESS_AFTER = 5.0
"""Seconds without a word of a leader after which a process that ends waits no longer for it."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Child to parent: ready, and these are the tasks I know, and the queues I serve."""

    names: list[str]
    queues: list[str]
    unserved: list[str]
    """The other queues of the application, if nobody has chosen."""


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """Child to parent: replace me."""

    reason: str
    at_once: bool
    """I take no more tasks already. Otherwise I go on until my successor is ready."""
    is_last: bool = True
    """With `at_once`: I end whatever happens. Otherwise I could go on, should there be no successor."""


class Command(msgspec.Struct, frozen=True, array_like=True, tag="command"):
    """Parent to child."""

    verb: Literal["pause", "resume", "drain", "retire", "stay", "stop", "spare"]
    """`drain`: finish what runs, up to the drain timeout. `retire`: the same, however long it takes. `stay`: there is
    no successor, so go on although you have run enough tasks."""
    stop: list[Attempt] = []
    """With `stop`: the attempts to end."""
    moved: list[Attempt] = []
    """Of these, the ones whose task goes on in another attempt."""
    spare: list[Attempt] = []
    """With `spare`: the attempts to give back if they have not begun."""


prepare(Command, Hello | Leaving)


def main(
    spec: WorkerSpec,
    settings: Settings,
    worker: str,
    held: HeldAttempts,
    pipe: Connection[Any, Any],
    first_word: FirstWord,
) -> Farewell:
    """Run a worker process; return its last word."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent passes it on
    signal.signal(signal.SIGHUP, lambda *_: None)  # so does the end of a terminal
    if spec.reload:  # a file that is changed twice in a second must not be taken for what was compiled in between
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    capture_output()
    try:
        app = load_app(spec.app)
        share_log()
        install(app)
        if spec.database:
            app.settings.require_database()
    except OrchestratorError as error:
        end_fork(error.__cause__ or error)
        share_log()  # what it has silenced before it failed comes out all the same
        if first_word.take():
            log.error("%s", error)
        return Farewell.BROKEN if isinstance(error, ImportFailed) else Farewell.UNUSABLE
    except BaseException as error:  # the user's module fails to import, or ends: show where, once
        end_fork(error)
        share_log()
        if first_word.take():
            log.error("the application %s cannot be loaded", spec.app, exc_info=error)
        return Farewell.BROKEN
    end_fork()
    first_word.close()
    named = app.queues()
    process = WorkerProcess(spec, spec.served(named), settings, worker, held, pipe)
    outbox = ProcessOutbox(process.reporter, process.journal, process.pages, keeps_lines=settings.capture_logs != "off")
    share_log(outbox.log if settings.capture_logs == "all" else None)
    process.reporter.on_end = process.journal.end
    isolation = Isolation(spec, outbox)
    allowed = Allowed(app, spec.allow)
    spans = begin_tracing("worker", worker)
    process.pool = Pool(
        Runner(app, outbox, allowed, database=spec.database),
        isolation,
        process.reporter,
        held,
        concurrency=spec.concurrency,
        ttl=settings.worker_ttl,
        stop_grace=settings.stop_grace,
        on_stuck=process.leave_behind,
        turn_timeout=settings.turn_timeout,
        on_standstill=process.leave_loop,
        spans=AttemptSpans(spans),
    )
    setup = Setup(settings=settings, worker=worker, commands=spec.commands)
    process.pool.driver = Driver(
        process.pool.runner, outbox, process.reporter, process.pool.task_log, setup, spec.executions
    )
    # In a thread: a handler interrupts the main thread anywhere, also while it holds the lock that draining needs.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=process.drain, daemon=True).start())
    means = [*spec.means, *key_names(settings), *store_means(settings)]
    means += announcements(setup) if spec.executions else []
    names = sorted({*app.tasks, *app.code_workflows._announced, *allowed.patterns, *means})
    pipe.send_bytes(encode(Hello(names, spec.served(named), spec.unserved(named))))
    start_critical_thread("orders", process.obey)
    finished = process.run()
    isolation.close()
    if spans is not None:
        spans.flush(LAST_SPANS)
    return Farewell.FINISHED if finished else Farewell.UNFINISHED


class WorkerProcess:
    """Receives tasks and gives them to the pool."""

    pool: Pool

    def __init__(
        self,
        spec: WorkerSpec,
        queues: Sequence[str],
        settings: Settings,
        worker: str,
        held: HeldAttempts,
        pipe: Connection[Any, Any],
    ) -> None:
        self._spec = spec
        self._settings = settings
        self._worker = worker
        self._held = held
        self._pipe = pipe
        self._pipe_lock = threading.Lock()
        self._give_up_at = float("inf")
        self._is_leaving = False
        self._is_spent = False
        """It has received as many tasks as it may run."""
        self._stays = False
        """It goes on all the same."""
        url = settings.require_redis()
        self._queues = (*queues, private_queue(worker))
        keys = Keys.of(settings)
        self._streams = WorkerStreams(connect(url), keys)
        self.reporter = Reporter(WorkerStreams(connect(url), keys), worker, held, vault_of(settings))
        self.journal = Journal(connect(url), keys, settings.log_limit)
        self.pages = Pages(connect(url), keys)
        self._redis = Outage(log, "Redis", "no tasks are received")
        self._joined = ""
        self._executing: threading.Thread | None = None
        """Receives executions, from the first of them on: they need none of the slots that tasks wait for."""
        self._full = False
        self._bundle = 1.0
        self._draining = threading.Event()
        self._may_start = threading.Event()
        self._may_start.set()

    def run(self) -> bool:
        """Work until drained; say whether everything was finished."""
        self.reporter.start()
        self.pool.start()
        handed_back = 0
        while not self._draining.is_set():
            self._held.shrink()
            if not self._may_start.wait(_WAIT):
                continue
            if self.pool.is_unheard():
                self._draining.wait(_UNHEARD_PAUSE)
                continue
            if self._left() <= 0:
                self._check_age()
                self._draining.wait(_UNHEARD_PAUSE)
                continue
            room = self.pool.wait_for_room(_WAIT) if self._has_space() else 0
            room = min(room, self._left())
            if room > 0 and not self._draining.is_set():
                asked_at = time.monotonic()
                handed_back += self._take_in(self._receive(room), asked_at)
            elif self._executing is None and not self._draining.is_set():  # executions need no slot
                handed_back += self._take_in(self._left_over(), time.monotonic())
            self._check_age()
        handed_back += self.pool.let_go()
        if self._executing is not None:
            self._executing.join(2 * _WAIT)
        handed_back += self.pool.hand_back_waiting() + self._give_back(self._left_over(), "worker stops")
        self._held.say_handed_back(handed_back)
        finished = self._finish()
        self.pool.task_log.summarize(time.monotonic())
        if not finished:
            log.warning("tasks still run after %g s; they are handed back", self._settings.drain_timeout)
            self.pool.send_notes()
        # In an outage a report may need longer. One that never arrives makes its task run again.
        left = min(self._settings.drain_timeout, self._give_up_at - time.monotonic())
        self._await_applied(max(_LAST_REPORTS, left))
        self.pool.release(_LAST_RELEASES)
        self.journal.flush()
        return finished

    def _await_applied(self, timeout: float) -> None:
        """Wait until the leader has the last reports; where there is none, they wait for the next one in Redis."""
        give_up_at = time.monotonic() + timeout
        while not self.reporter.wait_until_applied(min(_WAIT, max(0.0, give_up_at - time.monotonic()))):
            if time.monotonic() >= give_up_at:
                return
            with contextlib.suppress(*UNAVAILABLE):
                if self.reporter.has_sent_all and not self._streams.is_led(_LEADERLESS_AFTER):
                    log.warning("no scheduler leads; the last reports wait in Redis for the next one")
                    return

    def _finish(self) -> bool:
        """Wait until what runs has ended, as long as that takes; when the worker stops, up to its drain timeout.

        Tasks on an event loop that somebody blocks for good would be waited for in vain.
        """
        began = time.monotonic()
        while not self.pool.wait_until_idle(_WAIT):
            give_up_at = self._give_up_at
            if self.pool.loop_is_blocked():
                give_up_at = min(give_up_at, began + self._settings.drain_timeout)
            if time.monotonic() >= give_up_at or self.pool.is_hopeless():
                self.pool.mark_blocking()
                return False
        return True

    def drain(self) -> None:
        """Take no more, finish what runs, hand back the rest."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + self._settings.drain_timeout)
        self.retire()

    def retire(self) -> None:
        """Take no more, and finish what runs, however long it takes."""
        self._draining.set()
        self._may_start.set()

    def leave_behind(self, task: str) -> None:
        """End for the sake of code that does not: with the process, it will."""
        self.retire()
        self._tell_parent(Leaving(f"the code of task {task} does not end", at_once=True))

    def leave_loop(self, why: str) -> None:
        """End because no asynchronous task gets on here; another process runs those that come."""
        log.error("%s; this process is replaced", why)
        self.retire()
        self._tell_parent(Leaving("its event loop stands still", at_once=True))

    def _left(self) -> int:
        """Return how many tasks this process may still take."""
        most = self._spec.max_tasks_per_process
        return _MOST_TASKS if most is None or self._stays else max(0, most - self.pool.used)

    def _check_age(self) -> None:
        """Have a successor ready by the time that this process has run all it may; then take no more."""
        most = self._spec.max_tasks_per_process
        if most is None or self._stays or self._is_spent:
            return
        left = self._left()
        if left == 0:
            self._is_spent = True
            self._tell_parent(Leaving(f"it has run {most} tasks", at_once=True, is_last=False))
        elif not self._is_leaving and left <= min(most / 2, max(most / 5, self.pool.rate() * _SUCCESSION)):
            self._is_leaving = True
            self._tell_parent(Leaving(f"it has run {self.pool.ended} tasks of {most}", at_once=False))

    def _tell_parent(self, message: Leaving) -> None:
        with self._pipe_lock:
            self._pipe.send_bytes(encode(message))

    def _receive(self, room: int) -> list[Received]:
        try:
            generation = self._join()
            if not generation:
                return []
            fits = self._held.room // LARGEST_BUNDLE
            count = max(1, min(_MOST_MESSAGES, fits, int(room / self._bundle)))
            received = self._streams.take(generation, self._worker, self._queues, count, _WAIT)
            self._redis.worked()
            if not received and self._streams.generation() != generation:
                self._joined = ""  # its streams may stay: who began the next need not have known of it
            return received
        except StreamsGone:
            self._joined = ""
            self._draining.wait(0.1)
        except UNAVAILABLE as error:
            self._redis.failed(describe(error))
            self._joined = ""  # it may come back as another server, with messages of before in its streams
            self._draining.wait(0.5)
        return []

    def _take_in(self, received: list[Received], asked_at: float) -> int:
        """Run what was received, unless it comes too late; return how much is handed back because the worker stops."""
        if self._draining.is_set():
            return self._give_back(received, "worker stops")
        if time.monotonic() - asked_at > _TOO_LATE:
            self._give_back(received, "received too late")
        else:
            self._accept(received)
        return 0

    def _receive_executions(self) -> None:
        """Receive what was sent to this worker alone, whether slots are free or not; in a thread of its own."""
        streams = WorkerStreams(connect(self._settings.require_redis()), Keys.of(self._settings))
        driver, own = self.pool.driver, [private_queue(self._worker)]
        assert driver is not None
        while not self._draining.is_set():
            if not self._may_start.wait(_WAIT):
                continue
            room = min(driver.wait_for_room(_WAIT), self._held.room // LARGEST_BUNDLE)
            generation = self._joined
            if self.pool.is_unheard() or not generation or room <= 0:
                self._draining.wait(_UNHEARD_PAUSE)
                continue
            asked_at = time.monotonic()
            try:
                received = streams.take(generation, self._worker, own, min(_MOST_MESSAGES, room), _WAIT)
            except (StreamsGone, *UNAVAILABLE):  # of which the other thread takes note
                self._draining.wait(0.5)
                continue
            self._take_in(received, asked_at)

    def _has_space(self) -> bool:
        """Say whether a message fits the table of what is held; if not, no leader has applied a report for long."""
        was_full, self._full = self._full, self._held.room < LARGEST_BUNDLE
        if self._full and not was_full:
            log.warning("no tasks are received: %d reports wait for a leader, and no more fit", self._held.capacity)
        if self._full:
            self._draining.wait(0.2)
        return not self._full

    def _left_over(self) -> list[Received]:
        """Receive what was sent to this worker alone: nobody else would."""
        try:
            if self._joined:
                own = [private_queue(self._worker)]
                return self._streams.take(self._joined, self._worker, own, _MOST_MESSAGES, 0.001)
        except (StreamsGone, *UNAVAILABLE) as error:
            log.debug("what was sent to this worker alone is found by the leader: %s", error)
        return []

    def _join(self) -> str:
        """Make sure that the queues of the current generation can be read; return the generation."""
        if self._joined and self._joined == self.reporter.generation:
            return self._joined
        generation = self._streams.generation()
        if generation is None:
            self._draining.wait(0.2)  # no leader has begun yet
            return ""
        self._streams.join(generation, self._queues)
        self._joined = generation
        if not self.reporter.generation:
            self.reporter.generation = generation
        return generation

    def _give_back(self, received: list[Received], reason: str) -> int:
        """Start nothing of what came when this process was to take no more, or came long ago; return how many."""
        for queue, entry, tasks in received:
            bundle = Bundle(self._joined, queue, entry, len(tasks))
            for task in tasks:
                job = Job(task, bundle, self._held.add(task.id, task.attempt), time.monotonic())
                self.reporter.report(Returned(task.id, task.attempt, reason), job)
        return sum(len(tasks) for _, _, tasks in received)

    def _accept(self, received: list[Received]) -> None:
        now = time.monotonic()
        jobs: list[Job] = []
        executions: list[Job] = []
        left = self._left()
        for queue, entry, tasks in received:
            bundle = Bundle(self._joined, queue, entry, len(tasks))
            for task in tasks:
                job = Job(task, bundle, self._held.add(task.id, task.attempt), now)
                if job.options.executor is not None:
                    executions.append(job)
                elif len(jobs) < left:
                    jobs.append(job)
                else:
                    self.reporter.report(Returned(task.id, task.attempt, "its process has run enough"), job)
        if executions:
            self.pool.submit(executions)
            if self._executing is None:
                self._executing = threading.Thread(target=self._receive_executions, name="executions", daemon=True)
                self._executing.start()
        if jobs:
            self._bundle = 0.5 * self._bundle + 0.5 * len(jobs) / len(received)
            self.pool.submit(jobs)
            if not self._may_start.is_set():
                self.pool.hand_back_waiting()

    # -- the parent's commands

    def obey(self) -> None:
        """Do what the parent says; if it is gone, nobody beats for this process, and it must not go on."""
        while True:
            try:
                command = decode(Command, self._pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)
            except Malformed:
                continue  # cannot happen between a parent and the child it forked
            if command.verb == "pause":
                self._may_start.clear()
                self._doubt(True)
            elif command.verb == "resume":
                self._may_start.set()
                self._doubt(False)
            elif command.verb == "drain":
                self.drain()
            elif command.verb == "retire":
                self.retire()
            elif command.verb == "stay":
                self._stays = True
            elif command.verb == "spare":
                self.pool.spare((attempt.id, attempt.attempt) for attempt in command.spare)
            else:
                stop, moved = (
                    [(attempt.id, attempt.attempt) for attempt in some] for some in (command.stop, command.moved)
                )
                self.pool.revoke(stop, moved)

    def _doubt(self, in_doubt: bool) -> None:
        """Take note that others may have what this process has, or that it is known who has what."""
        if self.pool.driver is not None:
            self.pool.driver.in_doubt = in_doubt
