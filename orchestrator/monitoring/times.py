"""Times and numbers, formatted for people."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def duration(seconds: float | None) -> str:
    """Format a duration in a fitting unit: `0.4ms`, `12ms`, `1.2s`, `3m 20s`, `5h 3m`, `2d 4h`."""
    if seconds is None:
        return ""
    seconds = max(0.0, seconds)
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f}ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    total = round(seconds)
    for large, high, small, low in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if total >= large:
            rest = total % large // small
            return f"{total // large}{high} {rest}{low}" if rest else f"{total // large}{high}"
    return f"{total}s"


def between(start: datetime | None, end: datetime | None) -> str:
    """Format the time between two moments; empty if one is unknown."""
    return "" if start is None or end is None else duration((end - start).total_seconds())


def ago(moment: datetime | None, now: datetime) -> str:
    """Format how long ago a moment was, or how far ahead it is: `3m ago`, `in 20s`."""
    if moment is None:
        return ""
    seconds = (now - moment).total_seconds()
    half = 0.5 if seconds < 0 else 0.0  # future times are rounded: "in 1d" is not almost two days
    size = next((f"{int(abs(seconds) / unit + half)}{name}" for unit, name in _UNITS if abs(seconds) >= unit), "0s")
    return f"in {size}" if seconds < 0 else f"{size} ago"


def when(moment: datetime | None, now: datetime) -> str:
    """Format a moment, and how long ago it was."""
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC ({ago(moment, now)})"


def present() -> datetime:
    """Return the current time."""
    return datetime.now(UTC)


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 task`, `2 tasks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size(value: float) -> str:
    """Format a number of bytes in a fitting unit."""
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
