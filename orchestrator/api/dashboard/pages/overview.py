"""The first page: is anything wrong, what is under way, how long do tasks wait?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b

from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.charts import Hour, hour
from orchestrator.api.dashboard.rendering import HTML, page
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.routes import system
from orchestrator.domain.access import KeyScope
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.monitoring import trouble
from orchestrator.monitoring.trouble import Trouble
from orchestrator.store.insights import Overview, QueueCounts, list_queues
from orchestrator.store.insights import overview as overview_of
from orchestrator.store.insights.failures import MOST_LOOKED_AT, Failures, latest_failures
from orchestrator.store.insights.system import Ends
from orchestrator.store.throughput import Throughput

routes = Routes("dashboard", "/ui")

_RECENT = 1.0
"""Seconds for which open pages share what was read."""
_MOST_GROUPS = 8
_MOST_FAILURES = 1_000
"""Of which groups are made here."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What only those see who may see all."""

    overview: Overview
    troubles: list[Trouble]

    @property
    def mark(self) -> str:
        """Which troubles there are, whatever is said of them: a page that has another one is read again."""
        found = sorted(f"{one.kind} {one.about}" for one in self.troubles)
        return blake2b("\n".join(found).encode(), digest_size=6).hexdigest()


def read_whole(api: Api) -> Whole:
    """Return how the system is doing, and what needs a person, as `orchestrator status` says it."""
    queues = read_queues(api, KeyScope())
    ends = _ends(read_minutes(api, KeyScope()))
    with api.reading() as connection:
        found = overview_of(connection, queues=queues, ends=ends)
    insights = api.backend.insights
    health, held = insights.redis(found.events.generation if found.events else None, [queue.queue for queue in queues])
    transactions = insights.long_transactions(api.settings.long_transaction)
    troubles = [
        *trouble.of_the_system(found, api.settings.lease, health.complaint),
        *trouble.of_redis(health),
        *trouble.of_what_redis_holds(held),
        *trouble.of_postgres(insights.connections(), transactions, insights.dead_rows()),
    ]
    return Whole(overview=replace(found, standbys=held.standbys), troubles=troubles)


def read_queues(api: Api, key_scope: KeyScope) -> list[QueueCounts]:
    """Return the queues, as all who look within a second see them."""

    def read() -> list[QueueCounts]:
        with api.reading() as connection:
            return list_queues(connection, key_scope.queues)

    return api.recent.get(("queues", key_scope), _RECENT, read)


def read_minutes(api: Api, key_scope: KeyScope) -> list[Throughput]:
    """Return the last hour by the minute, as all who look within a second see it."""
    return api.recent.get(("minutes", key_scope), _RECENT, lambda: system.read_minutes(api, key_scope))


def read_hour(api: Api, key_scope: KeyScope) -> Hour:
    """Return the last hour of all that somebody may see."""
    return hour(read_minutes(api, key_scope), datetime.now(UTC))


def _ends(minutes: list[Throughput]) -> Ends:
    """Return what the minutes come to, the last one of them and all."""
    last, all_of_them = (
        {str(state): sum(getattr(one, state) for one in some) for state in ENDED_TASK_STATES}
        for some in (minutes[-1:], minutes)
    )
    return last, all_of_them


def read_failures(api: Api, key_scope: KeyScope, since: timedelta, most: int = MOST_LOOKED_AT) -> Failures:
    """Return failed tasks by name and error, the largest groups first."""

    def read() -> Failures:
        with api.reading() as connection:
            return latest_failures(connection, datetime.now(UTC) - since, key_scope.queues, most)

    return api.recent.get(("failures", key_scope, since, most), 5 * _RECENT, read)


@routes.get("", about=WITHIN, media_type=HTML)
def overview(api: Api, key_scope: KeyScope) -> Response:
    """Show how the system is doing."""
    whole = None if key_scope.is_bound else api.recent.get(("whole",), _RECENT, lambda: read_whole(api))
    failures = read_failures(api, key_scope, timedelta(hours=1), _MOST_FAILURES)
    return page(
        "overview.html",
        whole=whole,
        queues=read_queues(api, key_scope),
        hour=read_hour(api, key_scope),
        failures=failures.groups[:_MOST_GROUPS],
        more_failures=max(0, len(failures.groups) - _MOST_GROUPS),
        failures_looked_at=failures.looked_at,
    )
