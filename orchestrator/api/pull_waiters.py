"""Where work is asked for and handed in: what this process of the API has open for those who pull."""

from __future__ import annotations

import threading

from orchestrator.sdk.backend.connections import Connections
from orchestrator.transport.pull import Pulls
from orchestrator.transport.pull_notifications import PullNotifications


class PullWaiters:
    """Work in Redis, and two threads, begun with the first who waits, that hear of it for everybody."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        self._pulls: Pulls | None = None
        self._offers: PullNotifications | None = None
        self._ends: PullNotifications | None = None

    @property
    def pulls(self) -> Pulls:
        """What is offered, and what became of it."""
        with self._lock:
            if self._pulls is None:
                self._pulls = Pulls(self._connections.redis, self._connections.keys)
            return self._pulls

    @property
    def offers(self) -> PullNotifications:
        """Who waits for work of some services; each offer is for one of them."""
        with self._lock:
            if self._offers is None:
                channel = self._connections.keys.pull_offers
                self._offers = PullNotifications(self._connections.redis, channel, one_by_one=True)
            return self._offers

    @property
    def ends(self) -> PullNotifications:
        """Who waits until the end of an execution is in Postgres."""
        with self._lock:
            if self._ends is None:
                self._ends = PullNotifications(
                    self._connections.redis, self._connections.keys.pull_ends, one_by_one=False
                )
            return self._ends

    def close(self) -> None:
        """End the threads."""
        for tick in (self._offers, self._ends):
            if tick is not None:
                tick.close()
