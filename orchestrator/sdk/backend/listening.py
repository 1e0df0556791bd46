"""Listen to one run: hear that it may have changed, from the stream of live changes."""

from __future__ import annotations

import time

from orchestrator.sdk.backend.connections import Connections
from orchestrator.transport.changes import Entry, Follower
from orchestrator.transport.connection import UNAVAILABLE

_PAUSE = 0.5
"""Seconds between two looks while Redis is away."""


class RunListener:
    """Hears of one run; for one thread. It only makes a wait faster."""

    def __init__(self, connections: Connections, run: bytes) -> None:
        self._connections = connections
        self._run = run
        self._follower: Follower | None = None

    def wait(self, seconds: float) -> None:
        """Wait until the run may have changed since this was called last, or so many seconds; then look at it.

        The first time, it begins to listen, and what was looked at before may have changed already.
        """
        give_up_at = time.monotonic() + seconds
        try:
            if self._follower is None:
                follower = Follower(self._connections.shared_redis, self._connections.keys)
                follower.begin()
                self._follower = follower
                return
            while time.monotonic() < give_up_at:
                heard = self._follower.wait()
                if heard.has_gap or any(map(self._is_about, heard.entries)):
                    return
        except UNAVAILABLE:
            self._follower = None
            time.sleep(max(0.0, min(_PAUSE, give_up_at - time.monotonic())))

    def _is_about(self, entry: Entry) -> bool:
        changes = entry.changes
        return changes.is_first or any(run.id == self._run for run in changes.runs)

    def close(self) -> None:
        """Listen no more; the leader notices after a while."""
        self._follower = None
