"""`self.replace`: another task or composition provides a task's result.

A single task ends with a reference, which `AsyncResult` follows. A task in a composition, or from the bridge, must
wait, because later parts need the result: each of its attempts checks the replacement and is postponed until it has
ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from orchestrator.compat.celery import request as requests
from orchestrator.compat.celery.exceptions import Again, NotCovered, Replaced, TimeoutError
from orchestrator.sdk.tasks.context import TaskContext, enter_task

_MAX_PAUSE = 5.0
"""Seconds between two checks of the replacement, at most."""


def replace(task: Any, sig: Any) -> None:
    """Start the replacement of the running task, and raise Replaced."""
    request, app = task.request, task.app
    new = app.signature(sig).clone()
    for link in request.callbacks or ():
        new.link(app.signature(link))
    for link in request.errbacks or ():
        new.link_error(app.signature(link))
    replaced = Replaced("Replaced by new task")
    if request.is_eager:
        replaced.reference = {"value": new.apply().get()}
        raise replaced
    ctx = request.native
    if ctx is None:
        raise NotCovered("self.replace outside of a worker", "Call the other task.")
    is_awaited = ctx.run_id is not None or request.is_bridged
    if is_awaited and not app.orchestrator.settings.database_url:
        raise NotCovered(
            "self.replace in a chain, group, chord or message of Celery's, in a worker without the database",
            "Give workers the setting database_url: the task reads there whether its replacement has ended.",
        )
    replaced.reference = {"replaced": new.apply_async(on_success=not is_awaited).id}
    raise replaced


def awaited(task: Any, ctx: TaskContext) -> Any:
    """Return the result of the replacement, or postpone the task."""
    looks = ctx.details.get("looks", 0)
    result = task.app.AsyncResult(ctx.details["replaced"])
    try:
        return copy_context().run(_outside_task, lambda: result.get(timeout=0.05))
    except TimeoutError:
        ctx.heartbeat({**ctx.details, "looks": looks + 1})
        raise Again(min(_MAX_PAUSE, 0.1 * 1.5**looks), f"replaced by {ctx.details['replaced']}") from None


def _outside_task(function: Callable[[], Any]) -> Any:
    """Call a function as if no task were running, so that it reads results from the database."""
    enter_task(None)
    requests.current.set(None)
    return function()
