"""Claim ready tasks from the front of each queue, or from behind the last one that was claimed.

Every claim leaves dead entries at the front of the index. While somebody keeps a transaction open, vacuum cannot remove
them, and a claim from the front wades through all of them, tick after tick. Where that has become slow, the leader goes
on behind the mark that its last claim has left, and looks from the front for a sixth of its time at most.

Behind the mark it does not see what became ready out of order: a task that came back, or whose transaction committed
late. Such a task waits for the next look from the front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy import Connection

from orchestrator.scheduler.commit_hooks import CommitHooks
from orchestrator.store.tasks import claims
from orchestrator.store.tasks.claims import Claimed, ClaimPosition

_SLOW = 0.05
"""Seconds; a claim from the front that takes less is made every time."""
_PAUSE = 5.0
"""Between two slow claims from the front, so many times as long as one takes."""


class Claims(CommitHooks):
    """Remembers, for each queue, where the last claim ended."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.is_slow = False
        """The last claim from the front was: since then not all is seen that is ready."""
        self._front_at = 0.0
        self._positions: dict[str, ClaimPosition] = {}

    def claim(self, connection: Connection, rooms: dict[str, int], now: datetime) -> list[Claimed]:
        """Claim the most urgent ready tasks of each queue, as many as it has room for, most urgent first."""
        began = self._monotonic()
        if self.is_slow and began < self._front_at and rooms.keys() <= self._positions.keys():
            found = claims.claim_behind(connection, rooms, self._positions, now)
            for queue, room in rooms.items():
                self._move_position(queue, room, [task for task in found if task.queue == queue])
            return found
        newest = claims.newest(connection) if self.is_slow else None
        found = claims.claim(connection, rooms, now)
        took = self._monotonic() - began
        self.is_slow = took >= _SLOW
        self._front_at = began + took + _PAUSE * took
        self._positions = {}
        if newest is not None:
            for queue, room in rooms.items():
                self._set_position(queue, room, newest, [task for task in found if task.queue == queue])
        return found

    def rolled_back(self) -> None:
        """What stands before the marks was not claimed."""
        self._positions = {}

    def _set_position(self, queue: str, room: int, newest: int, found: Sequence[Claimed]) -> None:
        """After a claim from the front, which has seen everything up to the newest task."""
        if len(found) < room:
            self._positions[queue] = ClaimPosition(found[-1].priority if found else 0, newest, emptied=True)
        else:
            self._positions[queue] = ClaimPosition(found[-1].priority, found[-1].seq, emptied=False)

    def _move_position(self, queue: str, room: int, found: Sequence[Claimed]) -> None:
        """After a claim from behind the mark."""
        position = self._positions[queue]
        if len(found) < room and not position.emptied:
            self._front_at = 0.0  # less urgent ones wait there, and slots are free
        if not found:
            return
        emptied = position.emptied and len(found) < room
        seq = max(task.seq for task in found) if emptied else found[-1].seq
        self._positions[queue] = ClaimPosition(found[-1].priority, seq, emptied)
