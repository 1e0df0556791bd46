"""What a running task knows of its call: `self.request`."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from orchestrator.compat.celery.tags import untagged
from orchestrator.sdk.tasks.context import TaskContext

MARK = "__celery__"
"""In the result of a task that has none of its own: what `AsyncResult` shows in its place."""
ARGS = "celery_args"
"""The attribute of an exception that carries its arguments."""
MESSAGE = "_celery"
"""The argument that carries what a call has beside its arguments: callbacks, headers, whose child it is."""


@cache
def hostname() -> str:
    """Return the name that workers of this machine have in Celery."""
    return f"celery@{socket.gethostname()}"


class Context:
    """One call of a task, as it runs. An attribute that a call does not have is None."""

    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    id: str | None = None
    task: str | None = None
    retries: int = 0
    called_directly: bool = True
    is_eager: bool = False
    headers: Mapping[str, Any] | None = None
    delivery_info: Mapping[str, Any] | None = None
    hostname: str | None = None
    root_id: str | None = None
    parent_id: str | None = None
    group: str | None = None
    group_index: int | None = None
    eta: str | None = None
    expires: str | None = None
    timelimit: tuple[float | None, ...] = (None, None)
    time_limit: float | None = None
    soft_time_limit: float | None = None
    callbacks: Sequence[Any] | None = None
    errbacks: Sequence[Any] | None = None
    chain: Any = None
    chord: Any = None
    correlation_id: str | None = None
    reply_to: str | None = None
    origin: str | None = None
    utc: bool = True
    ignore_result: bool = False
    loglevel: int | None = None
    logfile: str | None = None
    properties: Mapping[str, Any] | None = None
    stamps: Mapping[str, Any] | None = None
    stamped_headers: Sequence[str] | None = None
    replaced_task_nesting: int = 0

    def __init__(self, *args: Mapping[str, Any], **fields: Any) -> None:
        self.update(*args, **fields)
        self.state: tuple[str, Any] | None = None
        """What `update_state` has said last."""
        self.native: TaskContext | None = None
        """The attempt in a worker of ours; None where the task runs elsewhere."""

    def update(self, *args: Mapping[str, Any], **fields: Any) -> None:
        """Set attributes."""
        self.__dict__.update(*args, **fields)

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute."""
        return getattr(self, key, default)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (self.__dict__.get("headers") or {}).get(name)

    def __repr__(self) -> str:
        return f"<Context: {self.task} {self.id}>"


def of_attempt(task: Any, ctx: TaskContext, args: list[Any], kwargs: dict[str, Any]) -> Context:
    """Return the request of an attempt in a worker; what came in the message is taken out of the arguments."""
    args, kwargs = untagged(args), untagged(kwargs)
    message: Mapping[str, Any] = kwargs.pop(MESSAGE, None) or {}
    details = untagged(ctx.details) if isinstance(ctx.details, dict) else {}
    if "args" in message:
        args = [*args, *message["args"]]
    identifier = message.get("id") or str(ctx.task_id)
    retries = details.get("retries", message.get("retries", 0))
    root = identifier if ctx.run_id is None else str(ctx.run_id)
    limits = message.get("timelimit") or (task.time_limit, task.soft_time_limit)
    request = Context(
        args=details.get("args", args),
        kwargs=details.get("kwargs", kwargs),
        id=identifier,
        task=task.name,
        retries=retries,
        called_directly=False,
        headers=message.get("headers") or {},
        delivery_info={
            "exchange": "",
            "routing_key": task.app._celery_queue(ctx.queue),
            "priority": message.get("priority"),
            "redelivered": ctx.attempt > 1 + details.get("retries", 0),
        },
        hostname=hostname(),
        root_id=message.get("root_id") or root,
        correlation_id=identifier,
        ignore_result=bool(task.ignore_result),
        properties=message.get("properties") or {},
        time_limit=limits[0],
        soft_time_limit=limits[1],
        timelimit=tuple(limits),
    )
    if message:
        found = {name: message.get(name) for name in ("parent_id", "eta", "expires", "errbacks", "origin")}
        request.update(found, callbacks=message.get("link"))
    if ctx.parallel_index is not None:
        request.update(group=root if ctx.run_id else None, group_index=ctx.parallel_index)
    request.native = ctx
    return request


current: ContextVar[tuple[Any, Context] | None] = ContextVar("celery_request", default=None)
"""The task that runs here, and its request."""
