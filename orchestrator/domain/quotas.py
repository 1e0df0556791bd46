"""Quotas of the HTTP API: how much a key, or all callers together, may ask of a server process, and when it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from orchestrator.errors import ConfigurationError, did_you_mean

LOOK = 10.0
"""Seconds after which open tasks are counted again."""
EVERY_QUEUE = ""
"""Stands for all queues together, where tasks are counted."""
_BURST = 10.0
"""Seconds' worth of requests that may come at once."""
_HOUR = 3_600.0


class Quotas(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much a key may ask of one server process."""

    rate: Annotated[float, Meta(gt=0, le=1e6)] = 5_000.0
    """Requests a second."""
    concurrent: Annotated[int, Meta(ge=1, le=1_000_000)] = 500
    """Requests at the same time."""
    streams: Annotated[int, Meta(ge=0, le=1_000_000)] = 500
    """Event streams at the same time."""
    megabytes: Annotated[float, Meta(gt=0, le=1e9)] = 6_000.0
    """Megabytes of request bodies a minute."""
    open_tasks: Annotated[int, Meta(ge=0, le=2**31)] = 10_000_000
    """Open tasks in a queue, from which on the key adds none to it."""
    queues: Annotated[int, Meta(ge=0, le=1_000_000)] = 20_000
    """Different queues that it enqueues to in an hour."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 100
    """The highest priority of its tasks."""


DEFAULTS = Quotas()


class Exceeded(NamedTuple):
    """Why a request is refused."""

    detail: str
    retry_after: float | None = None
    """Seconds; None where waiting does not help."""


class Allowance:
    """So much in so many seconds, refilled evenly; one request may overdraw it."""

    __slots__ = ("_at", "_left", "_most", "_per_second")

    def __init__(self, most: float, seconds: float) -> None:
        self._most = self._left = max(1.0, most)
        self._per_second = most / seconds
        self._at = -math.inf

    def wait(self, now: float) -> float:
        """Return the seconds until one is left of it."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_second)
        self._at = now
        return 0.0 if self._left >= 1 else (1 - self._left) / self._per_second

    def spend(self, amount: float) -> None:
        """Take something of it."""
        self._left -= amount


class Usage:
    """The used part of the quotas of a key, or of all callers."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self.under_way = self.streams = 0
        self.requests = Allowance(quotas.rate * _BURST, _BURST)
        self.bytes = Allowance(quotas.megabytes * 1e6, 60.0)
        self._queues: set[str] = set()
        self._since = -math.inf

    def begin(self, now: float) -> Exceeded | None:
        """Count a request, or say why it is refused."""
        quotas = self.quotas
        if self.under_way >= quotas.concurrent:
            return Exceeded(f"{quotas.concurrent:,} requests are under way (quota concurrent).", 1.0)
        if wait := self.requests.wait(now):
            return Exceeded(f"No more than {quotas.rate:g} requests a second are served (quota rate).", wait)
        if wait := self.bytes.wait(now):
            return Exceeded(f"No more than {quotas.megabytes:g} MB a minute are read (quota megabytes).", wait)
        self.requests.spend(1)
        self.under_way += 1
        return None

    def end(self, size: int) -> None:
        """Note that a request with so large a body has ended."""
        self.under_way -= 1
        self.bytes.spend(size)

    def listen(self) -> Exceeded | None:
        """Count an event stream, or say why it is refused."""
        if self.streams >= self.quotas.streams:
            return Exceeded(f"{self.quotas.streams:,} event streams are open (quota streams).", 10.0)
        self.streams += 1
        return None

    def leave(self) -> None:
        """Note that an event stream has ended."""
        self.streams -= 1

    def enqueue(self, tasks: Mapping[str, int], highest: int, known: Mapping[str, int], now: float) -> Exceeded | None:
        """Say why so many tasks, by queue, up to a priority are refused; `known` is how many are open already."""
        quotas = self.quotas
        if highest > quotas.priority:
            return Exceeded(f"Priority {highest}: the highest of its tasks is {quotas.priority} (quota priority).")
        for queue, count in tasks.items():
            if known.get(queue, 0) + count > quotas.open_tasks:
                where = "The namespace" if queue == EVERY_QUEUE else f"Queue {queue!r}"
                limit = f"more are added up to {quotas.open_tasks:,} (quota open_tasks)"
                return Exceeded(f"{where} has {known.get(queue, 0):,} open tasks, and {limit}.", LOOK)
        if now - self._since > _HOUR:
            self._queues, self._since = set(), now
        if new := tasks.keys() - self._queues:
            if len(self._queues) + len(new) > quotas.queues:
                detail = f"It may enqueue to {quotas.queues:,} different queues an hour (quota queues)."
                return Exceeded(detail, self._since + _HOUR - now)
            self._queues |= new
        return None


def parse_quotas(words: Iterable[str]) -> Quotas:
    """Return quotas from words such as `rate=10`; what is not named is as usual."""
    given: dict[str, str] = {}
    for word in words:
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in Quotas.__struct_fields__:
            near = did_you_mean(name, Quotas.__struct_fields__)
            known = ", ".join(Quotas.__struct_fields__)
            raise ConfigurationError(f"There is no quota {name!r:.60}.{near} Expected one of {known}, as in rate=10.")
        given[name] = value
    try:
        return msgspec.convert(given, Quotas, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"Quotas: {error}.") from None
