"""Rounds of upkeep: in a thread and on a connection of their own, beside the ticks of the leader.

A round is made of small steps, at rest for nine tenths of the time, and ends where this process no longer leads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from sqlalchemy import Connection, Engine, exc

from orchestrator.errors import Unavailable
from orchestrator.telemetry import first_line, get_logger

log = get_logger("scheduler")

_SHORTEST_REST = 0.01


class Rounds:
    """Makes a round of `steps` whenever this process leads, and the last round is `every` seconds ago.

    A step yields how long to rest at least. Where a round is given up in the middle, `start_over` is called.
    """

    def __init__(
        self,
        what: str,
        engine: Engine,
        leading: threading.Event,
        steps: Callable[[Connection], Iterator[float]],
        *,
        every: float,
        start_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._what = what
        self._engine = engine  # in autocommit mode
        self._leading = leading
        self._steps = steps
        self._every = every
        self._start_over = start_over

    def start(self) -> None:
        """Begin to wait for leadership."""
        threading.Thread(target=self._run, name=self._what, daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._leading.wait()
            try:
                with self._engine.connect() as connection:
                    self._make_round(connection, pause)
            except (exc.SQLAlchemyError, Unavailable) as error:
                log.warning("upkeep.postponed work=%r error=%s", self._what, first_line(error))
                self._start_over()
            pause.wait(self._every)

    def _make_round(self, connection: Connection, pause: threading.Event) -> None:
        began = time.monotonic()
        for rest in self._steps(connection):
            pause.wait(rest or max(_SHORTEST_REST, 9 * (time.monotonic() - began)))
            if not self._leading.is_set():
                self._start_over()
                return
            began = time.monotonic()
