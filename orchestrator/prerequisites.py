"""Prerequisites of a starting process: wait for servers that are down, and fail at once on other errors.

Service managers start everything at the same time and, after a power cut, in any order. A process that gave up because
a server needs another minute would be restarted repeatedly, with an error in the log each time.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from orchestrator.telemetry import Outage

_FIRST_PAUSE = 0.1
_MAX_PAUSE = 2.0


class Prerequisite(NamedTuple):
    """A server that a process needs before it can work."""

    name: str
    check: Callable[[], str | None]
    """Raises if the server cannot be used. Returns a warning, if any."""
    outage: Callable[[Exception], str | None]
    """Returns the description of a temporary error; None for one that waiting does not fix."""


class Prerequisites:
    """All prerequisites of a process. Handles SIGTERM and SIGINT until replaced; check `is_stopped` then."""

    def __init__(self, log: logging.Logger, needed: Sequence[Prerequisite]) -> None:
        self._log = log
        self._missing = [(each, Outage(log, each.name, "waiting for it", settled=0.0)) for each in needed]
        self._stopping = threading.Event()
        self.is_stopped = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self) -> bool:
        """Wait until all prerequisites are met. Return False if the process was stopped first.

        All missing servers are checked in every round, so the log names each of them.
        """
        pause = _FIRST_PAUSE
        while not self.is_stopped:
            self._missing = [(each, outage) for each, outage in self._missing if not self._is_met(each, outage)]
            if not self._missing:
                return True
            self._stopping.wait(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        return False

    def _on_signal(self, *_: object) -> None:
        self.is_stopped = True
        # A signal interrupts the main thread anywhere, even while it holds the lock of the event that it waits for.
        threading.Thread(target=self._stopping.set, name="stop", daemon=True).start()

    def _is_met(self, needed: Prerequisite, outage: Outage) -> bool:
        try:
            warning = needed.check()
        except Exception as error:
            reason = needed.outage(error)
            if reason is None:
                raise
            outage.failed(reason)
            return False
        outage.worked()
        if warning:
            self._log.warning("service.misconfigured: %s", warning)
        return True
