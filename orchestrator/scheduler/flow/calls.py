"""The tasks of flow nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.dag.definition import Registered
from orchestrator.domain.dag.placement import Origin, Placement
from orchestrator.domain.executors.builtin import Http, Process, Pull
from orchestrator.domain.executors.record import ExecutorCall
from orchestrator.domain.executors.registry import built_in, call_from, option_problems, task_name
from orchestrator.domain.flow.commands import Call
from orchestrator.domain.flow.definition import Flow, step_of
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.tasks.retry import RetryPolicy
from orchestrator.domain.tasks.task import NewTask, TaskOptions
from orchestrator.store.flow.runs import FlowRun

LOCAL = "local_func"
SCRIPT = "local_script"
QUEUE = "queue"
_DEFAULT_QUEUE = "default"
_MAX_REQUESTS = 10
"""Requests that may find no worker of a service before the node fails, by default."""
_REQUEST_PAUSE = 0.3
"""Seconds between two such requests."""


class CannotCall(Exception):
    """The task of a node cannot be created. The message says why."""


class Route(NamedTuple):
    """How the tasks of a node, or of one of its branches, run."""

    name: str
    is_local: bool
    """The task is a function of the application."""
    parameters: Collection[str] | None
    """The parameters of the function; None if it accepts any."""
    placement: Placement
    lane_key: str | None


class Caller:
    """Creates the tasks of one version of a flow."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._routes: dict[str, Route] = {}
        """The routes of nodes whose tasks all run in the same way, by path."""

    def new_task(self, run: FlowRun, call: Call, max_payload: int) -> NewTask:
        """Return the task of a node, or of one of its branches."""
        route = self._routes.get(call.path) or self._route(call)
        context = {"workflow": run.flow, "step": call.path, "index": call.position, "count": call.of}
        values = {"input": call.input, "params": call.params}
        if route.is_local:  # a function may also declare their fields as parameters
            values = {**call.params, **(call.input if isinstance(call.input, dict) else {}), **values}
            if (names := route.parameters) is not None:  # the input is also kept for display
                values = {key: value for key, value in values.items() if key in names or key == "input"}
        try:
            payload = timezones.encode(((), values, context))
        except REFUSALS as error:
            raise CannotCall(f"Its input cannot be sent: {error}.") from error
        if len(payload) > max_payload:
            raise CannotCall(
                f"Its input has {len(payload):,} bytes, and at most {max_payload:,} are allowed. Pass a reference to "
                f"the data instead, or raise the setting max_payload."
            )
        origin = Origin(run.id, call.position, step_of(call.path))
        return route.placement.new(call.id, payload, route.lane_key, origin)

    def _route(self, call: Call) -> Route:
        executor, node = call.exec, call.node
        kind = executor.exec_type or Http.executor
        name = executor.func if kind == LOCAL else ""
        name = (
            name
            or executor.service
            or executor.func
            or ("" if kind in (LOCAL, Http.executor, QUEUE) else task_name(kind))
        )
        if not name:
            raise CannotCall(
                f"It names nothing to run: exec_type {kind!r} needs {'func' if kind == LOCAL else 'a service'}."
            )
        registered = self._flow.functions.get(name) or Registered()
        queue, priority = node.queue or registered.queue or _DEFAULT_QUEUE, node.priority or registered.priority
        options = _options(call, registered)
        if kind != LOCAL:
            options = msgspec.structs.replace(options, executor=_executor(kind, name, call))
        placement = Placement(name, queue, priority, options, registered)
        route = Route(name, kind == LOCAL, self._flow.takes.get(name), placement, registered.key)
        if node.kind == "executor" or (node.kind == "foreach" and not node.foreach_execs):
            self._routes[call.path] = route
        return route


def _options(call: Call, registered: Registered) -> TaskOptions:
    """Return the options of a task. Those of the node override those of the function."""
    node, options = call.node, msgspec.convert(registered.options, TaskOptions)
    if node.max_retries is not None:
        retry = RetryPolicy(max=node.max_retries, backoff="listed", intervals=(node.wait_ms / 1000,), jitter=0.0)
        options = msgspec.structs.replace(options, retry=retry)
    if node.timeout_ms:
        options = msgspec.structs.replace(options, timeout=node.timeout_ms / 1000)
    elif call.exec.script is not None and call.exec.script.timeout_ms:
        options = msgspec.structs.replace(options, timeout=call.exec.script.timeout_ms / 1000)
    return options


def _executor(kind: str, name: str, call: Call) -> ExecutorCall:
    """Return the executor call of a task that is not a function of the application."""
    node, options_given = call.node, dict(call.exec.options)
    if kind == Http.executor:
        own = {"weighted_by_load": node.weighted_by_load or options_given.get("weighted_by_load", True)}
        own["max_attempts"] = node.max_attempts or options_given.get("max_attempts", _MAX_REQUESTS)
        own["attempt_delay"] = node.attempt_delay_ms / 1000 or options_given.get("attempt_delay", _REQUEST_PAUSE)
        options_given = {"service": name, **options_given, **own}
    elif kind == QUEUE:
        kind, options_given = Pull.executor, {"service": name, **options_given}
    elif kind == SCRIPT:
        kind, options_given = Process.executor, {**_command(call), **options_given}
    try:
        found = call_from(kind, options_given)
    except msgspec.ValidationError as error:
        raise CannotCall(f"Executor {kind!r} cannot take these options: {error}.") from error
    options = built_in(kind)
    for option, problem in option_problems(options, found.options) if options is not None else ():
        raise CannotCall(f"Executor {kind!r}, option {option!r}: {problem}")
    return found


def _command(call: Call) -> dict[str, Any]:
    script = call.exec.script
    if script is None or not (script.cmd or script.code):
        raise CannotCall("exec_type 'local_script' needs `script` with a cmd.")
    command = [script.cmd, *script.args] if script.cmd else [script.language or "bash", "-c", script.code]
    found: dict[str, Any] = {"command": command, "env": script.env}
    found["input"] = "none" if script.stdin_mode == "none" else "stdin"
    found["output"] = "text" if script.output_mode in ("text", "raw") else "json"
    return {**found, "cwd": script.work_dir} if script.work_dir else found
