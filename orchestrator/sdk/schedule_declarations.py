"""Schedules declared in the code of an application: `@app.schedule` above a task or a workflow as code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar

from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.plain import stored_json, unstorable
from orchestrator.domain.tasks.starts import CodeTarget
from orchestrator.errors import InvalidTask, InvalidWorkflow
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.code.workflow_class import workflow_of
from orchestrator.sdk.dag.registered import check_allowed_in_workflow, copy_task_options
from orchestrator.sdk.tasks.task import Task

if TYPE_CHECKING:
    from orchestrator.domain.dag.definition import Definition

S = TypeVar("S")
T = TypeVar("T", bound="Task[..., Any] | CodeWorkflow[..., Any] | type[Any]")

DEFAULT_NAME = "default"
"""The name of a schedule that is declared without a name."""
STEP = "task"
"""The name of the only step of the workflow that runs a scheduled task."""
_SAMPLE_RUN_ID, _SAMPLE_TIME = "00000000-0000-7000-8000-000000000000", "2000-01-01T00:00:00+00:00"
"""Example values of `${run.id}` and `${run.fire_time}`, to check parameters in advance."""
_EXPRESSION = re.compile(r"\$\{([^{}]+)\}")
"""A value that consists of one expression only."""


class Times(TypedDict, total=False):
    """The options of a schedule. Exactly one of `cron`, `every` and `at` is required."""

    cron: str
    every: float | str | timedelta
    at: str | datetime
    start: str | date
    """The schedule fires from `start` on and before `end`, each a moment or a day."""
    end: str | date
    timezone: str
    overlap: Literal["skip", "queue", "allow", "cancel_previous"]
    catch_up: str
    jitter: float | str | timedelta
    paused: bool


@dataclass(frozen=True, kw_only=True)
class _Declaration(Generic[S]):
    name: str
    target: S
    times: Times
    params: Mapping[str, Any]


class TaskDeclaration(_Declaration[Task[..., Any]]):
    """A schedule of a task."""

    @property
    def key(self) -> str:
        """The key of the schedule in the database."""
        return f"{self.name}/{DEFAULT_NAME}"

    def definition(self) -> Definition:
        """Return a workflow of one step that runs the task. Raise InvalidWorkflow if the schedule is invalid."""
        from orchestrator.sdk.dag import (
            definitions,  # loads YAML and cron, which a worker without schedules does not need
        )

        source = f"schedule of task {self.target.name!r}"
        further = partial(copy_task_options, tasks={self.target.name: self.target})
        # Evaluated at each fire, so that a run has the values among its parameters.
        computed = {name: value for name, value in self.params.items() if _is_expression(value)}

        def complete_with(parts: Mapping[str, Any]) -> Definition:
            about = {"name": self.name, "description": f"Task {self.target.name}, scheduled in the code."}
            schedule = plain_times(self.times) | ({"params": computed} if computed and "params" in parts else {})
            data = {**about, "queue": self.target.queue, "schedule": schedule, **parts}
            return definitions.completed(definitions.from_data(data, source), source, further)

        try:
            return complete_with(_parameters(self.target, self.params))
        except InvalidWorkflow:  # a key that a function computes needs constants
            return complete_with({"tasks": {STEP: {"task": self.target.name, "input": dict(self.params)}}})


class CodeDeclaration(_Declaration[CodeWorkflow[..., Any]]):
    """A schedule of a workflow as code."""

    @property
    def key(self) -> str:
        """The key of the schedule in the database."""
        return f"{self.target.name}/{self.name}"

    @property
    def data(self) -> dict[str, Any]:
        """The schedule as plain data, with the fields of a YAML file."""
        return {"name": self.name, "params": dict(self.params), **plain_times(self.times)}

    @property
    def code(self) -> CodeTarget:
        """The version, queue and timeout of the runs that the schedule starts."""
        return code_target(self.target)

    def check(self) -> None:
        """Raise InvalidWorkflow if the schedule is invalid."""
        from orchestrator.sdk.dag.schedule_fields import schedule_of_code  # loads YAML and cron, too

        try:
            schedule_of_code(self.data)
            check_params(self.target, self.params)
        except InvalidWorkflow as error:
            raise InvalidWorkflow(f"schedule of workflow {self.target.name!r}: {error}") from None


def declaration(
    target: object, name: str | None, params: Mapping[str, Any], times: Times
) -> TaskDeclaration | CodeDeclaration:
    """Return the schedule that an `@app.schedule` declares. Raise on mistakes, so that the traceback shows its line."""
    target = workflow_of(target)
    if isinstance(target, CodeWorkflow):
        chosen = check_name("schedule", name or DEFAULT_NAME)
        of_code = CodeDeclaration(name=chosen, target=target, times=times, params=params)
        of_code.check()
        return of_code
    if isinstance(target, Task):
        chosen = check_name("schedule", name or target.name)
        check_allowed_in_workflow(target)
        target._signature.check((), params)
        of_task = TaskDeclaration(name=chosen, target=target, times=times, params=params)
        of_task.definition()
        return of_task
    raise InvalidTask(
        f"@app.schedule goes above @app.task or @app.workflow, on a task or a workflow; found {target!r:.100}."
    )


def _is_expression(value: Any) -> bool:
    return isinstance(value, str) and _EXPRESSION.fullmatch(value) is not None


def _parameters(task: Task[..., Any], provided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters and the step of the workflow that runs a scheduled task.

    The values in the declaration and the defaults of the function become defaults of the workflow's parameters, so
    that another schedule can override them. A value that mixes text and expressions stays as it is.
    """
    params: dict[str, Any] = {}
    inputs = {**task._signature.plain_defaults(), **provided}
    for name, value in inputs.items():
        is_constant = unstorable(value) is None and "${" not in stored_json(value)
        if _is_expression(value):
            params[name] = {"default": None}
            inputs[name] = f"${{default(params.{name}, {value[2:-1]})}}"
        elif is_constant:
            params[name] = {"default": value}
            inputs[name] = f"${{params.{name}}}"
    return {"params": params, "tasks": {STEP: {"task": task.name, "input": inputs}}}


def check_params(workflow: CodeWorkflow[..., Any], params: Mapping[str, Any]) -> None:
    """Refuse parameters with which the workflow's function could not be called when the schedule fires."""
    workflow._signature.check((), params)
    info = {"id": _SAMPLE_RUN_ID, "workflow": workflow.name, "version": workflow.version, "fire_time": _SAMPLE_TIME}
    workflow._signature.restore([], parse_template(dict(params)).render({"run": info}))


def code_target(workflow: CodeWorkflow[..., Any]) -> CodeTarget:
    """Return the version, queue and timeout with which a schedule starts runs of a workflow."""
    timeout = workflow._code_options.seconds or None
    pinned = workflow.versioning == "pinned"
    return CodeTarget(version=workflow.version, queue=workflow._queue, timeout=timeout, pinned=pinned)


def plain_times(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a schedule as plain data, as in a YAML file."""
    return {name: _plain(value) for name, value in times.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, date) else value
