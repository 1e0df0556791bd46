"""Listen to the event stream of one run over HTTP."""

from __future__ import annotations

import time
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse

from orchestrator.domain.ids import to_text
from orchestrator.errors import ConfigurationError
from orchestrator.sdk.remote.http import Connection, Http, Unreached

_PAUSE = 0.5
"""Seconds until the next look where there is no stream."""
_LATE = 2.0
"""Seconds by which what is said every few seconds may be late."""


class RemoteRunListener:
    """Hears of one run; for one thread. Only speed depends on it."""

    def __init__(self, http: Http, run: bytes) -> None:
        self._http = http
        self._path = f"/api/v1/runs/{to_text(run)}/events"
        self._connection: Connection | None = None
        self._answer: HTTPResponse | None = None

    def wait(self, seconds: float) -> None:
        """Wait until the run may have changed since this was called last, or about so many seconds; then look at it.

        The first time, it begins to listen, and what was looked at before may have changed already.
        """
        try:
            if self._answer is None:
                self._connection, self._answer = self._http.listen(self._path, seconds + _LATE)
                if self._answer.status != HTTPStatus.OK:
                    self._pause(seconds)
                return
            if not self._heard(self._answer):
                self.close()
        except (Unreached, ConfigurationError, OSError, HTTPException):
            self._pause(seconds)

    @staticmethod
    def _heard(answer: HTTPResponse) -> bool:
        """Read up to the end of an event, or of a sign of life; False where there is nothing more to come."""
        while line := answer.readline():
            if line == b"\n":
                return True
        return False

    def _pause(self, seconds: float) -> None:
        self.close()
        time.sleep(min(_PAUSE, seconds))

    def close(self) -> None:
        """Listen no more."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._answer = None
