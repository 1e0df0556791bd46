"""Why nothing moves, if nothing does: found once for all pages and listeners of a process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.api.recent import Recent
from orchestrator.domain.tasks import obstacles
from orchestrator.monitoring import trouble
from orchestrator.monitoring.trouble import Trouble
from orchestrator.sdk.calls.insights import InsightCalls
from orchestrator.settings import Settings
from orchestrator.store.insights.fleet import count_fleet
from orchestrator.store.insights.system import find_leader
from orchestrator.store.shards import list_shards

_FRESH = 1.0
"""Seconds for which what was found is told again."""
_REMEMBERED = 10.0
"""Seconds for which pages believe it. They do not ask Redis themselves, which may hang."""
_SOON, _LATEST = 0.25, 5.0
"""Seconds until the next look at what may change by itself."""


class Found(NamedTuple):
    """The result of a look."""

    trouble: Trouble | None
    """What stops everything."""
    lease: float
    """Seconds for which that cannot change for the worse by a scheduler that dies."""

    @property
    def text(self) -> str:
        """Why nothing moves, in a few words; empty while something does."""
        return "" if self.trouble is None else trouble.STOPPING[self.trouble.kind]

    @property
    def again(self) -> float:
        """Seconds until the next look: when the lease ends, unless it is renewed, or when a scheduler may be back."""
        return _FRESH if self.trouble else min(max(self.lease, _SOON), _LATEST)


class Outages:
    """Looks at the leader, the workers' heartbeats and Redis."""

    def __init__(
        self, settings: Settings, insights: InsightCalls, reading: Callable[[], AbstractContextManager[Connection]]
    ) -> None:
        self._settings = settings
        self._insights = insights
        self._reading = reading
        self._recent = Recent()

    def find(self) -> Found:
        """Return what stops everything now, or did a moment ago; Redis may take two seconds to say that it hangs."""
        return self._recent.get("all", _FRESH, lambda: self._look(asks_redis=True))

    def last(self) -> Trouble | None:
        """Return what others have found lately, or else what Postgres knows."""
        found = self._recent.last("all", _REMEMBERED)
        if found is None:
            found = self._recent.get("postgres", _FRESH, lambda: self._look(asks_redis=False))
        stopping: Trouble | None = found.trouble
        return stopping

    def forget(self) -> None:
        """Look anew: something has changed."""
        self._recent.forget()

    def _look(self, *, asks_redis: bool) -> Found:
        health = self._insights.redis(None, ())[0] if asks_redis else None
        with self._reading() as connection:
            leader = find_leader(connection)
            shards = list_shards(connection) if self._settings.shards > 1 else ()
            are_heard = count_fleet(connection).are_heard
        complaint = None if health is None else health.complaint
        found = [*trouble.of_leaders(leader, shards, self._settings.lease, complaint)]
        if health is not None:
            found += trouble.of_redis(health)
        if leader is not None and not are_heard:
            found.append(Trouble(kind="workers unheard", message=obstacles.UNHEARD))
        stopping = (one for one in trouble.by_gravity(found) if one.kind in trouble.STOPPING)
        return Found(next(stopping, None), 0.0 if leader is None else leader.lease_remaining)
