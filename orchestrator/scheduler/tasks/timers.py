"""Fire what is due: delays and retries that have waited long enough, and tasks that no worker came to know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.domain.code.activation import Violation, json_text
from orchestrator.domain.executors.call import announced
from orchestrator.domain.fleet.announced import tasks_among, workflows_among
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.obstacles import executor_of_hold, key_of_hold, no_data_key, no_database, no_executor
from orchestrator.domain.tasks.task import TaskError
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.tasks.creation import error_json, log_failed
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sealing import key_name
from orchestrator.store.runs import stuck
from orchestrator.store.tasks import transitions, waiting
from orchestrator.store.tasks.transitions import AttemptEnd

_MOST_NAMED = 100
"""Names that an error lists."""


def fire_due(tx: Transaction, limit: int) -> None:
    """Make a bounded slice of due tasks ready."""
    waiting.promote_due(tx.connection, tx.now, limit)


def expire(tx: Transaction, limit: int) -> None:
    """End a slice of the tasks that should have started by now."""
    errors = {
        task: TaskError("TaskExpired", f"It had not started when it expired, after waiting for {waited:.3g} s.")
        for task, waited in waiting.expired(tx.connection, tx.now, limit)
    }
    if errors:
        endings = [AttemptEnd(task, None, "expired", error_json(error)) for task, error in errors.items()]
        tx.result.note(transitions.end(tx.connection, TaskState.FAILED, endings, tx.now), errors=errors)
        log_failed(tx, errors)


def fail_unknown(tx: Transaction, fleet: Fleet, limit: int) -> None:
    """End tasks that no live worker has known, or could open, for the whole time allowed, saying what is known.

    What a worker knows and has handed back all the same needs the database, which no live one was given.
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
        # Code that has begun does not fail because no worker has it at the moment: its run waits for one.
        for run in stuck.mark_unknown(tx.connection, [(task, _stuck(error)) for task, error in errors.items()]):
            del errors[run]
        endings = [
            AttemptEnd(task, None, "no data key" if task in unopened else "unknown task", error_json(error))
            for task, error in errors.items()
        ]
        tx.result.note(transitions.end(tx.connection, TaskState.FAILED, endings, tx.now), errors=errors)
        log_failed(tx, errors)


def _unknown(queue: str, name: str, known: Sequence[str], *, is_turn: bool) -> str:
    what, names = ("workflow", workflows_among(known)) if is_turn else ("task", tasks_among(known))
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return (
        f"No live worker of queue {queue!r} knows the {what} {name!r}. "
        f"They know: {', '.join(names[:_MOST_NAMED]) or f'no {what}'}{more}."
    )


def _stuck(error: TaskError) -> str:
    return json_text(Violation(0, error.kind, error.message))


def release_known(tx: Transaction, fleet: Fleet, limit: int) -> None:
    """Make tasks ready again that were held back because no worker knew them, or could do them, and now one does."""
    known = fleet.known()
    lacking = fleet.capabilities.lacking
    if opened := [(queue, hold) for hold in lacking for queue in fleet.queues if _can_do(fleet, queue, hold)]:
        tx.result.wake.requests |= waiting.release_opened(tx.connection, opened, limit) > 0
    if known:
        denied = fleet.capabilities.denied()
        released = waiting.release_known(tx.connection, sorted(known), limit, denied=denied)
        tx.result.wake.requests |= bool(released)


def _can_do(fleet: Fleet, queue: str, hold: str) -> bool:
    """Say whether a worker of a queue has what tasks wait for that are held so."""
    key, wants = key_of_hold(hold), executor_of_hold(hold)
    if key is not None:
        return key_name(key) in fleet.known_on(queue)
    return wants is not None and fleet.knows(queue, announced(wants))


def release_crowded(tx: Transaction, fleet: Fleet, over: Iterable[bytes], limit: int) -> None:
    """Make tasks ready again that only some workers know, as many as these have places for now that some are over."""
    capabilities = fleet.capabilities
    capabilities.begin(over)
    rooms = capabilities.rooms().items()
    wanted = {held: limit if room is None else min(limit, room) for held, room in rooms if room != 0}
    if wanted:
        released = waiting.release_crowded(
            tx.connection, [(held.queue, held.name, held.hold, places) for held, places in wanted.items()]
        )
        tx.result.capacity.holds.update((held, (held.queue, held.name, held.hold) in released) for held in wanted)
        tx.result.wake.requests |= bool(released)
