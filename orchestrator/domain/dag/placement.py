"""How tasks of steps and hooks run: by their own options, else those of the registered task, else the workflow's."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from orchestrator.domain.dag.definition import Hook, Registered, Step
from orchestrator.domain.executors.registry import call_from, task_name
from orchestrator.domain.limits.lane_limits import lane_name
from orchestrator.domain.tasks.retry import RetryPolicy
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, NewTask, TaskOptions

WEBHOOK_TASK = "orchestrator.webhook"
"""A built-in task that posts JSON to a URL."""
HOOK_OPTIONS = TaskOptions(retry=RetryPolicy(max=5), timeout=60.0)
"""Default options of a hook's task. They include retries, because nobody waits for the task or notices a failure."""


class Origin(NamedTuple):
    """The position of a task in its run."""

    run_id: bytes | None = None
    position: int | None = None
    step: str | None = None


class Placement:
    """The common properties of all tasks of one step or hook, computed once."""

    def __init__(self, task: str, queue: str, priority: int, options: TaskOptions, registered: Registered) -> None:
        self._task = task
        self._queue = queue
        self._priority = priority
        self._options = options
        self._encoded = None if options == DEFAULT_OPTIONS else msgspec.json.encode(options).decode()
        self._registered = registered

    def new(self, identifier: bytes, payload: bytes, key: str | None, origin: Origin) -> NewTask:
        """Return a new task. `key` is its concurrency key."""
        return NewTask(
            id=identifier,
            name=self._task,
            queue=self._queue,
            payload=payload,
            priority=self._priority,
            delay=self._registered.delay or 0.0,
            options=self._encoded,
            run_id=origin.run_id,
            position=origin.position,
            step=origin.step,
            lane=lane_name(self._task, key, self._options),
            expires=self._registered.expires,
            callbacks=self._registered.callbacks,
        )


def of_step(step: Step, queue: str) -> Placement:
    """Return the placement of a step's tasks. `queue` is the workflow's."""
    registered = step.registered or Registered()
    options = msgspec.convert(registered.options, TaskOptions)
    if step.retries is not None:
        options = msgspec.structs.replace(options, retry=RetryPolicy(max=step.retries))
    if step.timeout is not None:
        options = msgspec.structs.replace(options, timeout=step.timeout)
    name = step.task or ""
    if step.executor is not None:
        name = task_name(step.executor)
        options = msgspec.structs.replace(options, executor=call_from(step.executor, step.with_))
    priority = registered.priority if step.priority is None else step.priority
    return Placement(name, step.queue or registered.queue or queue, priority, options, registered)


def of_hook(hook: Hook, queue: str) -> Placement:
    """Return the placement of a hook's task. `queue` is the workflow's."""
    registered = hook.registered or Registered()
    options = msgspec.convert(hook.registered.options, TaskOptions) if hook.registered is not None else HOOK_OPTIONS
    name = WEBHOOK_TASK if hook.webhook is not None else str(hook.task)
    return Placement(name, registered.queue or queue, registered.priority, options, registered)
