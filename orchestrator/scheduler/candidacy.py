"""When a standby tries to lead.

    the lease is its own                    at once: Postgres was away, or a tick failed
    the lease is free                       if it could do the work
    its holder does nothing useful          if it could have done the work for a while: a leader that cannot reach
                                            Redis, or fails in every tick, would keep its lease for ever; if the
                                            standby has the same problem, the leader keeps it
    its holder has not renewed it in ten
    times its length                        as if it were free: Postgres's clock was set back, and it seems to last
    it could not do the work itself         only where the lease has been free for a while: better a leader that can
                                            do half of it than none

A scheduler that has led and failed waits for a while, as if it could not do the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime

from orchestrator.scheduler.leadership import Leadership
from orchestrator.telemetry import get_logger
from orchestrator.transport import connection as transport
from orchestrator.transport.leader.streams import LeaderStreams

log = get_logger("scheduler")

_OTHERS_FIRST = 2.0
"""Leases for which a free lease is left to schedulers that could do the work."""
_PROVES_FIT = 2.0
"""Leases for which one must have been able to do the work that the leader does not: both may have suffered the same."""
_ABANDONED = 10.0
"""Leases without a renewal after which it counts as free."""
_STANDS_BACK = 10.0
"""Leases for which one stands back that has failed."""


class Candidacy:
    """Decides for one process, whenever it does not lead."""

    def __init__(
        self,
        leadership: Leadership,
        streams: LeaderStreams,
        lease: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leadership = leadership
        self._streams = streams
        self._lease = lease
        self._monotonic = monotonic
        self._back_until: float | None = None
        self._fit_since: float | None = None
        """Since when this process could do what the leader does not."""
        self._seen: tuple[datetime, float] | None = None
        """When the lease ends, and since when it has been seen to."""
        self._pause = 0.0
        self._said = False

    def stand(self) -> bool:
        """Try to become leader, if that is a good idea now."""
        leadership, lease = self._leadership, self._lease
        lease_view = leadership.lease_view()
        self._pause = min(max(lease_view.remaining, 0.05), lease / 3)
        if lease_view.is_mine:
            return leadership.acquire()
        is_abandoned = self._is_abandoned(lease_view.expires_at)
        is_free, idle = lease_view.remaining <= 0 or is_abandoned, lease_view.idle or 0.0
        if not is_free and idle <= lease:
            self._fit_since, self._said = None, False
            return False
        reason = self._unfitness()
        if reason is None:
            self._fit_since = self._monotonic() if self._fit_since is None else self._fit_since
            has_proved_fit = self._monotonic() - self._fit_since >= _PROVES_FIT * lease
            abandoned = lease_view.expires_at if is_abandoned else None
            return (is_free or has_proved_fit) and leadership.acquire(depose=has_proved_fit, abandoned=abandoned)
        self._fit_since = None
        self._pause = lease / 3
        if not self._said and (is_free or idle > leadership.idle_limit):
            self._said = True
            who = "nobody leads" if is_free else "the leader does nothing useful"
            log.warning("scheduler.not_leading reason=%s: %s", reason, who)
        return lease_view.remaining < -_OTHERS_FIRST * lease and leadership.acquire()

    def _is_abandoned(self, expires_at: datetime | None) -> bool:
        """Say whether the lease was not renewed for long, by the monotonic clock."""
        now = self._monotonic()
        if expires_at is None or self._seen is None or self._seen[0] != expires_at:
            self._seen = None if expires_at is None else (expires_at, now)
            return False
        return now - self._seen[1] > _ABANDONED * self._lease

    def wait(self, awake: threading.Event) -> None:
        """Wait until the lease could have expired, or a message asks for an earlier look."""
        awake.wait(self._pause)
        awake.clear()

    def failed(self) -> None:
        """This process has led, and could not do its work: others first, if there are any."""
        self._back_until = self._monotonic() + _STANDS_BACK * self._lease

    def worked(self) -> None:
        """This process has led, and done its work."""
        self._back_until = None

    def _unfitness(self) -> str | None:
        """Return why this process could not do a leader's work, as far as it can know; it has just used Postgres."""
        if self._back_until is not None and self._monotonic() < self._back_until:
            return "it has led, and failed."
        try:
            self._streams.fleet.write_canary()
        except transport.UNAVAILABLE as error:
            return f"it cannot use Redis: {transport.describe(error)}"
        return None
