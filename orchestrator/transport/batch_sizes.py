"""Read no more events at once than a tick can apply: their number is known beforehand, their size is not."""

from __future__ import annotations

MOST_BYTES = 4_000_000
"""Of events that are applied together; or one, however large it is."""

Entry = tuple[str, bytes]


class BatchSizes:
    """Learns from what was read how many entries to ask for."""

    def __init__(self) -> None:
        self._few: int | None = None

    def number(self, most: int) -> int:
        """Return how many entries are to be read, where `most` would be too many if they are large."""
        return most if self._few is None else min(most, self._few)

    def cut(self, entries: list[Entry], asked: int) -> list[Entry]:
        """Return the first entries, as far as they are not too large together; the others are read again."""
        size = 0
        for place, (_, body) in enumerate(entries):
            size += len(body)
            if place and size > MOST_BYTES:
                self._few = place
                return entries[:place]
        if self._few is not None and len(entries) == asked:
            self._few *= 2
        return entries
