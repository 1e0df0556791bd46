"""Apply the inbox: the requests of people and programs since the last tick."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.ends import REQUESTED
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.starts import is_start
from orchestrator.domain.tasks.task import WITHDRAWN, KeyHolder, NewTask, TaskError
from orchestrator.scheduler.budget import TooSlow
from orchestrator.scheduler.code.requests import ABOUT_CODE, queries, settle_promises, signal, update
from orchestrator.scheduler.code.resets import reset_runs
from orchestrator.scheduler.code.runs import CodeRuns, ask_to_cancel, reply
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.limits import LaneService
from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.scheduler.runs.cancels import Cancels, requeue_runs, retry_plain, retry_tasks
from orchestrator.scheduler.runs.triggers import Triggers
from orchestrator.scheduler.tasks.creation import cancel_tasks, create_tasks
from orchestrator.scheduler.tasks.reports import Reports
from orchestrator.scheduler.tasks.starts import start_runs
from orchestrator.scheduler.transaction import Transaction, isolate
from orchestrator.store import fleet, inbox
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.expectations import PromiseAnswer
from orchestrator.store.inbox import Request, RequestKind
from orchestrator.store.limits import queues
from orchestrator.store.postgres_errors import error_line
from orchestrator.store.tasks import cancels, completions, redrive, revival, transitions, unique
from orchestrator.store.tasks.redrive import EndCursor, FailedFilter
from orchestrator.telemetry import get_logger
from orchestrator.transport.quarantine import Refused

log = get_logger("scheduler")

_SLICE = 250
"""Tasks that a bulk request processes between two checks of the clock."""
_SLICES_SECONDS = 0.05
"""Seconds that a bulk request may take in one tick: all other work waits meanwhile."""
_WITHDRAWN = TaskError(WITHDRAWN, "It was withdrawn before a worker received it.")
Handler = Callable[[Transaction, list[Request], int], Iterable[int] | None]
"""Applies requests of one kind, up to about `limit` rows. Returns the ids of unfinished requests."""


@dataclass
class Requests:
    """Applies requests of the inbox."""

    runs: Runs
    cancels: Cancels
    triggers: Triggers
    code: CodeRuns
    backlog: Backlog
    lanes: LaneService
    workers: Fleet
    reports: Reports

    def apply(self, tx: Transaction, limit: int) -> None:
        """Apply the oldest requests in order, adjacent ones of the same kind together."""
        items = inbox.read(tx.connection, min(limit, tx.budget.slice))
        for item in [item for item in items if _suspect_id(item) in tx.budget.refused]:
            _refuse(tx, item, TooSlow("It takes too long; other work would have to wait."))
            tx.budget.resolved.add(_suspect_id(item))
            items.remove(item)
        isolate(tx, items, lambda tx, some: self._charge(tx, some, limit), _refuse)

    def _charge(self, tx: Transaction, items: Sequence[Request], limit: int) -> None:
        with tx.budget.charging(map(_suspect_id, items)):
            self._apply(tx, items, limit)

    def _apply(self, tx: Transaction, items: Sequence[Request], limit: int) -> None:
        unfinished: set[int] = set()
        for kind, neighbours in groupby(items, key=lambda item: item.kind):
            same = list(neighbours)
            if kind in ABOUT_CODE:
                last = code_runs.latest(tx.connection, _targets(same))
                same = [item._replace(target=last[item.target]) for item in same]
            if handler := self._handlers.get(kind):
                unfinished.update(handler(tx, same, limit) or ())
        inbox.remove(tx.connection, [item.id for item in items if item.id not in unfinished])
        if 2 * len(unfinished) > min(limit, tx.budget.slice):  # others must have their turn
            inbox.move_back(tx.connection, list(unfinished))

    def __post_init__(self) -> None:
        code, lanes, runs, triggers = self.code, self.lanes, self.runs, self.triggers
        self._handlers: dict[str, Handler] = {
            RequestKind.ARRIVAL: lambda tx, items, _: lanes.arrive(
                tx, [(item.target, bool(item.body)) for item in items]
            ),
            RequestKind.CANCEL_RUN: self._cancel_runs,
            RequestKind.CANCEL_TASK: self._unless_locked(lambda tx, items: cancel_by_id(tx, _targets(items))),
            RequestKind.COMPLETE_TASK: self._unless_locked(complete_tasks),
            RequestKind.DRAIN: _drain,
            RequestKind.ENQUEUE: lambda tx, items, _: enqueue_with_keys(tx, items),
            RequestKind.EVENT: lambda tx, items, _: triggers.start_on_events(tx, items),
            RequestKind.FLOW_SIGNAL: self._signal_flows,
            RequestKind.LANES: lambda tx, items, _: lanes.read_all(),  # noqa: ARG005
            RequestKind.PURGE: self._purge,
            RequestKind.QUERY: lambda tx, items, _: code.ask(tx, queries(items)),
            RequestKind.QUEUES: _queues_changed,
            RequestKind.REDRIVE: self._redrive,
            RequestKind.REPORT: self._apply_kept,
            RequestKind.REJECT: lambda tx, items, _: settle_promises(tx, items),
            RequestKind.RESET: lambda tx, items, _: reset_runs(tx, runs, items),
            RequestKind.RESOLVE: lambda tx, items, _: settle_promises(tx, items),
            RequestKind.RETRY_RUN: self._retry_runs,
            RequestKind.RETRY_TASK: self._retry_tasks,
            RequestKind.RUN_ENDED: lambda tx, items, _: triggers.hear_ends(tx, items),
            RequestKind.SIGNAL: lambda tx, items, _: signal(tx, items),
            RequestKind.TERMINATE: lambda tx, items, _: self.cancels.mark(tx, _targets(items), code=True),
            RequestKind.UPDATE: lambda tx, items, _: update(tx, items),
            RequestKind.WITHHOLD_RUN: self._withhold,
            RequestKind.WITHDRAW_TASK: lambda tx, items, _: cancel_tasks(
                tx, cancels.unstarted(tx.connection, _targets(items)), _WITHDRAWN
            ),
        }

    def _unless_locked(self, do: Callable[[Transaction, list[Request]], None]) -> Handler:
        """Return a handler that leaves requests about locked tasks for a later tick."""

        def handle(tx: Transaction, items: list[Request], _: int) -> list[int]:
            locked = self.reports.locked.among(tx, set(_targets(items)), items)
            do(tx, [item for item in items if item.target not in locked])
            return [item.id for item in items if item.target in locked]

        return handle

    def _apply_kept(self, tx: Transaction, items: list[Request], _: int) -> list[int]:
        """Apply reports that were kept because tasks were locked."""
        reports, unfinished = self.reports.locked.take(tx, items)
        self.reports.apply_reports(tx, reports)
        self.runs.advance(tx)
        return unfinished

    def _cancel_runs(self, tx: Transaction, items: list[Request], _: int) -> None:
        self.cancels.mark(tx, _targets(items))
        ask_to_cancel(tx, _targets(items), REQUESTED)

    def _withhold(self, tx: Transaction, items: list[Request], limit: int) -> list[int]:
        waiting = self.cancels.withhold(tx, [(item.target, item.body["step"]) for item in items], limit)
        return [item.id for item in items if waiting is None or (item.body["step"] and item.target in waiting)]

    def _signal_flows(self, tx: Transaction, items: list[Request], _: int) -> None:
        """Deliver signals to flow runs, in order. Ended runs ignore them."""
        for item in items:
            fact = history.SignalReceived(item.body["key"], base64.b64decode(item.body["value"]))
            tx.result.runs.flow_learns(item.target, fact)
        self.runs.advance(tx)

    def _retry_tasks(self, tx: Transaction, items: list[Request], _: int) -> list[int]:
        attempts = [(item.body or {}).get("attempt") for item in items]
        revived = retry_tasks(tx, self.runs, _targets(items), attempts=attempts)
        done = {task.id for task in revived.moved} | revived.contested
        if dropped := [item.target for item in items if item.target not in done]:
            for task, holder in revival.not_retried(tx.connection, dropped):
                log.warning(
                    "task.not_retried holder=%s: that task has the unique key now",
                    to_text(holder),
                    extra={"task_id": to_text(task)},
                )
        return [item.id for item in items if item.target in revived.contested]

    def _retry_runs(self, tx: Transaction, items: list[Request], limit: int) -> list[int]:
        freed = self.backlog.free(tx, _targets(items))
        failed = [item for item in items if item.target not in freed]
        requeued = requeue_runs(tx, _targets(failed))
        others = [item for item in failed if item.target not in requeued]
        return [item.id for item in others if not retry_plain(tx, self.runs, item, 10 * limit)]

    def _purge(self, tx: Transaction, items: list[Request], limit: int) -> list[int]:
        """Cancel the waiting tasks of queues. The queues start no tasks while that lasts."""
        unfinished = [item.id for item in items if not purge(tx, self.runs, self.workers, item, 5 * limit)]
        if len(unfinished) < len(items) or any("after" not in item.body for item in items):
            tx.result.wake.queues_changed = True
        return unfinished

    def _redrive(self, tx: Transaction, items: list[Request], limit: int) -> list[int]:
        return [item.id for item in items if not redrive_tasks(tx, self.runs, item, 5 * limit)]


def _targets(items: Sequence[Request]) -> list[bytes]:
    return [item.target for item in items]


def _drain(tx: Transaction, _: list[Request], __: int) -> None:
    fleet.forget_drains(tx.connection, tx.now)
    tx.result.outgoing.drains = fleet.drains(tx.connection)


def _suspect_id(item: Request) -> bytes:
    return b"request %d" % item.id


def _refuse(tx: Transaction, item: Request, error: Exception) -> None:
    """Quarantine a request that cannot be applied, and answer a waiting client with an error."""
    body = msgspec.json.encode({"kind": item.kind, "target": to_text(item.target), "body": item.body})
    tx.result.outgoing.set_aside.append(
        Refused(f"inbox/{item.id}", body, f"{type(error).__name__}: {error_line(error)}")
    )
    if isinstance(item.body, dict) and isinstance(item.body.get("request"), str):
        reason = TaskError(
            "CannotBeApplied", f"The scheduler could not apply the request: {type(error).__name__}: {error_line(error)}"
        )
        reply(tx, [PromiseAnswer(base64.b64decode(item.body["request"]), None, reason)])
    if item.kind == RequestKind.ENQUEUE:
        reason = TaskError(
            "CannotBeApplied", f"The scheduler could not apply the request: {type(error).__name__}: {error_line(error)}"
        )
        tx.result.outgoing.key_holders[item.target] = KeyHolder(item.target, error=reason)
    tx.result.wake.queues_changed |= item.kind == RequestKind.PURGE
    inbox.remove(tx.connection, [item.id])


def cancel_by_id(tx: Transaction, ids: list[bytes]) -> None:
    """Cancel tasks by id. The turn task of a code run stands for its run, whose code may clean up."""
    of_code = code_runs.of_code(tx.connection, ids)
    if of_code:
        latest = code_runs.latest(tx.connection, of_code)
        ask_to_cancel(tx, dict.fromkeys(latest.values()), REQUESTED)
    cancel_tasks(tx, [task for task in ids if task not in of_code])


def complete_tasks(tx: Transaction, items: list[Request]) -> None:
    """End tasks that completed in their own transactions, unless their workers' reports have already ended them."""
    completed = completions.find(tx.connection, items)
    if completed:
        results = {row.id: row.result for row in completed}
        tx.result.note(transitions.succeed(tx.connection, completed, tx.now), results=results, by_worker=True)


def purge(tx: Transaction, runs: Runs, workers: Fleet, item: Request, limit: int) -> bool:
    """Cancel the tasks that waited in a queue at the time of the request, slice by slice. Return whether all are done.

    If no worker serves the queue, dispatched tasks count as waiting too.
    """
    requested_at, queue = item.created_at, item.body["queue"]
    assert requested_at is not None  # Postgres's clock, like the enqueue times of tasks
    is_unserved = workers.is_in_view and not workers.slots(queue)

    def cancel_slice(after: str | None, size: int) -> str | None:
        start = bytes.fromhex(after or "00" * 16)
        found = queues.waiting_tasks(tx.connection, queue, requested_at, start, size, dispatched=is_unserved)
        if found.waiting:
            cancel_by_id(tx, found.waiting)
            runs.advance(tx)
        return None if found.last is None else found.last.hex()

    return _in_slices(tx, item, limit, cancel_slice)


def _in_slices(tx: Transaction, item: Request, limit: int, do: Callable[[Any, int], Any]) -> bool:
    """Continue a bulk request while there is time, for at least one slice. Return whether it is done.

    `do` gets the start of a slice and the number of tasks to examine. It returns the start of the next slice: the same
    again if a lock is in the way, or None at the end.
    """
    until = tx.budget.monotonic() + _SLICES_SECONDS
    after = item.body.get("after")
    while limit > 0:
        size, before = min(limit, _SLICE), after
        after = do(after, size)
        if after is None:
            return True
        limit -= size
        if after == before or tx.budget.monotonic() >= until:
            break
    inbox.save_progress(tx.connection, item.id, msgspec.json.encode({"after": after}).decode())
    return False


def redrive_tasks(tx: Transaction, runs: Runs, item: Request, limit: int) -> bool:
    """Reopen the failed tasks that matched at the time of the request, slice by slice. Return whether all are done."""
    conditions = {name: item.body.get(name) for name in FailedFilter.__struct_fields__}
    failed_filter = msgspec.convert(conditions, FailedFilter)
    requested_at = tx.now - timedelta(seconds=item.age)

    def retry_slice(after: EndCursor | None, size: int) -> EndCursor | None:
        after = after or redrive.beginning(failed_filter)
        found = redrive.matching(tx.connection, failed_filter, requested_at, after, size)
        return after if retry_tasks(tx, runs, found.tasks).contested else found.last

    return _in_slices(tx, item, limit, retry_slice)


def enqueue_with_keys(tx: Transaction, items: list[Request]) -> set[int]:
    """Create the tasks that running tasks enqueue under unique keys, and start runs. Return those to retry.

    If a key is taken, the enqueuing task gets the id of the task that holds it.
    """
    first: dict[str, NewTask] = {}
    requests: list[tuple[int, NewTask, str]] = []
    starts: list[NewTask] = []
    existing = unique.existing(tx.connection, [item.target for item in items])
    for item in items:
        task = unique.deferred(item.body)
        if is_start(task):
            starts.append(task)
        elif item.target not in existing and task.unique is not None:
            first.setdefault(task.unique.key, task)
            requests.append((item.id, task, task.unique.key))
    if starts:
        tx.result.outgoing.key_holders.update(start_runs(tx, starts))
    taken, contested = unique.take(tx.connection, list(first.values())) if first else (set(), set())
    create_tasks(tx, [task for task in first.values() if task.id in taken])
    tx.result.wake.contested |= bool(contested)
    unfinished = {item for item, _, key in requests if first[key].id in contested}
    tx.result.outgoing.key_holders.update((task, KeyHolder(task)) for task in existing | taken)
    refused = [task for item, task, _ in requests if item not in unfinished and task.id not in taken]
    if refused:
        tx.result.outgoing.key_holders.update(unique.holders(tx.connection, refused))
    return unfinished


def _queues_changed(tx: Transaction, items: list[Request], _: int) -> None:  # noqa: ARG001
    tx.result.wake.queues_changed = True


def settle_ends(tx: Transaction) -> None:
    """Create the callbacks of ended tasks, and free their unique keys."""
    if tx.result.tasks.follow_ups:
        follow_ups = list(tx.result.tasks.follow_ups)
        tx.result.tasks.follow_ups.clear()
        isolate(tx, follow_ups, create_tasks, _refuse_task)
    if tx.result.tasks.keys:
        unique.free(tx.connection, tx.result.tasks.keys, ended=True)
        tx.result.tasks.keys.clear()


def _refuse_task(tx: Transaction, task: NewTask, error: Exception) -> None:
    refused = Refused(f"task/{to_text(task.id)}", task.payload, f"{task.name}: {error_line(error)}")
    tx.result.outgoing.set_aside.append(refused)
