"""Numbers as small pictures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[int], width: int) -> str:
    """Return values as bars, the last at the right; as many to a bar as it takes for a minute to fit."""
    if width < 1 or not values:
        return ""
    each = -(-len(values) // width)
    pad = (-len(values)) % each
    padded = [0] * pad + list(values)
    sums = [sum(padded[start : start + each]) for start in range(0, len(padded), each)]
    most = max(sums)
    if not most:
        return " " * len(sums)
    return "".join(" " if not value else _BARS[min(7, value * 8 // (most + 1))] for value in sums)


def bar(share: float, width: int, style: str = "") -> Text:
    """Return how full something is; without a style, in a colour that warns."""
    full = round(max(0.0, min(1.0, share)) * width)
    style = style or ("red" if share > 0.95 else "yellow" if share > 0.75 else "green")
    return Text.assemble(("■" * full, style), ("·" * (width - full), "dim"))


def rate(value: float) -> str:
    """Return how often something happens in a second; nothing where it does not."""
    return "" if not value else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"
