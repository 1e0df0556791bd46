"""Charts of the last hour: bars by minute, and percentiles from histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from orchestrator.monitoring.exposition import SECONDS
from orchestrator.monitoring.times import duration
from orchestrator.store.throughput import Throughput

MINUTES = 60
HEIGHT = 40.0
"""The height of a chart in its own units; the width is the number of minutes."""


@dataclass(frozen=True)
class Bar:
    """The tasks that ended in one minute."""

    at: int
    """The index of the minute, from the left."""
    value: float
    failed: float
    y: float
    height: float
    failed_y: float
    failed_height: float
    moment: datetime


@dataclass(frozen=True, kw_only=True)
class Hour:
    """The throughput of the last hour."""

    bars: list[Bar]
    most: int
    """The highest bar."""
    success: int
    failed: int
    cancelled: int
    skipped: int
    retried: int
    lost: int
    per_second: float
    """Ended tasks per second, over the last five minutes."""
    queue_latency: Percentiles
    run_time: Percentiles

    @property
    def begin(self) -> datetime:
        """The start of the first minute."""
        return self.bars[0].moment


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of durations, as bounds of a histogram such as `≤ 30.0s`; empty if nothing was counted."""

    p50: str
    p95: str
    p99: str
    line: str
    """The p95 by minute, as an SVG path with gaps where nothing was counted."""
    total: int


@dataclass(frozen=True)
class Outline:
    """The last hour as two SVG paths, for small charts of which a page may have many."""

    ended: str
    """The bars of ended tasks by minute."""
    failed: str
    """The bars of failed tasks by minute."""
    ends: int
    failures: int


def outline(buckets: Sequence[Throughput], now: datetime) -> Outline:
    """Return the small chart of the last hour."""
    minutes = _by_minute(buckets, _first_minute(now))
    ends, failed = [sum(map(_ends, minute)) for minute in minutes], [_failed(minute) for minute in minutes]
    highest = max(*ends, 1)
    return Outline(_shape(ends, highest, 1.0), _shape(failed, highest, 1.5), sum(ends), sum(failed))


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
    return sum(bucket.failed for bucket in buckets)


def _shape(counts: Sequence[int], highest: int, least: float) -> str:
    """Return bars as an SVG path. Very low bars get a visible minimum height."""
    heights = [max(HEIGHT * count / highest, least) for count in counts]
    return "".join(
        f"M{minute + 0.12:.2f} {HEIGHT:g}v-{height:.1f}h.76v{height:.1f}z"
        for minute, (count, height) in enumerate(zip(counts, heights, strict=True))
        if count
    )


def hour(buckets: Sequence[Throughput], now: datetime) -> Hour:
    """Return the chart and totals of the last hour."""
    begin = _first_minute(now)
    minutes = _by_minute(buckets, begin)
    ends, failed = [sum(map(_ends, minute)) for minute in minutes], [_failed(minute) for minute in minutes]
    lately = now.replace(second=0, microsecond=0) - timedelta(minutes=4)
    recent = [bucket for bucket in buckets if bucket.bucket >= lately]
    return Hour(
        bars=_bars(ends, failed, begin),
        most=max(ends),
        success=sum(bucket.success for bucket in buckets),
        failed=_failed(buckets),
        cancelled=sum(bucket.cancelled for bucket in buckets),
        skipped=sum(bucket.skipped for bucket in buckets),
        retried=sum(bucket.retried for bucket in buckets),
        lost=sum(bucket.lost for bucket in buckets),
        per_second=sum(map(_ends, recent)) / (now - lately).total_seconds(),
        queue_latency=_percentiles(SECONDS, [[bucket.waits for bucket in minute] for minute in minutes]),
        run_time=_percentiles(SECONDS, [[bucket.runs for bucket in minute] for minute in minutes]),
    )


def _ends(bucket: Throughput) -> int:
    return bucket.success + bucket.failed + bucket.cancelled + bucket.skipped


def _bars(ends: Sequence[int], failed: Sequence[int], begin: datetime) -> list[Bar]:
    highest = max(*ends, 1)
    bars = []
    for minute, (all_ends, bad) in enumerate(zip(ends, failed, strict=True)):
        height = max(HEIGHT * all_ends / highest, 1.0) if all_ends else 0.0
        bad_height = max(HEIGHT * bad / highest, 1.5) if bad else 0.0
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
    counts = [_sum_rows(minute, len(bounds) + 1) for minute in minutes]
    total = _sum_rows(counts, len(bounds) + 1)
    by_minute = [_estimate(bounds, minute, 0.95) for minute in counts]
    highest = max((value for value in by_minute if value is not None), default=0.0) or 1.0
    path = ""
    for minute, value in enumerate(by_minute):
        if value is not None:
            is_begun = minute and by_minute[minute - 1] is not None
            path += f"{'L' if is_begun else 'M'}{minute + 0.5:g} {HEIGHT - 1 - (HEIGHT - 3) * value / highest:.1f}"
            path += "" if is_begun else "h.01"  # a single minute is drawn as a dot
    p50, p95, p99 = (_upper_bound(bounds, total, part) for part in (0.5, 0.95, 0.99))
    return Percentiles(p50, p95, p99, path, sum(total))


def _sum_rows(rows: Sequence[Sequence[int]], length: int) -> list[int]:
    total = [0] * length
    for row in rows:
        for index, count in enumerate(row[:length]):
            total[index] += count
    return total


def _upper_bound(bounds: Sequence[float], counts: Sequence[int], part: float) -> str:
    """Return the upper bound of the bucket with a quantile."""
    if (found := _bucket(counts, part)) is None:
        return ""
    index, _ = found
    return f"≤ {duration(bounds[index])}" if index < len(bounds) else f"> {duration(bounds[-1])}"


def _estimate(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Estimate a quantile by interpolation within its bucket, for a line; None if the histogram is empty."""
    if (found := _bucket(counts, part)) is None:
        return None
    index, share = found
    low, high = bounds[index - 1] if index else 0.0, bounds[min(index, len(bounds) - 1)]
    return low + (high - low) * share


def _bucket(counts: Sequence[int], part: float) -> tuple[int, float] | None:
    """Return the bucket with a quantile, and the share of the bucket below it; None if all buckets are empty."""
    target, below = part * sum(counts), 0
    for index, count in enumerate(counts):
        if count and below + count >= target:
            return index, (target - below) / count
        below += count
    return None
