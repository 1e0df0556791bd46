"""One term of leadership: a sequence of ticks, each of which is one transaction.

tick:  check the fleet                once a second, and when a worker announces a change
       read a batch of events         blocks until one arrives or work is due
       one transaction, guarded by the term:
           apply reports and the inbox
           advance the runs that they touch
           fire due schedules and timers
           claim ready tasks
           record the events cursor
       publish: the applied position to workers, ends to waiting clients, claimed tasks to queues

Some ticks are a single round trip to Postgres; see `_shorten`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from sqlalchemy import exc

from orchestrator.domain.runs import Nesting
from orchestrator.scheduler.budget import Pace
from orchestrator.scheduler.code.runs import CodeRuns
from orchestrator.scheduler.dag.plans import Dags
from orchestrator.scheduler.dispatch.dispatcher import Dispatcher
from orchestrator.scheduler.fleet.capabilities import CapacityHold
from orchestrator.scheduler.fleet.generations import Generations
from orchestrator.scheduler.fleet.reconcile import FleetCheck, Reconciler, Suspicion
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.fleet.watch import FleetWatch
from orchestrator.scheduler.flow.plans import Flows
from orchestrator.scheduler.leadership import TICK_LIMIT, Leadership
from orchestrator.scheduler.limits import LaneService
from orchestrator.scheduler.link import FAILURES, ChangeLog, Link
from orchestrator.scheduler.meter import Meter, ThroughputRecord
from orchestrator.scheduler.pending_work import PendingWork
from orchestrator.scheduler.requests import Requests, settle_ends
from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.scheduler.runs.cancels import Cancels
from orchestrator.scheduler.runs.triggers import Triggers
from orchestrator.scheduler.spans import LeaderSpans
from orchestrator.scheduler.tasks.creation import Foreseen
from orchestrator.scheduler.tasks.locked import LockedTasks
from orchestrator.scheduler.tasks.reports import Decoded, Reports
from orchestrator.scheduler.tick_result import CommitHooks, TickResult
from orchestrator.scheduler.transaction import Transaction, affects_everything
from orchestrator.sealing import vault_of
from orchestrator.settings import Settings
from orchestrator.store import postgres_errors
from orchestrator.store.driver import flush
from orchestrator.store.fleet import drains
from orchestrator.store.leases import Cursor
from orchestrator.store.sql import statement_of
from orchestrator.store.tasks import waiting
from orchestrator.store.tasks.transitions import is_unforeseen
from orchestrator.store.tasks.waiting import PendingWorkProbe
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.transport.codec import Ended
from orchestrator.transport.leader.streams import Inbound, LeaderStreams

log = get_logger("scheduler")

_FAILED_PAUSE = 0.5
"""Seconds before a part of a tick that failed is tried again, unless an event arrives."""
_LOG_INTERVAL = 1.0
"""Seconds between two log entries about slowed parts."""
_MAX_SHORT_REPORTS = 20
"""Reports that may be applied and committed in one round trip, at most. For more, the round trip hardly matters."""
_NUDGE_PAUSE = 0.005
"""Seconds for which the leader does not listen after nudges that led to nothing because no worker had room."""


class Term:
    """The leader's state for one term. It starts from Postgres and Redis; only `pace` outlives a term."""

    def __init__(
        self,
        settings: Settings,
        streams: LeaderStreams,
        leadership: Leadership,
        pace: Pace,
        redis: Outage,
        meter: Meter,
        *,
        stopping: threading.Event,
        on_ended: Callable[[int], None],
        monotonic: Callable[[], float],
        spans: LeaderSpans | None = None,
    ) -> None:
        self._settings = settings
        self._spans = spans
        self._vault = vault_of(settings)
        self._streams = streams
        self._leadership = leadership
        self._pace = pace
        self._meter = meter
        self._stopping = stopping
        self._on_ended = on_ended
        self._monotonic = monotonic
        self._is_bisecting = bool(pace.parts)
        self._blamed_part: str | None = None
        """The part of the last failed tick whose statement took too long."""
        self._logged_at = 0.0
        """The monotonic time of the last log entry about slowed parts."""
        self.due_in = 0.0
        """Seconds until work is due, unless an event arrives; counted from `_due_since`."""
        self._due_since = 0.0
        self._nudged_in_vain = False
        self._last_was_single = True
        """In the last tick that moved tasks, the first of them ended without consequences for other tasks and runs."""
        self._may_be_committed = False
        """The last tick may have been committed before its end."""
        self._began_at: float | None = None
        """The monotonic start of the open transaction, or of the one that failed last."""

        nesting = Nesting(settings.max_depth, settings.max_descendants)
        self.fleet = fleet = Fleet(settings.worker_ttl)
        self._shard = settings.shard if settings.shards > 1 else None
        self.lanes = lanes = LaneService(self._shard, settings.shards)
        self.dispatcher = dispatcher = Dispatcher(fleet, lanes, settings.batch, monotonic)
        self.watch = watch = FleetWatch(fleet, streams, settings, monotonic)
        backlog = Backlog()
        self.dags = dags = Dags(backlog, settings.max_payload, settings.batch, nesting)
        self.code = code = CodeRuns(fleet, backlog, nesting)
        triggers = Triggers(dags, nesting)
        self.flows = flows = Flows(settings.max_payload)
        self.runs = runs = Runs(dags, flows, triggers, code, backlog)
        self.cancels = Cancels(runs, backlog)
        self._reports = reports = Reports(
            *(code, settings.loss_limit, settings.inline_result, streams.signing, settings.unknown_task_timeout),
            LockedTasks(),
        )
        requests = Requests(runs, self.cancels, triggers, code, backlog, lanes, fleet, reports)
        self.pending_work = PendingWork(settings, fleet, code, backlog, runs, self.cancels, requests)
        self._reconciler = Reconciler(fleet)
        self.generations = Generations(streams, leadership, settings.batch, self._apply_leftover)
        self.link = Link(
            streams=streams,
            leadership=leadership,
            generations=self.generations,
            outage=redis,
            fleet=fleet,
            watch=watch,
            paging=code.paging,
            changes=ChangeLog(),
            batch=settings.batch,
            monotonic=monotonic,
            has_spans=spans is not None,
        )
        self._fleet_check = FleetCheck(
            streams=streams,
            leadership=leadership,
            generations=self.generations,
            link=self.link,
            fleet=fleet,
            watch=watch,
            dispatcher=dispatcher,
            paging=code.paging,
            reconciler=self._reconciler,
            monotonic=monotonic,
        )
        self._throughput = ThroughputRecord(meter, leadership.term)
        self._foreseen = Foreseen()
        self._before_publish: tuple[CommitHooks, ...] = (code, watch, self.link)
        """Parts notified of a commit before it is published. The rest is notified afterwards."""
        parts = (dispatcher, dags, flows, backlog, self.pending_work, self._throughput, meter, self._foreseen)
        self._after_publish: tuple[CommitHooks, ...] = parts if spans is None else (*parts, spans)

    def begin(self) -> None:
        """Read the attempts in flight from Postgres, and make Redis accept writes of this term."""
        with self._leadership.reading() as connection:
            self.dispatcher.recount(waiting.in_flight(connection))
            self.fleet.capabilities.holds = {CapacityHold.parse(*found) for found in waiting.capacity_holds(connection)}
            self.fleet.capabilities.resource_holds = set(waiting.resource_holds(connection))
            self.watch.drains = drains(connection)
        log.info("scheduler.leading term=%d shard=%d", self._leadership.term, self._shard or 0)
        try:
            self.generations.claim_term(self._monotonic())
        except FAILURES as error:
            self.link.failed(error)

    @property
    def took(self) -> float:
        """Seconds since the open transaction began, or the one that has just failed."""
        return 0.0 if self._began_at is None else self._monotonic() - self._began_at

    # -- the tick

    def tick(self) -> None:
        """Apply incoming events, decide what follows, and dispatch ready tasks."""
        suspicion = self._check_fleet()
        inbound = self._read(suspicion)
        decoded = self._reports.decode(inbound)
        try:
            tx = self._commit(inbound, decoded, suspicion)
        except Exception as error:
            is_part_known = self._blamed_part is not None
            if self._is_bisecting or (affects_everything(error) and not is_part_known):
                raise
            if is_part_known:
                log.warning(
                    "scheduler.statement_cancelled part=%r statement=%s: it took too long; the next ticks do less work",
                    self._blamed_part,
                    statement_of(error),
                )
            else:
                log.error("scheduler.tick_rolled_back error=%s: the next tick looks for the cause", first_line(error))
            self._is_bisecting = True
            if self._may_be_committed:
                self._reload()
            return
        ended, had_room = tx.result.outgoing.ended, self.dispatcher.last.had_room
        self._nudged_in_vain = inbound.nudged and not (inbound.entries or inbound.fleet_changed or ended or had_room)
        try:
            self.link.publish(tx.result, tx.now.timestamp(), moved_on=bool(inbound.entries))
        finally:
            self._committed(tx.result)
        self._meter.ticked(self._monotonic() - self._due_since)

    def _commit(self, inbound: Inbound, decoded: Decoded, suspicion: Suspicion | None) -> Transaction:
        """Run and commit the tick's transaction. Run it again without foreseen ends if those were wrong."""
        try:
            return self._run_transaction(inbound, decoded, suspicion)
        except exc.DataError as error:
            if not is_unforeseen(error):
                raise
        return self._run_transaction(inbound, decoded, suspicion)

    def _run_transaction(self, inbound: Inbound, decoded: Decoded, suspicion: Suspicion | None) -> Transaction:
        cursor, is_full_check = self._cursor_after(inbound), inbound.needs_full_check or suspicion is not None
        are_plain = decoded.are_plain_successes() and not inbound.nudged
        self._may_be_committed = False
        with self._transaction(cursor, with_pending_work=is_full_check) as (tx, pending_work):
            if not is_full_check:
                self._shorten(tx, cursor, decoded, are_plain=are_plain, is_nudged=inbound.nudged)
            tx.budget.part = "apply reports"
            self._reports.apply(tx, decoded)
            tx.budget.finish(tx.budget.part, None)
            if moved := tx.result.outgoing.moved:
                self._last_was_single = moved[0].is_single
            if suspicion is not None and inbound.complete:
                lost, tx.result.outgoing.withdrawn = self._reconciler.judge(suspicion)
                self._reports.apply_reports(tx, lost)
            self.runs.advance(tx)
            somebody_waits = inbound.nudged or bool(inbound.entries)
            self.due_in = self.pending_work.run(tx, pending_work, somebody_waits=somebody_waits)
            settle_ends(tx)
            if suspicion is not None:
                self.lanes.release_stopped(tx, self.fleet)
            if self.link.can_write and not (are_plain and self._is_drained(tx.result)):
                if inbound.nudged:
                    tx.created = None  # more tasks may be ready; claim them together
                if self.dispatcher.is_slow:
                    flush(tx.connection)  # the duration of a claim is measured
                self.dispatcher.claim(tx, self._settings.unknown_task_timeout)
                self.code.attach_events(tx)
                self.due_in = min(self.due_in, self.dispatcher.due_in(tx.now))
            self.watch.record(tx)
            self._throughput.record(tx)
        return tx

    def _shorten(self, tx: Transaction, cursor: Cursor, decoded: Decoded, *, are_plain: bool, is_nudged: bool) -> None:
        """Let the tick be one round trip if it only claims, only applies reports, or applies foreseen ends.

        Any further work goes into a second transaction of the same tick.
        """
        if cursor is self.generations.cursor:
            self._may_be_committed = tx.may_end_with_claim = True
        elif len(decoded.reports) > _MAX_SHORT_REPORTS:
            return
        elif are_plain and self._last_was_single and self._was_drained:
            self._may_be_committed = True
            tx.succeed_and_commit = partial(self._leadership.succeed_and_commit, tx.connection, tx.now, cursor)
        elif tx.may_gather and not (tx.is_watched or (is_nudged and (decoded.turns or not self._last_was_single))):
            reports = (report for _, _, report in decoded.reports)
            tx.foreseen = self._foreseen.ends(reports, single=is_nudged)
            if tx.foreseen is not None:
                self._may_be_committed = True
                tx.may_end_with_claim = is_nudged
                tx.commit_with_next = partial(self._leadership.commit_with_next, tx.connection, cursor)

    def _reload(self) -> None:
        """Reload state that a failed tick had already committed. Its results were not published: the reconciler returns
        the claimed tasks, and waiting clients poll."""
        with self._leadership.reading() as connection:
            self.dispatcher.recount(waiting.in_flight(connection))
        self.generations.cursor = self._leadership.cursor() or self.generations.cursor
        self.watch.due_at = 0.0

    @property
    def _was_drained(self) -> bool:
        return self.pending_work.was_empty and self.dispatcher.last.has_drained

    def _is_drained(self, tick: TickResult) -> bool:
        """Return whether no task can be ready: the last claim left none, and the successes of this tick lead to none.

        An enqueue nudges the leader, and a nudged tick claims. If a nudge is lost, the next fleet check finds the task.
        """
        return self._was_drained and all(task.is_single for task in tick.outgoing.moved)

    def _check_fleet(self) -> Suspicion | None:
        return self._fleet_check.run() if self._monotonic() >= self.watch.due_at else None

    def _read(self, suspicion: Suspicion | None) -> Inbound:
        """Read a batch of events, waiting for the first; after a fleet check, read all of them without waiting.

        After nudges that led to nothing, pause so that more gather: while no worker has room, each enqueue would cost a
        tick. There is no pause while a worker has room: an earlier tick had claimed the nudged task.
        """
        if not self.link.can_read:
            self._stopping.wait(min(self.due_in, 0.1))
            return Inbound()
        until = min(self._due_since + self.due_in, self.watch.due_at)
        if self._nudged_in_vain and suspicion is None:
            self._nudged_in_vain = False
            self._stopping.wait(min(_NUDGE_PAUSE, until - self._monotonic()))
        return self.link.read(until if suspicion is None else None)

    def _cursor_after(self, inbound: Inbound) -> Cursor:
        cursor = self.generations.cursor
        return cursor._replace(position=inbound.entries[-1][0]) if inbound.entries else cursor

    def _apply_leftover(self, inbound: Inbound, cursor: Cursor) -> Sequence[Ended]:
        """Apply the events left in an ending generation's stream, up to a cursor. Return what ended."""
        self._is_bisecting = True  # no leftover event may keep the next generation from beginning
        decoded = self._reports.decode(inbound)
        with self._transaction(cursor) as (tx, _):
            self._reports.apply(tx, decoded)
            self.runs.advance(tx)
            settle_ends(tx)
        self._committed(tx.result)
        self.link.set_aside(tx.result.outgoing.set_aside)
        return tx.result.outgoing.ended

    # -- the transaction

    @contextmanager
    def _transaction(
        self, cursor: Cursor, *, with_pending_work: bool = False
    ) -> Iterator[tuple[Transaction, PendingWorkProbe | None]]:
        """Open a transaction. All caches are notified of a rollback, and `_before_publish` of a commit."""
        budget, result = self._pace.budget(), TickResult()
        began: float | None = None
        try:
            with self._leadership.writing(
                self._monotonic(), with_pending_work=with_pending_work, may_begin_later=not self._is_bisecting
            ) as writing:
                self._began_at = self._due_since = began = self._monotonic()
                watched, undone = self._streams.fleet.is_watched, self._rolled_back
                tx = Transaction(
                    writing.connection, writing.now, budget, self._is_bisecting, not self._is_bisecting, watched, undone
                )
                tx.vault, tx.spans, tx.result, tx.shard = self._vault, self._spans, result, self._shard
                tx.statement_limit = TICK_LIMIT * self._settings.lease
                yield tx, writing.pending_work
                writing.cursor = cursor if cursor is not self.generations.cursor else None
        except Exception as error:
            if is_unforeseen(error):
                self._rolled_back()
                raise
            self._meter.failed_ticks += 1
            took, is_late = 0.0 if began is None else self._monotonic() - began, postgres_errors.is_timeout(error)
            self._pace.interrupted(budget, by_postgres=is_late, took=took)
            self._blamed_part = budget.blamed_part if is_late else None
            if self._blamed_part is not None:
                self._pace.parts.timed_out(self._blamed_part, statement_of(error))
            self._rolled_back()
            self.due_in = 0.0
            raise
        self._pace.worked(budget, self.took)
        if self._pace.parts and self._monotonic() >= self._logged_at + _LOG_INTERVAL:
            self._logged_at = self._monotonic()
            self._streams.complain(self._pace.parts.describe() or "")
        self._began_at = None
        self.generations.cursor = cursor
        for part in self._before_publish:
            part.committed(result)

    def _committed(self, tick: TickResult) -> None:
        for part in self._after_publish:
            part.committed(tick)
        self._on_ended(len(tick.outgoing.ended))
        self._is_bisecting = bool(tick.failed_parts or self._pace.parts)
        if self.link.has_pages:
            self.due_in = 0.0
        elif tick.failed_parts:  # it is tried again, but all other work comes first
            self.due_in = max(self.due_in, _FAILED_PAUSE)

    def _rolled_back(self) -> None:
        for part in (*self._before_publish, *self._after_publish):
            part.rolled_back()
