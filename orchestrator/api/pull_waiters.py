"""Connections of an API process for workers that pull their work."""

from __future__ import annotations

from orchestrator.sdk.backend.connections import Connections
from orchestrator.transport.pull import Pulls
from orchestrator.transport.pull_notifications import PullNotifications


class PullWaiters:
    """Work in Redis, and two threads that hear of it for all requests; the first request that waits begins them."""

    def __init__(self, connections: Connections) -> None:
        redis, keys = connections.redis, connections.keys
        self.pulls = Pulls(redis, keys)
        self.offers = PullNotifications(redis, keys.pull_offers, one_by_one=True)
        """Wakes one waiter for each offer of its services."""
        self.ends = PullNotifications(redis, keys.pull_ends, one_by_one=False)
        """Wakes all requests that wait until the end of an execution is in Postgres."""

    def close(self) -> None:
        """End the threads."""
        self.offers.close()
        self.ends.close()
