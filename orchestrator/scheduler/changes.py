"""State changes for live events: one entry per commit, and only while somebody listens.

Listeners update their state from these entries, so no gap may go unnoticed. After a possible gap, because nobody
listened, Redis was away, or another scheduler may have died between a commit and its publication, the next entry is a
*first* one: listeners read the current state again and go on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from orchestrator.domain.states import TaskState
from orchestrator.scheduler.tick_result import Outgoing, TickResult
from orchestrator.transport.codec import Changes, Heartbeat, RunChange, TaskChange, WorkerChange, encode
from orchestrator.transport.leader.streams import NO_CHANGES

_MOST_BYTES = 8_000_000
"""Of the entries that are kept for listeners that come back."""
_MOST_ENTRIES = 20_000


class ChangeLog:
    """What has been published in this term."""

    def __init__(self) -> None:
        self._is_watched = False
        self._generation: str | None = None
        """The generation since a first entry, without gaps; None if another first entry is needed."""
        self._workers: dict[str, str] = {}
        self._moved_workers: list[WorkerChange] = []
        self._sizes: deque[int] = deque()
        """Sizes of the entries since the first one: earlier entries are not needed."""
        self._size = 0

    def look(self, is_watched: bool, beats: Iterable[Heartbeat]) -> None:
        """Note whether somebody listens, and the live workers."""
        self._is_watched = is_watched
        if not is_watched:
            self.interrupted()
            return
        now = {beat.worker: _state(beat) for beat in beats}
        changed = [WorkerChange(worker, state) for worker, state in now.items() if self._workers.get(worker) != state]
        self._moved_workers += changed + [WorkerChange(worker, "gone") for worker in self._workers if worker not in now]
        self._workers = now

    def interrupted(self) -> None:
        """Note a possible gap."""
        self._generation = None

    def of(self, generation: str, tick: TickResult) -> tuple[bytes, int]:
        """Return the entry of a commit, and how many entries are kept for listeners that reconnect."""
        if not self._is_watched or not generation:
            return NO_CHANGES
        if self._generation != generation:
            self._generation = generation
            self._moved_workers.clear()
            self._sizes.clear()
            self._size = 0
            return self._entry(Changes(generation, is_first=True))
        tasks, runs, queues_changed = _tasks(tick.outgoing), _runs(tick.outgoing), tick.wake.queues_changed
        if not (tasks or runs or self._moved_workers or queues_changed):
            return NO_CHANGES
        workers, self._moved_workers = self._moved_workers, []
        return self._entry(Changes(generation, False, tasks, runs, workers, queues_changed))

    def _entry(self, changes: Changes) -> tuple[bytes, int]:
        body = encode(changes)
        self._sizes.append(len(body))
        self._size += len(body)
        while len(self._sizes) > _MOST_ENTRIES or (self._size > _MOST_BYTES and len(self._sizes) > 1):
            self._size -= self._sizes.popleft()
        return body, len(self._sizes)


def _state(beat: Heartbeat) -> str:
    return "still" if beat.still else "draining" if beat.draining else "live"


def _tasks(outgoing: Outgoing) -> list[TaskChange]:
    """Return the tasks that moved; what came back may have been claimed again in the same commit."""
    moved = [
        TaskChange(task.id, task.queue, task.name, task.state, task.attempt, task.run_id)
        for task in outgoing.moved
        if not task.is_turn_task
    ]
    return moved + [
        TaskChange(task.id, task.queue, task.name, TaskState.DISPATCHED, task.attempt, task.run_id)
        for task in outgoing.claimed
        if not task.is_turn_task
    ]


def _runs(outgoing: Outgoing) -> list[RunChange]:
    """Return the runs that have begun or ended, and those of which something else has changed."""
    rows = {run.id: RunChange(run.id, run.status, run.workflow) for run in outgoing.runs}
    turns = (task.id for task in outgoing.moved if task.is_turn_task)
    others = {run: RunChange(run) for run in (*outgoing.counted, *turns) if run not in rows}
    return [*others.values(), *rows.values()]
