"""How the events that code is to be shown travel, and what has to wait so that they fill no memory."""

from __future__ import annotations

from enum import Enum

from orchestrator.domain.code.activation import Violation

PAGE = 1_000_000
"""Bytes of events that go into one message, or into one page where there are more."""
LARGEST_HISTORY = 1_000_000_000
"""Bytes of a history that can be sent at all."""
MOST_IN_MESSAGES = 64_000_000
"""Bytes that the messages of one tick may hold before others have to wait; the leader has them in memory."""
MOST_IN_PAGES = 256_000_000
"""Bytes of pages that may be out before others have to wait; Redis has them in memory."""

_BYTES_A_SECOND = 32_000_000
"""How fast pages are sent, and read by workers, at a guess."""
_LONGEST_WAIT = 60.0


class Delivery(Enum):
    """How events reach a worker."""

    MESSAGE = "in the message"
    PAGES = "in pages beside it"
    LATER = "not now"
    NEVER = "not at all"


class HistoryBudget:
    """The bytes that one tick may send. A history goes while there is room, however large, so none waits for ever."""

    def __init__(self, in_pages: int) -> None:
        """Begin with so many bytes of pages that are out."""
        self._in_pages = in_pages
        self._in_messages = 0
        self._waiting = 0

    def delivery(self, size: int) -> Delivery:
        """Decide on one more, of so many bytes."""
        if size > LARGEST_HISTORY:
            return Delivery.NEVER
        if size <= PAGE and self._in_messages < MOST_IN_MESSAGES:
            self._in_messages += size
            return Delivery.MESSAGE
        if size > PAGE and self._in_pages < MOST_IN_PAGES:
            self._in_pages += size
            return Delivery.PAGES
        self._waiting += size
        return Delivery.LATER

    @property
    def wait(self) -> float:
        """Return how many seconds the last one that has to wait should: until those before it have gone, roughly."""
        return min(_LONGEST_WAIT, 1.0 + self._waiting / _BYTES_A_SECOND)


def history_unreadable(error: Exception) -> Violation:
    """Say that a history cannot be read."""
    return Violation(0, type(error).__name__, f"The history cannot be sent to a worker: {error}")


def history_too_long(size: int) -> Violation:
    """Say that a history is too large."""
    return Violation(
        0,
        "HistoryTooLong",
        f"The history has {size:,} bytes, and at most {LARGEST_HISTORY:,} can be sent to a worker. "
        f"Let the workflow continue_as_new earlier.",
    )
