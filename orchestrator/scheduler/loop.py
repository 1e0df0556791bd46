"""The scheduler's heart: one tick after another, one transaction each.

tick:  look at the fleet              once a second, and when it says that it has changed
       read a batch of events         blocks until there is one, or something is due
       one transaction, guarded by my term:
           apply reports and inbox
           advance the runs they touch
           fire what is due
           claim what is ready
           record the events cursor
       publish: what is applied, for workers; what has ended, for waiters; the claimed tasks
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine

from orchestrator.domain.runs.nesting import Nesting
from orchestrator.scheduler.agenda import Errands
from orchestrator.scheduler.budget import Pace
from orchestrator.scheduler.candidacy import Candidacy
from orchestrator.scheduler.code.runs import CodeRuns
from orchestrator.scheduler.dag.plans import Dags
from orchestrator.scheduler.dispatch.dispatcher import Dispatcher
from orchestrator.scheduler.fleet.generations import Generations
from orchestrator.scheduler.fleet.knowers import Crowd
from orchestrator.scheduler.fleet.reconcile import Reconciler, Suspicion
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.fleet.watch import Watch
from orchestrator.scheduler.isolation import is_about_all
from orchestrator.scheduler.leadership import TICK_LIMIT, Leadership, TermOver
from orchestrator.scheduler.limits import LaneService
from orchestrator.scheduler.requests import settle_ends
from orchestrator.scheduler.runs.advance import advance_runs
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.scheduler.runs.triggers import Triggers
from orchestrator.scheduler.tasks.reports import Reported, apply_carefully, apply_reports
from orchestrator.scheduler.tick import Tick
from orchestrator.settings import Settings
from orchestrator.store import database
from orchestrator.store.leases import Cursor
from orchestrator.store.tasks import waiting
from orchestrator.store.tasks.transitions import Claimed
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.transport import connection as transport
from orchestrator.transport.codec import Attempt, Ended, Malformed, decode_flush, encode
from orchestrator.transport.leader import Deposed, Inbound, LeaderStreams, StreamsDamaged, TermForgotten
from orchestrator.transport.portions import MOST_BYTES
from orchestrator.transport.quarantine import Refused

log = get_logger("scheduler")

_SWEEP_EVERY = 10.0
"""Seconds between two looks for messages that belong to nothing."""

_FAILED_PAUSE = 0.5
"""Seconds in which a part of a tick that failed is not tried again, unless something happens."""
_COUNT_PAUSE = 20.0
"""Between two looks at what is in flight, so many times as long as one takes: where a transaction of others keeps dead
rows in the index, it takes long, and must not take all the time."""


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
    ) -> None:
        self._settings = settings
        self._streams = streams
        self._monotonic = monotonic
        self._on_ended = on_ended
        self._leadership = Leadership(engine, lease=settings.lease, clock_offset=clock_offset)
        self._candidacy = Candidacy(self._leadership, streams, settings.lease, monotonic)
        self._stopping = threading.Event()
        self._awake = threading.Event()
        """Wakes a standby: the lease is free, or it is time to stop."""
        self._redis = Outage(log, "Redis", "nothing is handed out, and reports wait", monotonic=monotonic)
        self._postgres = Outage(log, "Postgres", "nothing moves, and reports wait", monotonic=monotonic)
        self.leading = threading.Event()
        self._pace = Pace(settings.lease, monotonic)
        self._budget = self._pace.budget()
        self._began: float | None = None
        """When the transaction of the last tick began, if it did."""

    # -- one process's life

    def run(self) -> None:
        """Lead, or stand by, until told to stop."""
        pause = 0.1
        while not self._stopping.is_set():
            leads = False
            try:
                if not self._candidacy.stand():
                    self._postgres.worked()
                    self._candidacy.wait(self._awake)
                    continue
                leads = True
                self.take_over()
                pause = 0.1
                while not self._stopping.is_set():
                    self.tick()
                    self._postgres.worked()
                    if self._leadership.trouble is None:
                        self._candidacy.worked()
            except (TermOver, Deposed) as error:
                if isinstance(error, TermForgotten):
                    log.warning("Redis has lost its data, and with it who leads; leading anew from what Postgres has")
                else:
                    log.warning("another scheduler leads now; standing by")
                if self._leadership.trouble is not None:
                    self._candidacy.failed()
                self._stopping.wait(0.1)
            except (*database.UNAVAILABLE, *transport.UNAVAILABLE) as error:
                self._cannot_work(error)
                self._start_again(leads, pause)
                pause = min(pause * 2, 2.0)
            except Exception as error:  # a defect: say so loudly, and go on rather than leave the queue alone
                log.exception("this should not have happened; starting again from what is committed")
                self._leadership.trouble = f"its ticks fail: {type(error).__name__}: {first_line(error)}"
                self._start_again(leads, 2.0)
            finally:
                self.leading.clear()
        self._resign()

    def _start_again(self, led: bool, pause: float) -> None:
        """Wait a moment before the next try; nothing is carried over but who has failed."""
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

    def _cannot_work(self, error: Exception) -> None:
        if isinstance(error, transport.UNAVAILABLE):
            self._miss_redis(error)
            return
        took = 0.0 if self._began is None else self._monotonic() - self._began
        if took > TICK_LIMIT * self._settings.lease:
            reason = (
                f"a tick took {took:.1f} s, more than it may, and Postgres ended its transaction: {first_line(error)}"
            )
            complaint = f"The scheduler had more to do at once than it can in its lease: {reason}."
        else:
            reason, complaint = first_line(error), database.explain(error, self._settings.namespace)
        self._postgres.failed(reason)
        self._leadership.trouble = f"it cannot use Postgres: {reason}"
        self._streams.complain(complaint)

    def misses_postgres(self, seconds: float) -> None:
        """Say that Postgres has not answered for so long; called from another thread while a statement waits."""
        self._postgres.failed(f"it has not answered for {seconds:.1f} s", age=seconds)

    def _miss_redis(self, error: Exception) -> None:
        reason = transport.describe(error)
        self._redis.failed(reason)
        self._leadership.trouble = f"it cannot use Redis: {reason}"

    def _resign(self) -> None:
        try:
            if self._leadership.term:
                self._leadership.release()
        except database.UNAVAILABLE as error:
            log.warning("could not give the lease up; it expires by itself: %s", first_line(error))
        self._leadership.disconnect()

    # -- taking over

    def take_over(self) -> None:
        """Start from what Postgres and Redis say; nothing is carried over in memory."""
        settings = self._settings
        self._fleet = Fleet(settings.worker_ttl)
        self._lanes = LaneService()
        self._dispatcher = Dispatcher(self._fleet, self._lanes, settings.batch, self._monotonic)
        self._reconciler = Reconciler(self._fleet)
        nesting = Nesting(settings.max_depth, settings.max_descendants)
        self._dags = Dags(settings.max_payload, settings.batch, nesting)
        self._triggers = Triggers(nesting)
        self._code = CodeRuns(self._fleet, nesting)
        self._backlog = Backlog()
        self._watch = Watch(self._fleet, self._streams, settings)
        self._errands = Errands(settings, self._fleet, self._code)
        self._careful = False
        self._deaf_until = 0.0
        self._mute_until = 0.0
        self._sweep_at = 0.0
        self._count_at = 0.0
        self._patience = 0.0
        """Seconds for which nothing is due, unless something comes in; counted from `_patient_since`."""
        self._patient_since = 0.0
        self._last_claimed: Attempt | None = None
        self._generations = Generations(self._streams, self._leadership, settings.batch, self._apply_leftover)
        with self._leadership.reading() as connection:
            self._dispatcher.recount(waiting.in_flight(connection))
            self._fleet.knowers.crowds = {Crowd.parse(*found) for found in waiting.crowded(connection)}
        self.leading.set()
        log.info("leading, term %d", self._leadership.term)
        self._hear(self._claim_term)

    def _claim_term(self) -> None:
        """Have pushes of this term accepted. Terms come from Postgres; a later one in Redis may be none of its own."""
        term, database = self._leadership.term, self._leadership.identity()
        try:
            is_new = self._streams.claim_term(term, database)
        except Deposed:
            with self._leadership.writing(self._monotonic()):  # which says so if there is a later term
                log.error(
                    "Redis holds a later term than %d, which Postgres never issued: the database is new or restored, "
                    "or another system uses this Redis. Give each system a Redis database of its own.",
                    term,
                )
            self._streams.claim_term(term, database, overrule=True)
            is_new = False
        if not is_new:
            self._generations.postgres_has_lost_commits()

    # -- the tick

    def tick(self) -> None:
        """Apply what came in, decide what follows, and hand out what is ready."""
        suspicion = self._look() if self._monotonic() >= self._watch.due_at else None
        inbound = self._read(to_the_end=suspicion is not None)
        reports, set_aside = _decode(inbound)
        cursor = self._cursor._replace(position=inbound.entries[-1][0]) if inbound.entries else self._cursor
        withdraw: dict[str, list[str]] = {}
        thorough = inbound.nudged or suspicion is not None
        self._began = None
        try:
            with self._leadership.writing(self._monotonic(), look=thorough) as writing:
                self._began = self._patient_since = self._monotonic()
                tick = self._begin_tick(writing.connection, writing.now, set_aside)
                self._apply(tick, reports)
                if suspicion is not None and inbound.complete:
                    lost, withdraw = self._reconciler.judge(suspicion)
                    self._apply(tick, lost)
                advance_runs(tick)
                self._patience = self._errands.run(tick, writing.agenda)
                settle_ends(tick)
                if suspicion is not None:
                    self._lanes.look(tick, self._fleet)
                if self._speaks:
                    self._dispatcher.claim(tick, self._settings.unknown_task_timeout)
                    self._code.equip(tick)
                    self._patience = min(self._patience, self._dispatcher.patience(tick.now))
                self._watch.record(tick)
                writing.cursor = cursor if cursor is not self._cursor else None
        except Exception as error:
            self._dags.forget()
            self._lanes.forget()
            self._backlog.forget()
            self._pace.interrupted(self._budget, by_postgres=database.is_timeout(error))
            if is_about_all(error) or self._careful:
                raise
            log.error("a tick failed, and the next one looks for what is at fault: %s", first_line(error))
            self._careful = True
            return
        self._careful = bool(tick.failed_parts)
        if tick.failed_parts:  # it is tried again, but all the others come first
            self._patience = max(self._patience, _FAILED_PAUSE)
        self._pace.worked(self._budget)
        self._generations.cursor = cursor
        self._last_claimed = tick.last_claimed() or self._last_claimed
        self._dispatcher.committed(tick, self._monotonic())
        self._code.paging.committed(tick)
        if self._code.paging.is_busy and self._speaks:
            self._patience = 0.0
        self._on_ended(len(tick.ended))
        self._watch.revoke(tick.revoked, self._monotonic())
        self._hear(self._publish, tick, withdraw, bool(inbound.entries))

    def _begin_tick(self, connection: Connection, now: datetime, set_aside: list[Refused]) -> Tick:
        self._budget = self._pace.budget()
        parts = self._dags, self._triggers, self._lanes, self._code, self._backlog
        return Tick(connection, now, *parts, self._budget, self._careful, set_aside=set_aside)

    def _apply(self, tick: Tick, reports: Sequence[Reported]) -> None:
        if not reports:
            return
        settings = self._settings

        def apply(some: Sequence[Reported]) -> None:
            apply_reports(tick, some, loss_limit=settings.loss_limit, inline_result=settings.inline_result)

        apply_carefully(tick, reports, apply)

    # -- around the transaction

    @property
    def _cursor(self) -> Cursor:
        return self._generations.cursor

    @property
    def _hears(self) -> bool:
        return self._monotonic() >= self._deaf_until and bool(self._cursor.generation)

    @property
    def _speaks(self) -> bool:
        return self._monotonic() >= self._mute_until and self._hears

    def _hear(self, speak: Callable[..., None], *arguments: object) -> None:
        """Talk to Redis; while it is away, the tick goes on without it.

        While it only refuses writes, events are still read and applied: if they are what fills it, that makes room.
        """
        try:
            speak(*arguments)
        except StreamsDamaged as error:
            log.error("a stream of generation %s cannot be used: %s", self._cursor.generation, first_line(error))
            self._generations.give_up()
            self._watch.due_at = 0.0
        except transport.UNAVAILABLE as error:
            self._miss_redis(error)
            self._mute_until = self._monotonic() + 0.5
            if not isinstance(error, transport.REFUSED):
                self._deaf_until = self._mute_until
            self._fleet.interrupted()
            self._watch.due_at = self._mute_until

    def _look(self) -> Suspicion:
        """Look at Redis and the fleet, and note which in-flight tasks seem to be nowhere."""
        suspicion = Suspicion()

        def look() -> None:
            nonlocal suspicion
            if self._generations.keep(self._monotonic()):
                self._fleet.grace()
                if self._generations.is_rewound:
                    self._watch.doubt_all(self._monotonic())
            self._watch.look(self._monotonic())
            began = self._monotonic()
            sweep = self._sweep() if began >= self._count_at else []
            if (self._dispatcher.in_flight and began >= self._count_at) or sweep:
                with self._leadership.reading() as connection:
                    in_flight = waiting.in_flight(connection)
                self._count_at = began + _COUNT_PAUSE * (self._monotonic() - began)
                self._dispatcher.recount(in_flight)
                away = [task for task in in_flight if not self._code.paging.holds(task.id, task.attempt)]
                suspicion = self._reconciler.suspects(self._streams, self._cursor.generation, away, sweep)
            self._redis.worked()
            self._leadership.trouble = None

        self._hear(look)
        return suspicion

    def _sweep(self) -> list[str]:
        """Now and then, forget workers that are gone; return the queues in which they may have left messages: all."""
        if self._monotonic() < self._sweep_at:
            return []
        self._sweep_at = self._monotonic() + _SWEEP_EVERY
        queues = list(self._fleet.queues)
        self._streams.forget_gone(self._cursor.generation, queues)
        return queues

    def _apply_leftover(self, inbound: Inbound, cursor: Cursor) -> Sequence[Ended]:
        """Apply what still stands in the stream of a generation that ends, up to a cursor; return what ended."""
        self._careful = True  # nothing that stands there may keep the next generation from beginning
        reports, set_aside = _decode(inbound)
        with self._leadership.writing(self._monotonic()) as writing:
            tick = self._begin_tick(writing.connection, writing.now, set_aside)
            self._apply(tick, reports)
            advance_runs(tick)
            settle_ends(tick)
            writing.cursor = cursor
        self._dispatcher.committed(tick, self._monotonic())
        self._code.paging.committed(tick)
        self._set_aside(tick)
        return tick.ended

    def _read(self, to_the_end: bool) -> Inbound:
        """Read events: one batch, waiting for the first; or all there are, without waiting."""
        if not self._hears:
            self._stopping.wait(min(self._patience, 0.1))
            return Inbound()
        gathered = Inbound([], False, False)

        def read() -> None:
            nonlocal gathered
            position = self._cursor.position
            now = self._monotonic()
            block = 0.0 if to_the_end else min(self._patient_since + self._patience, self._watch.due_at) - now
            count = self._settings.batch
            for _ in range(20 if to_the_end else 1):
                inbound = self._streams.read(self._cursor.generation, position, count, block)
                gathered = Inbound(
                    gathered.entries + inbound.entries,
                    gathered.nudged or inbound.nudged,
                    gathered.fleet_changed or inbound.fleet_changed,
                    inbound.complete,
                    gathered.stopped + inbound.stopped,
                )
                if inbound.complete or sum(len(body) for _, body in gathered.entries) > MOST_BYTES:
                    return
                position = inbound.entries[-1][0]

        self._hear(read)
        if gathered.fleet_changed:
            self._watch.due_at = 0.0
        self._watch.heard_of(gathered.stopped)
        return gathered

    def _publish(self, tick: Tick, withdraw: dict[str, list[str]], moved_on: bool) -> None:
        """After the commit: hand out, withdraw, and tell everyone."""
        generation, term, position = self._cursor.generation, self._leadership.term, self._cursor.position
        news = moved_on or bool(tick.ended)
        if tick.claimed or news:
            handed_out = self._dispatcher.messages(tick.claimed)
            claimed = encode(None if moved_on else self._last_claimed)
            self._streams.publish(generation, term, handed_out, position if news else None, tick.ended, claimed)
        if news:
            self._generations.confirmed = position
        if tick.key_holders:
            self._streams.tell_key_holders(tick.key_holders)
        for messages in (withdraw, self._watch.unreceived(generation, tick.revoked)):
            for queue, entries in messages.items():
                self._streams.withdraw(generation, queue, entries)
        self._set_aside(tick)
        self._watch.give_orders()
        if self._code.paging.is_busy and self._speaks:
            self._code.paging.send(self._leadership.reading, self._streams.pages, self._push)

    def _push(self, claimed: Sequence[Claimed]) -> None:
        generation, term, last = self._cursor.generation, self._leadership.term, encode(self._last_claimed)
        self._streams.publish(generation, term, self._dispatcher.messages(claimed), claimed=last)

    def _set_aside(self, tick: Tick) -> None:
        if tick.set_aside:
            first = tick.set_aside[0]
            log.error("set aside: %d events, the first %s: %s", len(tick.set_aside), first.source, first.error)
            self._streams.set_aside(tick.set_aside)


def _decode(inbound: Inbound) -> tuple[list[Reported], list[Refused]]:
    reports: list[Reported] = []
    set_aside: list[Refused] = []
    for entry, body in inbound.entries:
        try:
            flush = decode_flush(body)
        except Malformed as error:
            set_aside.append(Refused(entry, body, str(error)))
        else:
            reports.extend((entry, flush.worker, report) for report in flush.reports)
    return reports, set_aside
