"""`self.request`: the call that a running task works on."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from orchestrator.compat.celery import states
from orchestrator.compat.celery.exceptions import NotCovered
from orchestrator.compat.celery.tags import tagged, untagged
from orchestrator.domain.ids import to_text
from orchestrator.sdk.tasks.context import TEXT_LIMIT, TaskContext, TaskRuntime

MARK = "__celery__"
"""Key in a task's result that marks a state or reference for `AsyncResult` instead of a value."""
ARGS = "celery_args"
"""Attribute of an exception that carries its constructor arguments."""
MESSAGE = "_celery"
"""Keyword argument that carries callbacks, headers and parent ids beside the task's own arguments."""


@cache
def hostname() -> str:
    """Return the name that Celery gives to workers of this machine."""
    return f"celery@{socket.gethostname()}"


class Context:
    """One call of a task while it runs. Missing attributes are None."""

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
    state: tuple[str, Any] | None = None
    """The last state and meta set with `update_state`."""
    is_bridged: bool = False
    """Whether a Celery client waits for the result."""
    failed: Mapping[str, Any] | None = None
    """For an error callback sent by the bridge: the exception, as data."""
    native: TaskContext | None = None
    """The native context of an attempt in a worker; None if the task runs elsewhere."""

    def __init__(self, *args: Mapping[str, Any], **fields: Any) -> None:
        self.update(*args, **fields)

    def update(self, *args: Mapping[str, Any], **fields: Any) -> None:
        self.__dict__.update(*args, **fields)

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (self.__dict__.get("headers") or {}).get(name)

    def __repr__(self) -> str:
        return f"<Context: {self.task} {self.id}>"


class Attempt(Context):
    """The request of an attempt in a worker. Few tasks read most fields, so these are computed on access."""

    called_directly = False
    _details: Mapping[str, Any] = {}
    """Details that an earlier attempt has stored."""
    _source: tuple[Any, TaskRuntime, Mapping[str, Any]] | None = None
    """The task, its runtime and its message, until the remaining fields are computed."""

    def __init__(self, task: Any, runtime: TaskRuntime, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Split the arguments into the task's own and the message."""
        dispatch = runtime.dispatch
        args = untagged([*args]) if args else []
        message: Mapping[str, Any] = {}
        if kwargs:
            kwargs = untagged(kwargs)
            message = kwargs.pop(MESSAGE, None) or {}
        self.id = to_text(dispatch.id)
        if message:
            self.id = message.get("id") or self.id
            self.retries = message.get("retries", 0)
            self.callbacks, self.errbacks = message.get("link"), message.get("errbacks")
            self.is_bridged, self.failed = message.get("is_bridged", False), message.get("failed")
            args = [*args, *message.get("args", ())]
        if dispatch.details is not None and isinstance(details := runtime.context().details, dict):
            self._details = details = untagged(details)
            self.retries = details.get("retries", self.retries)
            args, kwargs = details.get("args", args), details.get("kwargs", kwargs)
        self.args, self.kwargs = args, kwargs
        self._source = task, runtime, message

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        fields: dict[str, Any] = super().__dict__
        if self._source is not None:
            for name, value in _computed(self, *self._source).items():
                fields.setdefault(name, value)
            self._source = None
        return fields


class _Computed:
    """Descriptor of an `Attempt` field: its first access computes all such fields."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, request: Context | None, owner: type[Context]) -> Any:
        return getattr(Context, self._name) if request is None else request.__dict__[self._name]


_COMPUTED = """
task headers delivery_info hostname root_id parent_id correlation_id ignore_result properties time_limit soft_time_limit
timelimit eta expires origin group group_index native
"""
for _name in _COMPUTED.split():
    setattr(Attempt, _name, _Computed(_name))


def _computed(request: Attempt, task: Any, runtime: TaskRuntime, message: Mapping[str, Any]) -> dict[str, Any]:
    ctx = runtime.context()
    root = request.id if ctx.run_id is None else str(ctx.run_id)
    limits = message.get("timelimit") or (task.time_limit, task.soft_time_limit)
    declared = task._registered()._call_options.priority
    is_in_group = ctx.parallel_index is not None and ctx.run_id is not None
    return {
        "task": task.name,
        "headers": message.get("headers") or {},
        "delivery_info": {
            "exchange": "",
            "routing_key": task.app._celery_queue(ctx.queue),
            "priority": message.get("priority") or (declared and task.app._priority(declared)) or None,
            "redelivered": ctx.attempt > 1 + request._details.get("retries", 0),
        },
        "hostname": hostname(),
        "root_id": message.get("root_id") or root,
        "correlation_id": request.id,
        "ignore_result": bool(task.ignore_result),
        "properties": message.get("properties") or {},
        "time_limit": limits[0],
        "soft_time_limit": limits[1],
        "timelimit": tuple(limits),
        **{name: message.get(name) for name in ("parent_id", "eta", "expires", "origin")},
        "group": root if is_in_group else None,
        "group_index": ctx.parallel_index,
        "native": ctx,
    }


def update_state(request: Context, task_id: str | None, state: str | None, meta: Any) -> None:
    """Publish a state and meta of the running task. They are stored as progress, for an hour."""
    if task_id is not None and task_id != request.id:
        raise NotCovered("update_state(task_id=…) of another task", "A task can report only its own progress.")
    request.state = (state or states.PENDING, meta)
    ctx = request.native
    if ctx is None:
        return
    data = {"state": state, "meta": tagged(meta)}
    text = json.dumps(data, default=str, separators=(",", ":"))
    if len(text) > TEXT_LIMIT:
        ctx.log(f"update_state: {len(text):,} characters of meta are not shown: up to {TEXT_LIMIT:,} are.", "warning")
        text = json.dumps({**data, "meta": None})
    step, total = (meta.get("current"), meta.get("total")) if isinstance(meta, dict) else (None, None)
    is_valid = isinstance(step, (int, float)) and isinstance(total, (int, float)) and 0 <= step <= total and total > 0
    ctx.progress(float(step) / float(total) if is_valid else 0.0, text)  # type: ignore[arg-type]


current: ContextVar[tuple[Any, Context] | None] = ContextVar("celery_request", default=None)
"""The task that runs in this context, and its request."""
