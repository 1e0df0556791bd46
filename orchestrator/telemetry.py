"""The log of a process of ours: one line per event, on stderr, where nobody need read it."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from orchestrator.log_format import JsonFormatter, TextFormatter
from orchestrator.unblocked import UnblockedHandler, flush_within, unblocked_handlers

LOGGER_NAME = "orchestrator"


def get_logger(role: str) -> logging.Logger:
    """Return the logger of one role: scheduler, worker, client."""
    return logging.getLogger(f"{LOGGER_NAME}.{role}")


def configure_logging(level: str = "info", form: str = "text", into: logging.Handler | None = None) -> None:
    """Send the package's log to stderr, or into a handler; called by the commands, never by the library."""
    handler = into or _handler()
    handler.setFormatter(_formatter(form))
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def _formatter(form: str) -> logging.Formatter:
    if form == "json":
        return JsonFormatter()
    return TextFormatter(brief=is_watched(sys.stderr), colours=has_colours(sys.stderr))


def has_colours(stream: TextIO) -> bool:
    """Say whether what is written there may have colours."""
    return is_watched(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def is_watched(stream: TextIO) -> bool:
    """Say whether somebody looks at what is written there: at a terminal, or where FORCE_COLOR says so."""
    try:
        return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
    except (AttributeError, ValueError):  # no file, but something in its place, or closed
        return False


def _handler() -> logging.Handler:
    try:
        return UnblockedHandler(sys.stderr.fileno())
    except (OSError, AttributeError):  # no file, but something in its place
        return logging.StreamHandler(sys.stderr)


def retry_log() -> None:
    """Write what of the log could not be written before, without waiting."""
    for handler in unblocked_handlers():
        handler.retry()


def close_output() -> None:
    """Write what is left of the log and of what was printed, and give that a moment: the process ends."""
    flush_within(2.0, sys.stdout, sys.stderr, *unblocked_handlers())


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
