"""How a worker runs a job: RQ's current job, dependencies, callbacks and repetitions around its function.

All of it happens in the attempt, as in RQ: a callback that raises fails the job.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any
from uuid import UUID

import msgspec

from orchestrator.compat.rq.application import RQApplication, app
from orchestrator.compat.rq.call import Retry, function_name, new_task, new_task_id, read_info, waits_of
from orchestrator.compat.rq.exceptions import InvalidJobDependency
from orchestrator.compat.rq.job import Job, _current
from orchestrator.compat.rq.values import tagged, untagged
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.errors import ConfigurationError, GiveUp, InvalidTask, RetryLater, TaskAborted, TaskTimeout
from orchestrator.sdk.middleware import AttemptEnd, Middleware
from orchestrator.sdk.names import type_name
from orchestrator.sdk.tasks.context import TaskContext, current_runtime, current_task
from orchestrator.sdk.tasks.signature import Signature

Find = Callable[[str], Any]
_LONGEST_WAIT = 15.0
"""Seconds between two looks at the jobs that one depends on."""


def perform(function: Callable[..., Any], find: Find) -> Callable[..., Any]:
    """Return a function that runs a job; `find` finds callbacks, which the worker must allow as well."""
    name = function_name(function)
    signature = Signature(name, function)

    def call(*args: Any, **kwargs: Any) -> Any:
        context = current_task() or TaskContext(task_name=name)
        job = Job(context.task_id, name, context.queue, read_info(context.headers), untagged((args, kwargs)))
        _await_dependencies(job, context)
        return run_job(job, context, function, signature, find)

    return call


def run_job(job: Job, context: TaskContext, function: Callable[..., Any], signature: Signature, find: Find) -> Any:
    """Run a job in an attempt, with its callbacks; return its result as data."""
    job._context, info, token = context, job._info, _current.set(job)
    if info.stopped or info.failure:
        _running[job._task] = job, find
        if not any(isinstance(one, _Ends) for one in app.middleware):
            app.middleware.add(_Ends())
    try:
        keywords = signature.pick(job.kwargs) if context.workflow_name else dict(job.kwargs)
        arguments, keywords = signature.restore(list(job.args), keywords)
        if signature.wants_context:
            signature.add_context(context, arguments, keywords)
        value = function(*arguments, **keywords)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if isinstance(value, Retry):
            raise _later(value, context)
        data = None if info.result_ttl == 0 else tagged(value)
        if info.success is not None:
            _callback(find, info.success)(job, None, value)
        if info.repeats:
            _repeat(job)
        return data
    except RetryLater:
        raise
    except TaskAborted:
        if info.stopped and _running.pop(job._task, None):
            _callback(find, info.stopped)(job, None)
        raise
    except Exception:
        if info.failure and _running.pop(job._task, None):
            _callback(find, info.failure)(job, None, *sys.exc_info())
        raise
    finally:
        _current.reset(token)
        _running.pop(job._task, None)


_running: dict[UUID, tuple[Job, Find]] = {}
"""Jobs that run here and have callbacks for their end, which have not been called."""


class _Ends(Middleware):
    """Calls what a job cannot whose code blocks: its process is replaced after a cancel or timeout."""

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        job, find = _running.pop(ctx.task_id, (None, None))
        if job is None or find is None:
            return
        if end.outcome == "cancelled" and job._info.stopped:
            _callback(find, job._info.stopped)(job, None)
        elif end.error is not None and end.error.kind == type_name(TaskTimeout) and job._info.failure:
            _callback(find, job._info.failure)(job, None, TaskTimeout, TaskTimeout(end.error.message), None)


def _callback(find: Find, name: str) -> Callable[..., Any]:
    found = find(name)
    if found is None:
        raise InvalidTask(f"Callback {name} is not among the functions that this worker allows (--allow).")
    called: Callable[..., Any] = found
    return called


def _await_dependencies(job: Job, context: TaskContext) -> None:
    """Hand the job back while others that it depends on are open; fail it if one of them has not succeeded."""
    if not job.dependency_ids:
        return
    try:
        states = job._dependency_states()
    except ConfigurationError as error:
        raise GiveUp(
            f"Job {job.id} depends on others, and its worker cannot look at them: {error} Give workers "
            f"ORCHESTRATOR_DATABASE_URL or ORCHESTRATOR_API_URL."
        ) from error
    if any(state not in ENDED_TASK_STATES for state in states):
        raise RetryLater(min(_LONGEST_WAIT, 0.2 * 1.3 ** min(context.attempt, 30)))
    if not job.allow_dependency_failures and any(state != "success" for state in states):
        missing = [one for one, state in zip(job.dependency_ids, states, strict=True) if state != "success"]
        raise InvalidJobDependency(f"Job {job.id} depends on {', '.join(missing)}, which did not succeed.")


def _later(policy: Retry, context: TaskContext) -> Exception:
    """Return what makes a job run again that returned a Retry, as often as that says."""
    waits = waits_of(policy)
    if context.attempt > len(waits):
        return GiveUp(f"The job returned a Retry in attempt {context.attempt}, and may have {len(waits)} retries.")
    return RetryLater(waits[context.attempt - 1])


def _repeat(job: Job) -> None:
    """Let the job run again: as a new job, which exists if this one succeeds."""
    runtime = current_runtime()
    if runtime is None:
        return  # it was run where it was enqueued
    wait, *rest = job._info.repeats
    info = msgspec.structs.replace(job._info, id=None, repeats=tuple(rest), after=())
    again = new_task(app, new_task_id(info), job._name, job.origin, job.args, job.kwargs, info, delay=wait)
    runtime.enqueue_on_success([again])


RQApplication.perform = staticmethod(perform)
