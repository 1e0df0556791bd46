"""What tasks print and log, with their names on it.

In a process that runs tasks, `sys.stdout` and `sys.stderr` lead here before the application is imported. A line that a
task prints becomes a record of the log; all else, and what log handlers of the application write, passes as it is.
A reader that does not read blocks nothing, and one that is gone breaks nothing. Tasks of a process share the two
streams, so none can close them. `TaskFields` adds the task to each log record. Lines of tasks also go to the store of
task logs (`share_log`).
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
from orchestrator.workers.reporting.lines import as_it_stands
from orchestrator.workers.reporting.printed import LONGEST_PIECE, RATE, LogBudget, PrintBuffer
from orchestrator.workers.running.forks import is_fork, on_fork
from orchestrator.workers.running.job import Job, Stage
from orchestrator.workers.running.task_runtime import JobRuntime

_unfinished: dict[tuple[int, TaskOutput], str] = {}
"""Lines that have not ended, by the thread that prints them outside of a task."""


class Keeper(Protocol):
    """Keeps the lines of attempts."""

    def log(self, job: Job, line: LogLine) -> None:
        """Keep what a task says."""

    def log_lines(self, job: Job, lines: LogLine) -> None:
        """Keep what a task says in many lines, which are one text here."""


_keepers: list[Keeper] = []
"""Keeps the lines of attempts, if anything does."""
_streams: dict[str, TaskStream] = {}
"""The replaced `sys.stdout` and `sys.stderr`, by name."""


def capture_output() -> None:
    """Make standard output and error lead here; called before the application is imported."""
    on_fork(_forked)
    _mark_log_handlers()
    for name in ("stdout", "stderr"):
        try:
            output = TaskOutput(name, nonblocking(getattr(sys, name).fileno()))
        except (OSError, AttributeError, ValueError):  # closed, or no file
            continue
        _streams[name] = TaskStream(output)
        setattr(sys, name, _streams[name])


def _forked() -> None:
    _unfinished.clear()
    if (printed := _printed()) is not None:
        printed.forked()


def _mark_log_handlers() -> None:
    """Let what log handlers write not count as printed by the task that logs: they say themselves whose it is."""
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
    """Let the logs of the application out; called when it has been imported.

    Output and logs of tasks go to `keep`, too. The application's configuration stays. If it has given the root logger
    no handler, that gets ours; and our own lines come out although `dictConfig` silences, by default, all loggers that
    it does not name.
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
            handler.addFilter(TaskFields())
    if keep is not None:
        _keepers[:] = [keep]
        kept = KeptRecords()
        for logger in _loggers():
            if logger is root or not (logger.propagate or logger is ours):  # of these, each record reaches exactly one
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


def _printed() -> PrintBuffer | None:
    """Return what the attempt around the current code has printed."""
    runtime = current_runtime()
    return runtime.printed if isinstance(runtime, JobRuntime) else None


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

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields, once what the attempt has printed before is passed on."""
        job = current_job()
        if (printed := _printed()) is not None:
            printed.pass_on()
        add_fields(record, job)
        if job is not None and job.secrets:
            _hide(record, job.secrets)
        return True


def _keep(job: Job, level: str, text: str, source: str) -> None:
    """Pass a line to the log of its attempt; code that outlives its task has none."""
    if job.stage is Stage.RUNNING:
        line = LogLine(time.time(), job.dispatch.attempt, level, scrub(text, job.secrets), source)
        for keeper in _keepers:
            keeper.log(job, line)


class KeptRecords(logging.Handler):
    """Keeps what tasks log; our own lines are about them, and not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a record, without a lock: the keeper of lines has one."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        job = current_job()
        if job is None or record.name.partition(".")[0] == LOGGER_NAME:
            return
        try:
            is_plain = not (record.exc_info or record.exc_text or record.stack_info)
            text = record.getMessage() if is_plain else self.format(record)
        except Exception:  # noqa: BLE001  # what cannot be written is for the other handlers to say
            return
        if (printed := _printed()) is not None:
            printed.pass_on()
        _keep(job, record.levelname.lower(), text, record.name)


class TaskStream(io.TextIOWrapper):
    """The `sys.stdout` or `sys.stderr` of tasks: all tasks of the process share it, and none can close it."""

    def __init__(self, output: TaskOutput) -> None:
        super().__init__(output, encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True)
        self.write = _write_to(output)  # type: ignore[method-assign]

    def detach(self) -> Any:
        """Return what it writes to, and go on writing there."""
        self.flush()
        return self.buffer

    def reconfigure(self, **_: Any) -> None:
        """Keep it as it is: it takes every character already, and hides no line that has ended."""
        self.flush()


def _write_to(output: TaskOutput) -> Callable[[str], int]:
    """Return what `print` calls twice a line: to a task that prints much, an append is nearly all that it costs."""
    current: Callable[[], Any] = current_runtime
    is_handler, put = in_handler.get, output.put

    def write(text: str, /) -> int:
        runtime = current()
        if runtime is None or (printed := runtime.printed) is None or printed.output is not output or is_handler():
            return put(text)
        size = len(text)
        if size > LONGEST_PIECE or text.__class__ is not str:
            return put(text)
        pieces = printed.pieces
        pieces.append(text)
        if len(pieces) >= printed.pass_on_at:
            printed.pass_on()
        return size

    return write


class TaskOutput(io.RawIOBase):
    """The target of `sys.stdout` or `sys.stderr`."""

    def __init__(self, name: str, passed_on: NonblockingHandler) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._log = get_logger(name)
        self._level = logging.WARNING if name == "stderr" else logging.INFO
        self._passed_on = passed_on

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, for programs that a task starts."""
        return self._passed_on.descriptor

    def write(self, data: Any, /) -> int:
        """Take bytes that are printed."""
        data = bytes(data)
        self.put(data.decode("utf-8", "backslashreplace"))
        return len(data)

    def put(self, text: str) -> int:
        """Take a piece of what is printed; lines are logged when they end."""
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
        if len(rest) > LONGEST_PIECE:
            ended, newline, rest = text, "\n", ""
        if rest:
            _unfinished[key] = rest
        if newline:
            lines = ended.split("\n")
            self._passed_on.write("".join([f"{with_styles(line)}\n" for line in lines]), len(lines))
        return size

    def flush(self) -> None:
        """Write what has not ended, unless a task prints it: that has a line of its own when it ends."""
        if rest := _unfinished.pop((threading.get_ident(), self), ""):
            self._passed_on.write(with_styles(rest))
        if is_fork() and (printed := _printed()) is not None:  # it ends, and its job does not
            printed.pass_on(is_last=True)
        self._passed_on.retry()

    def close(self) -> None:
        """Write what is there, and stay open: a task that closes it, or a wrapper around it, has no other in mind."""
        self.flush()

    def print_lines(self, job: Job, room: LogBudget, text: str) -> None:
        """Log what a job has printed: whole lines, the last without its end."""
        if not text.isascii():
            text = text.encode("utf-8", "backslashreplace").decode()  # some characters cannot be stored
        text = scrub(as_it_stands(text), job.secrets)
        left_out, shown = room.take(text)
        self.log_dropped(job, left_out)
        if shown and (lines := [line for line in shown.split("\n") if line and not line.isspace()]):
            self._log_lines(job, self._level, lines)
        if job.stage is Stage.RUNNING:  # code that outlives its task has nothing to say
            for keeper in _keepers:
                level = logging.getLevelName(self._level).lower()
                keeper.log_lines(job, LogLine(time.time(), job.dispatch.attempt, level, text, self.name[1:-1]))

    def log_dropped(self, job: Job, lines: int) -> None:
        """Log how many lines the log of the worker does not have."""
        if lines:
            number = "1 line was" if lines == 1 else f"{lines:,} lines were"
            why = f"the log of a worker takes {RATE:,} bytes a second of a task that prints more"
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
        """Return the one handler that gets what is printed, if it is ours as we have made it."""
        logger, found = self._log, list(self._log.handlers)
        while logger.propagate and logger.parent is not None:
            logger = logger.parent
            found += logger.handlers
        if len(found) != 1 or self._log.disabled or self._log.filters:
            return None
        (handler,) = found
        if type(handler) is not NonblockingHandler or handler.level > self._level:
            return None
        is_ours = type(handler.formatter) in (TextFormatter, JsonFormatter)
        return handler if is_ours and all(isinstance(one, TaskFields) for one in handler.filters) else None


def end_lines(job: Job) -> None:
    """Log what a job has printed without ending the line: its code has ended.

    What a task has put in place of `sys.stdout` or `sys.stderr` is taken away again if it is a closed file, or None.
    """
    runtime = current_runtime()
    if isinstance(runtime, JobRuntime) and runtime.job is job and runtime.printed is not None:
        runtime.printed.pass_on(is_last=True)
    for name, stream in _streams.items():
        if getattr(sys, name, None) is not stream and _is_useless(name):
            setattr(sys, name, stream)


def _is_useless(name: str) -> bool:
    """Say whether what a task has left as standard output or error cannot be written to."""
    try:
        found = getattr(sys, name)
        return found is None or bool(getattr(found, "closed", False))
    except Exception:  # noqa: BLE001  # there is none, or it is a wrapper that was detached
        return True
