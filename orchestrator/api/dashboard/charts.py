"""Charts of the last hour: bars by the minute, and percentiles from histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from orchestrator.monitoring.exposition import SECONDS
from orchestrator.monitoring.times import duration
from orchestrator.store.throughput import Throughput

MINUTES = 60
HEIGHT = 40.0
"""Of a chart, in its own units; it is as wide as there are minutes."""


@dataclass(frozen=True)
class Bar:
    """One minute."""

    at: int
    """How many minutes stand to the left of it."""
    value: float
    failed: float
    y: float
    height: float
    failed_y: float
    failed_height: float
    moment: datetime


@dataclass(frozen=True, kw_only=True)
class Hour:
    """Tasks of the last hour."""

    bars: list[Bar]
    """Ends by the minute."""
    most: int
    """Of one minute."""
    success: int
    failed: int
    cancelled: int
    skipped: int
    retried: int
    lost: int
    per_second: float
    """Ends in a second, in the last five minutes."""
    queue_latency: Percentiles
    run_time: Percentiles

    @property
    def begin(self) -> datetime:
        """When the first minute of the bars begins."""
        return self.bars[0].moment


@dataclass(frozen=True)
class Percentiles:
    """How long most things took, by the bounds of a histogram, as `≤ 30.0s`; empty where nothing was counted."""

    p50: str
    p95: str
    p99: str
    line: str
    """The p95 by the minute, as a path that is broken where nothing was counted."""
    total: int


@dataclass(frozen=True)
class Outline:
    """The last hour as two shapes, for a chart that is small: a page may have many of them."""

    ended: str
    """The bars of ends by the minute, as one path."""
    failed: str
    """The bars of failures, likewise."""
    ends: int
    failures: int


def outline(buckets: Sequence[Throughput], now: datetime) -> Outline:
    """Return the shape of the last hour."""
    minutes = _by_minute(buckets, _first_minute(now))
    ends, failed = [sum(map(_ends, minute)) for minute in minutes], [_failed(minute) for minute in minutes]
    most = max(*ends, 1)
    return Outline(_shape(ends, most, 1.0), _shape(failed, most, 1.5), sum(ends), sum(failed))


def _first_minute(now: datetime) -> datetime:
    return now.replace(second=0, microsecond=0) - timedelta(minutes=MINUTES - 1)


def _by_minute(buckets: Sequence[Throughput], begin: datetime) -> list[list[Throughput]]:
    minutes: list[list[Throughput]] = [[] for _ in range(MINUTES)]
    for bucket in buckets:
        offset = int((bucket.bucket - begin).total_seconds() // 60)
        if 0 <= offset < MINUTES:
            minutes[offset].append(bucket)
    return minutes


def _failed(buckets: Sequence[Throughput]) -> int:
    return sum(one.failed for one in buckets)


def _shape(counts: Sequence[int], most: int, least: float) -> str:
    """Return bars as a path; those that are very low are drawn a little higher, so that one sees them."""
    heights = [max(HEIGHT * count / most, least) for count in counts]
    return "".join(
        f"M{minute + 0.12:.2f} {HEIGHT:g}v-{height:.1f}h.76v{height:.1f}z"
        for minute, (count, height) in enumerate(zip(counts, heights, strict=True))
        if count
    )


def hour(buckets: Sequence[Throughput], now: datetime) -> Hour:
    """Return what the minutes of the last hour come to."""
    begin = _first_minute(now)
    minutes = _by_minute(buckets, begin)
    ends, failed = [sum(map(_ends, minute)) for minute in minutes], [_failed(minute) for minute in minutes]
    lately = now.replace(second=0, microsecond=0) - timedelta(minutes=4)
    recent = [one for one in buckets if one.bucket >= lately]
    return Hour(
        bars=_bars(ends, failed, begin),
        most=max(ends),
        success=sum(one.success for one in buckets),
        failed=_failed(buckets),
        cancelled=sum(one.cancelled for one in buckets),
        skipped=sum(one.skipped for one in buckets),
        retried=sum(one.retried for one in buckets),
        lost=sum(one.lost for one in buckets),
        per_second=sum(map(_ends, recent)) / (now - lately).total_seconds(),
        queue_latency=_percentiles(SECONDS, [[one.waits for one in minute] for minute in minutes]),
        run_time=_percentiles(SECONDS, [[one.runs for one in minute] for minute in minutes]),
    )


def _ends(one: Throughput) -> int:
    return one.success + one.failed + one.cancelled + one.skipped


def _bars(ends: Sequence[int], failed: Sequence[int], begin: datetime) -> list[Bar]:
    most = max(*ends, 1)
    bars = []
    for minute, (all_ends, bad) in enumerate(zip(ends, failed, strict=True)):
        height = max(HEIGHT * all_ends / most, 1.0) if all_ends else 0.0
        bad_height = max(HEIGHT * bad / most, 1.5) if bad else 0.0
        moment = begin + timedelta(minutes=minute)
        bars.append(
            Bar(
                minute,
                all_ends,
                bad,
                round(HEIGHT - height, 2),
                round(height, 2),
                round(HEIGHT - bad_height, 2),
                round(bad_height, 2),
                moment,
            )
        )
    return bars


def _percentiles(bounds: Sequence[float], minutes: Sequence[Sequence[Sequence[int]]]) -> Percentiles:
    counts = [_added(minute, len(bounds) + 1) for minute in minutes]
    total = _added(counts, len(bounds) + 1)
    by_minute = [_estimate(bounds, minute, 0.95) for minute in counts]
    highest = max((value for value in by_minute if value is not None), default=0.0) or 1.0
    path = ""
    for minute, value in enumerate(by_minute):
        if value is not None:
            is_begun = minute and by_minute[minute - 1] is not None
            path += f"{'L' if is_begun else 'M'}{minute + 0.5:g} {HEIGHT - 1 - (HEIGHT - 3) * value / highest:.1f}"
            path += "" if is_begun else "h.01"  # so that a minute alone is a dot
    p50, p95, p99 = (_at_most(bounds, total, part) for part in (0.5, 0.95, 0.99))
    return Percentiles(p50, p95, p99, path, sum(total))


def _added(rows: Sequence[Sequence[int]], length: int) -> list[int]:
    total = [0] * length
    for row in rows:
        for index, count in enumerate(row[:length]):
            total[index] += count
    return total


def _at_most(bounds: Sequence[float], counts: Sequence[int], part: float) -> str:
    """Return what is known of the quantile of a histogram: the upper bound of its bucket."""
    if (found := _bucket(counts, part)) is None:
        return ""
    index, _ = found
    return f"≤ {duration(bounds[index])}" if index < len(bounds) else f"> {duration(bounds[-1])}"


def _estimate(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Return about where in its bucket the quantile of a histogram is, for a line; None if the histogram is empty."""
    if (found := _bucket(counts, part)) is None:
        return None
    index, share = found
    low, high = bounds[index - 1] if index else 0.0, bounds[min(index, len(bounds) - 1)]
    return low + (high - low) * share


def _bucket(counts: Sequence[int], part: float) -> tuple[int, float] | None:
    """Return which bucket has the quantile, and which share of the bucket is below it; None if all are empty."""
    wanted, passed = part * sum(counts), 0
    for index, count in enumerate(counts):
        if count and passed + count >= wanted:
            return index, (wanted - passed) / count
        passed += count
    return None
