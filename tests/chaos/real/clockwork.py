"""The application's schedules: created before the first fault, and paused when everything is healed."""

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
    """Creates and pauses the schedules, and records their first and last due times."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def create_schedules(self) -> None:
        """Create the schedules that the application declares."""
        app.schedules.apply()
        self._note("first")

    def pause_schedules(self) -> list[str]:
        """Pause every schedule when no fire is due; return what went wrong."""
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline:
            try:
                if not self._arena.sql(_LATE):
                    for name in app.schedules._declared:
                        with suppress(WrongState):  # already paused by an earlier attempt
                            app.schedules[name].pause()
                    self._note("next")
                    return []
            except psycopg2.OperationalError:
                pass  # Postgres is starting
            except Exception as error:  # any error not caused by an outage is a defect
                if not is_weather(error):
                    raise
            time.sleep(0.1)
        return [f"schedules still owed fires {_TIMEOUT:g} s after everything was healed"]

    def _note(self, bound: str) -> None:
        """Record the next fire of every schedule: the first fire, or the fire that the pause prevents."""
        for row in self._arena.sql("SELECT workflow, extract(epoch FROM next_fire) AS at FROM orchestrator.schedules"):
            append(self._arena.journal.commit_log, "schedule", row["workflow"], bound, f"{row['at']:.0f}")
