"""A worker process: its parts, and its work from the start until it has drained."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from orchestrator.domain import redaction
from orchestrator.domain.fleet.announced import redacting, taking
from orchestrator.environment import forbid_inspection
from orchestrator.errors import OrchestratorError
from orchestrator.memory import freeze_before_fork
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.modules import ImportFailed
from orchestrator.sdk.tasks.parameters import announced_parameters
from orchestrator.sdk.values.sealing import store_capabilities as store_means
from orchestrator.sealing import key_names, vault_of
from orchestrator.settings import Settings
from orchestrator.telemetry import close_output, get_logger
from orchestrator.tracing.entry import LAST_SPANS, begin_tracing
from orchestrator.transport.codec import Malformed, decode, encode
from orchestrator.transport.connection import UNAVAILABLE, connect, connect_shared
from orchestrator.transport.keys import Keys
from orchestrator.transport.pages import Pages
from orchestrator.transport.worker import WorkerStreams
from orchestrator.workers.executors.driving import Driver
from orchestrator.workers.executors.protocol import Setup
from orchestrator.workers.executors.registry import announcements
from orchestrator.workers.functions import Allowed, install, load_app
from orchestrator.workers.parent.held import Farewell, HeldAttempts
from orchestrator.workers.parent.messages import Command, FirstToReport, Hello, Leaving
from orchestrator.workers.receiving import Age, Receiver
from orchestrator.workers.reporting.journal import Journal
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.reporting.task_output import capture_output, share_log
from orchestrator.workers.running.forks import end_fork
from orchestrator.workers.running.hooks import AttemptSpans
from orchestrator.workers.running.isolated import Isolation
from orchestrator.workers.running.pool import Pool
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.task_runtime import ProcessOutbox
from orchestrator.workers.running.threads import start_critical_thread
from orchestrator.workers.spec import WorkerSpec

log = get_logger("worker")

_POLL_INTERVAL = 1.0
"""Seconds between two checks of whether the running tasks have ended and the process should still wait for them."""
_LAST_REPORTS = 5.0
"""Minimum seconds to deliver the last reports, even if running tasks have used up the drain timeout."""
_LAST_RELEASES = 2.0
"""Seconds to clean up the leftovers of executions when the process ends."""
_LEADERLESS_AFTER = 5.0
"""Seconds without a sign of a leader after which an ending process stops waiting for the leader."""


def main(
    spec: WorkerSpec,
    settings: Settings,
    worker: str,
    held: HeldAttempts,
    pipe: Connection[Any, Any],
    first_to_report: FirstToReport,
) -> Farewell:
    """Run a worker process until it has drained. Return how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent forwards it
    signal.signal(signal.SIGHUP, lambda *_: None)  # a closed terminal signals the whole group, too
    if spec.reload:  # a file changed twice in one second must not match the bytecode compiled in between
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if spec.commands:
        forbid_inspection(False)  # briefly: `capture_output` reopens the standard output by its path in /proc
    capture_output()
    if spec.commands:
        forbid_inspection()
    try:
        app = load_app(spec.app)
        share_log()
        install(app)
        if spec.database:
            app.settings.require_database()
        app._resources.start()
    except OrchestratorError as error:
        end_fork(error.__cause__ or error)
        share_log()  # print also the output that was muted before the failure
        if first_to_report.take():
            log.error("app.not_loaded app=%s error=%s", spec.app, error)
        return Farewell.BROKEN if isinstance(error, ImportFailed) else Farewell.UNUSABLE
    except BaseException as error:  # the user's module fails to import, or exits: log the traceback once
        end_fork(error)
        share_log()
        if first_to_report.take():
            log.error("app.not_loaded app=%s", spec.app, exc_info=error)
        return Farewell.BROKEN
    end_fork()
    first_to_report.close()
    freeze_before_fork()  # the application lives as long as this process
    process = WorkerProcess(app, spec, settings, worker, held, pipe)
    # Drain in a thread: a signal handler interrupts the main thread anywhere, also while the main thread holds the lock
    # that draining needs.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=process.drain, daemon=True).start())
    process.send_hello()
    start_critical_thread("orders", process.run_commands)
    return Farewell.FINISHED if process.run() else Farewell.UNFINISHED


def end_process(held: HeldAttempts, farewell: Farewell) -> NoReturn:
    """Record how this process ended, and exit without waiting for threads."""
    close_output()
    held.write_farewell(farewell)
    os._exit(0 if farewell is Farewell.FINISHED else 1)


class WorkerProcess:
    """Receives, runs and reports tasks, from the start of the process until it has drained."""

    def __init__(
        self,
        app: Orchestrator,
        spec: WorkerSpec,
        settings: Settings,
        worker: str,
        held: HeldAttempts,
        pipe: Connection[Any, Any],
    ) -> None:
        self._app = app
        self._spec = spec
        self._settings = settings
        self._held = held
        self._pipe = pipe
        self._pipe_lock = threading.Lock()
        self._give_up_at = float("inf")
        self._named = app.queues()
        app._client.shard = settings.namespace.partition("/")[2] or None
        url, keys = settings.require_redis(), Keys.of(settings)
        self._reporter = Reporter(WorkerStreams(connect(url), keys), worker, held, vault_of(settings))
        redis = connect(url)
        self._journal = Journal(redis, keys, settings.log_limit, connect_shared(settings, redis))
        self._reporter.on_end = self._journal.end
        keeps_lines = settings.capture_logs != "off"
        outbox = ProcessOutbox(self._reporter, self._journal, Pages(connect(url), keys), keeps_lines=keeps_lines)
        share_log(outbox if settings.capture_logs == "all" else None)
        self._isolation = Isolation(spec, outbox, shard=app._client.shard)
        self._allowed = Allowed(app, spec.allow)
        self._spans = begin_tracing("worker", worker)
        self._pool = Pool(
            Runner(app, outbox, self._allowed, database=spec.database),
            self._isolation,
            self._reporter,
            held,
            concurrency=spec.concurrency,
            ttl=settings.worker_ttl,
            stop_grace=settings.stop_grace,
            on_stuck=self.leave_stuck_code,
            turn_timeout=settings.turn_timeout,
            on_standstill=self.leave_blocked_loop,
            spans=AttemptSpans(self._spans),
        )
        self._reporter.jobs = self._pool.received.snapshot
        self._setup = Setup(settings=settings, worker=worker, commands=spec.commands)
        self._driver = self._pool.driver = Driver(
            self._pool.runner, outbox, self._reporter, self._pool.task_log, self._setup, spec.executions
        )
        self._age = Age(spec.max_tasks_per_process, self._pool.received, self._notify_parent)
        self._receiver = Receiver(
            settings,
            worker,
            spec.served(self._named),
            held=held,
            reporter=self._reporter,
            pool=self._pool,
            age=self._age,
        )

    def run(self) -> bool:
        """Work until drained. Return whether all tasks were finished."""
        self._reporter.start()
        self._pool.start()
        self._held.write_handed_back(self._receiver.run())
        finished = self._finish()
        self._pool.task_log.summarize(time.monotonic())
        if not finished:
            log.warning(
                "worker.drain_timeout seconds=%g: tasks that still run are returned", self._settings.drain_timeout
            )
            self._pool.send_notes()
        # In an outage a report may need longer. A task whose report never arrives runs again.
        remaining = min(self._settings.drain_timeout, self._give_up_at - time.monotonic())
        self._await_applied(max(_LAST_REPORTS, remaining))
        self._pool.release(_LAST_RELEASES)
        timer = threading.Timer(max(_LAST_REPORTS, self._settings.drain_timeout), self._leave_open, (finished,))
        timer.daemon = True
        timer.start()
        self._app._resources.close(self._pool.loop)
        timer.cancel()
        self._leave()
        return finished

    def _leave(self) -> None:
        self._journal.flush()
        self._isolation.close()
        if self._spans is not None:
            self._spans.flush(LAST_SPANS)

    def _leave_open(self, finished: bool) -> None:
        """Exit although a resource or a lifespan does not close."""
        name = ", ".join(self._app._resources.closing)
        log.error("resource.close_hangs resource=%s: the process ends without closing it", name)
        self._leave()
        end_process(self._held, Farewell.FINISHED if finished else Farewell.UNFINISHED)

    def _finish(self) -> bool:
        """Wait until running tasks have ended. When the worker stops, wait at most for its drain timeout.

        Do not wait for tasks on an event loop that is blocked for good.
        """
        began = time.monotonic()
        while not self._pool.received.wait_until_idle(_POLL_INTERVAL):
            give_up_at = self._give_up_at
            if self._pool.standstill.is_blocked():
                give_up_at = min(give_up_at, began + self._settings.drain_timeout)
            if time.monotonic() >= give_up_at or self._pool.standstill.is_hopeless(self._pool.received.snapshot()):
                self._pool.standstill.mark_blocking()
                return False
        return True

    def _await_applied(self, timeout: float) -> None:
        """Wait until the leader has applied the last reports. Without a leader, leave them in Redis."""
        give_up_at = time.monotonic() + timeout
        while not self._reporter.wait_until_applied(min(_POLL_INTERVAL, max(0.0, give_up_at - time.monotonic()))):
            if time.monotonic() >= give_up_at:
                return
            with contextlib.suppress(*UNAVAILABLE):
                if self._reporter.has_sent_all and not self._receiver.is_led(_LEADERLESS_AFTER):
                    log.warning("worker.no_leader: the last reports wait in Redis for the next leader")
                    return

    def drain(self) -> None:
        """Receive no more tasks, finish running tasks within the drain timeout, and hand back the rest."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + self._settings.drain_timeout)
        self.retire()

    def retire(self) -> None:
        """Receive no more tasks, and finish running tasks, however long they take."""
        self._receiver.close()

    # -- messages to the parent

    def send_hello(self) -> None:
        """Tell the parent that this process is ready, and announce its tasks, queues and capabilities."""
        spec, app, settings = self._spec, self._app, self._settings
        capabilities = [*spec.capabilities, *key_names(settings), *store_means(settings)]
        capabilities += announcements(self._setup) if spec.executions else []
        redacted = {name: task._redacting_options.redact for name, task in app.tasks.items()}
        capabilities += [redacting(name, patterns) for name, patterns in redacted.items() if patterns]
        signals = ((name, workflow._signature.signals()) for name, workflow in app.code_workflows.items())
        capabilities += [taking(name, accepted) for name, accepted in signals if accepted is not None]
        names = sorted({*app.tasks, *app.code_workflows._announced, *self._allowed.patterns, *capabilities})
        everywhere = redaction.split_patterns(app.settings.redact)
        workflows = ((name, workflow._signature, everywhere) for name, workflow in app.code_workflows.items())
        tasks = ((name, task._signature, redacted[name]) for name, task in app.tasks.items())
        parameters = encode(announced_parameters(chain(workflows, tasks)))
        served, unserved = spec.served(self._named), spec.unserved(self._named)
        self._notify_parent(Hello(names, served, unserved, app.settings.release, parameters))

    def leave_stuck_code(self, task: str) -> None:
        """Ask to be replaced, because the code of a task does not stop. Only the end of the process can stop it."""
        self.retire()
        self._notify_parent(Leaving(f"the code of task {task} does not end", at_once=True))

    def leave_blocked_loop(self, why: str) -> None:
        """Ask to be replaced, because the event loop is blocked. Another process runs new asynchronous tasks."""
        log.error("process.event_loop_blocked: %s; this process is replaced", why)
        self.retire()
        self._notify_parent(Leaving("its event loop is blocked", at_once=True))

    def _notify_parent(self, message: Hello | Leaving) -> None:
        with self._pipe_lock:
            self._pipe.send_bytes(encode(message))

    # -- the parent's commands

    def run_commands(self) -> None:
        """Run the parent's commands. Exit at once if the parent is gone, because then there are no heartbeats."""
        while True:
            try:
                command = decode(Command, self._pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)
            except Malformed:
                continue  # cannot happen between a parent and the child it forked
            if command.verb == "pause":
                self._receiver.pause()
                self._driver.doubt(True)  # another worker may have taken over the executions of this process
            elif command.verb == "resume":
                self._receiver.resume()
                self._driver.doubt(False)
            elif command.verb == "drain":
                self.drain()
            elif command.verb == "retire":
                self.retire()
            elif command.verb == "stay":
                self._age.remove_limit()
            elif command.verb == "spare":
                self._pool.spare((attempt.id, attempt.attempt) for attempt in command.spare)
            else:
                stop, moved = (
                    [(attempt.id, attempt.attempt) for attempt in items] for items in (command.stop, command.moved)
                )
                self._pool.revoke(stop, moved)
