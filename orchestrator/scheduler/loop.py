"""The main loop of a scheduler: lead while it holds the lease (`term.py`), stand by otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import Engine, exc

from orchestrator.scheduler.budget import Pace
from orchestrator.scheduler.leadership import TICK_LIMIT, Leadership, TermOver
from orchestrator.scheduler.link import report_redis_outage
from orchestrator.scheduler.meter import Meter
from orchestrator.scheduler.spans import LeaderSpans
from orchestrator.scheduler.term import Term
from orchestrator.settings import Settings
from orchestrator.store import leases, postgres_errors
from orchestrator.store.sql import statement_of
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.terminal_safe import sentence
from orchestrator.transport import connection as transport
from orchestrator.transport.leader.streams import LeaderStreams
from orchestrator.transport.leader.terms import Deposed, TermForgotten

_UNFIT_DELAY = 2.0
"""Leases that an unfit process waits after a lease has expired, so that a fit scheduler takes it first."""
_FITNESS_PROOF = 2.0
"""Leases for which a standby must stay fit before it deposes an idle leader. An outage may affect both of them."""
_ABANDONED_AFTER = 10.0
"""Leases without a renewal after which even a longer lease of a leader with other settings counts as free."""
_FAILURE_COOLDOWN = 10.0
"""Leases for which a process that failed as leader does not try again."""


class Candidacy:
    """Decides whether a process that does not lead should try to acquire the lease."""

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
        self._cooldown_until: float | None = None
        self._fit_since: float | None = None
        """The monotonic time since which this process could do the work that the leader fails to do."""
        self._lease_seen: tuple[datetime, float] | None = None
        """The end of the lease, and the monotonic time at which that end was first seen."""
        self._pause = 0.0
        self._has_warned = False

    def try_to_lead(self) -> bool:
        """Acquire the lease if this process should lead now. Return whether it leads."""
        leadership, lease = self._leadership, self._lease
        lease_view = leadership.lease_view()
        self._pause = min(max(lease_view.remaining, 0.05), lease / 3)
        if lease_view.is_mine:
            return leadership.acquire()
        is_abandoned = self._is_abandoned(lease_view.expires_at, lease_view.length)
        is_free, idle = lease_view.remaining <= 0 or is_abandoned, lease_view.idle or 0.0
        if not is_free and idle <= lease:
            self._fit_since, self._has_warned = None, False
            return False
        reason = self._unfitness()
        if reason is None:
            self._fit_since = self._monotonic() if self._fit_since is None else self._fit_since
            has_proved_fit = self._monotonic() - self._fit_since >= _FITNESS_PROOF * lease
            abandoned = lease_view.expires_at if is_abandoned else None
            return (is_free or has_proved_fit) and leadership.acquire(depose=has_proved_fit, abandoned=abandoned)
        self._fit_since = None
        self._pause = lease / 3
        if not self._has_warned and (is_free or idle > leadership.idle_limit):
            self._has_warned = True
            who = "nobody leads" if is_free else "the leader does no useful work"
            log.warning("scheduler.not_leading reason=%s: %s", reason, who)
        return lease_view.remaining < -_UNFIT_DELAY * lease and leadership.acquire()

    def _is_abandoned(self, expires_at: datetime | None, length: float) -> bool:
        """Return whether the lease has gone unrenewed for its length, by this process's monotonic clock.

        It has then expired, too, unless the clock of Postgres was set back.
        """
        now = self._monotonic()
        if expires_at is None or self._lease_seen is None or self._lease_seen[0] != expires_at:
            self._lease_seen = None if expires_at is None else (expires_at, now)
            return False
        return now - self._lease_seen[1] > min(max(length, self._lease), _ABANDONED_AFTER * self._lease)

    def wait(self, awake: threading.Event) -> None:
        """Wait until the lease may have expired, or until `awake` is set."""
        awake.wait(self._pause)
        awake.clear()

    def failed(self) -> None:
        """Note that this process led and could not do the work. Other schedulers get the lease first."""
        self._cooldown_until = self._monotonic() + _FAILURE_COOLDOWN * self._lease

    def worked(self) -> None:
        """Note that this process led and did the work."""
        self._cooldown_until = None

    def _unfitness(self) -> str | None:
        """Return why this process could not lead, or None. It checks Redis; the caller has just used Postgres."""
        if self._cooldown_until is not None and self._monotonic() < self._cooldown_until:
            return "it led before, and failed."
        try:
            self._streams.fleet.write_canary()
        except transport.UNAVAILABLE as error:
            return f"it cannot use Redis: {transport.describe(error)}"
        return None


log = get_logger("scheduler")

_MIN_PAUSE, _MAX_PAUSE = 0.1, 5.0
"""Seconds until the next attempt to lead, after the first failure and after many."""


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
        """Wakes a standby because the lease was released or the process stops."""
        self.redis = Outage(log, "Redis", "no task is dispatched, and reports wait", monotonic=monotonic)
        self.postgres = Outage(log, "Postgres", "no task starts, and reports wait", monotonic=monotonic)
        self.meter = Meter()
        self.leading = threading.Event()
        self._pause = _MIN_PAUSE
        """Seconds until the next attempt to lead, after a failed one."""
        self._has_complained = False
        """An outage of Postgres has been logged, and a complaint published."""
        self._pace = Pace(settings.lease, monotonic)
        self._pace.parts.on_timeout = self._on_timeout = on_timeout
        self.term: Term
        """The current term, or the last one."""

    @property
    def trouble(self) -> str | None:
        """Why this scheduler cannot work while it leads."""
        return self._leadership.trouble

    # -- the main loop

    def run(self) -> None:
        """Lead or stand by until `stop` is called."""
        while not self._stopping.is_set():
            leads = False
            try:
                if not self._candidacy.try_to_lead():
                    self.postgres.worked()
                    self._candidacy.wait(self._awake)
                    continue
                leads = True
                self.take_over()
                while not self._stopping.is_set():
                    self.tick()
                    self._pause = _MIN_PAUSE  # taking over is no success: each time costs a term
                    self.postgres.worked()
                    if self._has_complained:
                        self._withdraw_complaint()
                    if self._leadership.trouble is None:
                        self._candidacy.worked()
            except (TermOver, Deposed) as error:
                if isinstance(error, TermForgotten):
                    log.warning("redis.leader_forgotten: Redis has lost its data; the scheduler starts a new term")
                else:
                    shard = self._settings.shard
                    log.warning("scheduler.deposed shard=%d: another scheduler leads now; this one stands by", shard)
                if self._leadership.trouble is not None:
                    self._candidacy.failed()
                self._stopping.wait(0.1)
            except (*postgres_errors.UNAVAILABLE, *transport.UNAVAILABLE) as error:
                self._report_outage(error)
                self._pause_after_failure(leads, self._pause)
                self._pause = min(2 * self._pause, _MAX_PAUSE)
            except Exception as error:
                if postgres_errors.is_being_restored(error):
                    self._report_outage(error)
                    self._pause_after_failure(leads, self._pause)
                    self._pause = min(2 * self._pause, _MAX_PAUSE)
                    continue
                # A defect: log it, and continue rather than abandon the queue.
                log.exception("scheduler.tick_failed: a defect; the scheduler continues from the last commit")
                self._leadership.trouble = f"its ticks fail: {type(error).__name__}: {first_line(error)}"
                self._pause_after_failure(leads, 2.0)
            finally:
                self.leading.clear()
        self._resign()

    def _pause_after_failure(self, led: bool, pause: float) -> None:
        """Disconnect from Postgres and pause before the next attempt to lead. Only `Pace` remembers the failure."""
        if led:
            self._candidacy.failed()
        self._leadership.disconnect()
        self._stopping.wait(pause)

    def stop(self) -> None:
        """Finish the current tick, release the lease, and return from `run`."""
        self._stopping.set()
        self._awake.set()

    def try_to_lead(self) -> None:
        """Wake a standby to try for the lease now, because the leader released it."""
        self._awake.set()

    def offer_lease(self, engine: Engine) -> None:
        """Release the lease from another thread, so that a standby can take it. If none does, it is renewed."""
        try:
            with engine.connect() as connection:
                leases.release(connection, 0, self._leadership.term)
        except exc.SQLAlchemyError as error:
            log.debug("scheduler.lease_not_offered error=%s", first_line(error))

    def _report_outage(self, error: Exception) -> None:
        if isinstance(error, transport.UNAVAILABLE):
            report_redis_outage(self.redis, self._leadership, error)
            return
        self._has_complained = True
        took = max(self.term.took if self.leading.is_set() else 0.0, self._leadership.took)
        if took > TICK_LIMIT * self._settings.lease:
            statement = statement_of(error)
            self._on_timeout(statement)
            reason = (
                f"a tick took {took:.1f} s, too long, so Postgres ended its transaction in statement "
                f"{statement}: {first_line(error)}"
            )
            complaint = sentence(f"The scheduler had more work in one tick than fits into its lease: {reason}")
            # Postgres is healthy: it names its reason for ending the transaction, or has closed the connection
            # silently.
            if not self.postgres.is_down and (
                postgres_errors.is_out_of_time(error) or postgres_errors.is_broken_off(error)
            ):
                log.warning("scheduler.tick_too_slow: %s The next ticks do less.", complaint)
                self._leadership.trouble = f"it had too much work in one tick: {reason}"
                self._streams.complain(complaint, self._pause)
                return
        else:
            reason = first_line(error)
            complaint = f"The scheduler cannot use Postgres: {postgres_errors.explain(error, self._settings.namespace)}"
        self.postgres.failed(reason)
        self._leadership.trouble = f"it cannot use Postgres: {reason}"
        self._streams.complain(complaint, self._pause)

    def _withdraw_complaint(self) -> None:
        self._has_complained = False
        self._streams.withdraw_complaint()
        if not self.redis.is_down:
            self._leadership.trouble = None

    def misses_postgres(self, seconds: float) -> None:
        """Report that Postgres has not answered for some seconds. Another thread calls this while a statement waits."""
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
        """Run one tick."""
        self.term.tick()
