"""Create and cancel tasks on behalf of others: running tasks, runs, and people."""

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
from orchestrator.store import payloads
from orchestrator.store.tasks import details, enqueue, results, transitions, unique
from orchestrator.store.tasks.transitions import AttemptEnd, Moved
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

_CANCELLED = TaskError("Cancelled", "Cancelled by request.")


def create_enqueued(tx: Transaction, children: Sequence[NewTask]) -> None:
    """Create what running tasks enqueue. A task that needs a taken key waits for it in the inbox."""
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
    """Create tasks, once; `attempts` of tasks that were taken back go on counting from there.

    Those that `are_new` are copied, which costs Postgres a third: it refuses all of them where one exists.
    """
    if children:
        tx.result.wake.delayed |= any(child.delay > 0 or child.expires is not None for child in children)
        tx.result.wake.requests |= any(child.lane is not None for child in children)
        pairs = [(owner, new.run_id or new.id) for new in children for owner in owners_in(new.payload)]
        if kept := [pair for pair in pairs if pair[0] != pair[1]]:
            payloads.keep(tx.connection, kept)
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


def cancel_tasks(tx: Transaction, ids: list[bytes], error: TaskError = _CANCELLED) -> None:
    """End tasks wherever they stand; running attempts are revoked after the commit."""
    create_tasks(tx, _endings_of(details.executions(tx.connection, list(dict.fromkeys(ids)))))
    endings = [AttemptEnd(task, None, "cancelled", error.to_json()) for task in dict.fromkeys(ids)]
    moved = transitions.end(tx.connection, TaskState.CANCELLED, endings, tx.now)
    revoked = [task for task in moved if task.before in IN_FLIGHT_STATES]
    tx.result.note(moved, errors={task.id: error for task in moved}, lingering={task.id for task in revoked})
    tx.result.outgoing.revoked.extend(revoked)


_NO_ARGUMENTS = msgspec.msgpack.encode(([], {}))
_SURE_AFTER = 15.0
"""Seconds after which a task makes sure that cancelled work has ended: its watcher may have died."""
_END_OPTIONS = TaskOptions(retry=RetryPolicy(max=20), timeout=600.0, store_result=False)


def _endings_of(executions: Sequence[details.Execution]) -> list[NewTask]:
    """Return the tasks that end executions of cancelled tasks. A live watcher ends its execution at once."""
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
                delay=_SURE_AFTER if task.is_in_flight else 0.0,
                options=msgspec.json.encode(options).decode(),
            )
        )
    return created


def log_failed(tx: Transaction, errors: Mapping[bytes, TaskError]) -> None:
    """Log that tasks failed without a worker that could report it: one line for all of them."""
    for task, error in errors.items():
        others = f", and {len(errors) - 1:,} others likewise" if len(errors) > 1 else ""
        whose = {"task_id": to_text(task), "task_name": results.name_of(tx.connection, task)}
        log.error("task.failed error=%s: %s%s", error.kind, error.message, others, extra=whose)
        return


# -- ends that the leader knows before Postgres says so: of tasks of runs that it has created as claimed, and of the few
# single ones that it has claimed lately.
#
# If such an attempt succeeds, what follows can be worked out in memory, and the whole tick is one message to
# Postgres. Each of its statements that ends tasks fails unless it ends those that were foreseen; then nothing has
# happened, and the tick is done again without foresight.


_FEW = 20
"""Tasks that were claimed at once, at most, to be foreseen: more of them are reported together, too."""


class Foreseen(CommitHooks):
    """Tasks in flight as they are once they have succeeded."""

    def __init__(self) -> None:
        self._ends: dict[bytes, Moved] = {}

    def ends(self, reports: Iterable[Report], *, single: bool) -> Mapping[bytes, Moved] | None:
        """Return how the tasks of these reports have ended, if all of them are successes of foreseen attempts: of
        `single` tasks, or of steps."""
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
        """Foresee the ends of what was created, and forget what has ended."""
        if self._ends:
            for ended in tick.outgoing.ended:
                self._ends.pop(ended.id, None)
        self._ends.update({end.id: end for end in tick.tasks.foreseen})
        if len(claimed := tick.outgoing.claimed) <= _FEW:
            self._ends.update(
                {  # a claim does not say whether a task has callbacks
                    task.id: Moved(task.id, "success", task.queue, None, task.attempt, "dispatched", task.name)
                    for task in claimed
                    if task.run_id is None and task.lane is None and task.unique_key is None
                }
            )

    def rolled_back(self) -> None:
        """Foresee nothing of what is in flight."""
        self._ends.clear()
