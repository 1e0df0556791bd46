"""Names of lanes, gates and buckets: what a task shares its limits and turns with (see `lanes`)."""

from __future__ import annotations

from uuid import UUID

from orchestrator.domain.tasks.task import TaskOptions

LONGEST_KEY = 200
_SEPARATOR = "|"
"""No name of a task or workflow has it."""


def lane_name(task: str, key: str | None, options: TaskOptions) -> str | None:
    """Return the lane of a task: None if it has neither key nor limit."""
    limited = options.concurrency or options.total_concurrency or options.rate or options.total_rate
    if not limited and key is None:
        return None
    return f"{task if limited else ''}{_SEPARATOR}{key or ''}"


def scoped(workflow: str, key: str) -> str:
    """Return a key of one workflow as it stands among those of all; no two that differ give the same."""
    if "/" in workflow:  # of which `a/b` and `c` would read like `a` and `b/c`
        return f"{_SEPARATOR}{workflow}{_SEPARATOR}{key}"
    return f"{workflow}/{key}"


def key_text(value: object) -> str | None:
    """Return a key as text that can be stored, compared and shown; None for what is no key."""
    if isinstance(value, (str, int, UUID)) and not isinstance(value, bool):
        text = str(value)
        if 0 < len(text) <= LONGEST_KEY and text.isprintable():
            return text
    return None


def gate_of(lane: str) -> str:
    """Return the gate before which a lane stands."""
    return lane.partition(_SEPARATOR)[0]


def lane_bucket(lane: str) -> str:
    """Return the name of the bucket of a lane's rate."""
    return f"lane {lane}"


def gate_bucket(gate: str) -> str:
    """Return the name of the bucket of the rate that lanes of one gate share."""
    return f"task {gate}"


def queue_bucket(queue: str) -> str:
    """Return the name of a queue's bucket."""
    return f"queue {queue}"


def limited_by(bucket: str) -> str:
    """Return the lane, the gate or the bucket of a queue that a bucket is of."""
    kind, _, name = bucket.partition(" ")
    return bucket if kind == "queue" else name
