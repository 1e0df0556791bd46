"""Logging as people read it: one line per event, on stderr, with the process's role in front."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable

from orchestrator.harmless import indented
from orchestrator.unblocked import UnblockedHandler, flush_within

LOGGER_NAME = "orchestrator"


def get_logger(role: str) -> logging.Logger:
    """Return the logger of one role: scheduler, worker, client."""
    return logging.getLogger(f"{LOGGER_NAME}.{role}")


def configure_logging(level: str = "INFO") -> None:
    """Send the package's log to stderr; called by the commands, never by the library."""
    handler = _handler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def _handler() -> logging.Handler:
    try:
        return UnblockedHandler(sys.stderr.fileno())
    except (OSError, AttributeError):  # no file, but something in its place
        return logging.StreamHandler(sys.stderr)


def retry_log() -> None:
    """Write what of the log could not be written before, without waiting."""
    for handler in logging.getLogger(LOGGER_NAME).handlers:
        if isinstance(handler, UnblockedHandler):
            handler.retry()


def close_output() -> None:
    """Write what is left of the log and of what was printed, and give that a moment: the process ends."""
    flush_within(2.0, sys.stdout, sys.stderr, *logging.getLogger(LOGGER_NAME).handlers)


class _Formatter(logging.Formatter):
    """Shows what others have written without obeying it: no line but the first of a record begins at the margin."""

    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line and without the command that a driver quotes in front of it."""
    text = re.sub(r"^Command # \d+ .* of pipeline caused error: ", "", str(error).strip(), flags=re.DOTALL)
    return text.split("\n", 1)[0] or type(error).__name__


class Outage:
    """A time in which something cannot be used: one line when it begins, and one when it is over.

    It is over after `settled` seconds without a failure: what fails now and then is one outage, not many.
    """

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        meanwhile: str,
        *,
        settled: float = 5.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._what = what
        self._meanwhile = meanwhile
        self._settled = settled
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._began = 0.0
        self._failed = 0.0
        self.lasts = False

    def failed(self, reason: str) -> None:
        """Take note of a failure."""
        with self._lock:
            self._failed = self._monotonic()
            if not self.lasts:
                self.lasts = True
                self._began = self._failed
                self._log.warning("%s cannot be used; %s: %s", self._what, self._meanwhile, reason)

    def worked(self) -> None:
        """Take note of a success; a while after the last failure, the outage is over."""
        if not self.lasts:
            return
        with self._lock:
            now = self._monotonic()
            if self.lasts and now - self._failed >= self._settled:
                self.lasts = False
                self._log.warning("%s can be used again, after %.1f s", self._what, now - self._began)
