"""Runs that wait: to begin, to go on, or to be notified of pending changes, because they are stuck or time was up.

All of it waits in Postgres, and trees of runs are served by turns. The leader remembers which runs have pending
changes, and can read that from Postgres at any time.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

import orchestrator
from orchestrator.domain.ids import about_run, to_text
from orchestrator.domain.runs import RunChanges
from orchestrator.scheduler.budget import COST
from orchestrator.scheduler.tick_result import CommitHooks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store import shards
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag.plans import Version
from orchestrator.store.database import said
from orchestrator.store.runs import ancestry, cancels, pending_changes, stuck
from orchestrator.store.runs import transitions as runs
from orchestrator.store.runs.pending_changes import Waited
from orchestrator.store.runs.transitions import Pending, RunRow
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

_MOST_FREED = 1_000
"""Runs that a new release tries again in one tick."""


_REMEMBERED = 10_000
"""Runs that wait, at most; if there are more, Postgres is asked about those that matter."""
_LOOKED_AT = 200
"""Places of the line."""
_TAKEN_BYTES = 4_000_000
"""Bytes taken from the backlog between two looks at the clock."""
LOOKS_EVERY = timedelta(seconds=0.1)
"""How often it is looked whether another shard has left room in a lane."""


RunAndChanges = tuple[bytes, Sequence[RunChanges]]
"""A run, and what happened to it since it was last notified."""
Sizes = Callable[[Mapping[bytes, Version]], Callable[[bytes], int]]
"""Returns a function that says how many steps a run of these versions has."""


class Backlog(CommitHooks):
    """The leader's view of the runs that have pending changes."""

    def __init__(self) -> None:
        self._waiting: set[bytes] | None = None
        """All of them; None if that is not known, or if they are too many."""
        self._are_many = False
        self._pending = runs.pending()
        self._expanding = dags.expanding()
        self._line = pending_changes.PendingChangesQueue()
        self._last_cancelled = bytes(16)
        self.parked_lanes: set[str] | None = None
        """With several shards: where runs wait for room that another may leave. None until that is read."""
        self._looked_at: datetime | None = None
        self._inherits = True
        """Without other shards: runs may be parked for room that shards had which are gone."""
        self._has_older = True
        """Another release may have set runs aside, which this one tries again."""

    def rolled_back(self) -> None:
        """The cached backlog may be wrong."""
        self._forget()
        self.parked_lanes = None
        self._inherits = True
        self._has_older = True

    def _forget(self) -> None:
        """Read the waiting runs from Postgres again."""
        self._waiting = None
        self._are_many = False

    def waiting(self, tx: Transaction, runs: Sequence[bytes]) -> set[bytes]:
        """Return those of these runs that have pending changes, and are notified of nothing else before these."""
        if not runs:
            return set()
        if self._waiting is None and not self._are_many:
            self._waiting = pending_changes.waiting(tx.connection, _REMEMBERED)
            self._are_many = self._waiting is None
        if self._waiting is None:
            return pending_changes.waiting_among(tx.connection, runs)
        return self._waiting.intersection(runs) if self._waiting else set()

    def _note(self, *, wait: Iterable[bytes] = (), go_on: Iterable[bytes] = ()) -> None:
        """Keep what is remembered true."""
        if self._waiting is not None:
            self._waiting.difference_update(go_on)
            self._waiting.update(wait)
            if len(self._waiting) > _REMEMBERED:
                self._forget()

    def pending(self, tx: Transaction, limit: int) -> list[Pending]:
        """Return the next runs that want to begin."""
        found = [Pending(row.id, row.workflow, row.version, row.lane) for row in self._pending(tx.connection, limit)]
        if tx.shard is not None and (lanes := {run.lane for run in found if run.lane is not None}):
            mine = {None, *ancestry.try_lanes(tx.connection, lanes)}
            tx.result.wake.contested |= len(mine) <= len(lanes)
            found = [run for run in found if run.lane in mine]
        return in_line(found)

    def park(self, waiting: Iterable[RunRow]) -> None:
        """Take note of runs for whose lanes there is no room in all shards."""
        if self.parked_lanes is not None:
            self.parked_lanes.update(row.lane for row in waiting if row.lane is not None)

    def look_for_room(self, tx: Transaction) -> None:
        """Let parked runs try again where another shard has left room: nobody tells.

        Those that a shard has left before it was given up are looked for once.
        """
        if tx.shard is None:
            if self._inherits and shards.are_there(tx.connection) and (lanes := ancestry.parked_lanes(tx.connection)):
                runs.unpark(tx.connection, lanes)
                tx.result.wake.runs_to_begin = True
            self._inherits = False
            return
        if self.parked_lanes is None:
            self.parked_lanes = set(ancestry.parked_lanes(tx.connection))
        if self.parked_lanes and (self._looked_at is None or abs(tx.now - self._looked_at) >= LOOKS_EVERY):
            self._looked_at = tx.now
            self.parked_lanes, any_tries = ancestry.unpark(tx.connection, self.parked_lanes)
            tx.result.wake.runs_to_begin |= any_tries

    def expanding(self, tx: Transaction, limit: int) -> list[bytes]:
        """Return the next runs of which more tasks are to be created."""
        return [row.id for row in self._expanding(tx.connection, limit)]

    def cancelling(self, tx: Transaction, limit: int) -> list[bytes]:
        """Return the next runs that are being cancelled; after the last of them come the first again."""
        found = cancels.following(tx.connection, self._last_cancelled, limit)
        self._last_cancelled = found[-1] if len(found) == limit else bytes(16)
        return found

    def free_older(self, tx: Transaction) -> None:
        """Let runs try again, once, that another release has set aside."""
        if self._has_older:
            freed = stuck.free_older(tx.connection, orchestrator.__version__, _MOST_FREED)
            self._has_older = len(freed) == _MOST_FREED
            self.freed(tx, freed)

    def free(self, tx: Transaction, runs: Sequence[bytes]) -> set[bytes]:
        """Let stuck runs try again; return those among these."""
        freed = stuck.free(tx.connection, runs)
        self.freed(tx, freed)
        return set(freed)

    def freed(self, tx: Transaction, runs: Sequence[bytes]) -> None:
        """Take note that stuck runs may go on."""
        if runs:
            log.info("run.stuck_retried runs=%d", len(runs))
            tx.budget.forgive(runs)
            self._forget()
            tx.result.outgoing.counted += runs
            tx.result.wake.requests = True

    def add(self, tx: Transaction, some: Iterable[tuple[bytes, RunChanges]], *, is_over: bool = False) -> None:
        """Keep what happened to runs for another tick; of runs that are over, until they have begun again."""
        rows = list(some)
        pending_changes.add(tx.connection, rows, is_over=is_over)
        self._note(wait=(run for run, _ in rows))
        tx.result.wake.requests = True

    def set_aside(self, tx: Transaction, some: RunAndChanges, error: Exception) -> None:
        """Mark a run that cannot be notified as stuck, so that others do not wait for it.

        Its changes are added to its pending ones.
        """
        run, changes = some
        reason = {"event": 0, "kind": type(error).__name__, "message": said(error), "difference": ""}
        reason |= {"release": orchestrator.__version__}
        trace = "".join(traceback.format_exception(error))
        log.error("run.stuck run=%s error=%s: nobody waits for this run", to_text(run), trace, extra=about_run(run))
        stuck.set_aside(tx.connection, [(run, msgspec.json.encode(reason).decode().replace("\\u0000", " "))])
        self._note(wait=[run])
        tx.result.outgoing.counted.append(run)
        self.add(tx, [(run, one) for one in changes])

    def next(self, tx: Transaction, sizes: Sizes) -> list[Waited]:
        """Return the pending changes of the next runs in the line.

        It is as much as can be done between two looks at the clock, or one. It keeps its place until it is removed.
        """
        line = self._line(tx.connection, _LOOKED_AT)
        if self._are_many and len(line) < _LOOKED_AT:
            self._forget()  # they may be few again
        if not line:
            return []
        steps = sizes(dags.versions(tx.connection, list({place.run for place in line})))
        ids: list[int] = []
        cost = size = 0
        for place in line:
            cost += COST + steps(place.run)
            size += place.size
            if ids and (cost > tx.budget.slice or size > _TAKEN_BYTES):
                break
            ids.append(place.id)
        return pending_changes.read(tx.connection, ids)

    def remove(self, tx: Transaction, some: Iterable[Waited]) -> None:
        """Remove pending changes of which runs are notified now; runs that have no others no longer wait."""
        waited = list(some)
        unfinished = pending_changes.remove(tx.connection, [place for one in waited for place in one.ids])
        self._note(go_on={one.run for one in waited} - unfinished)

    def release(self, tx: Transaction, runs: Sequence[bytes]) -> None:
        """Let runs that have begun again be notified of changes that were pending when they ended."""
        late = self.waiting(tx, runs)
        if late:
            pending_changes.release(tx.connection, list(late))

    def take_of(self, tx: Transaction, runs: Sequence[bytes]) -> Mapping[bytes, Sequence[RunChanges]]:
        """Take all pending changes of these runs, which are no longer stuck."""
        taken = pending_changes.take_of(tx.connection, runs)
        self._note(go_on=runs)
        return taken


def in_line(pending: Sequence[Pending]) -> list[Pending]:
    """Return runs in the same order, but those of one lane by age: the oldest gets the first position of the lane."""
    lanes: dict[str, list[Pending]] = defaultdict(list)
    for run in pending:
        if run.lane is not None:
            lanes[run.lane].append(run)
    first = {lane: iter(sorted(runs, key=lambda run: run.id)) for lane, runs in lanes.items()}
    return [run if run.lane is None else next(first[run.lane]) for run in pending]
