"""`self.replace`: another task or composition gives a task's result.

A task that stands alone ends with a reference, which `AsyncResult` follows. One in a composition, or of the bridge, has
something after it that wants the result, so it waits: each attempt looks whether the other has ended, and is postponed
if not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from orchestrator.compat.celery import request as requests
from orchestrator.compat.celery.exceptions import Again, NotCovered, Replaced, TimeoutError
from orchestrator.sdk.tasks.context import TaskContext, enter_task

_LONGEST = 5.0
"""Seconds between two looks, at most."""


def replace(task: Any, sig: Any) -> None:
    """Start what replaces the running task, and raise what says so."""
    request, app = task.request, task.app
    new = app.signature(sig).clone()
    for link in request.callbacks or ():
        new.link(app.signature(link))
    for link in request.errbacks or ():
        new.link_error(app.signature(link))
    ended = Replaced("Replaced by new task")
    if request.is_eager:
        ended.reference = {"value": new.apply().get()}
        raise ended
    ctx = request.native
    if ctx is None:
        raise NotCovered("self.replace outside of a worker", "Call the other task.")
    is_awaited = ctx.run_id is not None or request.is_bridged
    if is_awaited and not app.orchestrator.settings.database_url:
        raise NotCovered(
            "self.replace in a chain, group, chord or message of Celery's, in a worker without the database",
            "Give workers the setting database_url: the task looks there whether the other has ended.",
        )
    ended.reference = {"replaced": new.apply_async(on_success=not is_awaited).id}
    raise ended


def awaited(task: Any, ctx: TaskContext) -> Any:
    """Return what the other came to, or look again later."""
    looks = ctx.details.get("looks", 0)
    result = task.app.AsyncResult(ctx.details["replaced"])
    try:
        return copy_context().run(_outside, lambda: result.get(timeout=0.05))
    except TimeoutError:
        ctx.heartbeat({**ctx.details, "looks": looks + 1})
        raise Again(min(_LONGEST, 0.1 * 1.5**looks), f"replaced by {ctx.details['replaced']}") from None


def _outside(function: Callable[[], Any]) -> Any:
    """Call a function as if no task ran here: it asks the database."""
    enter_task(None)
    requests.current.set(None)
    return function()
