"""Runs that wait: to begin, to go on, or to be told what happened to them, because they are stuck or time was up.

All of it waits in Postgres, and trees of runs are served by turns. Who is told nothing is remembered here, and can be
had from Postgres at any time.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

import orchestrator
from orchestrator.domain.ids import to_text
from orchestrator.domain.runs.happened import Happened
from orchestrator.scheduler.budget import COST
from orchestrator.store.dag import plans as dags
from orchestrator.store.database import said
from orchestrator.store.runs import cancels, stuck, untold
from orchestrator.store.runs import life as runs
from orchestrator.store.runs.life import Pending
from orchestrator.store.runs.untold import Waited
from orchestrator.store.tasks.transitions import identifier
from orchestrator.telemetry import get_logger

if TYPE_CHECKING:
    from orchestrator.scheduler.tick import Tick

log = get_logger("scheduler")

_MOST_FREED = 1_000
"""Runs that a new release tries again in one tick."""


_REMEMBERED = 10_000
"""Runs that wait, at most; if there are more, Postgres is asked about those that matter."""
_LOOKED_AT = 200
"""Places of the line."""
_TAKEN_BYTES = 4_000_000
"""What is taken from the line between two looks at the clock."""


class Backlog:
    """The leader's view of the runs that wait to be told."""

    def __init__(self) -> None:
        self._waiting: set[bytes] | None = None
        """All of them; None if that is not known, or if they are too many."""
        self._are_many = False
        self._pending = runs.pending()
        self._expanding = dags.expanding()
        self._line = untold.Line()
        self._last_cancelled = bytes(16)
        self._has_older = True
        """Another release may have set runs aside, which this one tries again."""

    def forget(self) -> None:
        """Something was rolled back: what is known may not be true."""
        self._waiting = None
        self._are_many = False

    def waiting(self, tick: Tick, runs: Sequence[bytes]) -> set[bytes]:
        """Return those of these runs that are told nothing now."""
        if not runs:
            return set()
        if self._waiting is None and not self._are_many:
            self._waiting = untold.waiting(tick.connection, _REMEMBERED)
            self._are_many = self._waiting is None
        if self._waiting is None:
            return untold.waiting_among(tick.connection, runs)
        return self._waiting.intersection(runs) if self._waiting else set()

    def _note(self, *, wait: Iterable[bytes] = (), go_on: Iterable[bytes] = ()) -> None:
        """Keep what is remembered true."""
        if self._waiting is not None:
            self._waiting.difference_update(go_on)
            self._waiting.update(wait)
            if len(self._waiting) > _REMEMBERED:
                self.forget()

    def pending(self, tick: Tick, limit: int) -> list[Pending]:
        """Return the next runs that want to begin."""
        return [Pending(identifier(row[0]), row[1], row[2]) for row in self._pending(tick.connection, limit)]

    def expanding(self, tick: Tick, limit: int) -> list[bytes]:
        """Return the next runs of which more tasks are to be created."""
        return [identifier(row[0]) for row in self._expanding(tick.connection, limit)]

    def cancelling(self, tick: Tick, limit: int) -> list[bytes]:
        """Return the next runs that are being cancelled; after the last of them come the first again."""
        found = cancels.following(tick.connection, self._last_cancelled, limit)
        self._last_cancelled = found[-1] if len(found) == limit else bytes(16)
        return found

    def free_older(self, tick: Tick) -> None:
        """Let runs try again, once, that another release has set aside."""
        if self._has_older:
            freed = stuck.free_older(tick.connection, orchestrator.__version__, _MOST_FREED)
            self._has_older = len(freed) == _MOST_FREED
            self.freed(tick, freed)

    def free(self, tick: Tick, runs: Sequence[bytes]) -> set[bytes]:
        """Let stuck runs try again; return those among these."""
        freed = stuck.free(tick.connection, runs)
        self.freed(tick, freed)
        return set(freed)

    def freed(self, tick: Tick, runs: Sequence[bytes]) -> None:
        """Take note that stuck runs may go on."""
        if runs:
            log.info("%d stuck runs try again", len(runs))
            self.forget()
            tick.has_wishes = True

    def add(self, tick: Tick, some: Iterable[tuple[bytes, Happened]], *, is_over: bool = False) -> None:
        """Keep what happened to runs for another tick; of runs that are over, until they have begun again."""
        rows = list(some)
        untold.add(tick.connection, rows, is_over=is_over)
        self._note(wait=(run for run, _ in rows))
        tick.has_wishes = True

    def set_aside(self, tick: Tick, run: bytes, happened: Sequence[Happened], error: Exception) -> None:
        """Let a run be stuck that cannot be told what happened to it; nobody else waits for it.

        What happened is added to what stands in the line already.
        """
        reason = {"event": 0, "kind": type(error).__name__, "message": said(error), "difference": ""}
        reason |= {"release": orchestrator.__version__}
        told = "".join(traceback.format_exception(error))
        log.error("run %s is stuck, and nobody waits for it: %s", to_text(run), told)
        stuck.set_aside(tick.connection, [(run, msgspec.json.encode(reason).decode().replace("\\u0000", " "))])
        self._note(wait=[run])
        self.add(tick, [(run, one) for one in happened])

    def next(self, tick: Tick) -> list[Waited]:
        """Return what the next runs in the line are to be told.

        It is as much as can be done between two looks at the clock, or one. It keeps its place until it is removed.
        """
        line = self._line(tick.connection, _LOOKED_AT)
        if self._are_many and len(line) < _LOOKED_AT:
            self.forget()  # they may be few again
        if not line:
            return []
        steps = tick.dags.sizes(dags.versions(tick.connection, list({place.run for place in line})))
        ids: list[int] = []
        cost = size = 0
        for place in line:
            cost += COST + steps(place.run)
            size += place.size
            if ids and (cost > tick.budget.slice or size > _TAKEN_BYTES):
                break
            ids.append(place.id)
        return untold.read(tick.connection, ids)

    def remove(self, tick: Tick, some: Iterable[Waited]) -> None:
        """Keep no longer what runs are told now; if that is all, they no longer wait."""
        told = list(some)
        unfinished = untold.remove(tick.connection, [place for waited in told for place in waited.ids])
        self._note(go_on={waited.run for waited in told} - unfinished)

    def release(self, tick: Tick, runs: Sequence[bytes]) -> None:
        """Let runs hear, now that they have begun again, what they were not told before they ended."""
        late = self.waiting(tick, runs)
        if late:
            untold.release(tick.connection, list(late))

    def take_of(self, tick: Tick, runs: Sequence[bytes]) -> Mapping[bytes, Sequence[Happened]]:
        """Return all that these runs have not been told; they are no longer stuck."""
        taken = untold.take_of(tick.connection, runs)
        self._note(go_on=runs)
        return taken
