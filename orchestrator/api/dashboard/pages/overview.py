"""The first page: is anything wrong, what is under way, how long do tasks wait?"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.charts import hour
from orchestrator.api.dashboard.rendering import HTML, page
from orchestrator.api.endpoints import Routes
from orchestrator.api.reach import WITHIN
from orchestrator.api.routes import queues as queue_routes
from orchestrator.api.routes import system
from orchestrator.domain.access import Reach
from orchestrator.monitoring import trouble
from orchestrator.monitoring.trouble import Trouble
from orchestrator.store.insights import Overview, QueueCounts, WorkerView
from orchestrator.store.tasks import redrive
from orchestrator.store.tasks.redrive import FailedFilter, Group

routes = Routes("dashboard", "/ui")

_RECENT = 1.0
"""Seconds for which open pages share what was read."""
_MOST_GROUPS = 8


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What only those see who may see all."""

    overview: Overview
    troubles: list[Trouble]
    workers: list[WorkerView]


def read_whole(api: Api) -> Whole:
    """Return how the system is doing, and what needs a person, as `orchestrator status` says it."""
    found = system.status(api)
    insights = api.backend.insights
    queues = [queue.queue for queue in read_queues(api, Reach())]
    health, held = insights.redis(found.events.generation if found.events else None, queues)
    transactions = insights.long_transactions(api.settings.long_transaction)
    troubles = [
        *trouble.of_the_system(found, api.settings.lease, health.complaint),
        *trouble.of_redis(health),
        *trouble.of_what_redis_holds(held),
        *trouble.of_postgres(insights.connections(), transactions, insights.dead_rows()),
    ]
    return Whole(overview=found, troubles=troubles, workers=system.workers(api).workers)


def read_queues(api: Api, reach: Reach) -> list[QueueCounts]:
    """Return the queues, as all who look within a second see them."""
    return api.recent.get(("queues", reach), _RECENT, lambda: queue_routes.list_queues(api, reach).queues)


def read_failures(api: Api, reach: Reach, since: timedelta) -> list[Group]:
    """Return failed tasks by name and error, the largest groups first."""
    wanted = FailedFilter(since=datetime.now(UTC) - since)

    def read() -> list[Group]:
        with api.reading() as connection:
            return redrive.preview(connection, wanted, reach.queues)

    return api.recent.get(("failures", reach, since), 5 * _RECENT, read)


@routes.get("", about=WITHIN, media_type=HTML)
def overview(api: Api, reach: Reach) -> Response:
    """Show how the system is doing."""
    whole = None if reach.is_bound else api.recent.get(("whole",), _RECENT, lambda: read_whole(api))
    counted = api.recent.get(
        ("throughput", reach), _RECENT, lambda: system.show_throughput(api, system.ThroughputQuery(), reach)
    )
    failures = read_failures(api, reach, timedelta(hours=1))
    return page(
        "overview.html",
        whole=whole,
        queues=read_queues(api, reach),
        hour=hour(counted.bounds, counted.buckets, datetime.now(UTC)),
        failures=failures[:_MOST_GROUPS],
        more_failures=max(0, len(failures) - _MOST_GROUPS),
    )
