"""Schedules as they stand in the code of an application: above a task, or above a workflow as code."""

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
from orchestrator.sdk.dag.registered import check_fit, take_over
from orchestrator.sdk.tasks.task import Task

if TYPE_CHECKING:
    from orchestrator.domain.dag.definition import Definition

S = TypeVar("S")
T = TypeVar("T", bound="Task[..., Any] | CodeWorkflow[..., Any] | type[Any]")

DEFAULT_NAME = "default"
"""The name of a schedule without a name."""
STEP = "task"
"""The one step of the workflow that a scheduled task becomes."""
_A_RUN, _A_FIRE = "00000000-0000-7000-8000-000000000000", "2000-01-01T00:00:00+00:00"
"""Values with which parameters are tried."""
_WHOLE = re.compile(r"\$\{([^{}]+)\}")
"""A value that is one expression."""


class Times(TypedDict, total=False):
    """When a schedule fires, and what happens then; exactly one of cron, every and at is given."""

    cron: str
    every: float | str | timedelta
    at: str | datetime
    start: str | date
    """Not before this moment, or this day; `end`: only before it. A datetime is a date, too."""
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
    """A task that is to run by itself."""

    @property
    def key(self) -> str:
        """Its key in the database."""
        return f"{self.name}/{DEFAULT_NAME}"

    def definition(self) -> Definition:
        """Return it as a workflow of one step, or say what is wrong with it."""
        from orchestrator.sdk.dag import (
            definitions,  # loads YAML and cron, which a worker without schedules does without
        )

        source = f"schedule of task {self.target.name!r}"
        further = partial(take_over, tasks={self.target.name: self.target})
        # By the fire, so that a run has them among its parameters.
        computed = {name: value for name, value in self.params.items() if _is_expression(value)}

        def complete_with(parts: Mapping[str, Any]) -> Definition:
            about = {"name": self.name, "description": f"Task {self.target.name}, scheduled in the code."}
            schedule = plain_times(self.times) | ({"params": computed} if computed and "params" in parts else {})
            data = {**about, "queue": self.target.queue, "schedule": schedule, **parts}
            return definitions.completed(definitions.from_data(data, source), source, further)

        try:
            return complete_with(_parameters(self.target, self.params))
        except InvalidWorkflow:  # a key that a function computes wants constants
            return complete_with({"tasks": {STEP: {"task": self.target.name, "input": dict(self.params)}}})


class CodeDeclaration(_Declaration[CodeWorkflow[..., Any]]):
    """A workflow as code that is to start by itself."""

    @property
    def key(self) -> str:
        """Its key in the database."""
        return f"{self.target.name}/{self.name}"

    @property
    def data(self) -> dict[str, Any]:
        """The schedule in the shape of a file."""
        return {"name": self.name, "params": dict(self.params), **plain_times(self.times)}

    @property
    def code(self) -> CodeTarget:
        """How it starts runs."""
        return code_target(self.target)

    def check(self) -> None:
        """Say what is wrong with it."""
        from orchestrator.sdk.dag.schedule_fields import schedule_of_code  # loads YAML and cron, too

        try:
            schedule_of_code(self.data)
            check_params(self.target, self.params)
        except InvalidWorkflow as error:
            raise InvalidWorkflow(f"schedule of workflow {self.target.name!r}: {error}") from None


def declaration(
    target: object, name: str | None, params: Mapping[str, Any], times: Times
) -> TaskDeclaration | CodeDeclaration:
    """Return what `@app.schedule` declares, or say what is wrong with it, here where it stands."""
    target = workflow_of(target)
    if isinstance(target, CodeWorkflow):
        chosen = check_name("schedule", name or DEFAULT_NAME)
        of_code = CodeDeclaration(name=chosen, target=target, times=times, params=params)
        of_code.check()
        return of_code
    if isinstance(target, Task):
        chosen = check_name("schedule", name or target.name)
        check_fit(target)
        target._signature.check((), params)
        of_task = TaskDeclaration(name=chosen, target=target, times=times, params=params)
        of_task.definition()
        return of_task
    raise InvalidTask(
        f"@app.schedule goes above @app.task or @app.workflow, on a task or a workflow; found {target!r:.100}."
    )


def _is_expression(value: Any) -> bool:
    return isinstance(value, str) and _WHOLE.fullmatch(value) is not None


def _parameters(task: Task[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters and the step of the workflow that a scheduled task is.

    What the declaration gives, and the defaults of the function, are defaults of parameters, so that another schedule
    of the workflow can give others. A value that is put together from several expressions stays as it is.
    """
    params: dict[str, Any] = {}
    filled = {**task._signature.plain_defaults(), **given}
    for name, value in filled.items():
        is_constant = unstorable(value) is None and "${" not in stored_json(value)
        if _is_expression(value):
            params[name] = {"default": None}
            filled[name] = f"${{default(params.{name}, {value[2:-1]})}}"
        elif is_constant:
            params[name] = {"default": value}
            filled[name] = f"${{params.{name}}}"
    return {"params": params, "tasks": {STEP: {"task": task.name, "input": filled}}}


def check_params(workflow: CodeWorkflow[..., Any], params: Mapping[str, Any]) -> None:
    """Refuse what a workflow's function could not be called with at a fire."""
    workflow._signature.check((), params)
    info = {"id": _A_RUN, "workflow": workflow.name, "version": workflow.version, "fire_time": _A_FIRE}
    workflow._signature.restore([], parse_template(dict(params)).render({"run": info}))


def code_target(workflow: CodeWorkflow[..., Any]) -> CodeTarget:
    """Return how a schedule starts runs of a workflow."""
    timeout = workflow._code_options.seconds or None
    pinned = workflow.versioning == "pinned"
    return CodeTarget(version=workflow.version, queue=workflow._queue, timeout=timeout, pinned=pinned)


def plain_times(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a schedule in the shape of a file."""
    return {name: _plain(value) for name, value in times.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, date) else value
