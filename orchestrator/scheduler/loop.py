"""A scheduler's life: it leads while it can, and stands by while it cannot. What a leader does is in `term.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import Engine, exc

from orchestrator.scheduler.budget import Pace
from orchestrator.scheduler.leadership import TICK_LIMIT, Leadership, TermOver
from orchestrator.scheduler.link import miss_redis
from orchestrator.scheduler.meter import Meter
from orchestrator.scheduler.spans import LeaderSpans
from orchestrator.scheduler.term import Term
from orchestrator.settings import Settings
from orchestrator.store import database, leases
from orchestrator.store.sql import statement_of
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.terminal_safe import sentence
from orchestrator.transport import connection as transport
from orchestrator.transport.leader.streams import LeaderStreams
from orchestrator.transport.leader.terms import Deposed, TermForgotten

_OTHERS_FIRST = 2.0
"""Leases for which a free lease is left to schedulers that could do the work."""
_PROVES_FIT = 2.0
"""Leases for which one must have been able to do the work that the leader does not: both may have suffered the same."""
_ABANDONED = 10.0
"""Leases without a renewal after which it counts as free."""
_STANDS_BACK = 10.0
"""Leases for which one stands back that has failed."""


class Candidacy:
    """Decides for one process, whenever it does not lead."""

    def __init__(
        self,
        leadership: Leadership,
        streams: LeaderStreams,
        lease: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leadership = leadership
        self._streams = streams
        self._lease = lease
        self._monotonic = monotonic
        self._back_until: float | None = None
        self._fit_since: float | None = None
        """Since when this process could do what the leader does not."""
        self._seen: tuple[datetime, float] | None = None
        """When the lease ends, and since when it has been seen to."""
        self._pause = 0.0
        self._said = False

    def stand(self) -> bool:
        """Try to become leader, if that is a good idea now."""
        leadership, lease = self._leadership, self._lease
        lease_view = leadership.lease_view()
        self._pause = min(max(lease_view.remaining, 0.05), lease / 3)
        if lease_view.is_mine:
            return leadership.acquire()
        is_abandoned = self._is_abandoned(lease_view.expires_at)
        is_free, idle = lease_view.remaining <= 0 or is_abandoned, lease_view.idle or 0.0
        if not is_free and idle <= lease:
            self._fit_since, self._said = None, False
            return False
        reason = self._unfitness()
        if reason is None:
            self._fit_since = self._monotonic() if self._fit_since is None else self._fit_since
            has_proved_fit = self._monotonic() - self._fit_since >= _PROVES_FIT * lease
            abandoned = lease_view.expires_at if is_abandoned else None
            return (is_free or has_proved_fit) and leadership.acquire(depose=has_proved_fit, abandoned=abandoned)
        self._fit_since = None
        self._pause = lease / 3
        if not self._said and (is_free or idle > leadership.idle_limit):
            self._said = True
            who = "nobody leads" if is_free else "the leader does nothing useful"
            log.warning("scheduler.not_leading reason=%s: %s", reason, who)
        return lease_view.remaining < -_OTHERS_FIRST * lease and leadership.acquire()

    def _is_abandoned(self, expires_at: datetime | None) -> bool:
        """Say whether the lease was not renewed for long, by the monotonic clock."""
        now = self._monotonic()
        if expires_at is None or self._seen is None or self._seen[0] != expires_at:
            self._seen = None if expires_at is None else (expires_at, now)
            return False
        return now - self._seen[1] > _ABANDONED * self._lease

    def wait(self, awake: threading.Event) -> None:
        """Wait until the lease could have expired, or a message asks for an earlier look."""
        awake.wait(self._pause)
        awake.clear()

    def failed(self) -> None:
        """This process has led, and could not do its work: others first, if there are any."""
        self._back_until = self._monotonic() + _STANDS_BACK * self._lease

    def worked(self) -> None:
        """This process has led, and done its work."""
        self._back_until = None

    def _unfitness(self) -> str | None:
        """Return why this process could not do a leader's work, as far as it can know; it has just used Postgres."""
        if self._back_until is not None and self._monotonic() < self._back_until:
            return "it has led, and failed."
        try:
            self._streams.fleet.write_canary()
        except transport.UNAVAILABLE as error:
            return f"it cannot use Redis: {transport.describe(error)}"
        return None


log = get_logger("scheduler")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds until the next try, after the first that failed and after many."""


class Scheduler:
    """Leads when it can, stands by when it cannot."""

    def __init__(
        self,
        engine: Engine,
        streams: LeaderStreams,
        settings: Settings,
        *,
        clock_offset: timedelta = timedelta(),
        on_ended: Callable[[int], None] = lambda _: None,
        monotonic: Callable[[], float] = time.monotonic,
        spans: LeaderSpans | None = None,
        on_timeout: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._spans = spans
        self._settings = settings
        self._streams = streams
        self._monotonic = monotonic
        self._on_ended = on_ended
        self._leadership = Leadership(engine, lease=settings.lease, clock_offset=clock_offset)
        self._candidacy = Candidacy(self._leadership, streams, settings.lease, monotonic)
        self._stopping = threading.Event()
        self._awake = threading.Event()
        """Wakes a standby: the lease is free, or it is time to stop."""
        self.redis = Outage(log, "Redis", "nothing is handed out, and reports wait", monotonic=monotonic)
        self.postgres = Outage(log, "Postgres", "nothing moves, and reports wait", monotonic=monotonic)
        self.meter = Meter()
        self.leading = threading.Event()
        self._pause = _SHORTEST_PAUSE
        """Seconds until the next try, after one that failed."""
        self._has_complained = False
        """It is logged that Postgres cannot be used."""
        self._pace = Pace(settings.lease, monotonic)
        self._pace.parts.on_timeout = self._on_timeout = on_timeout
        self.term: Term
        """The one that it leads, or led last."""

    @property
    def trouble(self) -> str | None:
        """Why it cannot work while it leads."""
        return self._leadership.trouble

    # -- one process's life

    def run(self) -> None:
        """Lead, or stand by, until it is stopped."""
        while not self._stopping.is_set():
            leads = False
            try:
                if not self._candidacy.stand():
                    self.postgres.worked()
                    self._candidacy.wait(self._awake)
                    continue
                leads = True
                self.take_over()
                while not self._stopping.is_set():
                    self.tick()
                    self._pause = _SHORTEST_PAUSE  # taking over is no success: each time costs a term
                    self.postgres.worked()
                    if self._has_complained:
                        self._withdraw()
                    if self._leadership.trouble is None:
                        self._candidacy.worked()
            except (TermOver, Deposed) as error:
                if isinstance(error, TermForgotten):
                    log.warning("redis.leader_forgotten: Redis has lost its data; the scheduler takes over again")
                else:
                    shard = self._settings.shard
                    log.warning("scheduler.deposed shard=%d: another scheduler leads now; this one stands by", shard)
                if self._leadership.trouble is not None:
                    self._candidacy.failed()
                self._stopping.wait(0.1)
            except (*database.UNAVAILABLE, *transport.UNAVAILABLE) as error:
                self._cannot_work(error)
                self._start_again(leads, self._pause)
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            except Exception as error:
                if database.is_being_restored(error):
                    self._cannot_work(error)
                    self._start_again(leads, self._pause)
                    self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                    continue
                # A defect: say so loudly, and go on rather than leave the queue alone.
                log.exception("scheduler.tick_failed: a defect; the scheduler continues from the last commit")
                self._leadership.trouble = f"its ticks fail: {type(error).__name__}: {first_line(error)}"
                self._start_again(leads, 2.0)
            finally:
                self.leading.clear()
        self._resign()

    def _start_again(self, led: bool, pause: float) -> None:
        """Wait a moment before the next try; only the failing parts are remembered."""
        if led:
            self._candidacy.failed()
        self._leadership.disconnect()
        self._stopping.wait(pause)

    def stop(self) -> None:
        """Finish the tick that is under way, give the lease up, and return from `run`."""
        self._stopping.set()
        self._awake.set()

    def try_to_lead(self) -> None:
        """As a standby, try for the lease now: its holder has given it up."""
        self._awake.set()

    def offer_lease(self, engine: Engine) -> None:
        """Let a standby take the lease, called from another thread; if none does, this one goes on and renews it."""
        try:
            with engine.connect() as connection:
                leases.release(connection, 0, self._leadership.term)
        except exc.SQLAlchemyError as error:
            log.debug("scheduler.lease_not_offered error=%s", first_line(error))

    def _cannot_work(self, error: Exception) -> None:
        if isinstance(error, transport.UNAVAILABLE):
            miss_redis(self.redis, self._leadership, error)
            return
        self._has_complained = True
        took = max(self.term.took if self.leading.is_set() else 0.0, self._leadership.took)
        if took > TICK_LIMIT * self._settings.lease:
            statement = statement_of(error)
            self._on_timeout(statement)
            reason = (
                f"a tick took {took:.1f} s, more than it may, and Postgres ended its transaction in statement "
                f"{statement}: {first_line(error)}"
            )
            complaint = sentence(f"The scheduler had more to do at once than it can in its lease: {reason}")
            # Postgres is well: it says why it ended the transaction, or has closed its connection without a word.
            if not self.postgres.is_down and (database.is_out_of_time(error) or database.is_broken_off(error)):
                log.warning("scheduler.tick_too_slow: %s The next ticks do less.", complaint)
                self._leadership.trouble = f"it had more to do at once than it can: {reason}"
                self._streams.complain(complaint, self._pause)
                return
        else:
            reason = first_line(error)
            complaint = f"The scheduler cannot use Postgres: {database.explain(error, self._settings.namespace)}"
        self.postgres.failed(reason)
        self._leadership.trouble = f"it cannot use Postgres: {reason}"
        self._streams.complain(complaint, self._pause)

    def _withdraw(self) -> None:
        """A tick has worked: what was said of Postgres is no longer so."""
        self._has_complained = False
        self._streams.withdraw_complaint()
        if not self.redis.is_down:
            self._leadership.trouble = None

    def misses_postgres(self, seconds: float) -> None:
        """Say that Postgres has not answered for so long; called from another thread while a statement waits."""
        self.postgres.failed(f"it has not answered for {seconds:.1f} s", age=seconds)

    def _resign(self) -> None:
        try:
            if self._leadership.term:
                self._leadership.release()
        except exc.SQLAlchemyError as error:
            log.warning("scheduler.lease_kept error=%s: the lease expires by itself", first_line(error))
        self._leadership.disconnect()

    # -- leading

    def take_over(self) -> None:
        """Begin a term."""
        self.term = Term(
            self._settings,
            self._streams,
            self._leadership,
            self._pace,
            self.redis,
            self.meter,
            stopping=self._stopping,
            on_ended=self._on_ended,
            monotonic=self._monotonic,
            spans=self._spans,
        )
        self.term.begin()
        self.meter.terms += 1
        self.leading.set()

    def tick(self) -> None:
        """Do one round of a leader's work."""
        self.term.tick()
