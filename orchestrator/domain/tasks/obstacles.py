"""What keeps a task from going on, in the words of the person who waits for it."""

from __future__ import annotations

NO_LEADER = (
    "No scheduler leads, so nothing moves. Start one: orchestrator scheduler; if one runs, its log says what keeps it"
)
NONE_CAN_LEAD = "No scheduler leads, so nothing moves: those that run cannot use Postgres."


def no_worker(queue: str) -> str:
    """Say that nobody serves a queue."""
    return (
        f"Queue {queue!r} has ready tasks and no live worker. Start one: "
        f"orchestrator worker --app module:app --queues {queue}; if one runs, its log says whether its application "
        f"can be loaded"
    )


def unknown_task(queue: str, what: str) -> str:
    """Say that nobody who serves a queue knows something."""
    return f"No live worker of queue {queue!r} knows {what}. Start a worker whose application has it."


def no_database(queue: str, what: str) -> str:
    """Say that those who serve a queue and know something were not given what it needs."""
    return (
        f"No live worker of queue {queue!r} was given the database, which ctx.transaction() needs in {what}. "
        f"Start one: orchestrator worker --app module:app --queues {queue} --database. "
        f"If its values are sealed, it may be their data key that nobody has: the log of the workers says so"
    )


def paused(queue: str, what: str = "") -> str:
    """Say that a queue is paused, and what waits there."""
    return f"Queue {queue!r} is paused{what}. Resume it: orchestrator queues resume {queue}"
