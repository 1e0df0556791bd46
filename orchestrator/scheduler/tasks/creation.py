"""Create and cancel tasks on behalf of running tasks, runs and people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from orchestrator.domain.executors.record import decode_record
from orchestrator.domain.executors.registry import task_name
from orchestrator.domain.ids import derived_id, to_text
from orchestrator.domain.states import IN_FLIGHT_STATES, TaskState
from orchestrator.domain.tasks.outcomes import Report
from orchestrator.domain.tasks.retry import RetryPolicy
from orchestrator.domain.tasks.task import NewTask, Succeeded, TaskError, TaskOptions, executor_of
from orchestrator.references import owners_in
from orchestrator.scheduler.tick_result import CommitHooks, TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sealing import CALL
from orchestrator.store import inbox, payloads
from orchestrator.store.inbox import NewRequest, RequestKind
from orchestrator.store.tasks import details, enqueue, locks, results, transitions, unique
from orchestrator.store.tasks.transitions import AttemptEnd, Moved
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

_CANCELLED = TaskError("Cancelled", "Cancelled by request.")


def create_enqueued(tx: Transaction, children: Sequence[NewTask]) -> None:
    """Create the tasks that running tasks enqueued. Tasks with unique keys go through the inbox."""
    with_keys = [child for child in children if child.unique is not None]
    if with_keys:
        unique.defer(tx.connection, with_keys)
        tx.result.wake.requests = True
    create_tasks(tx, [child for child in children if child.unique is None])


def create_tasks(
    tx: Transaction,
    children: Sequence[NewTask],
    attempts: Mapping[bytes, int] | None = None,
    *,
    are_new: bool = False,
) -> None:
    """Create tasks, once. `attempts` holds the attempt numbers from which tasks that were taken back continue.

    With `are_new`, tasks are copied in bulk at a third of the cost, but Postgres refuses all of them if one exists.
    """
    if children:
        tx.result.wake.delayed |= any(child.delay > 0 or child.expires is not None for child in children)
        tx.result.wake.requests |= any(child.lane is not None for child in children)
        owned = [(owner, new.run_id or new.id) for new in children for owner in owners_in(new.payload)]
        if references := [reference for reference in owned if reference[0] != reference[1]]:
            payloads.add_keepers(tx.connection, references)
        if tx.vault is not None:
            children = [msgspec.structs.replace(new, payload=tx.vault.seal(CALL, new.payload)) for new in children]
        if are_new:
            enqueue.copy_tasks(tx.connection, children, tx.now)
            return
        size = sum(len(new.payload) for new in children)
        tx.created = enqueue.create_tasks(
            tx.connection,
            children,
            tx.now,
            attempts,
            has_spans=tx.has_spans,
            is_gathered=tx.gathers(len(children), size),
        )


def cancel_tasks(
    tx: Transaction, ids: Iterable[bytes], error: TaskError = _CANCELLED, *, is_repeated: bool = False
) -> None:
    """Cancel tasks in any state. Running attempts are revoked after the commit.

    A task whose row another transaction has locked is cancelled by a request later, or if the caller repeats the call.
    """
    ids = list(dict.fromkeys(ids))
    if locked := locks.lock(tx.connection, ids):
        tx.result.wake.contested = True
        if not is_repeated:
            inbox.add_all(tx.connection, RequestKind.CANCEL_TASK, [NewRequest(task, "null") for task in locked])
            tx.result.wake.requests = True
        ids = [task for task in ids if task not in locked]
    cancel_now(tx, ids, error)


def cancel_now(tx: Transaction, ids: Sequence[bytes], error: TaskError = _CANCELLED) -> None:
    """Cancel different tasks in any state, whose rows the caller has locked or may wait for."""
    create_tasks(tx, _endings_of(details.executions(tx.connection, ids)))
    endings = [AttemptEnd(task, None, "cancelled", error.to_json()) for task in ids]
    moved = transitions.end(tx.connection, TaskState.CANCELLED, endings, tx.now)
    revoked = [task for task in moved if task.before in IN_FLIGHT_STATES]
    tx.result.note(moved, errors={task.id: error for task in moved}, lingering={task.id for task in revoked})
    tx.result.outgoing.revoked.extend(revoked)


_NO_ARGUMENTS = msgspec.msgpack.encode(([], {}))
_END_CHECK_DELAY = 15.0
"""Seconds before a task checks that a cancelled execution has ended, in case its watcher has died."""
_END_OPTIONS = TaskOptions(retry=RetryPolicy(max=20), timeout=600.0, store_result=False)


def _endings_of(executions: Sequence[details.Execution]) -> list[NewTask]:
    """Return tasks that end the executions of cancelled tasks. A live watcher ends its execution at once."""
    created = []
    for task in executions:
        call, record = executor_of(task.options), decode_record(task.details)
        if call is None or record is None or call.ends is not None:
            continue
        options = msgspec.structs.replace(_END_OPTIONS, executor=msgspec.structs.replace(call, ends=record))
        created.append(
            NewTask(
                id=derived_id(task.id, "end", task.attempt),
                name=task_name(call.name),
                queue=task.queue,
                payload=_NO_ARGUMENTS,
                delay=_END_CHECK_DELAY if task.is_in_flight else 0.0,
                options=msgspec.json.encode(options).decode(),
            )
        )
    return created


def log_failed(tx: Transaction, errors: Mapping[bytes, TaskError]) -> None:
    """Log tasks that failed without a worker to report the failure, in one line."""
    for task, error in errors.items():
        others = f", and {len(errors) - 1:,} more tasks" if len(errors) > 1 else ""
        extra = {"task_id": to_text(task), "task_name": results.name_of(tx.connection, task)}
        log.error("task.failed error=%s: %s%s", error.kind, error.message, others, extra=extra)
        return


# -- foreseen ends: the results of tasks that the leader created as claimed for runs, and of the last few single tasks
# that it claimed
#
# If such an attempt succeeds, its consequences are computed in memory, and the whole tick is one round trip to
# Postgres. Its statements fail unless they end exactly the foreseen tasks; then nothing has happened, and the tick runs
# again without foresight.


_MAX_FORESEEN = 20
"""Tasks claimed together that are foreseen, at most. Larger batches are also reported together."""


class Foreseen(CommitHooks):
    """Tasks in flight, as they will be once they have succeeded."""

    def __init__(self) -> None:
        self._ends: dict[bytes, Moved] = {}

    def ends(self, reports: Iterable[Report], *, single: bool) -> Mapping[bytes, Moved] | None:
        """Return the ends of the reported tasks if all reports are successes of foreseen attempts, else None.

        With `single`, only tasks without a run count; otherwise only steps of runs.
        """
        found: dict[bytes, Moved] = {}
        for report in reports if self._ends else ():
            if not isinstance(report, Succeeded) or report.children:
                return None
            end = self._ends.get(report.id)
            if end is None or end.attempt != report.attempt or end.is_single is not single:
                return None
            found[end.id] = end
        return found or None

    def committed(self, tick: TickResult) -> None:
        """Foresee the ends of new tasks, and forget ended ones."""
        if self._ends:
            for ended in tick.outgoing.ended:
                self._ends.pop(ended.id, None)
        self._ends.update({end.id: end for end in tick.tasks.foreseen})
        if len(claimed := tick.outgoing.claimed) <= _MAX_FORESEEN:
            self._ends.update(
                {  # a claim does not read whether a task has callbacks
                    task.id: Moved(task.id, "success", task.queue, None, task.attempt, "dispatched", task.name)
                    for task in claimed
                    if task.run_id is None and task.lane is None and task.unique_key is None
                }
            )

    def rolled_back(self) -> None:
        self._ends.clear()
