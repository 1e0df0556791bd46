"""All schedules, a page at a time. It loads no database driver, which a worker does without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.sdk.calls.schedules import ScheduleCalls
    from orchestrator.store.schedules.definitions import StoredSchedule

_AT_ONCE = 1_000


def pages(schedules: ScheduleCalls) -> Iterator[list[StoredSchedule]]:
    """Yield all schedules, in order of their names."""
    after: str | None = None
    while True:
        found, after = schedules.page(limit=_AT_ONCE, after=after)
        yield found
        if after is None:
            return
