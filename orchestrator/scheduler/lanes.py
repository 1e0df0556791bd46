"""Serve the lanes: learn which have something ready, and share each queue's room among them.

A limit counts code that runs. An attempt that was cancelled, or that timed out and would not end, has no place among
the rows any more but keeps its place in its lane until no worker lists it: until then it *lingers*.

What is remembered here can be had from Postgres at any time, and is when a leader takes over or a tick is rolled back:
lanes by looking through an index, what is in flight by counting it, rates from the table of buckets. The limits are
exact because nobody but the leader claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from orchestrator.domain.lanes import Lanes, Share
from orchestrator.domain.limits import Buckets
from orchestrator.domain.task import parse_options
from orchestrator.scheduler.fleet import Fleet
from orchestrator.scheduler.tick import Tick
from orchestrator.store import lanes as store
from orchestrator.store import waiting
from orchestrator.store.lanes import Head
from orchestrator.store.transitions import Claimed

Attempt = tuple[bytes, int]

_ROUNDS = 4
"""How often a tick goes round the lanes before it lets the next one go on."""
_SLICE = 2_000
"""Lanes that one tick reads."""


class LaneService:
    """The leader's view of all lanes."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start again from what Postgres says: this leader has just begun, or a tick was rolled back."""
        self.buckets = Buckets()
        self._lanes = Lanes(self.buckets)
        self._is_stale = True
        self._read_after: tuple[str, str] | None = ("", "")
        """After which lane reading goes on; None once all have been read."""
        self._has_more = False
        self._lingering: dict[Attempt, str] | None = None
        """Lanes of attempts that have ended and whose code may still run; None until the fleet has been looked at."""

    # -- what is ready and what is in flight

    def recount(self, in_flight: Iterable[str]) -> None:
        """Start from what is in flight: the lane of each such task."""
        self._lanes.recount([*in_flight, *(self._lingering or {}).values()])

    def look(self, tick: Tick, fleet: Fleet) -> None:
        """After a look at the fleet: let go of the attempts whose code has stopped, and of rates that allow all again.

        A new leader takes everything that workers hold and that is not in flight for lingering at first.
        """
        self.buckets.forget_full(tick.now.timestamp())
        if self._lingering == {} or not fleet.is_in_view:
            return
        held = fleet.held()
        if self._lingering is None:
            over = list(held - waiting.current(tick.connection, list(held))) if held else []
            self._lingering = store.lanes_of(tick.connection, over) if over else {}
            for lane in self._lingering.values():
                self._lanes.took_off(lane)
        for attempt in [attempt for attempt in self._lingering if attempt not in held]:
            self._lanes.landed(self._lingering.pop(attempt))

    def read_all(self) -> None:
        """Look through all lanes: many have changed."""
        self._read_after = ("", "")

    def arrive(self, tick: Tick, tasks: Sequence[bytes]) -> None:
        """Take note of tasks that are ready."""
        self._note(store.arrived(tick.connection, tasks))

    def refresh(self, tick: Tick) -> None:
        """Before claiming: read what is not known, and count what has landed."""
        if self._is_stale:
            self.buckets.due.update(store.buckets(tick.connection))
            self.recount(task.lane for task in waiting.in_flight(tick.connection) if task.lane is not None)
            self._is_stale = False
            tick.left_lanes.clear()
            tick.lingering.clear()
        self.count_landed(tick)
        if self._read_after is None and self._lanes.should_read():
            self.read_all()
        if self._read_after is not None:
            heads = store.lanes_after(tick.connection, *self._read_after, _SLICE)
            self._note(heads)
            self._read_after = (heads[-1].queue, heads[-1].lane) if len(heads) == _SLICE else None

    def count_landed(self, tick: Tick) -> None:
        """Count what is no longer in flight, once."""
        for lane in tick.left_lanes:
            self._lanes.landed(lane)
        tick.left_lanes.clear()
        for task, attempt, lane in tick.lingering:
            if self._lingering is None:
                self._lanes.landed(lane)
            else:
                self._lingering[task, attempt] = lane
        tick.lingering.clear()

    def _note(self, heads: Iterable[Head]) -> None:
        for head in heads:
            self._lanes.arrive(head.queue, head.lane, head.priority, parse_options(head.options))

    # -- claiming

    def serves(self, queue: str) -> bool:
        """Say whether a queue has lanes with something in them."""
        return self._lanes.has(queue)

    def claim(self, tick: Tick, rooms: dict[str, int]) -> list[Claimed]:
        """Claim what fits into each queue's room, by turns."""
        claimed: list[Claimed] = []
        now = tick.now.timestamp()
        self._has_more = False
        for _ in range(_ROUNDS):
            shares = self._allot(tick, rooms, now)
            if not shares:
                return claimed
            found = store.claim(tick.connection, shares, tick.now)
            claimed.extend(found)
            for task in found:
                rooms[task.queue] -= 1
            if not self._settle(tick, shares, found, now):
                return claimed
        self._has_more = True
        return claimed

    def _allot(self, tick: Tick, rooms: dict[str, int], now: float) -> list[Share]:
        queues = [queue for queue, room in rooms.items() if room > 0 and self._lanes.has(queue)]
        plain = store.plain_tops(tick.connection, queues) if queues else {}
        return [share for queue in queues for share in self._lanes.allot(queue, rooms[queue], plain.get(queue), now)]

    def _settle(self, tick: Tick, shares: Sequence[Share], found: Sequence[Claimed], now: float) -> bool:
        """Take back what lanes could not use; say whether there was any."""
        if len(found) == sum(share.turns for share in shares):
            return False
        used = Counter((task.queue, task.lane, task.priority) for task in found)
        short = [share for share in shares if used[share[:3]] < share.turns]
        for share in short:
            self._lanes.give_back(share, share.turns - used[share[:3]], now)
        lanes = list({(share.queue, share.lane): None for share in short if share.lane is not None})
        for queue, lane, top in store.tops(tick.connection, lanes) if lanes else ():
            self._lanes.settle(queue, lane, top)
        return bool(short)

    def refuse(self, task: Claimed) -> None:
        """A claimed task was put back at once."""
        if task.lane is not None:
            self._lanes.landed(task.lane)

    def save(self, tick: Tick) -> None:
        """Save the rates that were used."""
        if self.buckets.changed:
            store.save_buckets(tick.connection, {name: self.buckets.due[name] for name in self.buckets.changed})
            self.buckets.changed.clear()

    def patience(self, now: float) -> float | None:
        """Return how many seconds may pass before there is something to do that nobody will tell of."""
        if self._read_after is not None or self._has_more:
            return 0.0
        due = self._lanes.next_due(now)
        return None if due is None else max(0.0, due - now)
