"""Counters of a scheduler for monitoring. They grow when a tick commits, never when it fails.

A batch is counted at once. The durations of a large batch are sampled: every n-th task counts n times.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from operator import attrgetter

from orchestrator.domain.states import ENDED_TASK_STATES, TaskState
from orchestrator.monitoring.exposition import (
    MAX_QUEUES,
    OTHER_QUEUES,
    SECONDS,
    SIZES,
    Family,
    Histogram,
    counter,
    histogram,
)
from orchestrator.scheduler.tick_result import CommitHooks, TickResult, sampled
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store import driver, throughput

_queue = attrgetter("queue")
_TIMED = 7
"""The UUID version of ids that contain the time of the enqueue."""


class Meter(CommitHooks):
    """Counts over the life of the process, across terms."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        """Ended tasks, by queue and state."""
        self.dispatched: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.waits: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.runs: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.ticks = self.failed_ticks = self.reports = self.set_aside = self.terms = 0
        self.tick_times = Histogram()
        self.batches = Histogram(SIZES)
        self._labels: dict[str, str] = {}
        """The metric label of each queue. Beyond `MAX_QUEUES`, new queues share one label."""

    # -- what happened

    def committed(self, tick: TickResult) -> None:
        counts = tick.counts
        for queue, state, number in counts.moved:
            if state != TaskState.PENDING:
                self.ended[self.label(queue), state] += number
        for queue in counts.retried:
            self.retried[self.label(queue)] += 1
        for queue in counts.lost:
            self.lost[self.label(queue)] += 1
        for queue, seconds, times in counts.durations:
            self.runs[self.label(queue)].add(seconds, times)
        self.set_aside += len(tick.outgoing.set_aside)
        if counts.reports:
            self.reports += counts.reports
            self.batches.add(counts.reports)
        if sent := tick.outgoing.claimed:
            queues = set(map(_queue, sent))
            counts_by_queue = dict.fromkeys(queues, len(sent)) if len(queues) == 1 else Counter(map(_queue, sent))
            for queue, number in counts_by_queue.items():
                self.dispatched[self.label(queue)] += number
            now = time.time()
            for index, times in sampled(len(sent)):
                task = sent[index]  # its id holds the time of the enqueue
                if task.attempt == 1 and task.id[6] >> 4 == _TIMED and not task.is_turn_task:
                    seconds = now - int.from_bytes(task.id[:6], "big") / 1_000
                    self.waits[self.label(task.queue)].add(max(0.0, seconds), times)

    def ticked(self, seconds: float) -> None:
        """Count a tick that ended, with its duration from the moment it had work."""
        self.ticks += 1
        self.tick_times.add(seconds)

    def label(self, queue: str) -> str:
        """Return the label under which a queue is counted."""
        label = self._labels.get(queue)
        if label is None:
            label = queue if len(self._labels) < MAX_QUEUES else OTHER_QUEUES
            if label is not OTHER_QUEUES:
                self._labels[queue] = label
        return label

    # -- metrics

    def metrics(self) -> Iterator[Family]:
        ended = [({"queue": queue, "state": state}, number) for (queue, state), number in sorted(self.ended.items())]
        yield counter("orchestrator_tasks_ended_total", "Tasks that ended, by state.", *ended)
        for name, help, counts in (
            ("orchestrator_tasks_dispatched_total", "Attempts that were dispatched to workers.", self.dispatched),
            ("orchestrator_attempts_retried_total", "Attempts that failed and are retried.", self.retried),
            ("orchestrator_attempts_lost_total", "Attempts that were lost with their workers.", self.lost),
        ):
            yield counter(name, help, *(({"queue": queue}, number) for queue, number in sorted(counts.items())))
        for name, help, times in (
            ("orchestrator_task_wait_seconds", "Time from enqueue to dispatch of first attempts.", self.waits),
            ("orchestrator_task_run_seconds", "Time that attempts ran, as their workers report.", self.runs),
        ):
            yield histogram(name, help, *(({"queue": queue}, found) for queue, found in sorted(times.items())))
        outcomes = (({"outcome": "committed"}, self.ticks), ({"outcome": "failed"}, self.failed_ticks))
        yield counter("orchestrator_ticks_total", "Ticks of this scheduler.", *outcomes)
        yield histogram(
            "orchestrator_tick_seconds", "Time that ticks took, without waiting for events.", ({}, self.tick_times)
        )
        yield counter("orchestrator_reports_total", "Reports of workers that were applied.", ({}, self.reports))
        yield histogram("orchestrator_tick_reports", "Reports that a tick applied together.", ({}, self.batches))
        sent = driver.statements_sent()
        yield counter("orchestrator_tick_statements_total", "Statements sent to Postgres as leader.", ({}, sent))
        yield counter("orchestrator_messages_set_aside_total", "Events that were quarantined.", ({}, self.set_aside))
        yield counter("orchestrator_terms_total", "Terms that this scheduler began.", ({}, self.terms))


# -- store the leader's counts every ten seconds, so that the last hour is visible at once and after a restart
#
# The meter counts continuously. The first tick after ten seconds with counts stores the growth, one row for each queue.
#
# Counts that a dying leader had not stored are lost. The first tick of the next term recounts the tasks that ended
# after the last stored row, and stores them with the next row.

_MAX_RECOUNT = 200_000
"""Tasks recounted in the first tick of a term, at most: more than end in ten seconds."""
_RECOUNT_DIVISOR = 8
"""Divisor of that limit after a rollback, which too many tasks may have caused."""

_Numbers = dict[str, Counter[str]]
"""Counts by queue and name. `waits:3` is the count of the fourth bucket of a histogram."""
_NONE: Counter[str] = Counter()


class ThroughputRecord(CommitHooks):
    """Stores the growth of the meter since the last stored row."""

    def __init__(self, meter: Meter, term: int) -> None:
        self._meter = meter
        self._term = term
        self._written = numbers_of(meter)
        self._bucket: datetime | None = None
        """The start of the ten seconds being counted."""
        self._recount_limit = _MAX_RECOUNT
        self._next: tuple[_Numbers, datetime] | None = None
        """Counts that become the stored ones when the open transaction commits."""

    def record(self, tx: Transaction) -> None:
        """Store the counts of the last ten seconds, if they are over."""
        if self._bucket is not None and self._bucket <= tx.now < self._bucket + throughput.BUCKET:
            return
        bucket = throughput.bucket_of(tx.now)
        numbers = numbers_of(self._meter)
        if self._bucket is None:
            for queue, state, number in throughput.unwritten(tx.connection, tx.now, self._recount_limit):
                numbers.setdefault(self._meter.label(queue), Counter())[state] -= number
        elif numbers != self._written:
            grown = {
                queue: numbers.get(queue, _NONE) - self._written.get(queue, _NONE) for queue in numbers | self._written
            }
            rows = [_row(queue, some) for queue, some in grown.items() if some]
            throughput.add(tx.connection, self._term, self._bucket, rows)
        self._next = numbers, bucket

    def committed(self, tick: TickResult) -> None:
        del tick
        if self._next is not None:
            self._written, self._bucket = self._next
            self._next = None

    def rolled_back(self) -> None:
        """Discard the uncommitted counts; the next tick stores them."""
        self._next = None
        if self._bucket is None:
            self._recount_limit //= _RECOUNT_DIVISOR


def numbers_of(meter: Meter) -> _Numbers:
    """Return all counts of a meter, by queue."""
    found: _Numbers = {}
    for (queue, state), number in meter.ended.items():
        found.setdefault(queue, Counter())[state] = number
    for name, counts in (("dispatched", meter.dispatched), ("retried", meter.retried), ("lost", meter.lost)):
        for queue, number in counts.items():
            found.setdefault(queue, Counter())[name] = number
    for name, times in (("waits", meter.waits), ("runs", meter.runs)):
        for queue, waits in times.items():
            found.setdefault(queue, Counter()).update(
                {f"{name}:{index}": number for index, number in enumerate(waits.counts)}
            )
    return found


def _row(queue: str, grown: Counter[str]) -> dict[str, object]:
    names = (*(str(state) for state in ENDED_TASK_STATES), "dispatched", "retried", "lost")
    return {
        "queue": queue,
        **{name: grown[name] for name in names},
        **{name: [grown[f"{name}:{index}"] for index in range(len(SECONDS) + 1)] for name in ("waits", "runs")},
    }
