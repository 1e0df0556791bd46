"""Durations as people write them: `250ms`, `30s`, `10m`, `1h30m`, `2d`."""

from __future__ import annotations

import re
from decimal import Decimal

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
"""Histogram bucket bounds for durations, in seconds."""
_UNITS = {"w": Decimal(604_800), "d": Decimal(86_400), "h": Decimal(3600), "m": Decimal(60), "s": Decimal(1)}
_UNITS["ms"] = Decimal("0.001")
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?(ms|[wdhms])")
DURATION = re.compile(rf"(?:{_PART.pattern} ?)+")


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as `1h30m`, or None if the text is not a duration."""
    if not DURATION.fullmatch(text.strip()):
        return None
    return float(sum(Decimal(amount) * _UNITS[unit] for amount, unit in _PART.findall(text)))


def format_duration(seconds: float) -> str | float:
    """Return seconds as the shortest exact duration, or the number itself if no duration is exact."""
    remaining = round(Decimal(seconds) * 1000)
    text = ""
    for unit, size in _UNITS.items():
        count, remaining = divmod(remaining, int(size * 1000)) if unit != "w" else (0, remaining)
        text += f"{count}{unit}" if count else ""
    return text if parse_duration(text) == seconds else seconds
