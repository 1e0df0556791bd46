"""A child process that runs tasks one by one, for a worker process at the other end of a pipe (`isolated.py`)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import Dispatch, KeyHolder, NewTask
from orchestrator.environment import forbid_inspection, hide_environment
from orchestrator.errors import Uncertain
from orchestrator.settings import load_settings
from orchestrator.telemetry import close_output, configure_logging
from orchestrator.tracing.entry import begin_tracing, enter, leave
from orchestrator.transport.codec import LogLine, ProgressMark, decode, encode
from orchestrator.workers.functions import Allowed, install, load_app
from orchestrator.workers.parent.processes import die_with
from orchestrator.workers.reporting.kept import PendingReport
from orchestrator.workers.reporting.task_output import capture_output, share_log
from orchestrator.workers.reporting.unsendable import sendable
from orchestrator.workers.running.forks import is_fork, on_fork, refuse_in_fork, watch_forks
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.turns import Turns

_CHECK_INTERVAL = 0.05
"""Seconds between two checks of a workflow turn."""


class _PipeOutbox:
    """Sends the requests of tasks to the worker process."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, verb: str, data: bytes) -> None:
        """Send a message. Any thread of the task may call this; in a fork, the message is ignored."""
        if is_fork():
            return
        with self._lock:
            self._pipe.send_bytes(encode((verb, data)))

    def ask(self, verb: str, data: bytes) -> tuple[str, bytes]:
        """Send a request, and wait for the answer."""
        refuse_in_fork()
        with self._lock:
            self._pipe.send_bytes(encode((verb, data)))
            return decode(tuple[str, bytes], self._pipe.recv_bytes())

    def send_tasks(self, tasks: Sequence[NewTask]) -> dict[bytes, KeyHolder]:
        verb, data = self.ask("enqueue", encode(list(tasks)))
        if verb == "uncertain":
            raise Uncertain(data.decode())
        return decode(dict[bytes, KeyHolder], data)

    def page(self, job: Job, number: int) -> bytes | None:
        del job  # the child runs one job at a time
        verb, page = self.ask("page", encode(number))
        return page if verb == "page" else None

    def publish_progress(self, task: bytes, mark: ProgressMark) -> None:
        del task
        self.send("mark", encode(mark))

    def log(self, job: Job, line: LogLine) -> None:
        self.send("log", encode((job.label, line)))

    def log_lines(self, job: Job, lines: LogLine) -> None:
        self.send("lines", encode((job.label, lines)))

    def save_details(self, job: Job, details: bytes) -> None:
        del job
        self.send("leave", details)


def main(
    app: str, descriptor: int, database: bool, shard: str | None, allow: Sequence[str], *, is_hidden: bool = False
) -> None:
    """Run tasks as they arrive, until the worker closes the pipe."""
    # The worker decides when this process ends. Handlers, unlike SIG_IGN, are not inherited by subprocesses of tasks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    pipe: Connection[Any, Any] = Connection(descriptor)
    # Subprocesses of tasks must not keep the pipe open: the worker learns from its end that this process has died.
    os.set_inheritable(descriptor, False)
    watch_forks()
    on_fork(pipe.close)
    capture_output()
    if is_hidden:
        forbid_inspection()
    application = load_app(app)
    application._client.shard = shard
    outbox = _PipeOutbox(pipe)
    share_log(outbox if application.settings.capture_logs == "all" else None)
    install(application)
    application._resources.start()
    runner = Runner(application, outbox, Allowed(application, allow), database=database)
    turn_timeout = load_settings().turn_timeout
    spans = begin_tracing("worker")  # for spans that tasks create: the worker creates those of attempts
    outbox.send("ready", b"")
    while True:
        try:
            _, data = decode(tuple[str, bytes], pipe.recv_bytes())
        except (EOFError, OSError):  # OSError if the worker died with unread data
            return
        dispatch = decode(Dispatch, data)
        job = Job(dispatch, Bundle("", "", "", 1), 0, time.monotonic())
        outbox.send("begun", b"")
        job.begin(time.monotonic())
        token = None if job.trace is None else enter(job.trace)
        report = _watched(runner, job, turn_timeout) if dispatch.is_turn_task else _run(runner, job)
        job.finish()
        if job.trace is not None:
            leave(token)
        outbox.send("report", encode([sendable(PendingReport(report)).report]))
        if spans is not None:
            spans.flush(0.0)  # in the background: if the process is idle for long, it is killed


def _run(runner: Runner, job: Job) -> AttemptReport:
    if job.options.soft_timeout is None:
        return runner.run(job)
    timer = threading.Timer(job.options.soft_timeout, job.warn)
    timer.daemon = True
    timer.start()
    try:
        return runner.run(job)
    except BaseException as error:
        if job.interrupted_by is None:
            raise  # otherwise the soft timeout arrived when the code had just ended
        return runner.failures.failure(job, error)
    finally:
        timer.cancel()


def _watched(runner: Runner, job: Job, limit: float) -> AttemptReport:
    """Run a workflow turn, and stop it if it takes too long, as a worker process does with its own turns."""
    turns, has_ended = Turns(limit), threading.Event()

    def keep_time() -> None:
        while not has_ended.wait(_CHECK_INTERVAL):
            turns.check(runner.running(job), job, time.monotonic())

    threading.Thread(target=keep_time, name="turns", daemon=True).start()
    try:
        report = runner.run(job)
    finally:
        has_ended.set()
    return turns.verdict(job) or report


if __name__ == "__main__":
    die_with(int(sys.argv[3]))
    configure_logging(sys.argv[6], sys.argv[7])
    hide_environment()
    main(
        sys.argv[1], int(sys.argv[2]), bool(sys.argv[4]), sys.argv[8] or None, sys.argv[9:], is_hidden=bool(sys.argv[5])
    )
    close_output()
