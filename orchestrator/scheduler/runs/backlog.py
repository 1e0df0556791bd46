"""Waiting runs: to begin, to continue, or to receive pending changes because they were stuck or a tick ran out of time.

All of this is stored in Postgres, and trees of runs take turns. The leader caches which runs have pending changes.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

import orchestrator
from orchestrator.domain.ids import run_log_fields, to_text
from orchestrator.domain.runs import RunChanges
from orchestrator.scheduler.budget import COST
from orchestrator.scheduler.tick_result import CommitHooks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store import shards
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag.plans import Version
from orchestrator.store.postgres_errors import error_line
from orchestrator.store.runs import ancestry, cancels, pending_changes, stuck
from orchestrator.store.runs import transitions as runs
from orchestrator.store.runs.pending_changes import Waited
from orchestrator.store.runs.transitions import Pending, RunRow
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

_MAX_FREED = 1_000
"""Runs set aside by another release that one tick frees, at most."""


_MAX_CACHED = 10_000
"""Cached runs with pending changes, at most. Beyond that, Postgres is queried for the relevant ones."""
_QUEUE_BATCH = 200
"""Entries of the queue read at once."""
_MAX_BYTES = 4_000_000
"""Bytes of pending changes read between two checks of the clock."""
ROOM_POLL_INTERVAL = timedelta(seconds=0.1)
"""The interval of checks whether another shard has left room in a lane."""


RunAndChanges = tuple[bytes, Sequence[RunChanges]]
"""A run, and the changes since it was last notified."""
Sizes = Callable[[Mapping[bytes, Version]], Callable[[bytes], int]]
"""Returns a function that maps a run of these versions to its number of steps."""


class Backlog(CommitHooks):
    """The leader's view of runs with pending changes."""

    def __init__(self) -> None:
        self._waiting: set[bytes] | None = None
        """All runs with pending changes; None if unknown or too many."""
        self._are_many = False
        self._pending = runs.pending()
        self._expanding = dags.expanding()
        self._queue = pending_changes.PendingChangesQueue()
        self._last_cancelled = bytes(16)
        self.parked_lanes: set[str] | None = None
        """With several shards: lanes with runs that wait for room in other shards. None until read."""
        self._polled_at: datetime | None = None
        self._inherits = True
        """Without other shards: runs may still be parked for room in shards that were removed."""
        self._has_older = True
        """Another release may have set runs aside that this release should try again."""

    def rolled_back(self) -> None:
        self._invalidate()
        self.parked_lanes = None
        self._inherits = True
        self._has_older = True

    def _invalidate(self) -> None:
        """Read the waiting runs from Postgres again on the next use."""
        self._waiting = None
        self._are_many = False

    def waiting(self, tx: Transaction, runs: Sequence[bytes]) -> set[bytes]:
        """Return which of these runs have pending changes. They are notified of those before anything newer."""
        if not runs:
            return set()
        if self._waiting is None and not self._are_many:
            self._waiting = pending_changes.waiting(tx.connection, _MAX_CACHED)
            self._are_many = self._waiting is None
        if self._waiting is None:
            return pending_changes.waiting_among(tx.connection, runs)
        return self._waiting.intersection(runs) if self._waiting else set()

    def _update(self, *, wait: Iterable[bytes] = (), go_on: Iterable[bytes] = ()) -> None:
        if self._waiting is not None:
            self._waiting.difference_update(go_on)
            self._waiting.update(wait)
            if len(self._waiting) > _MAX_CACHED:
                self._invalidate()

    def pending(self, tx: Transaction, limit: int) -> list[Pending]:
        """Return the next runs to begin."""
        found = [Pending(row.id, row.workflow, row.version, row.lane) for row in self._pending(tx.connection, limit)]
        if tx.shard is not None and (lanes := {run.lane for run in found if run.lane is not None}):
            mine = {None, *ancestry.try_lanes(tx.connection, lanes)}
            tx.result.wake.contested |= len(mine) <= len(lanes)
            found = [run for run in found if run.lane in mine]
        return by_age_in_lanes(found)

    def park(self, waiting: Iterable[RunRow]) -> None:
        """Note lanes whose runs wait for room in all shards."""
        if self.parked_lanes is not None:
            self.parked_lanes.update(row.lane for row in waiting if row.lane is not None)

    def look_for_room(self, tx: Transaction) -> None:
        """Let parked runs try again when another shard may have left room, which no message announces.

        Without shards, runs parked before the shards were removed are unparked once.
        """
        if tx.shard is None:
            if self._inherits and shards.are_there(tx.connection) and (lanes := ancestry.parked_lanes(tx.connection)):
                runs.unpark(tx.connection, lanes)
                tx.result.wake.runs_to_begin = True
            self._inherits = False
            return
        if self.parked_lanes is None:
            self.parked_lanes = set(ancestry.parked_lanes(tx.connection))
        if self.parked_lanes and (self._polled_at is None or abs(tx.now - self._polled_at) >= ROOM_POLL_INTERVAL):
            self._polled_at = tx.now
            self.parked_lanes, any_tries = ancestry.unpark(tx.connection, self.parked_lanes)
            tx.result.wake.runs_to_begin |= any_tries

    def expanding(self, tx: Transaction, limit: int) -> list[bytes]:
        """Return the next runs with more tasks to create."""
        return [row.id for row in self._expanding(tx.connection, limit)]

    def cancelling(self, tx: Transaction, limit: int) -> list[bytes]:
        """Return the next runs being cancelled, starting over after the last."""
        found = cancels.following(tx.connection, self._last_cancelled, limit)
        self._last_cancelled = found[-1] if len(found) == limit else bytes(16)
        return found

    def free_older(self, tx: Transaction) -> None:
        """Let runs that another release set aside try again, once."""
        if self._has_older:
            freed = stuck.free_older(tx.connection, orchestrator.__version__, _MAX_FREED)
            self._has_older = len(freed) == _MAX_FREED
            self.freed(tx, freed)

    def free(self, tx: Transaction, runs: Sequence[bytes]) -> set[bytes]:
        """Let stuck runs try again. Return those of `runs` that were stuck."""
        freed = stuck.free(tx.connection, runs)
        self.freed(tx, freed)
        return set(freed)

    def freed(self, tx: Transaction, runs: Sequence[bytes]) -> None:
        """Note that stuck runs may continue."""
        if runs:
            log.info("run.stuck_retried runs=%d", len(runs))
            tx.budget.forgive(runs)
            self._invalidate()
            tx.result.outgoing.counted += runs
            tx.result.wake.requests = True

    def add(self, tx: Transaction, items: Iterable[tuple[bytes, RunChanges]], *, is_over: bool = False) -> None:
        """Store changes of runs for a later tick; with `is_over`, until the run has begun again."""
        rows = list(items)
        pending_changes.add(tx.connection, rows, is_over=is_over)
        self._update(wait=(run for run, _ in rows))
        tx.result.wake.requests = True

    def set_aside(self, tx: Transaction, run_and_changes: RunAndChanges, error: Exception) -> None:
        """Mark a run that cannot be notified as stuck, and store its changes as pending."""
        run, changes = run_and_changes
        reason = {"event": 0, "kind": type(error).__name__, "message": error_line(error), "difference": ""}
        reason |= {"release": orchestrator.__version__}
        trace = "".join(traceback.format_exception(error))
        log.error(
            "run.stuck run=%s error=%s: other runs are not affected", to_text(run), trace, extra=run_log_fields(run)
        )
        stuck.set_aside(tx.connection, [(run, msgspec.json.encode(reason).decode().replace("\\u0000", " "))])
        self._update(wait=[run])
        tx.result.outgoing.counted.append(run)
        self.add(tx, [(run, item) for item in changes])

    def next(self, tx: Transaction, sizes: Sizes) -> list[Waited]:
        """Return the pending changes of the next runs: as much as fits between two checks of the clock, or one run.

        They stay in the queue until removed.
        """
        entries = self._queue(tx.connection, _QUEUE_BATCH)
        if self._are_many and len(entries) < _QUEUE_BATCH:
            self._invalidate()  # few enough to cache again
        if not entries:
            return []
        steps = sizes(dags.versions(tx.connection, list({entry.run for entry in entries})))
        ids: list[int] = []
        cost = size = 0
        for entry in entries:
            cost += COST + steps(entry.run)
            size += entry.size
            if ids and (cost > tx.budget.slice or size > _MAX_BYTES):
                break
            ids.append(entry.id)
        return pending_changes.read(tx.connection, ids)

    def remove(self, tx: Transaction, items: Iterable[Waited]) -> None:
        """Remove pending changes that are being applied. Runs without further ones no longer wait."""
        waited = list(items)
        unfinished = pending_changes.remove(tx.connection, [entry for item in waited for entry in item.ids])
        self._update(go_on={item.run for item in waited} - unfinished)

    def release(self, tx: Transaction, runs: Sequence[bytes]) -> None:
        """Release changes that were pending when a run ended, now that it has begun again."""
        late = self.waiting(tx, runs)
        if late:
            pending_changes.release(tx.connection, list(late))

    def take_of(self, tx: Transaction, runs: Sequence[bytes]) -> Mapping[bytes, Sequence[RunChanges]]:
        """Remove and return all pending changes of these runs, which are no longer stuck."""
        taken = pending_changes.take_of(tx.connection, runs)
        self._update(go_on=runs)
        return taken


def by_age_in_lanes(pending: Sequence[Pending]) -> list[Pending]:
    """Return the runs with the positions of each lane reassigned by age: its oldest run gets its first position."""
    lanes: dict[str, list[Pending]] = defaultdict(list)
    for run in pending:
        if run.lane is not None:
            lanes[run.lane].append(run)
    first = {lane: iter(sorted(runs, key=lambda run: run.id)) for lane, runs in lanes.items()}
    return [run if run.lane is None else next(first[run.lane]) for run in pending]
