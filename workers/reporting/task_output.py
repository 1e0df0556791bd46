"""What tasks print and log, with their names on it.

In a process that runs tasks, `sys.stdout` and `sys.stderr` lead here before the application is imported. A line that a
task prints becomes a record of the log; all else, and what log handlers of the application write, passes as it is.
Nobody hangs on a reader who does not read, and nobody dies of one who is gone. What a task does to the two holds for
all tasks of the process, so none can close them. `TaskFields` tells each log handler
whose a record is. What tasks print and log is also handed to whoever keeps the lines of attempts (`share_log`).
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from orchestrator.domain.redaction import scrub
from orchestrator.harmless import with_styles
from orchestrator.log_format import TASK_FIELDS
from orchestrator.sdk.tasks.context import current_runtime
from orchestrator.telemetry import LOGGER_NAME, get_logger
from orchestrator.transport.codec import LogLine
from orchestrator.unblocked import UnblockedHandler, unblocked
from orchestrator.workers.running.forks import is_fork, on_fork
from orchestrator.workers.running.job import Job, Stage
from orchestrator.workers.running.task_runtime import JobRuntime

_READER_TIMEOUT = 1.0
"""Seconds that a task waits, once, for a reader who is slow."""
_LONGEST_PIECE = 10_000
"""Characters that are kept until their line ends."""
_HANDLE = logging.Handler.handle.__code__

_unfinished: dict[tuple[Job | int, TaskOutput], str] = {}
"""Lines that have not ended, by the job or the thread that prints them."""

Keep = Callable[[Job, LogLine], None]
_keepers: list[Keep] = []
"""Who keeps the lines of attempts, if anybody does."""
_streams: dict[str, TaskStream] = {}
"""What was made `sys.stdout` and `sys.stderr`, by name."""


def capture_output() -> None:
    """Make standard output and error lead here; called before the application is imported."""
    on_fork(_unfinished.clear)
    for name in ("stdout", "stderr"):
        try:
            output = TaskOutput(name, unblocked(getattr(sys, name).fileno()))
        except (OSError, AttributeError, ValueError):  # closed, or no file
            continue
        _streams[name] = TaskStream(output)
        setattr(sys, name, _streams[name])


def share_log(keep: Keep | None = None) -> None:
    """Let what the application logs come out; called when it has been imported.

    What tasks print and log is handed to `keep`, too.
    What it has configured stays. If it has given the root logger no handler, that gets ours; and our own lines come out
    although `dictConfig` silences, unless it is told otherwise, all loggers that it does not name.
    """
    ours, root = logging.getLogger(LOGGER_NAME), logging.getLogger()
    if not root.handlers:
        for handler in ours.handlers:
            root.addHandler(handler)
        if root.level == logging.WARNING:  # as it is by default
            root.setLevel(ours.level)
    for logger in _loggers():
        if logger.name.startswith(f"{LOGGER_NAME}."):
            logger.disabled = False
    ours.disabled = False
    for handler in {handler for logger in _loggers() for handler in logger.handlers}:
        if not any(isinstance(known, TaskFields) for known in handler.filters):
            handler.addFilter(TaskFields(handler))
    if keep is not None:
        _keepers[:] = [keep]
        kept = KeptRecords()
        for logger in _loggers():
            if logger is root or not logger.propagate:  # of these, each record reaches exactly one
                logger.addHandler(kept)


def _loggers() -> Iterator[logging.Logger]:
    yield logging.getLogger()
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield logger


def current_job() -> Job | None:
    """Return the attempt around the current code, if any."""
    runtime = current_runtime()
    return runtime.job if isinstance(runtime, JobRuntime) else None


def add_fields(record: logging.LogRecord, job: Job | None) -> None:
    """Let a record know whose it is; what it knows already stays."""
    for name, value in (dict.fromkeys(TASK_FIELDS, "") if job is None else job.fields).items():
        record.__dict__.setdefault(name, value)


def _hide(record: logging.LogRecord, secrets: Sequence[str]) -> None:
    """Let a record repeat nothing that is secret in the arguments of its task."""
    try:
        record.msg, record.args = scrub(record.getMessage(), secrets), None
    except Exception:  # noqa: BLE001  # what cannot be written is for the handler to say
        return
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    if record.exc_text:
        record.exc_text = scrub(record.exc_text, secrets)


class TaskFields(logging.Filter):
    """Lets each record of a handler know which attempt it comes from; refuses none."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._unblocked = handler if isinstance(handler, UnblockedHandler) else None

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields; a task that says much waits for its reader, for a while."""
        job = current_job()
        add_fields(record, job)
        if job is not None and job.secrets:
            _hide(record, job.secrets)
        if job is not None and self._unblocked is not None:
            self._unblocked.wait_for_room(_READER_TIMEOUT)
        return True


def _keep(job: Job, level: str, text: str, source: str) -> None:
    """Hand a line to whoever keeps those of attempts; code that outlives its task has nothing to say."""
    if job.stage is Stage.RUNNING:
        line = LogLine(time.time(), job.dispatch.attempt, level, scrub(text, job.secrets), source)
        for keep in _keepers:
            keep(job, line)


class KeptRecords(logging.Handler):
    """Keeps what tasks log; our own lines are about them, and not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a record, without a lock: whoever keeps lines has one."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        job = current_job()
        if job is None or record.name.partition(".")[0] == LOGGER_NAME:
            return
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001  # what cannot be written is for the other handlers to say
            return
        _keep(job, record.levelname.lower(), text, record.name)


class TaskStream(io.TextIOWrapper):
    """What tasks have as `sys.stdout` or `sys.stderr`: all tasks of the process share it, and none can end it."""

    def __init__(self, output: TaskOutput) -> None:
        super().__init__(output, encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True)

    def detach(self) -> Any:
        """Return what it writes to, and go on writing there."""
        self.flush()
        return self.buffer

    def reconfigure(self, **_: Any) -> None:
        """Keep it as it is: it takes every character already, and hides no line that has ended."""
        self.flush()


class TaskOutput(io.RawIOBase):
    """What `sys.stdout` or `sys.stderr` writes to."""

    def __init__(self, name: str, passed_on: UnblockedHandler) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._log = get_logger(name)
        self._passed_on = passed_on

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, for programs that a task starts."""
        return self._passed_on.descriptor

    def write(self, data: Any, /) -> int:
        """Take whatever is printed; lines are told when they end."""
        data = bytes(data)
        job = current_job()
        if job is not None and _is_logging():
            job = None
        key = (job or threading.get_ident(), self)
        *lines, rest = (_unfinished.pop(key, "") + data.decode("utf-8", "backslashreplace")).split("\n")
        for line in lines:
            self._log_line(job, line)
        if len(rest) > _LONGEST_PIECE:
            self._log_line(job, rest)
        elif rest:
            _unfinished[key] = rest
        return len(data)

    def flush(self) -> None:
        """Write what has not ended, unless a task prints it: that has a line of its own when it ends."""
        if rest := _unfinished.pop((threading.get_ident(), self), ""):
            self._passed_on.write(with_styles(rest))
        job = current_job()
        if job is not None and is_fork():  # it ends, and its job does not
            self.end(job)
        self._passed_on.retry()

    def close(self) -> None:
        """Write what is there, and stay open: a task that closes it, or a wrapper around it, has no other in mind."""
        self.flush()

    def end(self, job: Job) -> None:
        """Tell the line that a job has left unfinished."""
        if rest := _unfinished.pop((job, self), ""):
            self._log_line(job, rest)

    def _log_line(self, job: Job | None, line: str) -> None:
        if job is None:
            self._passed_on.wait_for_room(_READER_TIMEOUT)
            self._passed_on.write(f"{with_styles(line)}\n")
            return
        line = line.rstrip("\r").rpartition("\r")[2]  # a bar that is drawn again and again is shown once
        if line.strip():
            record = self._log.makeRecord(self._log.name, logging.INFO, "", 0, line, (), None)
            add_fields(record, job)
            self._log.handle(record)
            _keep(job, "info", line, self.name[1:-1])


def end_lines(job: Job) -> None:
    """Tell what a job has printed without ending the line: its code has ended.

    A file that a task has put in place of `sys.stdout` or `sys.stderr` is taken away again if it is closed.
    """
    for owner, output in list(_unfinished) if _unfinished else ():
        if owner is job:
            output.end(job)
    for name, stream in _streams.items():
        if getattr(sys, name, None) is not stream and _is_useless(name):
            setattr(sys, name, stream)


def _is_useless(name: str) -> bool:
    """Say whether nobody can write to what a task has left as standard output or error."""
    try:
        return bool(getattr(getattr(sys, name), "closed", False))
    except Exception:  # noqa: BLE001  # there is none, or it is a wrapper that was detached
        return True


def _is_logging() -> bool:
    """Say whether a log handler writes, rather than the task itself."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _HANDLE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
