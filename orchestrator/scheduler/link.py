"""The leader's talk with Redis: what came in, and what goes out after a commit.

While Redis is away, ticks go on without it. While it only refuses writes, events are still read and applied: if they
are what fills it, that makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.scheduler.changes import ChangeLog
from orchestrator.scheduler.code.paging import Paging
from orchestrator.scheduler.commit_hooks import CommitHooks
from orchestrator.scheduler.dispatch.dispatcher import Dispatcher
from orchestrator.scheduler.fleet.generations import Generations
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.fleet.watch import FleetWatch
from orchestrator.scheduler.leadership import Leadership
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.store.tasks.claims import Claimed
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.transport import connection as transport
from orchestrator.transport.batch_sizes import MOST_BYTES
from orchestrator.transport.codec import Attempt, encode
from orchestrator.transport.leader.queues import StreamsDamaged
from orchestrator.transport.leader.streams import NO_CHANGES, Inbound, LeaderStreams
from orchestrator.transport.quarantine import Refused

log = get_logger("scheduler")

_PAUSE = 0.5
"""Seconds before Redis is tried again."""
_MOST_READS = 20
"""Batches that are read at once where all events are wanted."""


def miss_redis(outage: Outage, leadership: Leadership, error: Exception) -> None:
    """Tell people that Redis cannot be used."""
    reason = transport.describe(error)
    outage.failed(reason)
    leadership.trouble = f"it cannot use Redis: {reason}"


@dataclass
class Link(CommitHooks):
    """Knows whether Redis can be read and written."""

    streams: LeaderStreams
    leadership: Leadership
    generations: Generations
    outage: Outage
    fleet: Fleet
    watch: FleetWatch
    dispatcher: Dispatcher
    paging: Paging
    changes: ChangeLog
    batch: int
    monotonic: Callable[[], float]
    _read_at: float = 0.0
    _write_at: float = 0.0
    """When it may be tried again."""
    _last_claimed: Attempt | None = None

    @property
    def can_read(self) -> bool:
        return self.monotonic() >= self._read_at and bool(self.generations.cursor.generation)

    @property
    def can_write(self) -> bool:
        return self.monotonic() >= self._write_at and self.can_read

    @property
    def has_pages(self) -> bool:
        """Say whether there are pages of histories to send at once."""
        return self.paging.is_busy and self.can_write

    def talk(self, do: Callable[[], None]) -> None:
        """Do something with Redis, unless it fails."""
        try:
            do()
        except StreamsDamaged as error:
            generation = self.generations.cursor.generation
            log.error("redis.stream_unusable generation=%s error=%s", generation, first_line(error))
            self.generations.give_up()
            self.changes.interrupted()
            self.watch.due_at = 0.0
        except transport.UNAVAILABLE as error:
            miss_redis(self.outage, self.leadership, error)
            self.changes.interrupted()
            self._write_at = self.monotonic() + _PAUSE
            if not isinstance(error, transport.REFUSED):
                self._read_at = self._write_at
            self.fleet.interrupted()
            self.watch.due_at = self._write_at

    def worked(self) -> None:
        """Redis was read and written."""
        self.outage.worked()
        self.leadership.trouble = None

    def committed(self, tick: TickResult) -> None:
        """Remember an attempt of the last commit that made some."""
        self._last_claimed = tick.last_claimed() or self._last_claimed

    # -- in

    def read(self, until: float | None) -> Inbound:
        """Read events: one batch, waiting for the first until a time; or all there are, without waiting."""
        gathered = Inbound([], False, False)

        def read() -> None:
            nonlocal gathered
            generation, position, _ = self.generations.cursor
            block = 0.0 if until is None else until - self.monotonic()
            for _ in range(_MOST_READS if until is None else 1):
                inbound = self.streams.read(generation, position, self.batch, block)
                gathered = Inbound(
                    gathered.entries + inbound.entries,
                    gathered.nudged or inbound.nudged,
                    gathered.fleet_changed or inbound.fleet_changed,
                    inbound.complete,
                    gathered.stopped + inbound.stopped,
                    inbound.stream or gathered.stream,
                )
                if inbound.complete or sum(len(body) for _, body in gathered.entries) > MOST_BYTES:
                    return
                position = inbound.entries[-1][0]

        self.talk(read)
        if gathered.fleet_changed:
            self.watch.due_at = 0.0
        self.watch.heard_of(gathered.stopped)
        return gathered

    # -- out

    def publish(self, tick: TickResult, *, moved_on: bool) -> None:
        """After a commit: hand out, withdraw, and tell everyone; `moved_on` if events were applied."""
        self.talk(lambda: self._publish(tick, moved_on))

    def _publish(self, tick: TickResult, moved_on: bool) -> None:
        outgoing = tick.outgoing
        generation, position, _ = self.generations.cursor
        has_news = moved_on or bool(outgoing.ended)
        changes = self.changes.of(generation, tick)
        if outgoing.claimed or has_news or changes is not NO_CHANGES:
            self.streams.publish(
                generation,
                self.leadership.term,
                self.dispatcher.messages(outgoing.claimed),
                position if has_news else None,
                outgoing.ended,
                encode(None if moved_on else self._last_claimed),
                changes,
            )
        if has_news:
            self.generations.confirmed = position
        if outgoing.key_holders:
            self.streams.tell_key_holders(outgoing.key_holders)
        for messages in (outgoing.withdrawn, self.watch.unreceived(generation, outgoing.revoked)):
            for queue, entries in messages.items():
                self.streams.queues.withdraw(generation, queue, entries)
        self.set_aside(outgoing.set_aside)
        self.watch.give_orders()
        if self.has_pages:
            self.paging.send(self.leadership.reading, self.streams.pages, self._push)

    def _push(self, claimed: Sequence[Claimed]) -> None:
        generation, term, last = self.generations.cursor.generation, self.leadership.term, encode(self._last_claimed)
        self.streams.publish(generation, term, self.dispatcher.messages(claimed), claimed=last)

    def set_aside(self, refused: Sequence[Refused]) -> None:
        """Keep what could not be applied, for people to look at."""
        if refused:
            first = refused[0]
            log.error("event.quarantined events=%d first=%s error=%s", len(refused), first.source, first.error)
            self.streams.set_aside(refused)
