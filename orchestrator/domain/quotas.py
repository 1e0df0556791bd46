"""Quotas of the HTTP API: how much one key, or all callers together, may request of one server process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from orchestrator.errors import ConfigurationError, did_you_mean

COUNT_INTERVAL = 10.0
"""Seconds between two counts of the open tasks."""
EVERY_QUEUE = ""
"""The key for the sum of all queues in counts of tasks."""
_BURST = 10.0
"""Seconds' worth of requests that may arrive at once."""
_HOUR = 3_600.0


class Quotas(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much a key may request of one server process."""

    rate: Annotated[float, Meta(gt=0, le=1e6)] = 5_000.0
    """Requests per second."""
    concurrent: Annotated[int, Meta(ge=1, le=1_000_000)] = 500
    """Concurrent requests."""
    streams: Annotated[int, Meta(ge=0, le=1_000_000)] = 500
    """Concurrent event streams."""
    megabytes: Annotated[float, Meta(gt=0, le=1e9)] = 6_000.0
    """Megabytes of request bodies per minute."""
    open_tasks: Annotated[int, Meta(ge=0, le=2**31)] = 10_000_000
    """Open tasks in a queue. A key cannot enqueue to a queue that has as many."""
    queues: Annotated[int, Meta(ge=0, le=1_000_000)] = 20_000
    """Distinct queues that a key may enqueue to within an hour."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 100
    """The highest priority of tasks that a key enqueues."""


DEFAULTS = Quotas()


class Exceeded(NamedTuple):
    """Why a request is rejected."""

    detail: str
    retry_after: float | None = None
    """Seconds until a retry may succeed. None if waiting does not help."""


class Allowance:
    """A token bucket that refills evenly. One request may overdraw it."""

    __slots__ = ("_at", "_capacity", "_per_second", "_tokens")

    def __init__(self, capacity: float, seconds: float) -> None:
        self._capacity = self._tokens = max(1.0, capacity)
        self._per_second = capacity / seconds
        self._at = -math.inf

    def wait(self, now: float) -> float:
        """Return the seconds until a token is available."""
        self._tokens = min(self._capacity, self._tokens + max(0.0, now - self._at) * self._per_second)
        self._at = now
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self._per_second

    def spend(self, amount: float) -> None:
        """Take tokens from the bucket."""
        self._tokens -= amount


class Usage:
    """How much of its quotas a key, or all callers together, has used."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self.in_flight = self.streams = 0
        self.requests = Allowance(quotas.rate * _BURST, _BURST)
        self.bytes = Allowance(quotas.megabytes * 1e6, 60.0)
        self._queues: set[str] = set()
        self._since = -math.inf

    def begin(self, now: float) -> Exceeded | None:
        """Count a request, or return why it is rejected."""
        quotas = self.quotas
        if self.in_flight >= quotas.concurrent:
            return Exceeded(f"{quotas.concurrent:,} requests are under way (quota concurrent).", 1.0)
        if wait := self.requests.wait(now):
            return Exceeded(f"No more than {quotas.rate:g} requests a second are served (quota rate).", wait)
        if wait := self.bytes.wait(now):
            return Exceeded(f"No more than {quotas.megabytes:g} MB a minute are read (quota megabytes).", wait)
        self.requests.spend(1)
        self.in_flight += 1
        return None

    def end(self, size: int) -> None:
        """Count a request as ended, and the bytes of its body."""
        self.in_flight -= 1
        self.bytes.spend(size)

    def listen(self) -> Exceeded | None:
        """Count an event stream, or return why it is rejected."""
        if self.streams >= self.quotas.streams:
            return Exceeded(f"{self.quotas.streams:,} event streams are open (quota streams).", 10.0)
        self.streams += 1
        return None

    def leave(self) -> None:
        """Count an event stream as ended."""
        self.streams -= 1

    def enqueue(
        self, tasks: Mapping[str, int], highest: int, open_tasks: Mapping[str, int], now: float
    ) -> Exceeded | None:
        """Return why an enqueue is rejected, or None. `tasks` and `open_tasks` count new and open tasks by queue."""
        quotas = self.quotas
        if highest > quotas.priority:
            return Exceeded(f"Priority {highest}: the highest of its tasks is {quotas.priority} (quota priority).")
        for queue, count in tasks.items():
            if open_tasks.get(queue, 0) + count > quotas.open_tasks:
                where = "The namespace" if queue == EVERY_QUEUE else f"Queue {queue!r}"
                limit = f"more are added up to {quotas.open_tasks:,} (quota open_tasks)"
                return Exceeded(f"{where} has {open_tasks.get(queue, 0):,} open tasks, and {limit}.", COUNT_INTERVAL)
        if now - self._since > _HOUR:
            self._queues, self._since = set(), now
        if new_queues := tasks.keys() - self._queues:
            if len(self._queues) + len(new_queues) > quotas.queues:
                detail = f"It may enqueue to {quotas.queues:,} different queues an hour (quota queues)."
                return Exceeded(detail, self._since + _HOUR - now)
            self._queues |= new_queues
        return None


def parse_quotas(assignments: Iterable[str]) -> Quotas:
    """Return quotas from assignments such as `rate=10`. Quotas that are not named keep their defaults."""
    values: dict[str, str] = {}
    for assignment in assignments:
        name, _, value = (part.strip() for part in assignment.partition("="))
        if name not in Quotas.__struct_fields__:
            near = did_you_mean(name, Quotas.__struct_fields__)
            names = ", ".join(Quotas.__struct_fields__)
            raise ConfigurationError(f"There is no quota {name!r:.60}.{near} Expected one of {names}, as in rate=10.")
        values[name] = value
    try:
        return msgspec.convert(values, Quotas, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"Quotas: {error}.") from None
