"""Metrics of the API: its requests, and those of Postgres and Redis."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from orchestrator.monitoring.exposition import SECONDS, Family, Histogram, counter, gauge, histogram, own_metrics
from orchestrator.monitoring.system import SystemGauges
from orchestrator.settings import Settings


class ObservedApi:
    """Counts requests by route, of which there are only so many, and never by what a client sends."""

    def __init__(self, settings: Settings) -> None:
        self.system = SystemGauges(settings)
        self._lock = threading.Lock()
        self._answered: Counter[tuple[str, str, int]] = Counter()
        self._times: dict[str, Histogram] = {}
        self.under_way = 0

    def answered(self, method: str, route: str, subject: str, status: int, seconds: float) -> None:
        with self._lock:
            self._answered[method, route, status] += 1
            self._times.setdefault(subject, Histogram(SECONDS)).add(seconds)

    def metrics(self) -> Iterator[Family]:
        yield from own_metrics("api")
        with self._lock:
            answered, times = sorted(self._answered.items()), sorted(self._times.items())
        yield counter(
            "orchestrator_http_requests_total",
            "Requests that were answered.",
            *(
                ({"method": method, "route": route, "status": str(status)}, number)
                for (method, route, status), number in answered
            ),
        )
        yield histogram(
            "orchestrator_http_request_seconds",
            "Time until the answer, by what was asked about; calls that wait for something included.",
            *(({"subject": subject}, found) for subject, found in times),
        )
        yield gauge("orchestrator_http_requests_under_way", "Requests that are worked on.", ({}, self.under_way))
        yield from self.system.metrics()
