"""Whose turn it is: priority first, then keys by turns, then age; and never more than the limits allow.

A task with a key or a limit of its own waits in a *lane*, `task|key`. The lanes of a task that has limits stand before
its *gate*, which holds for all of them together. Where there is nothing but a key, the gate has no name, and keys
share their turns whatever the task. What has neither key nor limit is the queue's plain traffic: one more lane.

    queue ─┬─ plain
           ├─ gate ""       ── lane "|acme"      lane "|globex"  …      fairness alone
           └─ gate "mail"   ── lane "mail|acme"  lane "mail|zorg" …     limits of the task `mail`

Every lane has a clock that moves by 1/weight with each task it is given, and the lane that is furthest behind is next.
A lane that was empty starts where the others are, so nobody can save turns up. A lane that is at its limit, or whose
rate allows nothing yet, does not stand in line at all, so that a million tasks behind it cost nothing.

Of each lane it is known how many tasks can be had, so that a turn is rarely given to nobody. When those have been given
away the lane is *in doubt*, and Postgres is asked what is left, unless it has just said that there is nothing else.
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

MOST_LANES = 50_000
"""Lanes that are remembered at once. Of those beyond, Postgres is asked when there is room again."""

FINE, COARSE = 128, 16
"""Parts into which a queue's room is cut, where it has no more lanes than the first number, and where it has more: a
lane that is next is given a part. So ten thousand lanes cost no more than ten."""


class Share(NamedTuple):
    """The share of one lane in a queue's room."""

    queue: str
    lane: str | None
    """None for the plain traffic."""
    priority: int
    turns: int


class Rest(IntEnum):
    """Whether a lane has more than the known tasks."""

    NOTHING = 0
    """So Postgres has said, and nothing has arrived since."""
    PERHAPS = 1
    SOMETHING = 2


class Stock(NamedTuple):
    """Ready tasks of a lane."""

    top: int
    """The priority of its most urgent task."""
    known: int
    """How many of that priority there are, at least."""
    rest: Rest


@dataclass(slots=True, eq=False)
class _Lane:
    queue: str
    name: str
    options: TaskOptions
    top: int
    """The priority of its most urgent task."""
    clock: float
    known: int = 0
    """Tasks of that priority that can be given a turn; the lane stands in line only while there are any."""
    rest: Rest = Rest.PERHAPS
    ticket: int = 0
    """Its place in line; an older ticket is void."""
    waits: bool = False
    """For its limits, where it will be found again: once, whatever arrives meanwhile."""

    @property
    def position(self) -> tuple[int, float]:
        """Before which others it comes: the more urgent, and then the further behind."""
        return -self.top, self.clock


_LAST = (1_000, 0.0)
"""Behind every lane."""

_Entry = tuple[int, float, int, _Lane]
"""A place in line: urgency, clock, ticket, lane."""


@dataclass(slots=True)
class _Queue:
    lines: defaultdict[str, list[_Entry]] = field(default_factory=lambda: defaultdict(list))
    """By gate, the lanes that may be served: heaps."""
    plain: _Lane = field(default_factory=lambda: _Lane("", "", DEFAULT_OPTIONS, 0, 0.0))
    clock: float = 0.0
    """Of the lane that was served last."""
    size: int = 0
    """How many lanes it has."""
    in_doubt: dict[str, _Lane] = field(default_factory=dict)
    """Lanes whose known tasks have all been given a turn."""


class Lanes:
    """The lanes in which something is ready, and what each of them may be given."""

    def __init__(self, buckets: Buckets) -> None:
        self._limits = LaneLimits(buckets)
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._queues: dict[str, _Queue] = {}
        self._gates: dict[str, TaskOptions] = {}
        self._full: defaultdict[str, list[_Lane]] = defaultdict(list)
        """Lanes that are at their limit, by name."""
        self._asleep: list[tuple[float, int, _Lane]] = []
        """Lanes whose rate allows nothing before a time: a heap."""
        self._tickets = 0
        self._is_partial = False
        """Not all lanes are remembered."""

    # -- what is ready

    def has(self, queue: str) -> bool:
        """Say whether a queue has a lane in which something is ready."""
        place = self._queues.get(queue)
        return place is not None and place.size > 0

    def filled(self) -> Iterator[str]:
        """Yield the queues that have a lane in which something is ready."""
        return filter(self.has, self._queues)

    def has_next(self, queue: str, now: float) -> bool:
        """Say whether a lane of a queue could be given a turn now, or perhaps could."""
        if (place := self._queues.get(queue)) is None:
            return False
        in_doubt = any(lane.rest is Rest.SOMETHING for lane in place.in_doubt.values())
        return in_doubt or self._next_line(place, None, now) is not None

    def arrive(self, queue: str, name: str, priority: int, options: TaskOptions, is_first: bool = False) -> None:
        """Take note that a task is ready in a lane, or that it is the first of several."""
        if (lane := self._open(queue, name, priority, options)) is None:
            return
        lane.rest = max(lane.rest, Rest.PERHAPS)
        if lane.known == 0 or priority > lane.top:
            if lane.known:
                lane.rest = Rest.SOMETHING
            lane.top, lane.known = priority, 1
            self._line_up(lane)
        elif priority == lane.top:
            lane.known += 1
        else:
            lane.rest = Rest.SOMETHING
        if is_first:
            self._doubt(lane, Rest.SOMETHING)

    def was_overtaken(self, queue: str, name: str, priority: int, options: TaskOptions) -> None:
        """Note that a task was claimed before it was counted: it took the turn of another, which may be left."""
        lane = self._lanes.get((queue, name))
        if lane is not None:
            lane.rest = max(lane.rest, Rest.PERHAPS)
        elif (lane := self._open(queue, name, priority, options)) is not None:
            self._doubt(lane, Rest.PERHAPS)

    def learn(self, queue: str, name: str, stock: Stock | None, options: TaskOptions | None = None) -> None:
        """Take note of what Postgres says is ready in a lane: None if nothing is."""
        lane = self._lanes.get((queue, name))
        if stock is not None and options is not None:
            lane = self._open(queue, name, stock.top, options)
        if lane is None:
            return
        self._queues[queue].in_doubt.pop(name, None)
        if stock is None:
            self._close(lane)
            return
        is_other = stock.known != lane.known or stock.top != lane.top
        lane.top, lane.known, lane.rest = stock
        if is_other:
            self._line_up(lane)

    def in_doubt(self, queue: str, limit: int) -> list[str]:
        """Return lanes of a queue of which Postgres has to be asked what is left; forget those that are empty."""
        doubts = self._queues[queue].in_doubt
        for lane in [lane for lane in doubts.values() if lane.rest is Rest.NOTHING]:
            del doubts[lane.name]
            self._close(lane)
        return list(islice(doubts, limit))

    def _open(self, queue: str, name: str, priority: int, options: TaskOptions) -> _Lane | None:
        """Return a lane, a new one if need be; None if there is no room for it."""
        place = self._queues.get(queue)
        if place is None:
            place = self._queues[queue] = _Queue()
        self._gates[gate_of(name)] = options  # the newest task says what the limits are
        lane = self._lanes.get((queue, name))
        if lane is not None:
            lane.options = options
        elif len(self._lanes) < MOST_LANES:
            lane = self._lanes[queue, name] = _Lane(queue, name, options, priority, place.clock)
            place.size += 1
        else:
            self._is_partial = True
        return lane

    def _close(self, lane: _Lane) -> None:
        lane.ticket = 0
        del self._lanes[lane.queue, lane.name]
        self._queues[lane.queue].size -= 1

    def _doubt(self, lane: _Lane, rest: Rest) -> None:
        """Let a lane leave the line until it is known what it has left."""
        lane.known = lane.ticket = 0
        lane.rest = rest
        self._queues[lane.queue].in_doubt[lane.name] = lane

    def options_of(self, name: str, queue: str = "") -> TaskOptions | None:
        """Return the options of a lane of a queue, or of its gate; None if they are not known yet."""
        lane = self._lanes.get((queue, name))
        return self._gates.get(gate_of(name)) if lane is None else lane.options

    def should_read(self) -> bool:
        """Say, once, that lanes should be read again: not all could be remembered, and now there is room."""
        if not self._is_partial or len(self._lanes) > MOST_LANES // 2:
            return False
        self._is_partial = False
        return True

    # -- what is in flight

    def recount(self, lanes: Iterable[str]) -> None:
        """Start from what is in flight, one name for each task."""
        self._limits.recount(lanes)
        self._release_open()

    def _release_open(self) -> None:
        for lane, waiting in list(self._full.items()):
            if not all(self._limits.is_full(lane, each.options) for each in waiting):
                self._release(lane)

    def share(self, elsewhere: Mapping[str, int]) -> None:
        """Take note of what other shards have in flight, by lane and gate."""
        if elsewhere != self._limits.elsewhere:
            self._limits.elsewhere = elsewhere
            self._release_open()

    def limited(self) -> set[str]:
        """Return the names of lanes and gates that have limits, and in which something is ready."""
        lanes = {name for _, name in self._lanes if gate_of(name)}
        return lanes.union(map(gate_of, lanes))

    def held(self) -> dict[str, int]:
        """Return what is in flight, by lane and gate, where there are limits."""
        return self._limits.limited()

    def took_off(self, lane: str) -> None:
        """Note a running task of a lane that was unknown."""
        self._limits.count(lane, 1)

    def landed(self, lane: str, number: int = 1) -> None:
        """Take note that tasks of a lane are no longer in flight."""
        self._limits.count(lane, -number)
        self._release(lane)

    def heard(self, lane: str) -> None:
        """Take note that it was heard of a task of a lane: its rate may allow more now."""
        self._release(lane)

    def _release(self, name: str) -> None:
        if name in self._full:
            for lane in self._full.pop(name):
                lane.waits = False
                self._line_up(lane)

    # -- turns

    def allot(self, queue: str, room: int, plain_top: int | None, now: float) -> list[Share]:
        """Give `room` turns away; `plain_top` is the priority of the first plain task, if there is one.

        Fewer are given if a lane would be next of which it is not known what it has left.
        """
        self._wake(now)
        place = self._queues[queue]
        plain = place.plain
        plain.clock = max(plain.clock, place.clock)
        if plain_top is not None:
            plain.top = plain_top
        given: dict[tuple[str | None, int], int] = {}
        at_once = -(-room // (FINE if place.size <= FINE else COARSE))
        barrier = min((lane.position for lane in place.in_doubt.values() if lane.rest is Rest.SOMETHING), default=_LAST)
        while room > 0:
            line = self._next_line(place, None if plain_top is None else plain.position, now)
            if line is None and plain_top is None:
                break
            lane = plain if line is None else line[0][3]
            if lane.position > barrier:
                break
            wanted = min(room, at_once)
            if line is not None:
                wanted = 1 if self._is_shared(lane) else min(wanted, lane.known)
            turns = wanted if line is None else self._take(lane, wanted, now)
            if turns:
                turn = None if line is None else lane.name, lane.top
                given[turn] = given.get(turn, 0) + turns
                place.clock = lane.clock
                lane.clock += turns / lane.options.weight
                room -= turns
            if line is not None:
                lane.known -= turns
                if self._goes_on(line, has_time=turns == wanted):
                    continue
                if not lane.known and lane.rest is Rest.SOMETHING:
                    barrier = min(barrier, lane.position)
        return [Share(queue, name, top, turns) for (name, top), turns in given.items()]

    def _goes_on(self, line: list[_Entry], *, has_time: bool) -> bool:
        """Let the first lane of a line stand in it again, if it has tasks and is not waiting for its limits."""
        lane = line[0][3]
        if lane.known and has_time:
            heapq.heapreplace(line, self._entry(lane))
            return True
        heapq.heappop(line)
        lane.ticket = 0
        if not lane.known:
            self._doubt(lane, lane.rest)
        return False

    def _is_shared(self, lane: _Lane) -> bool:
        """Say whether lanes of one gate use up what is allowed to all of them together: then they go one by one."""
        options = self._gates[gate_of(lane.name)]
        return options.total_concurrency is not None or options.total_rate is not None

    def _take(self, lane: _Lane, wanted: int, now: float) -> int:
        """Count as many turns as a lane's own limits allow, and return how many. With fewer than are wanted, it waits
        where it will be found again."""
        granted = self._limits.take(lane.name, lane.options, wanted, now)
        lane.waits = granted.is_full or granted.until is not None
        if granted.is_full:
            self._full[lane.name].append(lane)
        elif granted.until is not None:
            self._tickets += 1
            heapq.heappush(self._asleep, (granted.until, self._tickets, lane))
        return granted.turns

    def give_back(self, queue: str, name: str, unused: int, now: float) -> None:
        """Take back turns that a lane was given and could not use."""
        lane = self._lanes[queue, name]
        self._limits.spend(lane.name, lane.options, now, -unused)
        lane.clock -= unused / lane.options.weight
        lane.waits = False
        self._doubt(lane, Rest.SOMETHING)
        self._release(lane.name)

    def refuse(self, queue: str, name: str) -> None:
        """Note that a task which was given a turn was put back at once.

        It may be ready again before a message says so, and take the turn of another that was counted.
        """
        self.landed(name)
        if (lane := self._lanes.get((queue, name))) is not None:
            lane.rest = max(lane.rest, Rest.PERHAPS)

    def next_due(self, now: float) -> float | None:
        """Return when a rate will next allow something that waits for it."""
        times = [time for time, _, _ in self._asleep[:1]]
        lines = (line for place in self._queues.values() for line in place.lines.items())
        times += filter(None, (self._limits.opens_at(gate, self._gates[gate], now) for gate, line in lines if line))
        return min(times, default=None)

    def _line_up(self, lane: _Lane) -> None:
        if lane.known and not lane.waits and self._lanes.get((lane.queue, lane.name)) is lane:
            heapq.heappush(self._queues[lane.queue].lines[gate_of(lane.name)], self._entry(lane))

    def _entry(self, lane: _Lane) -> _Entry:
        """Return a lane's new place in its line; an older one is void."""
        self._tickets += 1
        lane.ticket = self._tickets
        return -lane.top, lane.clock, lane.ticket, lane

    def _wake(self, now: float) -> None:
        while self._asleep and self._asleep[0][0] <= now:
            lane = heapq.heappop(self._asleep)[2]
            lane.waits = False
            self._line_up(lane)

    def _next_line(self, place: _Queue, plain: tuple[int, float] | None, now: float) -> list[_Entry] | None:
        """Return the line whose first lane is next; None if it is the plain traffic's turn, or there is none."""
        best: tuple[int, float, int] | None = None if plain is None else (*plain, 0)
        chosen = None
        for gate, line in place.lines.items():
            while line and line[0][2] != line[0][3].ticket:
                heapq.heappop(line)
            if line and (best is None or line[0][:3] < best) and self._limits.is_open(gate, self._gates[gate], now):
                best, chosen = line[0][:3], line
        return chosen
