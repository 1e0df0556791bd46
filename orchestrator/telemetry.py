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
from orchestrator.nonblocking_log import NonblockingHandler, flush_within, nonblocking_handlers

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


def adopt_logs(*names: str) -> None:
    """Have the warnings of libraries written like our own log, where that is written: bare lines are no JSON."""
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
        return NonblockingHandler(sys.stderr.fileno())
    except (OSError, AttributeError):  # no file, but something in its place
        return logging.StreamHandler(sys.stderr)


def retry_log() -> None:
    """Write what of the log could not be written before, without waiting."""
    for handler in nonblocking_handlers():
        handler.retry()


def close_output() -> None:
    """Write what is left of the log and of what was printed, and give that a moment: the process ends."""
    flush_within(2.0, sys.stdout, sys.stderr, *nonblocking_handlers())


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line and without the command that a driver quotes in front of it."""
    text = re.sub(r"^Command # \d+ .* of pipeline caused error: ", "", str(error).strip(), flags=re.DOTALL)
    return text.split("\n", 1)[0] or type(error).__name__


_LONGEST_CALM = 60.0
"""Seconds without a failure after which even a flapping outage is logged as over."""


class Outage:
    """An outage: one line when it begins, and one when it is over.

    It is over when it has worked for `settled` seconds. Each outage that begins within a minute of the last one has to
    be over for twice as long, up to a minute: flapping is logged, but not each time.
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
        self._returns = 0
        """How often it has begun again since it was logged."""
        self._over_at = float("-inf")
        self.lasts = False
        self.reason = ""
        """What the last failure said."""
        self.begun = 0
        """How many outages there have been."""

    @property
    def is_down(self) -> bool:
        """Say whether it failed when it was last used; the log may say so a little longer."""
        return self.lasts and self._works_since is None

    def failed(self, reason: str, *, age: float = 0.0) -> None:
        """Take note of a failure, which began so many seconds ago."""
        self.reason = reason
        with self._lock:
            began = self._monotonic() - age
            if not self.lasts:
                is_soon = began - self._over_at < _LONGEST_CALM
                self._calm = min(2 * self._calm, _LONGEST_CALM) if is_soon else self._settled
                self.lasts, self._began, self._returns = True, began, 0
                self.begun += 1
                self._log.warning(
                    "service.unavailable: %s cannot be used; %s: %s",
                    *(self._what, self._meanwhile, reason),
                    extra={"service": self._what},
                )
            elif self._works_since is not None:
                self._returns += 1
            self._works_since = None

    def worked(self) -> None:
        """Take note of a success; after a while of them, the outage is over."""
        if not self.lasts:
            return
        with self._lock:
            now = self._monotonic()
            if self._works_since is None:
                self._works_since = now
            if self.lasts and now - self._works_since >= self._calm:
                self.lasts, self._over_at = False, now
                times = f", in which it worked for a moment {self._returns} times" if self._returns else ""
                lasted = self._works_since - self._began
                self._log.warning(
                    "service.available: %s can be used again, after %.1f s%s",
                    *(self._what, lasted, times),
                    extra={"service": self._what},
                )
