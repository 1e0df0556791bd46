"""What a process stands on when it starts: it waits for what is away, and refuses at once what is wrong.

Service managers start everything at the same time, and after a power cut in any order. A process that gave up because
a server needs a minute longer would be started again and again, each time with an error in the log.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from orchestrator.telemetry import Outage

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0


class Prerequisite(NamedTuple):
    """A server that must be there before a process can work."""

    name: str
    check: Callable[[], str | None]
    """Raises where the server cannot be used; returns what to warn of, if anything."""
    outage: Callable[[Exception], str | None]
    """Returns what to say of an error that will pass; None for one that waiting does not mend."""


class Prerequisites:
    """All that a process stands on. SIGTERM and SIGINT are heard here until another takes them, and asks what came."""

    def __init__(self, log: logging.Logger, needed: Sequence[Prerequisite]) -> None:
        self._log = log
        self._missing = [(each, Outage(log, each.name, "waiting for it", settled=0.0)) for each in needed]
        self._stopping = threading.Event()
        self.is_stopped = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self) -> bool:
        """Wait until everything was found usable; False if the process was stopped before.

        Each that is away is looked for again and again, so the log names all that are missing.
        """
        pause = _FIRST_PAUSE
        while not self.is_stopped:
            self._missing = [(each, outage) for each, outage in self._missing if not self._is_there(each, outage)]
            if not self._missing:
                return True
            self._stopping.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return False

    def _on_signal(self, *_: object) -> None:
        self.is_stopped = True
        # A handler interrupts the main thread anywhere, also while it holds the lock of the event that it waits for.
        threading.Thread(target=self._stopping.set, name="stop", daemon=True).start()

    def _is_there(self, needed: Prerequisite, outage: Outage) -> bool:
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
