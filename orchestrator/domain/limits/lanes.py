"""Fair scheduling of tasks within limits: by priority, then round-robin over keys, then by age.

A task with a key or a limit of its own waits in a *lane*, `task|key`. All lanes of a task with limits belong to its
*gate*, which holds their shared limits. Lanes of tasks with a key but no limit belong to the gate without a name, and
take turns whatever the task. Tasks with neither key nor limit are the queue's plain traffic, which is one more lane.

    queue ─┬─ plain
           ├─ gate ""       ── lane "|acme"      lane "|globex"  …      fairness only
           └─ gate "mail"   ── lane "mail|acme"  lane "mail|zorg" …     limits of the task `mail`

Every lane has a virtual clock that advances by 1/weight per turn. The next turn goes to the lane with the lowest clock.
A lane that was empty starts at the clock of its queue, so that lanes cannot save up turns. A lane at its limit, or
without tokens, is not in the heap at all, so that a million tasks in it cost nothing.

Each lane counts its known ready tasks, so that few turns are wasted. When all known tasks have had a turn, the lane is
*in doubt*: Postgres is asked for more, unless its last answer said that there are none.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from orchestrator.domain.limits.buckets import Buckets
from orchestrator.domain.limits.lane_limits import LaneLimits, gate_of
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, TaskOptions

MAX_LANES = 50_000
"""Lanes in memory, at most. Further lanes are read from Postgres when there is room."""

FINE, COARSE = 128, 16
"""Parts into which a queue's room is split: `FINE` for up to `FINE` lanes, else `COARSE`. The next lane gets one part
at once, so that ten thousand lanes cost no more than ten."""


class Share(NamedTuple):
    """The turns of one lane in a queue's room."""

    queue: str
    lane: str | None
    """The name of the lane. None for the plain traffic."""
    priority: int
    turns: int


class Rest(IntEnum):
    """Whether a lane has more ready tasks than the known ones."""

    NOTHING = 0
    """Postgres said that there are none, and no task has arrived since."""
    PERHAPS = 1
    SOMETHING = 2


class Stock(NamedTuple):
    """Ready tasks of a lane."""

    top: int
    """The highest priority in the lane."""
    known: int
    """The number of tasks of that priority, at least."""
    rest: Rest


@dataclass(slots=True, eq=False)
class _Lane:
    queue: str
    name: str
    options: TaskOptions
    top: int
    """The highest priority in the lane."""
    clock: float
    known: int = 0
    """Tasks of the top priority that can be given a turn. The lane is in its heap only while there are any."""
    rest: Rest = Rest.PERHAPS
    ticket: int = 0
    """The number of the lane's valid heap entry. Entries with other numbers are void."""
    waits: bool = False
    """The lane waits for its limits, and is in `_full` or `_asleep` exactly once."""

    @property
    def position(self) -> tuple[int, float]:
        """The sort key: higher priority first, then the lower clock."""
        return -self.top, self.clock


_LAST = (1_000, 0.0)
"""Sorts after every lane."""

_Entry = tuple[int, float, int, _Lane]
"""A heap entry: urgency, clock, ticket, lane."""


@dataclass(slots=True)
class _Queue:
    heaps: defaultdict[str, list[_Entry]] = field(default_factory=lambda: defaultdict(list))
    """Heaps of the lanes that may be served, by gate."""
    plain: _Lane = field(default_factory=lambda: _Lane("", "", DEFAULT_OPTIONS, 0, 0.0))
    clock: float = 0.0
    """The clock of the lane that was served last."""
    size: int = 0
    in_doubt: dict[str, _Lane] = field(default_factory=dict)
    """Lanes whose known tasks have all had a turn."""


class Lanes:
    """The lanes with ready tasks, and the turns that each may get."""

    def __init__(self, buckets: Buckets) -> None:
        self._limits = LaneLimits(buckets)
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._queues: dict[str, _Queue] = {}
        self._gates: dict[str, TaskOptions] = {}
        self._full: defaultdict[str, list[_Lane]] = defaultdict(list)
        """Lanes at their limit, by name."""
        self._asleep: list[tuple[float, int, _Lane]] = []
        """A heap of lanes whose rate allows nothing before a certain time."""
        self._tickets = 0
        self._is_partial = False
        """There are more lanes in Postgres than in memory."""

    # -- what is ready

    def has(self, queue: str) -> bool:
        """Return whether a queue has a lane with ready tasks."""
        state = self._queues.get(queue)
        return state is not None and state.size > 0

    def filled(self) -> Iterator[str]:
        """Yield the queues that have a lane with ready tasks."""
        return filter(self.has, self._queues)

    def has_next(self, queue: str, now: float) -> bool:
        """Return whether a lane of the queue can be given a turn now, or is in doubt with more tasks."""
        if (state := self._queues.get(queue)) is None:
            return False
        in_doubt = any(lane.rest is Rest.SOMETHING for lane in state.in_doubt.values())
        return in_doubt or self._next_heap(state, None, now) is not None

    def arrive(self, queue: str, name: str, priority: int, options: TaskOptions, is_first: bool = False) -> None:
        """Count a task that became ready in a lane. With `is_first` more tasks of the lane follow."""
        if (lane := self._open(queue, name, priority, options)) is None:
            return
        lane.rest = max(lane.rest, Rest.PERHAPS)
        if lane.known == 0 or priority > lane.top:
            if lane.known:
                lane.rest = Rest.SOMETHING
            lane.top, lane.known = priority, 1
            self._push(lane)
        elif priority == lane.top:
            lane.known += 1
        else:
            lane.rest = Rest.SOMETHING
        if is_first:
            self._doubt(lane, Rest.SOMETHING)

    def claimed_early(self, queue: str, name: str, priority: int, options: TaskOptions) -> None:
        """Record that a task was claimed before it was counted. It used the turn of another ready task."""
        lane = self._lanes.get((queue, name))
        if lane is not None:
            lane.rest = max(lane.rest, Rest.PERHAPS)
        elif (lane := self._open(queue, name, priority, options)) is not None:
            self._doubt(lane, Rest.PERHAPS)

    def learn(self, queue: str, name: str, stock: Stock | None, options: TaskOptions | None = None) -> None:
        """Apply the answer of Postgres: the ready tasks of a lane, or None if there are none."""
        lane = self._lanes.get((queue, name))
        if stock is not None and options is not None:
            lane = self._open(queue, name, stock.top, options)
        if lane is None:
            return
        self._queues[queue].in_doubt.pop(name, None)
        if stock is None:
            self._close(lane)
            return
        has_changed = stock.known != lane.known or stock.top != lane.top
        lane.top, lane.known, lane.rest = stock
        if has_changed:
            self._push(lane)

    def in_doubt(self, queue: str, limit: int) -> list[str]:
        """Return lanes of a queue whose ready tasks must be read from Postgres. Forget lanes known to be empty."""
        doubts = self._queues[queue].in_doubt
        for lane in [lane for lane in doubts.values() if lane.rest is Rest.NOTHING]:
            del doubts[lane.name]
            self._close(lane)
        return list(islice(doubts, limit))

    def _open(self, queue: str, name: str, priority: int, options: TaskOptions) -> _Lane | None:
        """Return a lane, created if necessary, or None if memory has no room for it."""
        state = self._queues.get(queue)
        if state is None:
            state = self._queues[queue] = _Queue()
        self._gates[gate_of(name)] = options  # the limits of the newest task apply
        lane = self._lanes.get((queue, name))
        if lane is not None:
            lane.options = options
        elif len(self._lanes) < MAX_LANES:
            lane = self._lanes[queue, name] = _Lane(queue, name, options, priority, state.clock)
            state.size += 1
        else:
            self._is_partial = True
        return lane

    def _close(self, lane: _Lane) -> None:
        lane.ticket = 0
        del self._lanes[lane.queue, lane.name]
        self._queues[lane.queue].size -= 1

    def _doubt(self, lane: _Lane, rest: Rest) -> None:
        """Remove a lane from its heap until Postgres has been asked for its ready tasks."""
        lane.known = lane.ticket = 0
        lane.rest = rest
        self._queues[lane.queue].in_doubt[lane.name] = lane

    def options_of(self, name: str, queue: str = "") -> TaskOptions | None:
        """Return the options of a lane of a queue, or of its gate. None if they are not loaded yet."""
        lane = self._lanes.get((queue, name))
        return self._gates.get(gate_of(name)) if lane is None else lane.options

    def should_read(self) -> bool:
        """Return, once, whether lanes should be read again: some did not fit into memory, and now there is room."""
        if not self._is_partial or len(self._lanes) > MAX_LANES // 2:
            return False
        self._is_partial = False
        return True

    # -- what is in flight

    def recount(self, lanes: Iterable[str]) -> None:
        """Replace the counts of tasks in flight. `lanes` holds one name for each task."""
        self._limits.recount(lanes)
        self._release_open()

    def _release_open(self) -> None:
        for lane, waiting in list(self._full.items()):
            if not all(self._limits.is_full(lane, each.options) for each in waiting):
                self._release(lane)

    def share(self, elsewhere: Mapping[str, int]) -> None:
        """Set the tasks in flight in other shards, by lane and gate."""
        if elsewhere != self._limits.elsewhere:
            self._limits.elsewhere = elsewhere
            self._release_open()

    def limited(self) -> set[str]:
        """Return the names of limited lanes and gates that have ready tasks."""
        lanes = {name for _, name in self._lanes if gate_of(name)}
        return lanes.union(map(gate_of, lanes))

    def in_flight(self) -> dict[str, int]:
        """Return the tasks in flight by lane and gate, for those with limits."""
        return self._limits.limited()

    def add_in_flight(self, lane: str) -> None:
        """Count a task in flight that was not known before."""
        self._limits.count(lane, 1)

    def remove_in_flight(self, lane: str, number: int = 1) -> None:
        """Count tasks of a lane as no longer in flight."""
        self._limits.count(lane, -number)
        self._release(lane)

    def start_reported(self, lane: str) -> None:
        """Record that the start of a task was reported: the lane's rate may allow more now."""
        self._release(lane)

    def _release(self, name: str) -> None:
        if name in self._full:
            for lane in self._full.pop(name):
                lane.waits = False
                self._push(lane)

    # -- turns

    def allot(self, queue: str, room: int, plain_top: int | None, now: float) -> list[Share]:
        """Give up to `room` turns to the lanes of a queue. `plain_top` is the priority of the first plain task, if any.

        It stops early before a lane in doubt whose turn would be next.
        """
        self._wake(now)
        state = self._queues[queue]
        plain = state.plain
        plain.clock = max(plain.clock, state.clock)
        if plain_top is not None:
            plain.top = plain_top
        shares: dict[tuple[str | None, int], int] = {}
        part = -(-room // (FINE if state.size <= FINE else COARSE))
        barrier = min((lane.position for lane in state.in_doubt.values() if lane.rest is Rest.SOMETHING), default=_LAST)
        while room > 0:
            heap = self._next_heap(state, None if plain_top is None else plain.position, now)
            if heap is None and plain_top is None:
                break
            lane = plain if heap is None else heap[0][3]
            if lane.position > barrier:
                break
            requested = min(room, part)
            if heap is not None:
                requested = 1 if self._is_shared(lane) else min(requested, lane.known)
            turns = requested if heap is None else self._take(lane, requested, now)
            if turns:
                turn = None if heap is None else lane.name, lane.top
                shares[turn] = shares.get(turn, 0) + turns
                state.clock = lane.clock
                lane.clock += turns / lane.options.weight
                room -= turns
            if heap is not None:
                lane.known -= turns
                if self._requeue_first(heap, has_time=turns == requested):
                    continue
                if not lane.known and lane.rest is Rest.SOMETHING:
                    barrier = min(barrier, lane.position)
        return [Share(queue, name, top, turns) for (name, top), turns in shares.items()]

    def _requeue_first(self, heap: list[_Entry], *, has_time: bool) -> bool:
        """Put the first lane of a heap back with its new clock. Return False if it has no known tasks, or waits."""
        lane = heap[0][3]
        if lane.known and has_time:
            heapq.heapreplace(heap, self._entry(lane))
            return True
        heapq.heappop(heap)
        lane.ticket = 0
        if not lane.known:
            self._doubt(lane, lane.rest)
        return False

    def _is_shared(self, lane: _Lane) -> bool:
        """Return whether the gate has shared limits. Then its lanes get one turn at a time."""
        options = self._gates[gate_of(lane.name)]
        return options.total_concurrency is not None or options.total_rate is not None

    def _take(self, lane: _Lane, requested: int, now: float) -> int:
        """Return how many turns a lane's own limits allow, and count them. Park a lane at its limit."""
        granted = self._limits.take(lane.name, lane.options, requested, now)
        lane.waits = granted.is_full or granted.until is not None
        if granted.is_full:
            self._full[lane.name].append(lane)
        elif granted.until is not None:
            self._tickets += 1
            heapq.heappush(self._asleep, (granted.until, self._tickets, lane))
        return granted.turns

    def return_turns(self, queue: str, name: str, unused: int, now: float) -> None:
        """Take back turns that a lane could not use."""
        lane = self._lanes[queue, name]
        self._limits.spend(lane.name, lane.options, now, -unused)
        lane.clock -= unused / lane.options.weight
        lane.waits = False
        self._doubt(lane, Rest.SOMETHING)
        self._release(lane.name)

    def refuse(self, queue: str, name: str) -> None:
        """Record that a task was given a turn and put back to pending at once.

        It may be claimed again before it is counted, and use the turn of another counted task.
        """
        self.remove_in_flight(name)
        if (lane := self._lanes.get((queue, name))) is not None:
            lane.rest = max(lane.rest, Rest.PERHAPS)

    def next_due(self, now: float) -> float | None:
        """Return the earliest time at which a rate allows a waiting task to start."""
        times = [time for time, _, _ in self._asleep[:1]]
        heaps = (heap for state in self._queues.values() for heap in state.heaps.items())
        times += filter(None, (self._limits.opens_at(gate, self._gates[gate], now) for gate, heap in heaps if heap))
        return min(times, default=None)

    def _push(self, lane: _Lane) -> None:
        if lane.known and not lane.waits and self._lanes.get((lane.queue, lane.name)) is lane:
            heapq.heappush(self._queues[lane.queue].heaps[gate_of(lane.name)], self._entry(lane))

    def _entry(self, lane: _Lane) -> _Entry:
        """Return a new heap entry for a lane. It voids the previous one."""
        self._tickets += 1
        lane.ticket = self._tickets
        return -lane.top, lane.clock, lane.ticket, lane

    def _wake(self, now: float) -> None:
        while self._asleep and self._asleep[0][0] <= now:
            lane = heapq.heappop(self._asleep)[2]
            lane.waits = False
            self._push(lane)

    def _next_heap(self, state: _Queue, plain: tuple[int, float] | None, now: float) -> list[_Entry] | None:
        """Return the heap whose first lane is next. None for the plain traffic, or if no lane is ready."""
        best: tuple[int, float, int] | None = None if plain is None else (*plain, 0)
        chosen = None
        for gate, heap in state.heaps.items():
            while heap and heap[0][2] != heap[0][3].ticket:
                heapq.heappop(heap)
            if heap and (best is None or heap[0][:3] < best) and self._limits.is_open(gate, self._gates[gate], now):
                best, chosen = heap[0][:3], heap
        return chosen
