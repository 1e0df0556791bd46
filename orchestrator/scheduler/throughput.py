"""Write down what the leader has counted, every ten seconds: the last hour is seen at once, and after a restart too.

The meter counts anyway. In the first tick after ten seconds in which something was counted, what its numbers have grown
by is written, a row for each queue.

A leader that dies takes with it what it had counted since. The first tick of the next term counts the tasks that ended
after the last written row, once, and they are written with the next one.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.monitoring.exposition import SECONDS
from orchestrator.scheduler.meter import Meter
from orchestrator.scheduler.tick_result import CommitHooks, TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store import throughput

_MOST_UNWRITTEN = 200_000
"""Tasks that are counted in the first tick of a term: more than end in ten seconds."""
_LESS = 8
"""After a tick that was rolled back, so many times fewer are: it may have failed because they were too many."""

_Numbers = dict[str, Counter[str]]
"""By queue, what was counted; numbers of histograms by `waits:3`, the place of a bound."""
_NONE: Counter[str] = Counter()


class ThroughputRecord(CommitHooks):
    """Remembers how far the meter had come when something was last written."""

    def __init__(self, meter: Meter, term: int) -> None:
        self._meter = meter
        self._term = term
        self._written = numbers_of(meter)
        self._bucket: datetime | None = None
        """The ten seconds that are counted now."""
        self._most = _MOST_UNWRITTEN
        self._next: tuple[_Numbers, datetime] | None = None
        """Counts that are valid once the open transaction commits."""

    def record(self, tx: Transaction) -> None:
        """Write what was counted in the ten seconds that are over."""
        if self._bucket is not None and self._bucket <= tx.now < self._bucket + throughput.BUCKET:
            return
        bucket = throughput.bucket_of(tx.now)
        numbers = numbers_of(self._meter)
        if self._bucket is None:
            for queue, state, number in throughput.unwritten(tx.connection, tx.now, self._most):
                numbers.setdefault(self._meter.label(queue), Counter())[state] -= number
        elif numbers != self._written:
            grown = {
                queue: numbers.get(queue, _NONE) - self._written.get(queue, _NONE) for queue in numbers | self._written
            }
            rows = [_row(queue, some) for queue, some in grown.items() if some]
            throughput.add(tx.connection, self._term, self._bucket, rows)
        self._next = numbers, bucket

    def committed(self, tick: TickResult) -> None:
        """Keep the written counts."""
        del tick
        if self._next is not None:
            self._written, self._bucket = self._next
            self._next = None

    def rolled_back(self) -> None:
        """After a rollback: write it again."""
        self._next = None
        if self._bucket is None:
            self._most //= _LESS


def numbers_of(meter: Meter) -> _Numbers:
    """Return all that a meter has counted, by queue."""
    found: _Numbers = {}
    for (queue, state), number in meter.ended.items():
        found.setdefault(queue, Counter())[state] = number
    for name, counts in (("dispatched", meter.dispatched), ("retried", meter.retried), ("lost", meter.lost)):
        for queue, number in counts.items():
            found.setdefault(queue, Counter())[name] = number
    for name, times in (("waits", meter.waits), ("runs", meter.runs)):
        for queue, histogram in times.items():
            found.setdefault(queue, Counter()).update(
                {f"{name}:{place}": number for place, number in enumerate(histogram.counts)}
            )
    return found


def _row(queue: str, grown: Counter[str]) -> dict[str, object]:
    """Return what was counted of a queue as it is stored."""
    names = (*(str(state) for state in ENDED_TASK_STATES), "dispatched", "retried", "lost")
    return {
        "queue": queue,
        **{name: grown[name] for name in names},
        **{name: [grown[f"{name}:{place}"] for place in range(len(SECONDS) + 1)] for name in ("waits", "runs")},
    }
