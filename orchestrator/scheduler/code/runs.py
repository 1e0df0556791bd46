"""Workflows as code: send activations and deliver events to runs, for all runs of a tick together.

`batches.py` applies the reports, `ends.py` ends runs, `requests.py` handles requests of clients.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

from orchestrator.domain.code.activation import (
    PAGE,
    Activation,
    Delivery,
    HistoryBudget,
    Query,
    Violation,
    history_too_long,
    history_unreadable,
    json_text,
)
from orchestrator.domain.code.history import Event, Fact, RunCancelRequested, RunStarted, TimerFired, seen_events
from orchestrator.domain.ids import run_log_fields, successor_id, to_text
from orchestrator.domain.runs import CONTINUED, TIMED_OUT, Nesting, RunChanges
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.domain.tasks.task import Lost, TaskError
from orchestrator.scheduler.code.paging import Paging
from orchestrator.scheduler.code.queries import Queries, QueriesByRun
from orchestrator.scheduler.fleet.capabilities import CapacityHold
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.scheduler.runs.kinds import RunKind
from orchestrator.scheduler.tick_result import Paged, TickResult
from orchestrator.scheduler.transaction import Transaction, isolate
from orchestrator.store.code import expectations, histories, turns
from orchestrator.store.code.expectations import PromiseAnswer
from orchestrator.store.code.turns import Unshown
from orchestrator.store.runs import stuck
from orchestrator.store.runs.transitions import Delta, RunRow
from orchestrator.store.tasks import results, transitions
from orchestrator.store.tasks.claims import Claimed
from orchestrator.store.tasks.transitions import Requeue
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import Ended, encode

log = get_logger("scheduler")

_FIRST = bytes(16)
_CHECK_INTERVAL = 30.0
"""Seconds between two checks for runs that may be tried again after their processes died."""
_MAX_REPLAYS = 10_000
"""Queries of ended runs that are remembered."""
_CROWDED_TIMEOUT = 300.0
"""Seconds after which a turn that waits for capacity is tried again, unless it is released earlier."""
_RESEND_PAUSE = 1.0
"""Seconds before pages that a worker did not find are sent again: they may be many megabytes."""


class CodeRuns(RunKind):
    """The leader's memory of code runs: pending queries, and the workers for which stuck runs were freed."""

    name = "code"
    ends_itself = True

    def __init__(self, fleet: Fleet, backlog: Backlog, nesting: Nesting | None = None) -> None:
        self._fleet = fleet
        self._backlog = backlog
        self.nesting = nesting or Nesting()
        self.paging = Paging()
        self.queries = Queries()
        self._workers_seen: frozenset[bytes] = frozenset()
        self.has_waits = False
        """Runs may wait for the ends of other runs."""
        self.waits_checked_to: tuple[str, bytes] | None = ("", bytes(16))
        """The last wait checked for an end that an earlier leader may have missed; None once all are checked."""
        self._last_freed = b""
        """The last stuck run that was freed; empty if all were."""
        self._tried_code: tuple[frozenset[str], float] = frozenset(), 0.0
        """Digests of the code with which runs of dead processes were tried, and when to check these runs again."""
        self._replays: dict[bytes, bool] = {}
        """Queries of ended runs that were sent, and whether their process died."""

    def committed(self, tick: TickResult) -> None:
        self.paging.committed(tick)
        self.queries.committed(tick)
        if tick.code.waits_checked_to is not None:
            self.waits_checked_to = tick.code.waits_checked_to if tick.code.waits_checked_to[0] else None
        self._workers_seen, self._last_freed = tick.code.freed_up_to or (self._workers_seen, self._last_freed)
        self._tried_code = tick.code.tried_code or self._tried_code
        for replay in tick.outgoing.replays:
            self._replays.setdefault(replay.id, False)
        for lost in (self._replays, self.queries.askers):
            if len(lost) > _MAX_REPLAYS:
                lost.clear()

    def ask(self, tx: Transaction, queries: Iterable[tuple[bytes, Query]]) -> None:
        """Have the code of runs answer queries, in a separate turn or in the one after the current turn.

        A query may be lost with a worker or a leader; a client without an answer asks again.
        """
        requested = list(queries)
        free = stuck.wake(tx.connection, [run for run, _ in requested])
        tx.result.code.queries.extend((run, query) for run, query in requested if run in free)
        if of_ended := [(run, query) for run, query in requested if run not in free]:
            self._replay(tx, of_ended)

    def _replay(self, tx: Transaction, requested: Sequence[tuple[bytes, Query]]) -> None:
        """Have queries of ended runs answered by replaying their histories.

        This uses no task: it has no effect but the answer, and a client without one asks again.
        """
        states = results.run_states(tx.connection, list({run for run, _ in requested}))
        ended = {run: True for run, state in states.items() if state in ENDED_RUN_STATES}
        found = {run.id: run for run in turns.unshown(tx.connection, ended)}
        read = turns.events(tx.connection, [run for run in found.values() if run.events is None and run.size <= PAGE])
        budget = HistoryBudget(0)
        refused: list[PromiseAnswer] = []
        for run, query in requested:
            if run not in found:
                problem = "it has not started" if states.get(run) == RunState.PENDING else "it is stuck"
            elif found[run].size > PAGE:
                problem = f"it has ended, and its history has {found[run].size:,} bytes: at most {PAGE:,} are replayed"
            elif not (events := seen_events(read.get(run) or found[run].events or [])):
                problem = "it ended before its code ran"
            else:
                if budget.delivery(found[run].size) is Delivery.MESSAGE:
                    self._send_replay(tx, found[run], events, query)
                continue
            error = TaskError("WrongState", f"Run {to_text(run)} cannot be queried: {problem}.")
            refused.append(PromiseAnswer(query.id, None, error))
        self.answer(tx, refused)

    def _send_replay(self, tx: Transaction, run: Unshown, events: list[Event], query: Query) -> None:
        started = events[0].what
        assert isinstance(started, RunStarted)
        payload = encode(_activation(run, events, {run.id: {query.id: query}}))
        alone = self._replays.get(query.id, False)
        turn = Claimed(query.id, 1, run.workflow, payload, started.queue, None, query.id, None, alone=alone)
        placed = self._placed(turn, run)
        if self._fleet.slots(started.queue) and isinstance(placed, Claimed):
            tx.result.outgoing.replays.append(placed)

    def has_pending_changes(self, tx: Transaction, run: bytes) -> bool:
        """Return whether a run has pending changes."""
        return bool(self._backlog.waiting(tx, [run]))

    def took_turn(self, tx: Transaction, runs: Sequence[bytes], answered: Container[bytes]) -> None:
        """Wake runs whose code has taken a turn if they have newer queries."""
        if with_queries := self.queries.turn_taken(tx.result, runs, answered):
            stuck.wake(tx.connection, with_queries)

    def ended(self, tx: Transaction, rows: Sequence[RunRow]) -> None:
        """Pass unanswered queries of ended runs to their successors. Other queries are answered by a replay."""
        waiting_queries = self.queries.waiting(tx.result)
        successors = {row.id: successor_id(row.id) if row.reason == CONTINUED else row.id for row in rows}
        self.queries.forget(tx.result, list(successors))
        waiting = [(successors[run], query) for run in successors for query in waiting_queries.get(run, {}).values()]
        if waiting:
            tx.result.code.forwarded.extend(successors)
            self.ask(tx, waiting)

    @property
    def has_sent_queries(self) -> bool:
        """Return whether queries may be in flight."""
        return bool(self.queries.has_sent or self._replays)

    def lost(self, tx: Transaction, reports: Iterable[Lost]) -> None:
        """Retry queries whose process died, in a process of their own. If that has died, answer them with an error."""
        answers: list[PromiseAnswer] = []
        for report in reports:
            if not report.alone:
                self.queries.requeue(tx.result, [(report.id, report.attempt)])
                if report.id in self._replays:
                    self._replays[report.id] = True  # the client asks again
                continue
            is_replay = report.id in self._replays
            queries = [report.id] if is_replay else self.queries.lost(tx.result, report.id, report.attempt)
            why = f"The process that answered this query died; it ran only the query: {report.reason or 'killed'}."
            answers += [PromiseAnswer(query, None, TaskError("WorkerLost", why, phase="failed")) for query in queries]
        self.answer(tx, answers)

    def answer(self, tx: Transaction, answers: Sequence[PromiseAnswer]) -> None:
        """Send answers to the runs and clients that asked."""
        if self.queries.askers:
            facts, answers = self.queries.split(answers)
            append_facts(tx, facts)
        reply(tx, answers)

    def free_stuck(self, tx: Transaction, limit: int) -> None:
        """Retry stuck runs whenever a worker appears or disappears, because the code may have changed.

        A process that replaces another one of the same worker has the same code. If there are several workers, one of
        them may have code that fits: runs are retried after a pause.
        """
        if not self._fleet.is_in_view:
            return
        members = frozenset(beat.parent or beat.worker.encode() for beat in self._fleet.beats.values())
        self._free_late(tx, limit, has_others=len(members) > 1)
        if members == self._workers_seen and not self._last_freed:
            return
        after = self._last_freed if members == self._workers_seen else _FIRST
        known = self._known()
        freed = stuck.free_code(tx.connection, known, after, limit) if known else []
        tx.result.code.freed_up_to = members, max(freed) if len(freed) == limit else b""
        self._backlog.freed(tx, freed)

    def _free_late(self, tx: Transaction, limit: int, *, has_others: bool) -> None:
        """Retry runs whose processes died when code appears that this leader has not seen, or after a pause."""
        tried, check_at = self._tried_code
        codes = {beat.names for beat in self._fleet.beats.values()}
        now = tx.now.timestamp()
        if codes <= tried and now < check_at:
            return
        tx.result.code.tried_code = tried | codes, now + _CHECK_INTERVAL
        known = self._known()
        due = now if codes <= tried else math.inf
        if known:
            freed = stuck.free_unfit(tx.connection, known, now, limit) if has_others else []
            self._backlog.freed(tx, freed + stuck.free_lost(tx.connection, known, due, limit))

    def _known(self) -> list[str]:
        return sorted({name for _, name in self._fleet.known()})

    # -- out

    def attach_events(self, tx: Transaction) -> None:
        """Add the unseen events to the claimed activations, and send each to the worker that has its code.

        Events too large for one message are sent in pages. Activations without room are postponed.
        """
        claimed = [task for task in tx.result.outgoing.claimed if task.run_id is not None and task.is_turn_task]
        if not claimed:
            return
        queries_by_run = self.queries.waiting(tx.result)
        with_events: dict[bytes, Claimed] = {}
        isolate(
            tx,
            claimed,
            lambda tx, tasks: with_events.update(self._with_events(tx, tasks, queries_by_run)),
            lambda tx, task, error: mark_stuck(tx, [(task.id, task.attempt, history_unreadable(error))]),
        )
        with_events |= {paged.task.id: paged.task for paged in tx.result.outgoing.paged}
        tx.result.outgoing.claimed = [
            with_events.get(task.id, task)
            for task in tx.result.outgoing.claimed
            if task.id in with_events or not task.is_turn_task
        ]

    def _with_events(
        self, tx: Transaction, tasks: Sequence[Claimed], queries_by_run: QueriesByRun
    ) -> dict[bytes, Claimed]:
        """Return the claimed activations that fit into one message, with their events."""
        claimed = {task.id: task for task in tasks}
        can_stay = {run: self._can_stay(task) for run, task in claimed.items()}
        budget = HistoryBudget(self.paging.size)
        capabilities = self._fleet.capabilities
        small: dict[bytes, tuple[Claimed, Unshown]] = {}
        later: list[tuple[bytes, int, float]] = []
        crowded: list[tuple[Claimed, CapacityHold]] = []
        too_long: list[tuple[bytes, int, Violation]] = []
        for run in turns.unshown(tx.connection, {run: not stays for run, stays in can_stay.items()}):
            worker = claimed[run.id].worker if run.after else None
            task = claimed[run.id]._replace(worker=worker, to=worker)
            if capabilities.upgrades and worker is None:
                run = run._replace(version=max(run.version, capabilities.newest(task.queue, task.name)))
            placed = self._placed(task, run)
            if isinstance(placed, CapacityHold):
                crowded.append((task, placed))
                continue
            task = placed
            delivery = budget.delivery(run.size)
            if delivery is not Delivery.LATER:
                self.queries.send(tx.result, queries_by_run, run.id, task.attempt)
            if delivery is Delivery.MESSAGE:
                small[run.id] = task, run
            elif delivery is Delivery.PAGES:
                tx.result.outgoing.paged.append(Paged(task, _activation(run, [], queries_by_run), run))
            elif delivery is Delivery.LATER:
                later.append((run.id, task.attempt, budget.wait))
            else:
                too_long.append((run.id, task.attempt, history_too_long(run.size)))
        unread = [run for _, run in small.values() if run.events is None]
        read = turns.events(tx.connection, unread) if unread else {}
        with_events = {
            task.id: task._replace(payload=encode(_activation(run, read.get(run.id, run.events or []), queries_by_run)))
            for task, run in small.values()
        }
        if crowded:
            self._keep_back(tx, crowded)
        if later:
            turns.postpone(tx.connection, later, tx.now)
        if too_long:
            mark_stuck(tx, too_long)
        return with_events

    def _placed(self, task: Claimed, run: Unshown) -> Claimed | CapacityHold:
        """Return a turn with its worker if only some workers have its version, or a hold if those are full.

        If no worker has the version, workers with another version of the code may take it.
        """
        capabilities = self._fleet.capabilities
        if task.to is not None or task.queue not in capabilities.mixed:
            return task
        hold = CapacityHold(task.queue, task.name, f"{run.workflow}@{run.version}")
        kinds = capabilities.knowing(task.queue, hold.wanted)
        if kinds == frozenset():
            hold = CapacityHold(task.queue, task.name)
            kinds = capabilities.knowing(task.queue, task.name)
        if kinds is None:
            return task
        worker = capabilities.place(task.queue, kinds)
        return hold if worker is None else task._replace(to=worker)

    def _keep_back(self, tx: Transaction, crowded: Sequence[tuple[Claimed, CapacityHold]]) -> None:
        """Hold turns until a worker with their version has capacity: the code of another version may not fit."""
        requeued = [Requeue(task.id, task.attempt, _CROWDED_TIMEOUT, hold=hold.hold) for task, hold in crowded]
        transitions.requeue(tx.connection, requeued, tx.now)
        tx.result.capacity.holds.update((hold, True) for _, hold in crowded)
        self._fleet.capabilities.grows = True

    def pause(self, run: bytes, attempt: int) -> float:
        """Return the seconds before data that an attempt did not find is sent again."""
        return _RESEND_PAUSE if self.paging.has(run, attempt) else 0.0

    def _can_stay(self, task: Claimed) -> bool:
        """Return whether the worker that has a run's code in memory can take the turn."""
        if task.worker is None or task.alone:
            return False
        beat = self._fleet.beats.get(task.worker)
        is_able = beat is not None and not (beat.draining or beat.doubtful) and beat.running < beat.slots
        return is_able and not (self._fleet.capabilities.upgrades and self._fleet.is_outdated(task))


def _activation(run: Unshown, events: list[Event], queries_by_run: QueriesByRun) -> Activation:
    queries = list(queries_by_run.get(run.id, {}).values())
    return Activation(
        *(run.id, run.workflow, run.version, run.after, run.through, events, run.cached, queries),
        may_follow=True,
        tells=True,
    )


# -- facts


def append_facts(
    tx: Transaction, facts: Mapping[bytes, Sequence[Fact]], deltas: Mapping[bytes, Delta] | None = None
) -> set[bytes]:
    """Deliver events to runs, and change the counters of the open ones. Return the open runs."""
    return set(histories.append(tx.connection, facts, tx.now, deltas=deltas)) if facts else set()


def ask_to_cancel(tx: Transaction, ids: Iterable[bytes], reason: str) -> None:
    """Ask runs to cancel themselves."""
    append_facts(tx, {run: [RunCancelRequested(reason)] for run in ids})


def fire_timers(tx: Transaction, backlog: Backlog, late: Iterable[bytes], limit: int) -> dict[bytes, list[Fact]]:
    """Deliver a slice of due timers to runs, and the timeouts of late runs.

    Return the events of runs without code.
    """
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    for run, timer in expectations.fire_timers(tx.connection, tx.now, limit):
        facts[run].append(TimerFired(timer))
    for run in late:
        facts[run].append(RunCancelRequested(TIMED_OUT))
    delivered: set[bytes] = set()
    isolate(
        tx,
        list(facts.items()),
        lambda tx, batch: delivered.update(append_facts(tx, dict(batch))),
        lambda tx, item, error: backlog.set_aside(tx, (item[0], [RunChanges(facts=item[1])]), error),
    )
    return {run: events_of_run for run, events_of_run in facts.items() if run not in delivered}


def reply(tx: Transaction, answers: Sequence[PromiseAnswer]) -> None:
    """Store the answers to requests, and notify the waiting clients."""
    if answers:
        expectations.answer(tx.connection, answers, tx.now)
        for answer in answers:
            state = RunState.FAILED if answer.error is not None else RunState.SUCCESS
            tx.result.outgoing.ended.append(Ended(answer.id, state, answer.result, answer.error))


def mark_stuck(
    tx: Transaction, reasons: Sequence[tuple[bytes, int, Violation]], retry_at: Mapping[bytes, float] | None = None
) -> None:
    """Mark runs whose code cannot go on as stuck, with a reason for display. They have not failed.

    `retry_at` has the Unix times of the next attempts of runs whose own processes died.
    """
    rows = [(run, attempt, json_text(violation, (retry_at or {}).get(run))) for run, attempt, violation in reasons]
    moved = stuck.mark_stuck(tx.connection, rows, tx.now)
    tx.result.note(moved, by_worker=True)
    messages = {run: violation.message for run, _, violation in reasons}
    for task in moved:
        log.error("run.stuck run=%s error=%s", to_text(task.id), messages[task.id], extra=run_log_fields(task.id))
