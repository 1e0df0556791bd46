"""Captures the output and logs of tasks, and adds the task to each line.

In a process that runs tasks, `sys.stdout` and `sys.stderr` are replaced before the application is imported. A line that
a task prints becomes a log record. Other output, and output of the application's log handlers, passes unchanged. A
reader that does not read blocks nothing, and a closed reader breaks nothing. Tasks of a process share the two streams,
so no task can close them. `TaskFields` adds the task to each log record. Lines of tasks also go to the store of task
logs (`share_log`).
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Protocol

from orchestrator.domain.redaction import scrub
from orchestrator.log_format import TASK_FIELDS, JsonFormatter, TextFormatter
from orchestrator.nonblocking_log import NonblockingHandler, nonblocking
from orchestrator.sdk.tasks.context import current_runtime, in_handler
from orchestrator.telemetry import LOGGER_NAME, get_logger
from orchestrator.terminal_safe import with_styles
from orchestrator.transport.codec import LogLine
from orchestrator.workers.reporting.lines import final_text
from orchestrator.workers.reporting.printed import MAX_PIECE_LENGTH, RATE, LogBudget, PrintBuffer
from orchestrator.workers.running.forks import is_fork, on_fork
from orchestrator.workers.running.job import Job, Stage
from orchestrator.workers.running.task_runtime import JobRuntime

_unfinished: dict[tuple[int, TaskOutput], str] = {}
"""Unfinished lines printed outside of tasks, by thread and output."""


class Keeper(Protocol):
    """Stores the lines of attempts."""

    def log(self, job: Job, line: LogLine) -> None:
        """Store a line of a task."""

    def log_lines(self, job: Job, lines: LogLine) -> None:
        """Store many lines of a task, which are one text."""


_line_stores: list[Keeper] = []
"""The store of task lines, if there is one."""
_streams: dict[str, TaskStream] = {}
"""The replacements of `sys.stdout` and `sys.stderr`, by name."""


def capture_output() -> None:
    """Replace standard output and error. Called before the application is imported."""
    on_fork(_forked)
    _exempt_log_handlers()
    for name in ("stdout", "stderr"):
        try:
            output = TaskOutput(name, nonblocking(getattr(sys, name).fileno()))
        except (OSError, AttributeError, ValueError):  # closed, or no file
            continue
        _streams[name] = TaskStream(output)
        setattr(sys, name, _streams[name])


def _forked() -> None:
    _unfinished.clear()
    if (buffer := _current_buffer()) is not None:
        buffer.forked()


def _exempt_log_handlers() -> None:
    """Mark the output of log handlers, so that it does not count as printed by the task that logs."""
    handle = logging.Handler.handle
    if hasattr(handle, "__wrapped__"):
        return

    @wraps(handle)
    def handle_unprinted(self: logging.Handler, record: logging.LogRecord) -> bool:
        token = in_handler.set(True)
        try:
            return handle(self, record)
        finally:
            in_handler.reset(token)

    logging.Handler.handle = handle_unprinted  # type: ignore[method-assign]


def share_log(keep: Keeper | None = None) -> None:
    """Adjust logging after the import of the application.

    Send output and logs of tasks to `keep`, too. Keep the application's logging configuration, with two exceptions: a
    root logger without handlers gets those of this package, and this package's loggers are enabled again, because
    `dictConfig` by default disables all loggers that it does not name.
    """
    own, root = logging.getLogger(LOGGER_NAME), logging.getLogger()
    if not root.handlers:
        for handler in own.handlers:
            root.addHandler(handler)
        if root.level == logging.WARNING:  # the default level
            root.setLevel(own.level)
    for logger in _loggers():
        if logger.name.startswith(f"{LOGGER_NAME}."):
            logger.disabled = False
    own.disabled = False
    for handler in {handler for logger in _loggers() for handler in logger.handlers}:
        if not any(isinstance(existing, TaskFields) for existing in handler.filters):
            handler.addFilter(TaskFields())
    if keep is not None:
        _line_stores[:] = [keep]
        kept = KeptRecords()
        for logger in _loggers():
            if logger is root or not (logger.propagate or logger is own):  # each record reaches one of these
                logger.addHandler(kept)


def _loggers() -> Iterator[logging.Logger]:
    yield logging.getLogger()
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield logger


def current_job() -> Job | None:
    """Return the job that the current code belongs to, if any."""
    runtime = current_runtime()
    return runtime.job if isinstance(runtime, JobRuntime) else None


def _current_buffer() -> PrintBuffer | None:
    """Return the print buffer of the current attempt."""
    runtime = current_runtime()
    return runtime.printed if isinstance(runtime, JobRuntime) else None


def add_fields(record: logging.LogRecord, job: Job | None) -> None:
    """Add the task's fields to a record. Existing fields stay."""
    for name, value in (dict.fromkeys(TASK_FIELDS, "") if job is None else job.fields).items():
        record.__dict__.setdefault(name, value)


def _redact(record: logging.LogRecord, secrets: Sequence[str]) -> None:
    """Redact secret arguments of the task in a record."""
    try:
        record.msg, record.args = scrub(record.getMessage(), secrets), None
    except Exception:  # noqa: BLE001  # a record that cannot be formatted is the handler's problem
        return
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    if record.exc_text:
        record.exc_text = scrub(record.exc_text, secrets)


class TaskFields(logging.Filter):
    """Adds the task's fields to each record of a handler. Rejects no record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Flush the printed output of the attempt first, to keep the order, then add the fields."""
        job = current_job()
        if (buffer := _current_buffer()) is not None:
            buffer.flush()
        add_fields(record, job)
        if job is not None and job.secrets:
            _redact(record, job.secrets)
        return True


def _keep(job: Job, level: str, text: str, source: str) -> None:
    """Store a line of the attempt, unless the task has ended and its code goes on."""
    if job.stage is Stage.RUNNING:
        line = LogLine(time.time(), job.dispatch.attempt, level, scrub(text, job.secrets), source)
        for keeper in _line_stores:
            keeper.log(job, line)


class KeptRecords(logging.Handler):
    """Stores the log records of tasks, except those of this package, which are about tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))

    def handle(self, record: logging.LogRecord) -> bool:
        """Store a record without the handler's lock: the store has one."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        job = current_job()
        if job is None or record.name.partition(".")[0] == LOGGER_NAME:
            return
        try:
            is_plain = not (record.exc_info or record.exc_text or record.stack_info)
            text = record.getMessage() if is_plain else self.format(record)
        except Exception:  # noqa: BLE001  # a record that cannot be formatted is the other handlers' problem
            return
        if (buffer := _current_buffer()) is not None:
            buffer.flush()
        _keep(job, record.levelname.lower(), text, record.name)


class TaskStream(io.TextIOWrapper):
    """The `sys.stdout` or `sys.stderr` of tasks. All tasks of the process share it, and none can close it."""

    def __init__(self, output: TaskOutput) -> None:
        super().__init__(output, encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True)
        self.write = _write_to(output)  # type: ignore[method-assign]

    def detach(self) -> Any:
        """Return the underlying output without detaching it."""
        self.flush()
        return self.buffer

    def reconfigure(self, **_: Any) -> None:
        """Ignore the new configuration: the stream accepts every character and flushes every line."""
        self.flush()


def _write_to(output: TaskOutput) -> Callable[[str], int]:
    """Return a fast `write`, which `print` calls twice a line: for much output, it is little more than an append."""
    current: Callable[[], Any] = current_runtime
    is_handler, put = in_handler.get, output.put

    def write(text: str, /) -> int:
        runtime = current()
        if runtime is None or (printed := runtime.printed) is None or printed.output is not output or is_handler():
            return put(text)
        size = len(text)
        if size > MAX_PIECE_LENGTH or text.__class__ is not str:
            return put(text)
        pieces = printed.pieces
        pieces.append(text)
        if len(pieces) >= printed.flush_at:
            printed.flush()
        return size

    return write


class TaskOutput(io.RawIOBase):
    """The raw output behind `sys.stdout` or `sys.stderr`."""

    def __init__(self, name: str, passed_on: NonblockingHandler) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._log = get_logger(name)
        self._level = logging.WARNING if name == "stderr" else logging.INFO
        self._handler = passed_on

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor, for subprocesses of tasks."""
        return self._handler.descriptor

    def write(self, data: Any, /) -> int:
        """Write bytes."""
        data = bytes(data)
        self.put(data.decode("utf-8", "backslashreplace"))
        return len(data)

    def put(self, text: str) -> int:
        """Write a piece of text. Lines are logged when they end."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        runtime = current_runtime()
        if isinstance(runtime, JobRuntime) and not in_handler.get():
            if runtime.printed is None:
                runtime.printed = PrintBuffer(runtime.job, self)
            runtime.printed.put(self, text)
            return len(text)
        key, size = (threading.get_ident(), self), len(text)
        text = _unfinished.pop(key, "") + text
        ended, newline, rest = text.rpartition("\n")
        if len(rest) > MAX_PIECE_LENGTH:
            ended, newline, rest = text, "\n", ""
        if rest:
            _unfinished[key] = rest
        if newline:
            lines = ended.split("\n")
            self._handler.write("".join([f"{with_styles(line)}\n" for line in lines]), len(lines))
        return size

    def flush(self) -> None:
        """Write an unfinished line, unless a task prints it: lines of tasks are logged when they end."""
        if rest := _unfinished.pop((threading.get_ident(), self), ""):
            self._handler.write(with_styles(rest))
        if is_fork() and (buffer := _current_buffer()) is not None:  # the fork ends, but its job does not
            buffer.flush(is_last=True)
        self._handler.retry()

    def close(self) -> None:
        """Flush, and stay open: other tasks use the stream."""
        self.flush()

    def print_lines(self, job: Job, budget: LogBudget, text: str) -> None:
        """Log whole lines that a job has printed. The last one comes without its line end."""
        if not text.isascii():
            text = text.encode("utf-8", "backslashreplace").decode()  # surrogates cannot be stored
        text = scrub(final_text(text), job.secrets)
        dropped, visible = budget.take(text)
        self.log_dropped(job, dropped)
        if visible and (lines := [line for line in visible.split("\n") if line and not line.isspace()]):
            self._log_lines(job, self._level, lines)
        if job.stage is Stage.RUNNING:  # code that outlives its task has no log
            for keeper in _line_stores:
                level = logging.getLevelName(self._level).lower()
                keeper.log_lines(job, LogLine(time.time(), job.dispatch.attempt, level, text, self.name[1:-1]))

    def log_dropped(self, job: Job, lines: int) -> None:
        """Log how many lines were left out of the worker's log."""
        if lines:
            number = "1 line was" if lines == 1 else f"{lines:,} lines were"
            why = f"the log of a worker takes at most {RATE:,} bytes a second of a task"
            self._log_lines(job, logging.WARNING, [f"{number} left out here: {why}"])

    def _log_lines(self, job: Job, level: int, lines: list[str]) -> None:
        record = self._log.makeRecord(self._log.name, level, "", 0, lines[0], (), None)
        add_fields(record, job)
        if (handler := self._plain_handler()) is not None:
            assert isinstance(handler.formatter, (TextFormatter, JsonFormatter))
            handler.write(handler.formatter.format_lines(record, lines), len(lines))
            return
        self._log.handle(record)
        for line in lines[1:]:
            record = self._log.makeRecord(self._log.name, level, "", 0, line, (), None)
            add_fields(record, job)
            self._log.handle(record)

    def _plain_handler(self) -> NonblockingHandler | None:
        """Return the only handler of printed lines, if it is this package's own, unchanged."""
        logger, handlers = self._log, list(self._log.handlers)
        while logger.propagate and logger.parent is not None:
            logger = logger.parent
            handlers += logger.handlers
        if len(handlers) != 1 or self._log.disabled or self._log.filters:
            return None
        (handler,) = handlers
        if type(handler) is not NonblockingHandler or handler.level > self._level:
            return None
        is_own = type(handler.formatter) in (TextFormatter, JsonFormatter)
        return handler if is_own and all(isinstance(item, TaskFields) for item in handler.filters) else None


def end_lines(job: Job) -> None:
    """Log the unfinished lines of a job whose code has ended.

    Restore `sys.stdout` or `sys.stderr` if a task has left a closed file or None there.
    """
    runtime = current_runtime()
    if isinstance(runtime, JobRuntime) and runtime.job is job and runtime.printed is not None:
        runtime.printed.flush(is_last=True)
    for name, stream in _streams.items():
        if getattr(sys, name, None) is not stream and _is_unwritable(name):
            setattr(sys, name, stream)


def _is_unwritable(name: str) -> bool:
    """Return whether a task has left a standard stream that cannot be written to."""
    try:
        stream = getattr(sys, name)
        return stream is None or bool(getattr(stream, "closed", False))
    except Exception:  # noqa: BLE001  # the stream is missing, or a detached wrapper
        return True
