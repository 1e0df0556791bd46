"""Names that somebody enqueues as tasks, and that may be none."""

from __future__ import annotations

_DOORS = {
    "code": ("a workflow as code", "workflows", "runs"),
    "workflow": ("a workflow", "workflows", "runs"),
    "flow": ("a flow", "flows", "flows"),
}


def wrong_door(name: str, kind: str | None) -> str | None:
    """Return what to say to somebody who enqueues a workflow as a task; None if it may be a task."""
    if kind not in _DOORS:
        return None
    what, path, command = _DOORS[kind]
    ways = f"POST /api/v1/{path}/{name}/runs or `orchestrator {command} start {name}`"
    return f"{name!r} is {what}, and no task. Start a run of it instead: {ways}."


def unregistered(name: str) -> str:
    """Return what to say to somebody who enqueues what no live worker knows."""
    return (
        f"No live worker has registered a task {name!r}. It waits for one, and fails once workers of its queue have "
        f"run for the time of the setting unknown_task_timeout without it."
    )
