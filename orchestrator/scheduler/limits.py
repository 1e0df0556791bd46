"""Serve the lanes: track which have ready tasks, and share each queue's room among them.

A limit counts running code. A cancelled or timed-out attempt whose code has not ended has no row in flight anymore, but
*lingers* in its lane until no worker lists it. An attempt not listed yet lingers for a whole TTL.

All caches here are read from Postgres after a takeover or a rollback: lanes from an index, tasks in flight by counting
them, rates from the table of buckets. The limits are exact because only the leader claims. A worker must report the
start of a task under a rate (`domain/limits/lane_limits.py`); until then its row is dispatched and not running.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import datetime, timedelta

from orchestrator.domain.limits.buckets import Buckets, Rate
from orchestrator.domain.limits.lane_limits import (
    Attempt,
    DispatchedAttempt,
    UnreportedStarts,
    gate_bucket,
    lane_bucket,
    lane_buckets,
    limited_by,
    queue_bucket,
    reports_start,
)
from orchestrator.domain.limits.lanes import Lanes, Share
from orchestrator.domain.tasks.task import executor_of, parse_options
from orchestrator.scheduler import transaction
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.tick_result import CommitHooks, TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.limits import lanes as store
from orchestrator.store.tasks import waiting
from orchestrator.store.tasks.claims import Claimed
from orchestrator.store.tasks.waiting import InFlight

_MAX_CLAIMS = 4
"""Claims in one tick, at most, while they have used less than half of the room."""
_MAX_LANES_READ = 500
"""Lanes read in one tick, at most."""
_MIN_CLOCK_SETBACK = timedelta(seconds=0.2)
"""The smallest backward step of Postgres's clock that counts as the clock being set back."""
_SHARED_POLL_INTERVAL = 0.1
"""Seconds between two reads of limits that other shards hold too."""
_UNKNOWN_USAGE = 1_000_000_000
"""The assumed usage by a shard that has not published its own."""
_MAX_STOCK_READS = 500
"""Lanes of one queue whose stock of ready tasks is read at once, at most."""


class LaneService(CommitHooks):
    """The leader's view of all lanes."""

    def __init__(self, shard: int | None = None, shards: int = 1) -> None:
        """With several shards, `shard` is the leader's, and `shards` their number."""
        self._shard, self._shards = shard, shards
        self.queues_held: Callable[[Transaction], Mapping[str, int]] = lambda _: {}
        """Returns the tasks in flight of queues with limits, by bucket name."""
        self.held: Callable[[], Set[Attempt]] = frozenset
        """Returns the attempts that workers listed in the last fleet check."""
        self._last_claim: datetime | None = None
        self.queue_rates: dict[str, Rate] = {}
        """Rates of whole queues."""
        self.rolled_back()

    def rolled_back(self) -> None:
        """Discard everything cached; the next tick reads it from Postgres. A new leader starts in the same way."""
        self.buckets = Buckets()
        self._lanes = Lanes(self.buckets)
        self._unreported = UnreportedStarts(self.buckets)
        self._is_stale = True
        self._read_after: tuple[str, str] | None = ("", "")
        """The lane after which reading continues; None once all lanes are read."""
        self._has_more = False
        self._lingering: dict[Attempt, str] | None = None
        """Lanes of ended attempts whose code may still run; None until the first fleet check."""
        self._unlisted: dict[Attempt, float] = {}
        """Lingering attempts that no worker lists, and the `fair_time` since when."""
        self._published_usage: dict[str, int] | None = None
        """The usage of limits that this shard has published; None until it is read."""
        self.elsewhere: dict[str, int] = {}
        """The usage by other shards of the limits examined in this tick."""
        self.is_locked = False
        """Rows of limits are locked until this tick commits."""

    # -- ready tasks and tasks in flight

    def recount(self, in_flight: Sequence[InFlight]) -> None:
        """Count the tasks in flight of lanes, and of queues with rates."""
        lanes = [task.lane for task in in_flight if task.lane is not None]
        unknown = {lane for lane in set(lanes) if self._lanes.options_of(lane) is None}
        not_begun = list(self._not_begun(in_flight, unknown))
        if not_begun or self._unreported:
            self._unreported.recount(not_begun, unknown)
        self._lanes.recount([*lanes, *(self._lingering or {}).values()])

    def _not_begun(
        self, in_flight: Sequence[InFlight], unknown: Set[str]
    ) -> Iterator[tuple[Attempt, DispatchedAttempt]]:
        """Yield attempts dispatched under a rate that have not begun, including those of lanes with unknown options."""
        now = 0.0 if self._last_claim is None else self._last_claim.timestamp()
        for task in in_flight:
            if task.status != "dispatched" or task.is_execution:
                continue
            options = None if task.lane is None else self._lanes.options_of(task.lane, task.queue)
            buckets: tuple[tuple[str, Rate], ...] = ()
            if task.lane is not None and options is not None and reports_start(options):
                buckets = lane_buckets(task.lane, options)
            if task.queue in self.queue_rates:
                buckets = (*buckets, (queue_bucket(task.queue), self.queue_rates[task.queue]))
            if buckets or task.lane in unknown:
                yield (task.id, task.attempt), DispatchedAttempt(now - task.age, task.lane, buckets)

    def release_stopped(self, tx: Transaction, fleet: Fleet) -> None:
        """After a fleet check, release attempts whose code has stopped, and buckets that are full again.

        A new leader first treats every attempt that a worker lists and that is not in flight as lingering.
        """
        self.buckets.forget_full(tx.now.timestamp())
        if self._lingering == {} or not fleet.is_in_view:
            return
        held = fleet.held()
        if self._lingering is None:
            ended = list(held - waiting.current(tx.connection, list(held))) if held else []
            self._lingering = store.lanes_of(tx.connection, ended) if ended else {}
            for lane in self._lingering.values():
                self._lanes.add_in_flight(lane)
        for attempt in [*self._lingering]:
            since = min(self._unlisted.pop(attempt, -math.inf), fleet.fair_time)
            if attempt in held:
                continue
            if fleet.fair_time - since < fleet.ttl:
                self._unlisted[attempt] = since
            else:
                self._lanes.remove_in_flight(self._lingering.pop(attempt))

    def read_all(self) -> None:
        """Read all lanes again, because many have changed."""
        self._read_after = ("", "")

    def arrive(self, tx: Transaction, tasks: Sequence[tuple[bytes, bool]]) -> None:
        """Record tasks that became ready. Each is marked if it is the first of several."""
        for task in store.arrived(tx.connection, tasks):
            options = parse_options(task.options)
            if task.is_ready:
                self._lanes.arrive(task.queue, task.lane, task.priority, options, task.is_first)
            else:
                self._lanes.claimed_early(task.queue, task.lane, task.priority, options)

    def refresh(self, tx: Transaction) -> None:
        """Before a claim, read unknown lanes and count the tasks that left flight."""
        self._has_more = False
        if self._last_claim is not None and tx.now < self._last_claim - _MIN_CLOCK_SETBACK:
            self.rolled_back()  # due times of the old clock would be too late
        self._last_claim = tx.now
        if self._is_stale:
            self.buckets.due.update(store.buckets(tx.connection))
            self.recount(waiting.in_flight(tx.connection))
            self._is_stale = False
            tx.result.capacity.left_lanes.clear()
            for *attempt, lane in tx.result.capacity.lingering:  # rows in flight no longer count these
                if tuple(attempt) not in (self._lingering or {}):
                    self._lanes.add_in_flight(lane)
        self._note_begun(tx.result, tx.now.timestamp())
        self.committed(tx.result)
        if self._read_after is None and self._lanes.should_read():
            self.read_all()
        if self._read_after is not None:
            transaction.attempt(tx, "read keys with tasks", self._read, _MAX_LANES_READ)
        if self._unreported:
            self._unreported.complete(self._lanes.options_of)
        if self._shard is not None:
            self._share(tx, self._shard)

    def _share(self, tx: Transaction, shard: int) -> None:
        """Lock the limits that this tick may use, and read the usage of other shards."""
        names = {*self._lanes.limited(), *self.queues_held(tx), *map(limited_by, self.buckets.changed)}
        self.is_locked = bool(names)
        buckets = [bucket for name in names for bucket in (name, lane_bucket(name), gate_bucket(name))]
        self.elsewhere, due = store.lock(tx.connection, shard, [*names], buckets) if names else ({}, {})
        if names and self.elsewhere.pop(store.TAKES_PART, 0) < self._shards - 1:
            self.elsewhere = dict.fromkeys(names, _UNKNOWN_USAGE)
        mine = self.buckets.due
        mine.update({name: max(at, mine.get(name, 0.0)) for name, at in due.items()})
        self._lanes.share(self.elsewhere)
        self._publish_usage(tx, shard)

    def _publish_usage(self, tx: Transaction, shard: int) -> None:
        """Publish this shard's usage of limits to other shards."""
        if self._published_usage is None:
            self._published_usage = store.mine(tx.connection, shard)
        held = {store.TAKES_PART: 1, **self._lanes.in_flight(), **self.queues_held(tx)}
        changed = {name: held.get(name, 0) for name in held.keys() | self._published_usage.keys()}
        changed = {name: number for name, number in changed.items() if number != self._published_usage.get(name, 0)}
        if changed:
            store.save(tx.connection, shard, changed)
            self._published_usage = {name: number for name, number in held.items() if number > 0}

    def _read(self, tx: Transaction, most: int) -> None:
        heads = store.lanes_after(tx.connection, *(self._read_after or ("", "")), most)
        for head in heads:
            self._lanes.learn(head.queue, head.lane, head.stock, parse_options(head.options))
        self._read_after = (heads[-1].queue, heads[-1].lane) if len(heads) == most else None

    def committed(self, tick: TickResult) -> None:
        """Count tasks that left flight, unless that was done before the claim."""
        self._note_begun(tick)
        if not (tick.capacity.left_lanes or tick.capacity.lingering):
            return
        for lane, number in Counter(tick.capacity.left_lanes).items():
            self._lanes.remove_in_flight(lane, number)
        tick.capacity.left_lanes.clear()
        held = self.held() if tick.capacity.lingering else ()
        for task, attempt, lane in tick.capacity.lingering:
            if self._lingering is None:
                self._lanes.remove_in_flight(lane)
                continue
            self._lingering[task, attempt] = lane
            if (task, attempt) not in held:
                self._unlisted[task, attempt] = math.inf
        tick.capacity.lingering.clear()

    def _note_begun(self, tick: TickResult, now: float | None = None) -> None:
        """Record attempts that have begun, or are no longer in flight."""
        if not self._unreported:
            return
        ended = ((task.id, task.attempt) for task in tick.outgoing.moved if task.state != "dispatched")
        for attempt in (*tick.capacity.begun, *ended):
            lane = self._unreported.remove(attempt, now)
            if lane is not None:
                self._lanes.start_reported(lane)

    # -- claiming

    def serves(self, queue: str) -> bool:
        """Return whether a queue has lanes with ready tasks."""
        return self._lanes.has(queue)

    def served(self) -> Iterator[str]:
        """Yield the queues that have lanes with ready tasks."""
        return self._lanes.filled()

    def claim(self, tx: Transaction, rooms: dict[str, int]) -> list[Claimed]:
        """Claim as many tasks as each queue has room for, taking turns among lanes."""
        claimed: list[Claimed] = []
        now = tx.now.timestamp()
        enough = sum(rooms.values()) // 2
        for _ in range(_MAX_CLAIMS):
            shares = self._allot(tx, rooms, now)
            found = store.claim(tx.connection, shares, tx.now) if shares else []
            if len(found) < sum(share.turns for share in shares):
                self._return_unused(shares, found, now)
            claimed.extend(found)
            self._await_begin(found, now)
            for queue, count in Counter(task.queue for task in found).items():
                rooms[queue] -= count
            self._has_more = any(room > 0 and self._lanes.has_next(queue, now) for queue, room in rooms.items())
            if not self._has_more or len(claimed) > enough:
                break
        return claimed

    def _allot(self, tx: Transaction, rooms: dict[str, int], now: float) -> list[Share]:
        queues = [queue for queue, room in rooms.items() if room > 0 and self._lanes.has(queue)]
        if not queues:
            return []
        in_doubt = [(queue, lane) for queue in queues for lane in self._lanes.in_doubt(queue, _MAX_STOCK_READS)]
        ready = store.read_ready(tx.connection, queues, in_doubt, sum(rooms[queue] for queue in queues))
        for (queue, lane), stock in ready.stocks.items():
            self._lanes.learn(queue, lane, stock)
        plain = ready.plain
        return [share for queue in queues for share in self._lanes.allot(queue, rooms[queue], plain.get(queue), now)]

    def _return_unused(self, shares: Sequence[Share], found: Sequence[Claimed], now: float) -> None:
        used = Counter((task.queue, task.lane) for task in found)
        for share in shares:
            unused = share.turns - used[share.queue, share.lane]
            if share.lane is not None and unused:
                self._lanes.return_turns(share.queue, share.lane, unused, now)

    def _await_begin(self, found: Sequence[Claimed], now: float) -> None:
        """Remember the claimed tasks whose start a worker must report."""
        if not self.buckets.unreported:
            return
        for task in found:
            options = None if task.lane is None else self._lanes.options_of(task.lane, task.queue)
            if task.lane is not None and options is not None and reports_start(options):
                dispatched = DispatchedAttempt(now, task.lane, lane_buckets(task.lane, options))
                self._unreported.add((task.id, task.attempt), dispatched)

    def spend_of_queue(self, queue: str, tasks: Sequence[Claimed], now: float) -> None:
        """Spend the rate of a queue for dispatched tasks."""
        bucket, rate = queue_bucket(queue), self.queue_rates[queue]
        self.buckets.spend(bucket, rate, now, len(tasks))
        for task in tasks:
            if executor_of(task.options) is None:
                self.buckets.count_unreported(bucket, 1)
                self._unreported.add((task.id, task.attempt), DispatchedAttempt(now, task.lane, ((bucket, rate),)))

    def refuse(self, task: Claimed) -> None:
        """Note that a claimed task was returned at once."""
        if task.lane is not None:
            self._unreported.remove((task.id, task.attempt))
            self._lanes.refuse(task.queue, task.lane)

    def save(self, tx: Transaction) -> None:
        """Save the used rates, and publish this shard's usage of limits."""
        if self.buckets.changed:
            store.save_buckets(tx.connection, {name: self.buckets.due[name] for name in self.buckets.changed})
            self.buckets.changed.clear()
        if self._shard is not None:
            self._publish_usage(tx, self._shard)

    @property
    def is_shared(self) -> bool:
        """Return whether other shards depend on limits that this shard uses."""
        return self._published_usage is not None and len(self._published_usage) > 1  # more than its own registration

    def due_in(self, now: float) -> float | None:
        """Return the seconds until lanes have work that no message announces."""
        if self._read_after is not None or self._has_more:
            return 0.0
        if self.elsewhere:  # nothing announces that another shard has room
            return _SHARED_POLL_INTERVAL
        due = self._lanes.next_due(now)
        return None if due is None else max(0.0, due - now)
