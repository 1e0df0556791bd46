"""`apply_async` and `send_task`: enqueue native tasks with Celery's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from msgspec import structs

from orchestrator.compat.celery import request as requests
from orchestrator.compat.celery import signals
from orchestrator.compat.celery.app import routes
from orchestrator.compat.celery.app.routes import Invocation
from orchestrator.compat.celery.exceptions import EncodeError, NotCovered
from orchestrator.compat.celery.request import MESSAGE
from orchestrator.compat.celery.results.single import of_handle
from orchestrator.compat.celery.tags import tagged, tagged_call
from orchestrator.compat.celery.utils import listed, to_id
from orchestrator.domain.ids import to_text
from orchestrator.errors import PayloadError, did_you_mean
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.context import current_runtime
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.sdk.tasks.task import Task as NativeTask
from orchestrator.sdk.values.sealing import outgoing_task
from orchestrator.trace_context import current_trace

_NAMES = """
add_to_parent argsrepr compression connection content_encoding content_type correlation_id delivery_mode
exchange_type ignore_result kwargsrepr mandatory immediate producer publisher reply_to retry retry_policy
route_name router root_id parent_id replaced_task_nesting result_cls shadow declare timeout group_id group_index
utc chain chord
"""
WITHOUT_EFFECT = frozenset(_NAMES.split())
"""Options about Celery's broker and protocol, without effect here. Other unknown ones go to `request.properties`."""
_PROPERTIES = frozenset(["app_id", "message_id", "user_id", "type"])
"""Options that are message properties; they are never reported as misspelt."""
_DATA = ("json", "application/json", "msgpack", "application/x-msgpack", "yaml", None)


def publish(
    task: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    task_id: str | None,
    link: Any,
    link_error: Any,
    options: Mapping[str, Any],
    app: Any = None,
) -> Any:
    """Enqueue one call. A task that this program lacks is enqueued by its name."""
    app = app or task.app
    app._configure()
    name = task if isinstance(task, str) else task.name
    registered = app.tasks.get(name) if isinstance(task, str) else task
    if registered is not None and registered is not task and registered._check is not None:
        registered._check(args, kwargs)
    native = app._by_name(name) if registered is None else registered._registered()
    message = message_of(link, link_error, options)
    converted = native_options(Invocation(app, name, args, kwargs, options, registered))
    keep_priority(app, converted, message)
    if signals.before_task_publish.receivers:
        if task_id is None:
            runtime = current_runtime()
            task_id = to_text(new_id() if runtime is None else runtime.next_id())
        announce(app, native, args, kwargs, task_id, converted, message)
    if task_id is not None and to_id(task_id) is not None and str(to_id(task_id)) != task_id:
        message["id"] = task_id
    if converted:
        native = native.options(**converted)
    data, named = as_data(registered, args, kwargs, message)
    try:
        handle: Handle[Any] = (
            native.enqueue(*data, **named) if task_id is None else _enqueue_as(native, to_id(task_id), data, named)
        )
    except PayloadError as error:
        raise EncodeError(str(error)) from error
    if signals.after_task_publish.receivers:
        announce_stored(app, native, args, kwargs, task_id or handle.id, message)
    return of_handle(app, handle, task_id)


def keep_priority(app: Any, converted: Mapping[str, Any], message: dict[str, Any]) -> None:
    """Store Celery's priority in the message for `request.delivery_info`, also after routing by a function."""
    if "priority" in converted:
        message.setdefault("priority", app._priority(converted["priority"]))


def as_data(
    task: Any, args: Sequence[Any], kwargs: Mapping[str, Any], message: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call as data, with the message as an extra keyword argument."""
    if MESSAGE in kwargs:
        raise NotCovered(f"an argument named {MESSAGE}", "It carries headers and callbacks: choose another name.")
    if task is None or not task.pydantic:
        args, kwargs = tagged_call(args, kwargs)
    return args, {**kwargs, MESSAGE: tagged(message)} if message else kwargs


def announce(
    app: Any,
    native: NativeTask[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    task_id: str | None,
    converted: dict[str, Any],
    message: dict[str, Any],
) -> None:
    """Send `before_task_publish` before a call is stored; keep headers and a priority that receivers set."""
    headers = {"id": task_id, "task": native.name, **(message.get("headers") or {})}
    properties: dict[str, Any] = {"priority": message.get("priority"), "correlation_id": task_id}
    signals.before_task_publish.send(
        native.name,
        body=(args, kwargs, {}),
        headers=headers,
        properties=properties,
        exchange="",
        routing_key=app._celery_queue(converted.get("queue") or native.queue),
        declare=[],
        retry_policy={},
    )
    if added := {key: value for key, value in headers.items() if key not in ("id", "task")}:
        message["headers"] = added
    if properties["priority"] != message.get("priority"):
        message["priority"] = properties["priority"]
        converted["priority"] = app._priority(properties["priority"])


def announce_stored(
    app: Any,
    native: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    task_id: str | None,
    message: Mapping[str, Any],
) -> None:
    """Send `after_task_publish` when a call is stored."""
    body = (args, kwargs, {"callbacks": message.get("link"), "errbacks": message.get("errbacks")})
    headers = {"id": task_id, "task": native.name, **(message.get("headers") or {})}
    key = app._celery_queue(native._call_options.queue)
    signals.after_task_publish.send(native.name, body=body, headers=headers, exchange="", routing_key=key)


def message_of(link: Any, link_error: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message beside the arguments: callbacks, headers, parent ids."""
    message: dict[str, Any] = {}
    if links := listed(link):
        message["link"] = [dict(signature) for signature in links]
    if errors := listed(link_error):
        message["errbacks"] = [dict(signature) for signature in errors]
    if options.get("headers"):
        message["headers"] = dict(options["headers"])
    for name in ("retries", "priority"):
        if options.get(name):
            message[name] = options[name]
    if options.get("time_limit") or options.get("soft_time_limit"):
        message["timelimit"] = [options.get("time_limit"), options.get("soft_time_limit")]
    if properties := {name: options[name] for name in options.keys() - _TAKEN}:
        message["properties"] = properties
    running = requests.current.get()
    if running is not None and running[1].id is not None:
        message |= {"parent_id": running[1].id, "root_id": running[1].root_id}
    for name, value in (("eta", options.get("eta") or options.get("countdown")), ("expires", options.get("expires"))):
        if value is not None:
            is_moment = isinstance(value, (datetime, str))
            when = value if is_moment else datetime.now(UTC) + timedelta(seconds=_seconds(value))
            message[name] = when if isinstance(when, str) else when.isoformat()
    return message


def native_options(call: Invocation) -> dict[str, Any]:
    """Return a call's options as native ones; raise for options without a counterpart."""
    app, options, task = call.app, call.options, call.task
    if options.get("serializer") not in _DATA:
        raise NotCovered(f"serializer={options['serializer']!r}", "Arguments are data: see docs/tasks.md#types.")
    native: dict[str, Any] = {}
    is_routed = task is None or not app._is_routed_by_name
    route = routes.find(call) if is_routed else {}
    merged = {**route, **{key: value for key, value in options.items() if value is not None}}
    queue = merged.get("queue")
    if queue is None and (merged.get("routing_key") or merged.get("exchange")) is not None:
        queue = routes.queue_of(app.conf, merged.get("exchange"), merged.get("routing_key"))
    if queue is not None:
        native["queue"] = app._queue(getattr(queue, "name", queue))
    if (priority := merged.get("priority")) is not None:
        native["priority"] = app._priority(priority)
    if (countdown := merged.get("countdown")) is not None:
        native["delay"] = max(0.0, _seconds(countdown))
    if (eta := merged.get("eta")) is not None:
        native["eta"] = aware_datetime(eta)
    if (expires := merged.get("expires")) is not None:
        is_moment = isinstance(expires, (datetime, str))
        native["expires"] = aware_datetime(expires) if is_moment else max(0.001, _seconds(expires))
    hard, soft = merged.get("time_limit"), merged.get("soft_time_limit")
    if hard is not None and soft is not None and soft > hard:
        raise ValueError("soft_time_limit must be less than or equal to time_limit")
    if hard is not None or soft is not None:
        hard = hard if hard is not None or task is None else task.time_limit
        native |= {"timeout": hard, "soft_timeout": soft if soft and not (hard and soft >= hard) else None}
    if merged.get("ignore_result"):
        native["store_result"] = False
    if merged.get("on_success"):
        native["on_success"] = True
    for unknown in options.keys() - _TAKEN - _PROPERTIES:
        if suggestion := did_you_mean(unknown, _KNOWN):
            raise TypeError(f"apply_async of {call.name}: unknown option {unknown}.{suggestion}")
    return native


_NAMES = """
serializer queue routing_key exchange priority countdown eta expires time_limit soft_time_limit headers retries
link link_error on_success task_id
"""
_KNOWN = frozenset(_NAMES.split())
_TAKEN = _KNOWN | WITHOUT_EFFECT


def _seconds(value: Any) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def aware_datetime(value: datetime | str) -> datetime:
    """Return an aware datetime. A naive one is in UTC, as in Celery, whatever `timezone` and `enable_utc` say."""
    when = datetime.fromisoformat(value) if isinstance(value, str) else value
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def zone(app: Any) -> Any:
    """Return the application's time zone."""
    name = app.conf.timezone
    if name is None:
        return UTC
    return ZoneInfo(name) if isinstance(name, str) else name


def _enqueue_as(native: NativeTask[..., Any], identifier: UUID, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Enqueue a call under the caller's id. Enqueueing the same id again has no effect."""
    client = native._client
    native._refuse_in_workflow("enqueued")
    if client.middleware is not None and not native._is_hooked:
        with client.middleware.enqueuing(call := native._as_call(args, kwargs)):
            call.id = str(identifier)
            return _enqueue_as(native._hooked(call), identifier, args, kwargs)
    runtime = current_runtime()
    task = native._described(identifier.bytes, args, kwargs, None, None, in_task=runtime is not None)
    task = outgoing_task(structs.replace(task, trace=current_trace()), client.settings)
    sender = native._enqueue_path()
    if sender is not None:
        sender([task])
    else:
        client.backend.tasks.enqueue(task, repeated=True)
    return Handle(client, identifier.bytes, native._signature)
