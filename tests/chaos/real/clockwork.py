"""The schedules of the application: set before anything breaks, and paused when all is healed."""

from __future__ import annotations

import time
from contextlib import suppress

import psycopg2

from orchestrator import WrongState
from tests.chaos.real.arena import Arena
from tests.chaos.real.journal import append
from tests.chaos.real.project import app
from tests.chaos.real.weather import is_weather

_TIMEOUT = 60.0
_LATE = "SELECT workflow FROM orchestrator.schedules WHERE next_fire <= now()"


class Clockwork:
    """Winds schedules up and down, and writes down from when to when they had to fire."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def wind_up(self) -> None:
        """Set what the application declares."""
        app.schedules.apply()
        self._note("first")

    def wind_down(self) -> list[str]:
        """Pause every schedule once it owes nothing; return what went wrong."""
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline:
            try:
                if not self._arena.sql(_LATE):
                    for name in app.schedules._declared:
                        with suppress(WrongState):  # an earlier round has paused it
                            app.schedules[name].pause()
                    self._note("next")
                    return []
            except psycopg2.OperationalError:
                pass  # it starts
            except Exception as error:  # whatever but the weather a caller sees is a defect
                if not is_weather(error):
                    raise
            time.sleep(0.1)
        return [f"schedules still owed fires {_TIMEOUT:g} s after everything was healed"]

    def _note(self, which: str) -> None:
        """Write down the fire that comes first, or that would come next."""
        for row in self._arena.sql("SELECT workflow, extract(epoch FROM next_fire) AS at FROM orchestrator.schedules"):
            append(self._arena.journal.commit_log, "schedule", row["workflow"], which, f"{row['at']:.0f}")
