"""Fire what is due: delays and retries that have waited long enough, and tasks that nobody came to know."""

from __future__ import annotations

from orchestrator.domain.code.activation import Violation
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.obstacles import no_database
from orchestrator.domain.tasks.task import TaskError
from orchestrator.scheduler.code.runs import json_text
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.tasks.creation import error_json, tell_failed
from orchestrator.scheduler.tick import Tick
from orchestrator.store.runs import stuck
from orchestrator.store.tasks import transitions, waiting
from orchestrator.store.tasks.transitions import Ending


def fire_due(tick: Tick, limit: int) -> None:
    """Make a bounded slice of due tasks ready."""
    waiting.promote_due(tick.connection, tick.now, limit)


def expire(tick: Tick, limit: int) -> None:
    """End a slice of the tasks that should have started by now."""
    errors = {
        task: TaskError("TaskExpired", f"It had not started when it expired, after waiting for {waited:.3g} s.")
        for task, waited in waiting.expired(tick.connection, tick.now, limit)
    }
    if errors:
        endings = [Ending(task, None, "expired", error_json(error)) for task, error in errors.items()]
        tick.note(transitions.end(tick.connection, TaskState.FAILED, endings, tick.now), errors=errors)
        tell_failed(tick, errors)


def fail_unknown(tick: Tick, fleet: Fleet, limit: int) -> None:
    """End tasks that no live worker has known for the whole time allowed, saying what is known.

    What a worker knows and has handed back all the same needs the database, which no live one was given.
    """
    errors: dict[bytes, TaskError] = {}
    for task, name, queue, is_turn in waiting.overdue_unknown(tick.connection, tick.now, limit):
        if not fleet.knows(queue, name):
            known = fleet.known_on(queue)
            errors[task] = (
                TaskError("ConfigurationError", no_database(queue, repr(name)))
                if name in known and not is_turn
                else TaskError(
                    "UnknownTask",
                    f"No live worker of queue {queue!r} knows the {'workflow' if is_turn else 'task'} {name!r}. "
                    f"They know: {', '.join(known) or 'nothing'}.",
                )
            )
    if errors:
        # Code that has begun is not failed because nobody has it at the moment: its run waits for somebody who has.
        for run in stuck.stick_unknown(tick.connection, [(task, _stuck(error)) for task, error in errors.items()]):
            del errors[run]
        endings = [Ending(task, None, "unknown task", error_json(error)) for task, error in errors.items()]
        tick.note(transitions.end(tick.connection, TaskState.FAILED, endings, tick.now), errors=errors)
        tell_failed(tick, errors)


def _stuck(error: TaskError) -> str:
    return json_text(Violation(0, error.kind, error.message))


def release_known(tick: Tick, fleet: Fleet, limit: int) -> None:
    """Make tasks ready again that were held back because no worker knew them, and now one does."""
    known = fleet.known()
    if known:
        denied = fleet.knowers.denied()
        released = waiting.release_known(tick.connection, sorted(known), limit, denied=denied)
        tick.has_wishes = bool(released) or tick.has_wishes


def release_crowded(tick: Tick, fleet: Fleet, limit: int) -> None:
    """Make tasks ready again that only some workers know, as many as these have places for."""
    knowers = fleet.knowers
    knowers.begin(tick.over())
    rooms = {crowd: knowers.room(crowd) for crowd in knowers.crowds}
    wanted = {crowd: limit if room is None else min(limit, room) for crowd, room in rooms.items() if room != 0}
    if wanted:
        released = waiting.release_crowded(
            tick.connection, [(crowd.queue, crowd.name, crowd.hold, places) for crowd, places in wanted.items()]
        )
        knowers.crowds -= {crowd for crowd in wanted if (crowd.queue, crowd.name, crowd.hold) not in released}
        tick.has_wishes = bool(released) or tick.has_wishes
