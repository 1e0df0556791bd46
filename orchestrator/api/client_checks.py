"""Checks of calls of the Python client: rules for arguments that types cannot express, and limits of the caller's key.

A key that is bound to some queues and workflows can read and write only these. A key with the scope `enqueue` cannot
choose executors, whose options may hold any command, image or function, so they are removed from its tasks. A task that
is declared with an executor still runs there: the worker announces the declaration, and the leader writes it into the
task's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin
from uuid import UUID

import msgspec

from orchestrator.api.context import Api
from orchestrator.api.key_scope import check_task_name, has_run, lineage_within, with_followers
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.code.attributes import Scalar
from orchestrator.domain.code.history import RunStarted, SignalReceived, UpdateRequested
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.flow.definition import Flow
from orchestrator.domain.ids import is_derived, to_text
from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.limits.lane_limits import MAX_KEY_LENGTH, lane_name
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.headers import check_headers
from orchestrator.domain.tasks.starts import START, CodeTarget
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, NewTask, TaskOptions, UniqueKey, own_key
from orchestrator.errors import Forbidden, InvalidTask, InvalidWorkflow
from orchestrator.sdk.calls.checked import MAX_SECONDS, Checked, check_call, check_value, decoded
from orchestrator.sdk.calls.declaring import Declared, Kind, Rules
from orchestrator.sdk.checks import check_name, check_rate, check_weight
from orchestrator.sdk.code.messages import request_id
from orchestrator.sdk.dag.definitions import checked
from orchestrator.sdk.flow import reading
from orchestrator.settings import Settings
from orchestrator.trace_context import is_trace

_MESSAGE_VERSION = 5
"""The UUID version of request ids of messages. The answer to a start is stored under the id of the run."""

Arguments = Mapping[str, Any]
Check = Callable[[Settings, Any, Arguments], object]

_MAX_CALLBACK_DEPTH = 10
_WORKERS_ONLY = (START,)


def check_new_task(settings: Settings, task: NewTask, arguments: Arguments) -> None:
    """Reject a task that no client creates. A task of a run needs the run's id and a position, and no unique key."""
    run = arguments.get("run_id")
    if len(task.id) != 16 or task.name in _WORKERS_ONLY:
        raise InvalidTask(f"Task {task.name!r:.100}: expected an id of 16 bytes, and a name that is not reserved.")
    if task.parent is not None:
        raise InvalidTask(f"Task {task.name!r:.100} names a parent task, which only workers may do.")
    if task.run_id != run or task.step is not None or not _is_within(task.position or 0, 0, 2**31 - 1):
        raise InvalidTask(
            f"Task {task.name!r:.100} belongs to a different run, or has an invalid position in this run."
        )
    check_call(settings, f"The arguments of task {task.name!r:.100}", task.payload)
    _check_dispatchable(task)
    if task.unique is not None:
        _check_unique(task.name, task.unique)
    if run is not None and (task.unique is not None or task.position is None):
        raise InvalidTask(f"Task {task.name!r} of a run has a unique key, or no position in the run.")
    if task.trace is not None and not is_trace(task.trace):
        raise InvalidTask(f"Task {task.name!r:.100}: expected a traceparent, found {task.trace!r:.100}.")


def _check_dispatchable(task: NewTask | Callback, level: int = 0) -> None:
    """Reject a task or callback that cannot be stored or dispatched."""
    check_name("task", task.name)
    check_name("queue", task.queue)
    options = _check_options(task.options)
    key = None if task.lane is None else task.lane.partition("|")[2]
    if len(key or "") > MAX_KEY_LENGTH or task.lane not in (
        lane_name(task.name, key, options),
        lane_name(task.name, key or None, options),
    ):
        raise InvalidTask(f"Task {task.name!r}: its lane {task.lane!r:.100} does not match its options.")
    if not _is_within(task.priority, -100, 100) or not _is_within(task.delay, 0, MAX_SECONDS):
        raise InvalidTask(f"Task {task.name!r}: its priority or delay is out of range.")
    if not _is_within(task.expires or 0, 0, MAX_SECONDS):
        raise InvalidTask(f"Task {task.name!r}: its expiry is out of range.")
    if task.callbacks is not None:
        followers = decoded(task.callbacks, Callbacks, f"Task {task.name!r}: its callbacks")
        if level >= _MAX_CALLBACK_DEPTH:
            raise InvalidTask(f"Task {task.name!r}: callbacks are nested too deeply ({level} levels).")
        for follower in (*followers.success, *followers.failure):
            _check_dispatchable(follower, level + 1)


def _check_options(text: str | None) -> TaskOptions:
    options: TaskOptions = TaskOptions() if text is None else decoded(text, TaskOptions, "The options of a task")
    seconds = (options.timeout, options.soft_timeout)
    limits = (options.concurrency, options.total_concurrency, options.max_starts)
    if not all(value is None or _is_within(value, 1e-9, MAX_SECONDS) for value in seconds):
        raise InvalidTask(
            "Options timeout and soft_timeout: expected more than zero seconds, and at most a hundred years."
        )
    if not all(value is None or _is_within(value, 1, 2**31 - 1) for value in limits):
        raise InvalidTask("Options concurrency and max_starts: expected a whole number above zero.")
    check_weight(options.weight)
    for rate in (options.rate, options.total_rate):
        if rate is not None:
            check_rate("rate", rate)
    check_headers(options.headers)
    return options


def _check_unique(name: str, unique: UniqueKey) -> None:
    if not unique.key.startswith((own_key("once", name, ""), own_key("unique", name, ""))):
        raise InvalidTask(f"Task {name!r}: its unique key {unique.key!r:.100} belongs to a different task.")
    if not 1 <= len(unique.key) <= 2 * MAX_KEY_LENGTH or not _is_within(unique.period or 0, 0, MAX_SECONDS):
        raise InvalidTask(
            f"A unique key has at most {MAX_KEY_LENGTH} characters, and a period of at most a hundred years."
        )


def _is_within(value: float, least: float, most: float) -> bool:
    return least <= value <= most


def _check_start(settings: Settings, started: RunStarted, arguments: Arguments) -> None:
    check_name("workflow", started.workflow)
    check_name("queue", started.queue)
    check_call(settings, f"The arguments of workflow {started.workflow!r}", started.payload)
    if any((started.parent, started.continued_from, started.origin, started.first)):
        raise InvalidWorkflow("A client cannot set parent, origin, first or continued_from of a run.")
    if not _is_within(started.version, 0, 2**31 - 1) or not _is_within(arguments["timeout"] or 0, 0, MAX_SECONDS):
        raise InvalidWorkflow(f"Workflow {started.workflow!r}: its version or timeout is out of range.")
    if UUID(bytes=arguments["run_id"]).version == _MESSAGE_VERSION:
        raise InvalidWorkflow(f"Workflow {started.workflow!r}: the id of the run has the form of a message's id.")
    if started.attributes:
        decoded(started.attributes, dict[str, Scalar], f"The attributes of workflow {started.workflow!r}")


def _check_signal(settings: Settings, signal: SignalReceived, _: Arguments) -> None:
    check_value(settings, f"Signal {check_name('signal', signal.name)!r}", signal.value)
    if signal.otherwise is not None:
        raise InvalidWorkflow(f"Signal {signal.name!r}: a client cannot set the run that it starts otherwise.")


def _check_update(settings: Settings, update: UpdateRequested, _: Arguments) -> None:
    check_call(settings, f"The arguments of update {check_name('update', update.name)!r}", update.payload)
    if len(update.id) != 16:
        raise InvalidWorkflow(f"Update {update.name!r}: expected an id of 16 bytes, found {len(update.id)}.")


def _check_target(_: Settings, target: CodeTarget, __: Arguments) -> None:
    check_name("queue", target.queue)
    if not _is_within(target.version, 0, 2**31 - 1) or not _is_within(target.timeout or 0, 0, MAX_SECONDS):
        raise InvalidWorkflow("The version or timeout of a scheduled workflow is out of range.")


BY_TYPE: Mapping[Any, Check] = {
    NewTask: check_new_task,
    RunStarted: _check_start,
    SignalReceived: _check_signal,
    UpdateRequested: _check_update,
    CodeTarget: _check_target,
    Definition: lambda _, definition, __: checked(definition),
    Flow: lambda _, flow, __: reading.checked(flow),
    Rate: lambda _, rate, __: check_rate("rate", rate),
}
"""Argument types with checks that apply to every call."""


def argument_checks(call: Declared) -> Callable[[Settings, Arguments], None]:
    """Return a function that runs all checks of a call's arguments."""
    found = [(name, check) for name, hint in call.arguments.items() if (check := check_of(hint)) is not None]

    def check_all(settings: Settings, arguments: Arguments) -> None:
        for name, check in found:
            check(settings, arguments[name], arguments)

    return check_all


def check_of(hint: Any) -> Check | None:
    """Return the check for values of a type; None if it has none."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _all_of([check_of(parts[0]), *(part.check for part in parts[1:] if isinstance(part, Checked))])
    if not parts:
        return BY_TYPE.get(hint)
    found = [check_of(part) for part in parts]
    if not any(found):
        return None
    if origin is tuple:
        return lambda settings, values, arguments: _run_checks(settings, zip(found, values, strict=True), arguments)
    if origin in (Iterable, Sequence, list):
        return lambda settings, values, arguments: _run_checks(
            settings, ((found[0], value) for value in values), arguments
        )
    return _all_of(found)


def _all_of(checks: Sequence[Check | None]) -> Check | None:
    """Combine several checks of one value; None if there are none."""
    if not any(checks):
        return None
    return lambda settings, value, arguments: _run_checks(settings, ((check, value) for check in checks), arguments)


def _run_checks(settings: Settings, checks: Iterable[tuple[Check | None, Any]], arguments: Arguments) -> None:
    for check, value in checks:
        if check is not None and value is not None:
            check(settings, value, arguments)


def restrict(rules: Rules, api: Api, key_scope: KeyScope, arguments: dict[str, Any]) -> None:
    """Restrict the arguments of a call to the queues and workflows of a bound key."""
    for argument, kind in rules.within.items():
        name, _, field = argument.partition(".")
        is_of_queues = arguments["kind"] == "task" if kind is Kind.TASK_OR_RUN else kind is not Kind.WORKFLOW
        prefix = key_scope.queues if is_of_queues else key_scope.workflows
        if kind is Kind.TASK and arguments[name].run is not None and has_run(api, key_scope, arguments[name].run):
            prefix = ""  # a key for the run may see all its tasks
        arguments[name] = msgspec.structs.replace(arguments[name], **{field: prefix}) if field else prefix


def check_message_id(api: Api, call: Declared, arguments: Arguments) -> None:
    """Refuse the request id of a message to another run: it would count as sent there, and name the answer from there.

    A request id counts in the whole system. It is made from the run and the sender's own id, which proves its origin.
    """
    request, id, run = arguments.get("request"), arguments.get("id"), arguments.get("run")
    if request is None or run is None or id is None:
        return
    what: Literal["signal", "update"] = "signal" if call.name == "signal" else "update"
    made = api.backend.code.request_of if is_derived(run) else request_id
    if not id or request not in (request_id(run, what, id), made(run, what, id)):
        raise Forbidden(
            f"The request id does not belong to a message to run {to_text(run)}. A key for some queues or workflows "
            "sends the message's own id, too: use a client of this release."
        )


def visible_part(rules: Rules, key_scope: KeyScope, result: Any) -> Any:
    """Return the part of a result that a bound key may see."""
    for kind, field in rules.keeps.items():
        if kind is Kind.LINEAGE:
            return lineage_within(key_scope, result)
        has = key_scope.has_queue if kind is Kind.QUEUE else key_scope.has_workflow
        if isinstance(result, dict):
            return {name: one for name, one in result.items() if has(name)}
        return [one for one in result if has(getattr(one, field) if field else one)]
    return result if rules.bound_result is None else rules.bound_result


def check_names(key_scope: KeyScope, body: Any) -> None:
    """Reject tasks and callbacks whose names the caller may not enqueue."""
    task, tasks = getattr(body, "task", None), getattr(body, "tasks", None)
    new_tasks = [task] if isinstance(task, NewTask) else [task for task in tasks or () if isinstance(task, NewTask)]
    for name in sorted({new_task.name for new_task in with_followers(new_tasks)}):
        check_task_name(key_scope, name)


EXECUTOR_SCOPE = Scope.OPERATE
"""The scope for choosing executors: the same as for applying a workflow."""

T = TypeVar("T", NewTask, Callback)
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


def without_executors(body: Any) -> Any:
    """Remove the executors of tasks and their callbacks from the body of a call."""
    changed: dict[str, Any] = {}
    task, tasks = getattr(body, "task", None), getattr(body, "tasks", None)
    if isinstance(task, NewTask):
        changed["task"] = _without(task)
    if isinstance(tasks, list):
        changed["tasks"] = [_without(task) if isinstance(task, NewTask) else task for task in tasks]
    return msgspec.structs.replace(body, **changed) if changed else body


def _without(task: T) -> T:
    options, callbacks = _rewrite(task.options, _plain_options), _rewrite(task.callbacks, _plain_callbacks)
    if (options, callbacks) == (task.options, task.callbacks):
        return task
    return msgspec.structs.replace(task, options=options, callbacks=callbacks)


def _rewrite(text: str | None, change: Callable[[str], str | None]) -> str | None:
    try:
        return None if text is None else change(text)
    except _UNREADABLE:
        return text  # a later check rejects it


def _plain_options(text: str) -> str | None:
    options = msgspec.json.decode(text, type=TaskOptions)
    if options.executor is None:
        return text
    plain = msgspec.structs.replace(options, executor=None)
    return None if plain == DEFAULT_OPTIONS else msgspec.json.encode(plain).decode()


def _plain_callbacks(text: str) -> str:
    known = msgspec.json.decode(text, type=Callbacks)
    success, failure = tuple(map(_without, known.success)), tuple(map(_without, known.failure))
    if (success, failure) == (known.success, known.failure):
        return text
    return msgspec.json.encode(msgspec.structs.replace(known, success=success, failure=failure)).decode()
