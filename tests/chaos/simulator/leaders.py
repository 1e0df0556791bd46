"""Scheduler processes: one leads, the rest stand by. Each may crash, lose its connections, or pause within a tick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import exc

from orchestrator.scheduler.leadership import Leadership, TermOver, Writing
from orchestrator.scheduler.loop import Candidacy, Scheduler
from orchestrator.store import postgres_errors
from orchestrator.transport import connection as transport
from orchestrator.transport.leader.terms import Deposed
from tests.chaos.simulator.memory import MemoryLeaderStreams

if TYPE_CHECKING:
    from tests.chaos.simulator.world import World

BOUNDARIES = (
    "before read",
    "after read",
    "in transaction",
    "before commit",
    "after commit",
    "before publish",
    "after publish",
    "before begin_generation",
    "after begin_generation",
    "after remove_older",
    "before withdraw",
    "before order",
    "after state",
    "after fleet",
    "after messages",
)
"""Points in a tick at which a fault can hit a scheduler, in order."""


class Crash(BaseException):
    """A process crash. It is a BaseException so that no handler of the product catches it."""


class _NeverWaits:
    """Replaces the event on which a scheduler waits between two attempts; its `wait` returns at once."""

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return False

    def is_set(self) -> bool:
        return False


class SimulatedLeadership(Leadership):
    """Leadership with faults in its transactions. Dropped connections return to a pool."""

    def __init__(self, actor: SchedulerProcess, **options: Any) -> None:
        super().__init__(actor.world.database.engine_of(actor.shard), elapsed=actor._monotonic, **options)
        self._actor = actor
        self._strike: Callable[[str], None] = actor.strike

    @contextmanager
    def writing(
        self, monotonic: float, *, with_pending_work: bool = False, may_begin_later: bool = False
    ) -> Iterator[Writing]:
        world = self._actor.world
        options = {"with_pending_work": with_pending_work, "may_begin_later": may_begin_later}
        with super().writing(monotonic, **options) as writing:
            sent = writing.connection.info.get("sent", 0)
            self._strike("in transaction")
            yield writing
            self._strike("before commit")
            if world.armed("commit refused"):
                raise exc.OperationalError("COMMIT", None, Exception("the connection broke before the commit"))
        if writing.connection.info.get("sent", 0) > sent:  # otherwise nothing was written, not even the lease row
            world.note_commit(self._actor.shard, self.term)
        if world.armed("commit uncertain"):
            raise exc.OperationalError("COMMIT", None, Exception("the connection broke during the commit"))
        self._strike("after commit")

    def cut(self) -> None:
        """Break the connection, as Postgres does after the idle-in-transaction timeout."""
        if self._connection is not None:
            raw: Any = self._connection.connection.dbapi_connection
            raw.close()
            self._connection.info.clear()

    def disconnect(self) -> None:
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        raw: Any = connection.connection.dbapi_connection if not connection.invalidated else None
        if raw is None or raw.closed:
            connection.invalidate()
        connection.close()


class SchedulerProcess:
    """A scheduler process, restarted when it crashes."""

    def __init__(self, world: World, name: str, rate: float, shard: int = 0) -> None:
        self.world = world
        self.name = name
        self.shard = shard
        self.paused = False
        self._rate = rate
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        settings = self.world.settings.of_shard(self.shard)
        engine = self.world.database.engine_of(self.shard)
        self.streams = MemoryLeaderStreams(self.world.redis[self.shard], self.name, self.strike)
        self.scheduler = Scheduler(engine, self.streams, settings, monotonic=self._monotonic)  # type: ignore[arg-type]
        self.leadership = SimulatedLeadership(self, lease=settings.lease)
        self.scheduler._leadership = self.leadership
        self.candidacy = Candidacy(self.leadership, self.streams, settings.lease, self._monotonic)  # type: ignore[arg-type]
        self.scheduler._stopping = _NeverWaits()  # type: ignore[assignment]
        self.leading = False
        self._retry_at = 0.0
        self._ticked_at = 0.0

    def _monotonic(self) -> float:
        return 1_000.0 * self._starts + self._rate * self.world.now

    def close(self) -> None:
        self.leadership.disconnect()

    def stop(self) -> None:
        """Stop gracefully and for good."""
        if self.leading:
            self.leadership.release()
        self.close()

    # -- a turn

    def turn(self) -> None:
        """Run one round of `Scheduler.run` without waiting."""
        world = self.world
        if world.now < self._retry_at or (self.leading and not self._has_work()):
            return
        world.set_clocks()
        try:
            if not self.leading:
                if not self.candidacy.try_to_lead():
                    self._retry_at = world.now + world.settings.lease / 3
                    return
                world.trace(f"{self.name} leads, term {self.leadership.term}")
                self.scheduler.take_over()
                self.leading = True
            self._ticked_at = world.now
            self.scheduler.tick()
            if self.leadership.trouble is None:
                self.candidacy.worked()
            world.trace(f"{self.name} ticks to {self.scheduler.term.generations.cursor.position}")
        except (TermOver, Deposed) as error:
            world.trace(f"{self.name} steps down: {type(error).__name__}")
            if self.leadership.trouble is not None:
                self.candidacy.failed()
            self.leading = False
        except (*postgres_errors.UNAVAILABLE, *transport.UNAVAILABLE) as error:
            world.trace(f"{self.name} cannot work: {type(error).__name__}")
            self.scheduler._report_outage(error)
            if self.leading:
                self.candidacy.failed()
            self.leadership.disconnect()
            self.leading = False
            self._retry_at = world.now + 0.1
        except Crash:
            self.crash()

    def _has_work(self) -> bool:
        """Return whether the leader's blocking read would have returned by now."""
        scheduler, now = self.scheduler, self._monotonic()
        elapsed = self.world.now - self._ticked_at
        if not scheduler.term.link.can_read:
            return elapsed >= min(scheduler.term.due_in, 0.1)
        if now >= scheduler.term.watch.due_at or elapsed >= scheduler.term.due_in:
            return True
        cursor = scheduler.term.generations.cursor
        return self.streams.has_changes(cursor.generation, cursor.position)

    # -- faults

    def strike(self, boundary: str) -> None:
        """Apply the fault planned for this boundary, if any."""
        action = self.world.armed(boundary)
        if action is None:
            return
        self.world.trace(f"{self.name} is struck {boundary}: {action}")
        if action == "crash":
            raise Crash
        if boundary in ("in transaction", "before commit"):
            self.leadership.cut()
        self.paused = True
        self.world.run_until(self.world.now + float(action))
        self.paused = False
        self.world.set_clocks()

    def crash(self) -> None:
        """Crash, and restart after half a second."""
        self.world.trace(f"{self.name} crashes")
        self.leadership.disconnect()
        self._start()
        self._retry_at = self.world.now + 0.5
