"""The tasks of flows: what a node calls, as a task of the queue."""

from __future__ import annotations

import msgspec

from orchestrator.domain import zoned
from orchestrator.domain.dag.definition import Registered
from orchestrator.domain.dag.placement import Origin, Placement
from orchestrator.domain.flow.commands import Call
from orchestrator.domain.flow.definition import Flow, step_of
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.tasks.retry import RetryPolicy
from orchestrator.domain.tasks.task import NewTask, TaskOptions
from orchestrator.store.flow.runs import FlowRun

_DEFAULT_QUEUE = "default"


class CannotCall(Exception):
    """A node's task cannot be created; the text says why."""


def new_task(run: FlowRun, flow: Flow, call: Call, max_payload: int) -> NewTask:
    """Return the task that a node, or a branch of it, is."""
    executor = call.exec
    name = executor.func if executor.exec_type == "local_func" else ""
    name = name or executor.service or executor.func
    if not name:
        raise CannotCall(f"It names nothing to run: exec_type {executor.exec_type or 'http'!r} needs a service.")
    context = {"workflow": run.flow, "step": call.path, "index": call.position, "count": call.of}
    given = {"input": call.input, "params": call.params}
    if executor.exec_type == "local_func":  # a function may also name what it wants of them
        given = {**call.params, **(call.input if isinstance(call.input, dict) else {}), **given}
    try:
        payload = zoned.encode(((), given, context))
    except REFUSALS as error:
        raise CannotCall(f"Its input cannot be sent: {error}.") from error
    if len(payload) > max_payload:
        raise CannotCall(
            f"Its input has {len(payload):,} bytes, and at most {max_payload:,} are allowed. Pass a reference to the "
            f"data instead, or raise the setting max_payload."
        )
    node, registered = call.node, flow.functions.get(name) or Registered()
    queue, priority = node.queue or registered.queue or _DEFAULT_QUEUE, node.priority or registered.priority
    placement = Placement(name, queue, priority, _options(call, registered), registered)
    return placement.new(call.id, payload, registered.key, Origin(run.id, call.position, step_of(call.path)))


def _options(call: Call, registered: Registered) -> TaskOptions:
    """Return the options of a task: what its node says goes before what the task says of itself."""
    node, options = call.node, msgspec.convert(registered.options, TaskOptions)
    if node.max_retries:
        retry = RetryPolicy(max=node.max_retries, backoff="listed", intervals=(node.wait_ms / 1000,), jitter=0.0)
        options = msgspec.structs.replace(options, retry=retry)
    if node.timeout_ms:
        options = msgspec.structs.replace(options, timeout=node.timeout_ms / 1000)
    return options
