"""A scheduler as monitoring sees it."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.monitoring.exposition import Family, gauge
from orchestrator.monitoring.own import own_metrics
from orchestrator.monitoring.system import SystemGauges
from orchestrator.scheduler.loop import Scheduler
from orchestrator.settings import Settings


class ObservedScheduler:
    """Metrics of one scheduler, and those of the whole system from Postgres and Redis; reads nothing until a scrape."""

    def __init__(self, settings: Settings) -> None:
        self._system = SystemGauges(settings)
        self._labels = {"shard": str(settings.shard)} if settings.shards > 1 else {}
        self.scheduler: Scheduler | None = None
        """None while its process waits for Postgres and Redis to be there."""

    def metrics(self) -> Iterator[Family]:
        """Yield all metrics."""
        scheduler = self.scheduler
        if scheduler is None:
            yield from own_metrics("scheduler")
        else:
            yield from own_metrics("scheduler", postgres=scheduler.postgres, redis=scheduler.redis)
            leads = float(scheduler.leading.is_set())
            help = "Whether this scheduler leads; else it stands by."
            yield gauge("orchestrator_scheduler_leading", help, (self._labels, leads))
            yield from scheduler.meter.metrics()
        yield from self._system.metrics()

    def obstacles(self) -> dict[str, str]:
        """Return what keeps it from leading, or from taking the lead."""
        if self.scheduler is None:
            return {"start": "waiting for Postgres and Redis, or for the tables of this release"}
        found = {}
        if self.scheduler.postgres.is_down:
            found["postgres"] = self.scheduler.postgres.reason
        if self.scheduler.redis.is_down:
            found["redis"] = self.scheduler.redis.reason
        elif not self.scheduler.leading.is_set() and (trouble := self._system.redis_trouble()) is not None:
            found["redis"] = trouble
        if not found and self.scheduler.trouble is not None:
            found["leading"] = self.scheduler.trouble
        return found
