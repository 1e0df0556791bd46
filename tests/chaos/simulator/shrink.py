"""Shrinks a failing list of faults (Zeller's ddmin)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], budget: int = 60) -> list[T]:
    """Return a sublist that still fails and, within the budget of tries, cannot be shortened further."""
    kept = list(items)
    pieces = 2
    while kept and budget > 0:
        size = max(1, len(kept) // pieces)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            budget -= 1
            if fails(rest):
                kept, pieces = rest, max(2, pieces - 1)
                break
            if budget <= 0:
                break
        else:
            if size == 1:
                break
            pieces = min(len(kept), 2 * pieces)
    return kept
