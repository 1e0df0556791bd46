"""The work that waits in Postgres: requests, schedules, runs, cancellations, due tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from orchestrator.domain.code.activation import Violation, json_text
from orchestrator.domain.executors.record import announced
from orchestrator.domain.fleet.announced import tasks_among, workflows_among
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.obstacles import executor_of_hold, key_of_hold, no_data_key, no_database, no_executor
from orchestrator.domain.tasks.task import TaskError
from orchestrator.scheduler.code.ends import close_runs
from orchestrator.scheduler.code.other_runs import look_after
from orchestrator.scheduler.code.runs import CodeRuns, fire_timers
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.requests import Requests
from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.runs.backlog import ROOM_POLL_INTERVAL, Backlog
from orchestrator.scheduler.runs.cancels import Cancels
from orchestrator.scheduler.schedules import FirePace, extend_backfills, fire_schedules
from orchestrator.scheduler.tasks.creation import log_failed
from orchestrator.scheduler.tick_result import CommitHooks
from orchestrator.scheduler.transaction import Transaction, attempt
from orchestrator.sealing import key_name
from orchestrator.settings import Settings
from orchestrator.store.runs import stuck
from orchestrator.store.tasks import transitions, waiting
from orchestrator.store.tasks.transitions import AttemptEnd
from orchestrator.store.tasks.waiting import PendingWorkProbe

_MAX_NAMES = 100
"""Names listed in an error, at most."""


def expire(tx: Transaction, limit: int) -> None:
    """Fail a batch of tasks that have not started by their expiry time."""
    errors = {
        task: TaskError("TaskExpired", f"It had not started when it expired, after waiting for {waited:.3g} s.")
        for task, waited in waiting.expired(tx.connection, tx.now, limit)
    }
    if errors:
        endings = [AttemptEnd(task, None, "expired", error.to_json()) for task, error in errors.items()]
        tx.result.note(transitions.end(tx.connection, TaskState.FAILED, endings, tx.now), errors=errors)
        log_failed(tx, errors)


def fail_unknown(tx: Transaction, fleet: Fleet, limit: int) -> None:
    """Fail tasks that no live worker could run for the whole `unknown_task_timeout`. The error says why.

    A known task that its worker returned all the same needs the database, which no live worker was given.
    """
    errors: dict[bytes, TaskError] = {}
    unopened: set[bytes] = set()
    for task, name, queue, is_turn, hold in waiting.overdue_unknown(tx.connection, tx.now, limit):
        if (key := key_of_hold(hold)) is not None:
            if key_name(key) not in fleet.known_on(queue):
                errors[task] = TaskError("Sealed", f"{no_data_key(queue, repr(name), key)}.")
                unopened.add(task)
        elif (wants := executor_of_hold(hold)) is not None:
            if not fleet.knows(queue, announced(wants)):
                errors[task] = TaskError("ConfigurationError", f"{no_executor(queue, repr(name), wants)}.")
        elif not fleet.knows(queue, name):
            known = fleet.known_on(queue)
            errors[task] = (
                TaskError("ConfigurationError", no_database(queue, repr(name)))
                if name in known and not is_turn
                else TaskError("UnknownTask", _unknown(queue, name, known, is_turn=is_turn))
            )
    if errors:
        # Code that has begun does not fail because no worker has it at the moment; its run waits for such a worker.
        for run in stuck.mark_unknown(tx.connection, [(task, _stuck(error)) for task, error in errors.items()]):
            del errors[run]
        endings = [
            AttemptEnd(task, None, "no data key" if task in unopened else "unknown task", error.to_json())
            for task, error in errors.items()
        ]
        tx.result.note(transitions.end(tx.connection, TaskState.FAILED, endings, tx.now), errors=errors)
        log_failed(tx, errors)


def _unknown(queue: str, name: str, known: Sequence[str], *, is_turn: bool) -> str:
    what, names = ("workflow", workflows_among(known)) if is_turn else ("task", tasks_among(known))
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return (
        f"No live worker of queue {queue!r} knows the {what} {name!r}. "
        f"They know: {', '.join(names[:_MAX_NAMES]) or f'no {what}'}{more}."
    )


def _stuck(error: TaskError) -> str:
    return json_text(Violation(0, error.kind, error.message))


def release_known(tx: Transaction, fleet: Fleet, limit: int) -> None:
    """Make held tasks ready again if a live worker now knows them, or has the data key or executor that they need."""
    known = fleet.known()
    lacking = fleet.capabilities.resource_holds
    if can_open := [(queue, hold) for hold in lacking for queue in fleet.queues if _can_do(fleet, queue, hold)]:
        tx.result.wake.requests |= waiting.release_by_resource(tx.connection, can_open, limit) > 0
    if known:
        denied = fleet.capabilities.denied()
        released = waiting.release_known(tx.connection, sorted(known), limit, denied=denied)
        tx.result.wake.requests |= bool(released)


def _can_do(fleet: Fleet, queue: str, hold: str) -> bool:
    """Return whether a worker of the queue has the data key or executor that such tasks wait for."""
    key, wants = key_of_hold(hold), executor_of_hold(hold)
    if key is not None:
        return key_name(key) in fleet.known_on(queue)
    return wants is not None and fleet.knows(queue, announced(wants))


def release_crowded(tx: Transaction, fleet: Fleet, over: Iterable[bytes], limit: int) -> None:
    """Release crowded tasks, up to the free slots of the workers that know them. `over` have just ended."""
    capabilities = fleet.capabilities
    capabilities.begin(over)
    rooms = capabilities.rooms().items()
    places_by_hold = {hold: limit if room is None else min(limit, room) for hold, room in rooms if room != 0}
    if places_by_hold:
        released = waiting.release_crowded(
            tx.connection, [(hold.queue, hold.name, hold.hold, places) for hold, places in places_by_hold.items()]
        )
        tx.result.capacity.holds.update(
            (hold, (hold.queue, hold.name, hold.hold) in released) for hold in places_by_hold
        )
        tx.result.wake.requests |= bool(released)


_CONTESTED_PAUSE = 0.05
"""Seconds before the next look at a unique key that an open transaction may be taking."""

Part = Callable[[Transaction, int], object]
"""A part of a tick. It is passed the number of rows that it may process."""


@dataclass
class PendingWork(CommitHooks):
    """Tracks the waiting work from one tick to the next."""

    settings: Settings
    fleet: Fleet
    code: CodeRuns
    backlog: Backlog
    runs: Runs
    cancels: Cancels
    requests: Requests
    _pending_work: PendingWorkProbe | None = None
    _next_part: int = 0
    """The part that comes first in the next tick, if a tick has no time for all of them."""
    _pace: FirePace = field(default_factory=FirePace)
    _has_fired: bool = False
    """The last tick fired schedules."""
    was_empty: bool = False
    """The last tick found no waiting work."""

    def rolled_back(self) -> None:
        """Treat all work as pending. The next tick fires schedules, in case one of them caused the failure."""
        self._pending_work, self._has_fired = None, False

    def run(self, tx: Transaction, probe: PendingWorkProbe | None, *, somebody_waits: bool = False) -> float:
        """Do the waiting work. Return the seconds until the rest is due.

        `probe` is the work that waited when the transaction began, in a tick that checks everything. With
        `somebody_waits`, after a report or an enqueue, schedules are not fired in two ticks in a row.
        """

        def do(part_name: str, part: Part) -> None:
            attempt(tx, part_name, part, self.settings.batch)

        self.backlog.look_for_room(tx)
        fleet, runs = self.fleet, self.runs
        is_full_check = probe is not None
        pending_work = probe or self._pending_work
        self.was_empty = False
        if pending_work is not None and not is_full_check and self._is_empty(pending_work, tx):
            self.was_empty = True
            return self._until_next(pending_work, tx.now)
        wake = tx.result.wake
        is_old = wake.requests or wake.runs_to_begin or wake.handed_back or (is_full_check and wake.advanced)
        if pending_work is None or is_old:
            pending_work = waiting.probe_pending_work(tx.connection)
        if is_full_check:
            self.backlog.free_older(tx)
        if pending_work.inbox:
            do("apply requests", self.requests.apply)
            pending_work = waiting.probe_pending_work(tx.connection)
        self._has_fired = _is_due(pending_work.next_fire, tx.now) and not (self._has_fired and somebody_waits)
        if self._has_fired:
            do("fire schedules", lambda tx, limit: fire_schedules(tx, self.cancels, self._pace, limit))
            pending_work = waiting.probe_pending_work(tx.connection)
        if pending_work.backfills and is_full_check:
            do("go on with backfills", extend_backfills)
            pending_work = waiting.probe_pending_work(tx.connection)
        if pending_work.cancelling_runs:
            runs.advance(tx)  # ended tasks must be counted before the remaining ones are read
            do("cancel runs", lambda tx, limit: self.cancels.go_on(tx, 5 * limit))
        self._plan(tx, pending_work, do)
        if pending_work.closing_runs:
            do("cancel what ended runs have left", close_runs)
        runs.advance(tx)
        if pending_work.held and is_full_check:
            do("release tasks", lambda tx, limit: release_known(tx, fleet, limit))
        if fleet.capabilities.holds:
            over = list(tx.result.ended_ids())
            do("find places for tasks", lambda tx, limit: release_crowded(tx, fleet, over, limit))
        if is_full_check:
            do("free stuck runs", self.code.free_stuck)
            if self.code.waits_checked_to is not None:
                do("look after waits for runs", lambda tx, _: look_after(tx, self.code))
        if _is_due(pending_work.next_due, tx.now):
            do("make due tasks ready", lambda tx, limit: waiting.promote_due(tx.connection, tx.now, limit))
            do("fire timers", self._fire_timers)
            do("expire tasks", expire)
            if fleet.is_in_view:  # otherwise not all known names are available
                do("fail unknown tasks", lambda tx, limit: fail_unknown(tx, fleet, limit))
            runs.advance(tx)
        busy = pending_work.is_busy or _is_due(pending_work.next_of_all, tx.now)
        if busy or wake.delayed or wake.requests or wake.runs_to_begin or wake.runs_to_expand:
            pending_work = waiting.probe_pending_work(tx.connection)
        self._pending_work = pending_work
        return max(self._until_next(pending_work, tx.now), _CONTESTED_PAUSE if wake.contested else 0.0)

    def _plan(self, tx: Transaction, pending_work: PendingWorkProbe, do: Callable[[str, Part], None]) -> None:
        """Continue waiting runs. A part that uses up a tick comes last in the next."""
        runs = self.runs
        parts: list[tuple[bool, str, Part]] = [
            (pending_work.pending_changes, "notify runs of pending changes", lambda tx, _: runs.catch_up(tx)),
            (pending_work.pending_runs, "begin runs", runs.begin),
            (pending_work.expanding_runs, "create tasks of fan-outs", runs.expand),
        ]
        waiting = [(index, part_name, part) for index, (waits, part_name, part) in enumerate(parts) if waits]
        waiting.sort(key=lambda entry: (entry[0] - self._next_part) % len(parts))
        tx.budget.evaluated.clear()
        tx.budget.read_nodes = 0
        for _, part_name, part in waiting:
            do(part_name, part)
        if waiting:
            self._next_part = (waiting[0][0] + 1) % len(parts) if tx.budget.is_spent else 0

    def _is_empty(self, pending_work: PendingWorkProbe, tx: Transaction) -> bool:
        """Return whether there is nothing to do and nothing to query."""
        wake = tx.result.wake
        is_requested = wake.requests or wake.runs_to_begin or wake.handed_back or wake.delayed or wake.runs_to_expand
        waits = pending_work.is_busy or _is_due(pending_work.next_of_all, tx.now) or self.fleet.capabilities.holds
        return not (is_requested or wake.contested or waits or tx.result.runs)

    def _fire_timers(self, tx: Transaction, limit: int) -> None:
        late = self.cancels.time_out(tx, limit, self.settings.run_timeout_grace)
        for run, facts in fire_timers(tx, self.backlog, late, limit).items():
            tx.result.runs.flow_learns(run, *facts)
        self.runs.advance(tx)

    def _until_next(self, pending_work: PendingWorkProbe, now: datetime) -> float:
        if pending_work.is_busy:
            return 0.0
        due_in = self.settings.safety_scan
        if self.backlog.parked_lanes:
            due_in = min(due_in, ROOM_POLL_INTERVAL.total_seconds())
        if (due := pending_work.next_of_all) is not None:
            due_in = min(due_in, max(0.0, (due - now).total_seconds()))
        return due_in


def _is_due(due: datetime | None, now: datetime) -> bool:
    return due is not None and due <= now
