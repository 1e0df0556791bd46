"""The log of our processes: one line per event on stderr, which never blocks."""

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
from orchestrator.nonblocking_log import NonblockingHandler, flush_within, nonblocking_handlers

LOGGER_NAME = "orchestrator"


def get_logger(role: str) -> logging.Logger:
    """Return the logger of a role: scheduler, worker, client."""
    return logging.getLogger(f"{LOGGER_NAME}.{role}")


def configure_logging(level: str = "info", form: str = "text", into: logging.Handler | None = None) -> None:
    """Send the package's log to stderr or a handler. Commands call this; the library never does."""
    handler = into or _handler()
    handler.setFormatter(_formatter(form))
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def adopt_logs(*names: str) -> None:
    """Write warnings of libraries through our log handlers, so that the JSON log contains only JSON."""
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers[:] = logging.getLogger(LOGGER_NAME).handlers
        logger.setLevel(logging.WARNING)
        logger.propagate = False


def _formatter(form: str) -> logging.Formatter:
    if form == "json":
        return JsonFormatter()
    return TextFormatter(brief=is_watched(sys.stderr), colours=has_colours(sys.stderr))


def has_colours(stream: TextIO) -> bool:
    """Return whether output to the stream may have colors."""
    return is_watched(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def is_watched(stream: TextIO) -> bool:
    """Return whether the output goes to a terminal, or FORCE_COLOR is set."""
    try:
        return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
    except (AttributeError, ValueError):  # not a real file, or closed
        return False


def _handler() -> logging.Handler:
    try:
        return NonblockingHandler(sys.stderr.fileno())
    except (OSError, AttributeError):  # not a real file
        return logging.StreamHandler(sys.stderr)


def retry_log() -> None:
    """Write buffered log lines, without waiting."""
    for handler in nonblocking_handlers():
        handler.retry()


def close_output() -> None:
    """Flush the log and printed output before the process ends, within a short timeout."""
    flush_within(2.0, sys.stdout, sys.stderr, *nonblocking_handlers())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without the command that the Redis driver quotes before it."""
    text = re.sub(r"^Command # \d+ .* of pipeline caused error: ", "", str(error).strip(), flags=re.DOTALL)
    return text.split("\n", 1)[0] or type(error).__name__


_MAX_CALM = 60.0
"""Seconds without a failure after which even a flapping service counts as available."""


class Outage:
    """An outage of a service, logged once at its start and once at its end.

    It ends when the service has worked for `settled` seconds. For each outage that starts within a minute of the last
    one, this time is doubled, up to a minute, so that flapping is logged, but not every time.
    """

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        meanwhile: str,
        *,
        settled: float = 2.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._what = what
        self._meanwhile = meanwhile
        self._settled = self._calm = settled
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._began = 0.0
        self._works_since: float | None = None
        self._relapses = 0
        """How often the service has failed again since the start was logged."""
        self._over_at = float("-inf")
        self.is_ongoing = False
        self.reason = ""
        """The error message of the last failure."""
        self.begun = 0
        """The number of outages so far."""

    @property
    def is_down(self) -> bool:
        """Whether the last use failed. The log may report the outage a little longer."""
        return self.is_ongoing and self._works_since is None

    def failed(self, reason: str, *, age: float = 0.0) -> None:
        """Record a failure that started `age` seconds ago."""
        self.reason = reason
        with self._lock:
            began = self._monotonic() - age
            if not self.is_ongoing:
                is_soon = began - self._over_at < _MAX_CALM
                self._calm = min(2 * self._calm, _MAX_CALM) if is_soon else self._settled
                self.is_ongoing, self._began, self._relapses = True, began, 0
                self.begun += 1
                self._log.warning(
                    "service.unavailable: %s cannot be used; %s: %s",
                    *(self._what, self._meanwhile, reason),
                    extra={"service": self._what},
                )
            elif self._works_since is not None:
                self._relapses += 1
            self._works_since = None

    def worked(self) -> None:
        """Record a success. After enough time without failures, the outage is over."""
        if not self.is_ongoing:
            return
        with self._lock:
            now = self._monotonic()
            if self._works_since is None:
                self._works_since = now
            if self.is_ongoing and now - self._works_since >= self._calm:
                self.is_ongoing, self._over_at = False, now
                times = f", with {self._relapses} short recoveries" if self._relapses else ""
                duration = self._works_since - self._began
                self._log.warning(
                    "service.available: %s can be used again, after %.1f s%s",
                    *(self._what, duration, times),
                    extra={"service": self._what},
                )
