"""Finds out why no task can run, once for all pages and listeners of a process."""

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

_CHECK_TTL = 1.0
"""Seconds for which a check is cached."""
_PAGE_TTL = 10.0
"""Seconds for which pages use the last check. They do not query Redis themselves, because it may hang."""
_MIN_PAUSE, _MAX_PAUSE = 0.25, 5.0
"""The minimum and maximum of seconds until the next check."""


class OutageCheck(NamedTuple):
    """The result of a check."""

    trouble: Trouble | None
    """The problem that stops all tasks, if any."""
    lease: float
    """Seconds that remain of the leader's lease. If the leader dies, the result changes at its end."""

    @property
    def text(self) -> str:
        """A short description of the outage; empty if there is none."""
        return "" if self.trouble is None else trouble.STOPPING[self.trouble.kind]

    @property
    def pause(self) -> float:
        """Seconds until the next check: when the lease ends, or when a scheduler may be back."""
        return _CHECK_TTL if self.trouble else min(max(self.lease, _MIN_PAUSE), _MAX_PAUSE)


class Outages:
    """Checks the leader, the workers' heartbeats and Redis."""

    def __init__(
        self, settings: Settings, insights: InsightCalls, reading: Callable[[], AbstractContextManager[Connection]]
    ) -> None:
        self._settings = settings
        self._insights = insights
        self._reading = reading
        self._recent = Recent()

    def find(self) -> OutageCheck:
        """Return the current outage, cached for a second. The check may take two seconds if Redis hangs."""
        return self._recent.get("all", _CHECK_TTL, lambda: self._check(asks_redis=True))

    def last(self) -> Trouble | None:
        """Return the outage that a recent check found; without one, check only Postgres."""
        check = self._recent.last("all", _PAGE_TTL)
        if check is None:
            check = self._recent.get("postgres", _CHECK_TTL, lambda: self._check(asks_redis=False))
        stopping: Trouble | None = check.trouble
        return stopping

    def forget(self) -> None:
        """Drop cached checks, because something has changed."""
        self._recent.forget()

    def _check(self, *, asks_redis: bool) -> OutageCheck:
        health = self._insights.redis(None, ())[0] if asks_redis else None
        with self._reading() as connection:
            leader = find_leader(connection)
            shards = list_shards(connection) if self._settings.shards > 1 else ()
            are_heard = count_fleet(connection).are_heard
        complaint = None if health is None else health.complaint
        problems = [*trouble.of_leaders(leader, shards, self._settings.lease, complaint)]
        if health is not None:
            problems += trouble.of_redis(health)
        if leader is not None and not are_heard:
            problems.append(Trouble(kind="workers unheard", message=obstacles.UNHEARD))
        stopping = (problem for problem in trouble.by_gravity(problems) if problem.kind in trouble.STOPPING)
        return OutageCheck(next(stopping, None), 0.0 if leader is None else leader.lease_remaining)
