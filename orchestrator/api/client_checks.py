"""What a client of ours would not have sent: its own checks are made again, because anyone may send anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.domain.code.history import RunStarted, SignalReceived
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.flow.definition import Flow
from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.limits.names import LONGEST_KEY, lane_name
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.starts import START, CodeTarget
from orchestrator.domain.tasks.task import NewTask, TaskOptions, UniqueKey
from orchestrator.errors import InvalidTask, InvalidWorkflow, PayloadError
from orchestrator.references import may_hold_references
from orchestrator.sdk.checks import check_label, check_name, check_rate, check_retention, check_tags
from orchestrator.sdk.dag.definitions import checked
from orchestrator.sdk.flow import reading
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.sealing import is_sealed
from orchestrator.settings import Settings
from orchestrator.trace_context import is_trace

Check = Callable[..., None]

_LONGEST = 100 * 365 * 86_400.0
"""Seconds of anything."""
_MOST_LEVELS = 10
"""Of tasks that follow each other."""
_WORKERS_ONLY = (START,)


def _task(settings: Settings, task: NewTask, run: bytes | None = None) -> None:
    """Refuse a task that no client of ours makes; of a run, unless it belongs to that."""
    if len(task.id) != 16 or task.name in _WORKERS_ONLY:
        raise InvalidTask(f"Task {task.name!r:.100}: expected an id of 16 bytes, and a name that is not our own.")
    if task.parent is not None:
        raise InvalidTask(f"Task {task.name!r:.100} names a task that enqueued it, which only workers do.")
    if task.run_id != run or task.step is not None or not _is_within(task.position or 0, 0, 2**31 - 1):
        raise InvalidTask(f"Task {task.name!r:.100} belongs to another run, or to no place in this one.")
    _payload(settings, f"The arguments of task {task.name!r:.100}", task.payload)
    _placed(task)
    if task.unique is not None:
        _unique(task.unique)
    if task.trace is not None and not is_trace(task.trace):
        raise InvalidTask(f"Task {task.name!r:.100}: expected a traceparent, found {task.trace!r:.100}.")


def _placed(task: NewTask | Callback, level: int = 0) -> None:
    """Refuse what a task, or one that follows another, could not be stored or dispatched with."""
    check_name("task", task.name)
    check_name("queue", task.queue)
    options = _options(task.options)
    key = None if task.lane is None else task.lane.partition("|")[2]
    if len(key or "") > LONGEST_KEY or task.lane not in (
        lane_name(task.name, key, options),
        lane_name(task.name, key or None, options),
    ):
        raise InvalidTask(f"Task {task.name!r}: its lane {task.lane!r:.100} does not follow from its options.")
    if not _is_within(task.priority, -100, 100) or not _is_within(task.delay, 0, _LONGEST):
        raise InvalidTask(f"Task {task.name!r}: its priority or delay is out of bounds.")
    if not _is_within(task.expires or 0, 0, _LONGEST):
        raise InvalidTask(f"Task {task.name!r}: it expires out of bounds.")
    if task.callbacks is not None:
        followers = _decoded(task.callbacks, Callbacks, f"Task {task.name!r}: what follows it")
        if level >= _MOST_LEVELS:
            raise InvalidTask(f"Task {task.name!r} follows {level} others.")
        for follower in (*followers.success, *followers.failure):
            _placed(follower, level + 1)


def _options(text: str | None) -> TaskOptions:
    options: TaskOptions = TaskOptions() if text is None else _decoded(text, TaskOptions, "The options of a task")
    seconds = (options.timeout, options.soft_timeout)
    most = (options.concurrency, options.total_concurrency)
    if not all(value is None or _is_within(value, 1e-9, _LONGEST) for value in seconds):
        raise InvalidTask("Options timeout and soft_timeout: expected more than zero seconds, up to a hundred years.")
    if not all(value is None or _is_within(value, 1, 2**31 - 1) for value in most):
        raise InvalidTask("Option concurrency: expected a whole number above zero.")
    if not _is_within(options.weight, 1e-6, 1e6):
        raise InvalidTask(f"Option weight: expected a number above zero, found {options.weight!r}.")
    for rate in (options.rate, options.total_rate):
        _rate(rate)
    return options


def _rate(rate: Rate | None) -> None:
    if rate is not None:
        check_rate("rate", rate)


def _unique(unique: UniqueKey) -> None:
    if not 1 <= len(unique.key) <= 2 * LONGEST_KEY or not _is_within(unique.period or 0, 0, _LONGEST):
        raise InvalidTask(f"A unique key has up to {LONGEST_KEY} characters, and holds for up to a hundred years.")


def _payload(settings: Settings, what: str, data: bytes) -> None:
    """Refuse a call that is too large, or that no worker could read; what is sealed need not be for us to open."""
    _size(settings, what, data)
    _no_reference(what, data)
    if is_sealed(data):
        return
    try:
        arguments, keywords, *_ = decode_call(data)
    except (*REFUSALS, StopIteration) as error:
        raise PayloadError(f"{what} cannot be read: {error}.") from None
    if not isinstance(arguments, list) or not isinstance(keywords, dict) or not all(map(_is_text, keywords)):
        raise PayloadError(f"{what}: expected those by place and those by name.")


def _value(settings: Settings, what: str, data: bytes) -> None:
    _size(settings, what, data)
    _no_reference(what, data)
    if is_sealed(data):
        return
    try:
        decode_value(data)
    except REFUSALS as error:
        raise PayloadError(f"{what} cannot be read: {error}.") from None


def _no_reference(what: str, data: bytes) -> None:
    """Refuse what names a stored payload: only those who write into the store have something to name there."""
    if may_hold_references(data):
        raise PayloadError(f"{what} cannot be read: it names a stored payload, which is not for a client to do.")


def _size(settings: Settings, what: str, data: bytes) -> None:
    if len(data) > settings.max_payload:
        raise PayloadError(
            f"{what}: {len(data):,} bytes, and at most {settings.max_payload:,} are allowed. Pass a reference to the "
            f"data instead, or raise the setting max_payload of the API."
        )


def _decoded(text: str, kind: type[Any], what: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidTask(f"{what} cannot be read: {error}.") from None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_within(value: float, least: float, most: float) -> bool:
    return least <= value <= most


# -- by call


def _enqueue(settings: Settings, *, task: NewTask, **_: Any) -> None:
    _task(settings, task)


def _enqueue_many(settings: Settings, *, tasks: Sequence[NewTask], **_: Any) -> None:
    for task in tasks:
        _task(settings, task)
    if len({task.id for task in tasks}) < len(tasks):
        raise InvalidTask("Two of these tasks have the same id.")


def _start_many(settings: Settings, *, run_id: bytes, name: str, tasks: Iterable[NewTask], **_: Any) -> None:
    check_name("run", name)
    given = list(tasks)
    for task in given:
        _task(settings, task, run_id)
        if task.unique is not None or task.position is None:
            raise InvalidTask(f"Task {task.name!r} of a run has a unique key, or no place in it.")
    if len({task.id for task in given}) < len(given):
        raise InvalidTask("Two of these tasks have the same id.")


def _start_code(
    settings: Settings,
    *,
    started: RunStarted,
    timeout: float | None,
    tags: str,
    key: str | None,
    signal: SignalReceived | None,
    **_: Any,
) -> None:
    check_name("workflow", started.workflow)
    check_name("queue", started.queue)
    _payload(settings, f"The arguments of workflow {started.workflow!r}", started.payload)
    if (started.parent, started.continued_from, started.origin) != (None, None, None):
        raise InvalidWorkflow("A run that is started by a client comes of no other.")
    if not _is_within(started.version, 0, 2**31 - 1) or not _is_within(timeout or 0, 0, _LONGEST):
        raise InvalidWorkflow(f"Workflow {started.workflow!r}: its version or timeout is out of bounds.")
    check_tags(_decoded(tags, list, "The tags of a run"))
    if key is not None:
        check_label("run id", key)
    if signal is not None:
        _signal(settings, name=signal.name, value=signal.value)


def _signal(settings: Settings, *, name: str, value: bytes, **_: Any) -> None:
    _value(settings, f"Signal {check_name('signal', name)!r}", value)


def _resolve(settings: Settings, *, promise: str, value: bytes, **_: Any) -> None:
    _value(settings, f"Promise {promise!r:.100}", value)


def _ask(settings: Settings, *, name: str, payload: bytes, timeout: float, **_: Any) -> None:
    _payload(settings, f"The arguments of {name!r:.100}", payload)
    if not _is_within(timeout, 0, _LONGEST):
        raise InvalidTask(f"timeout: expected a number of seconds, found {timeout!r}.")


def _reset(_: Settings, *, reason: str, **__: Any) -> None:
    if reason:
        check_label("reason", reason)


def _start_run(_: Settings, *, key: str | None, tags: Sequence[str], **__: Any) -> None:
    if key is not None:
        check_label("key", key)
    check_tags(list(tags))


def _event(_: Settings, *, name: str, **__: Any) -> None:
    check_name("event", name)


def _apply(_: Settings, *, definition: Definition, **__: Any) -> None:
    checked(definition)


def _publish(_: Settings, *, graph: Flow, **__: Any) -> None:
    reading.checked(graph)


def _apply_schedules(
    _: Settings,
    *,
    definitions: Iterable[Definition],
    of_code: Iterable[tuple[str, Mapping[str, Any], CodeTarget]],
    **__: Any,
) -> None:
    for definition in definitions:
        checked(definition)
    for workflow, _data, target in of_code:
        check_name("workflow", workflow)
        _target(target)


def _set_code(_: Settings, *, workflow: str, target: CodeTarget, **__: Any) -> None:
    check_name("workflow", workflow)
    _target(target)


def _target(target: CodeTarget) -> None:
    check_name("queue", target.queue)
    if not _is_within(target.version, 0, 2**31 - 1) or not _is_within(target.timeout or 0, 0, _LONGEST):
        raise InvalidWorkflow("The version or timeout of a scheduled workflow is out of bounds.")


def _origin(_: Settings, *, origin: str, keys: Sequence[str], **__: Any) -> None:
    for text in (origin, *keys):
        check_label("name", text)


def _queue(_: Settings, *, name: str, **__: Any) -> None:
    check_name("queue", name)


def _limit(_: Settings, *, name: str, concurrency: int | None, rate: Rate | None, **__: Any) -> None:
    check_name("queue", name)
    _rate(rate)
    if concurrency is not None and not _is_within(concurrency, 1, 2**31 - 1):
        raise InvalidTask(f"Option concurrency: expected a whole number above zero, found {concurrency!r}.")


def _retain(_: Settings, *, name: str, success: float | None, failed: float | None, **__: Any) -> None:
    check_name("queue", name)
    check_retention("success", success)
    check_retention("failed", failed)


CHECKS: Mapping[tuple[str, str], Check] = {
    ("tasks", "enqueue"): _enqueue,
    ("tasks", "enqueue_many"): _enqueue_many,
    ("runs", "start"): _start_many,
    ("code", "start"): _start_code,
    ("code", "signal"): _signal,
    ("code", "resolve"): _resolve,
    ("code", "query"): _ask,
    ("code", "update"): _ask,
    ("code", "reset"): _reset,
    ("workflows", "start"): _start_run,
    ("workflows", "post_event"): _event,
    ("workflows", "apply"): _apply,
    ("flows", "publish"): _publish,
    ("flows", "start"): _start_run,
    ("schedules", "apply"): _apply_schedules,
    ("schedules", "set_code"): _set_code,
    ("schedules", "claim_origin"): _origin,
    ("queues", "pause"): _queue,
    ("queues", "limit"): _limit,
    ("queues", "retain"): _retain,
    ("queues", "purge"): _queue,
}
"""By part and name."""
