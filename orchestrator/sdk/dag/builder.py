"""Build workflow definitions in Python. They equal definitions written in a file.

flow = Workflow("nightly", params={"day": date}, defaults={"retries": 2}) discover = flow.task("discover", etl.discover,
input={"day": flow.params.day}) flow.task("process", "etl.process", depends_on=[discover], foreach=discover.files,
concurrency=4)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import date, datetime, timedelta
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from orchestrator.domain.dag.definition import Definition, Param, ParamType, Trigger
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.sorting import sorted_sets

Duration = float | str | timedelta
"""Seconds, a string such as `1h30m`, or a timedelta."""


class Reference:
    """A value that is known only during a run. Its fields and items are references, too."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Reference:
        if name.startswith("__"):
            raise AttributeError(name)
        return Reference(f"{self._path}.{name}")

    def __getitem__(self, key: int | str) -> Reference:
        return Reference(f"{self._path}[{msgspec.json.encode(key).decode()}]")

    def __iter__(self) -> Any:
        raise TypeError(f"{self} is not known yet, and cannot be iterated over. Use foreach=.")

    def __bool__(self) -> bool:
        raise TypeError(f"{self} is not known yet, and is neither true nor false. Use when=.")

    def __str__(self) -> str:
        return f"${{{self._path}}}"

    def __repr__(self) -> str:
        return f"<Reference {self}>"


class Output(Reference):
    """The output of a step. In `depends_on` it stands for the step."""

    def __init__(self, step: str) -> None:
        super().__init__(f"`{step}`" if "." in step else step)
        self._step = step


class Defaults(TypedDict, total=False):
    """Default options of all steps."""

    retries: int
    timeout: Duration
    queue: str
    priority: int
    trigger: Trigger


class StepOptions(Defaults, total=False):
    """Options of a step."""

    depends_on: Iterable[Output | str] | Output | str
    input: Mapping[str, Any]
    foreach: Reference | str | list[Any]
    parallel: Reference | str | int
    concurrency: int
    concurrency_key: Reference | str
    on_failure: Literal["run", "skip"]
    when: Reference | str | bool


class ExecutorStepOptions(StepOptions, total=False):
    """Options of a step that an executor runs."""

    executor_options: Mapping[str, Any]


class WorkflowOptions(TypedDict, total=False):
    """Options of a workflow."""

    version: int
    description: str
    schedule: Mapping[str, Any]
    timeout: Duration
    concurrency: int | Mapping[str, Any]
    tags: Iterable[str]
    on: Mapping[str, Any] | Iterable[Mapping[str, Any]]
    on_failure: Mapping[str, Any] | Iterable[Mapping[str, Any]]
    on_success: Mapping[str, Any] | Iterable[Mapping[str, Any]]
    queue: str


_PARAM_TYPES: dict[Any, ParamType] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    date: "date",
    datetime: "datetime",
    list: "list",
    dict: "object",
    Any: "any",
}


class Workflow:
    """Builds the definition of a workflow."""

    def __init__(
        self,
        name: str,
        *,
        params: Mapping[str, type | Param | Mapping[str, Any]] | None = None,
        defaults: Defaults | None = None,
        **options: Unpack[WorkflowOptions],
    ) -> None:
        self.name = name
        """The name of the workflow."""
        self.params = Reference("params")
        """The parameters of a run: `flow.params.day`."""
        self.run = Reference("run")
        """Properties of the run: `flow.run.id`, `flow.run.fire_time`."""
        self.item = Reference("item")
        """In a foreach step: the item of this task."""
        self.index = Reference("index")
        """In a fan-out: the index of this task, from 0."""
        self.count = Reference("count")
        """In a fan-out: the number of tasks."""
        self._data: dict[str, Any] = {"name": name, **options}
        if params:
            self._data["params"] = {key: _param(name, key, param) for key, param in params.items()}
        if defaults:
            self._data["defaults"] = dict(defaults)
        self._steps: dict[str, dict[str, Any]] = {}

    def task(
        self, name: str, task: Task[..., Any] | Callable[..., Any] | str, **options: Unpack[StepOptions]
    ) -> Output:
        """Add a step that runs a task, given as a registered task, its name, or a function of a module."""
        return self._add(name, {"task": _task_name(task), **options})

    def workflow(self, name: str, workflow: Workflow | str, **options: Unpack[StepOptions]) -> Output:
        """Add a step that starts another workflow and waits for it. `input` has the child's parameters."""
        child = workflow.name if isinstance(workflow, Workflow) else workflow
        return self._add(name, {"workflow": child, **options})

    def executor(self, name: str, executor: ExecutorOptions | str, **options: Unpack[ExecutorStepOptions]) -> Output:
        """Add a step that runs outside Python: `flow.executor("thumbs", Process(command=["convert"]), input=…)`."""
        if isinstance(executor, ExecutorOptions):
            return self._add(name, {"executor": executor.executor, "with": msgspec.to_builtins(executor), **options})
        values = options.pop("executor_options", {})
        return self._add(name, {"executor": executor, **({"with": dict(values)} if values else {}), **options})

    def definition(self) -> Definition:
        """Return the definition, or raise InvalidWorkflow with all its problems."""
        from orchestrator.sdk.dag.definitions import from_data  # loads YAML and cron, which workers do without

        return from_data(self._plain(), f"workflow {self.name!r}")

    def _plain(self) -> Any:
        try:
            return msgspec.to_builtins(
                sorted_sets({**self._data, "tasks": self._steps}), builtin_types=(timedelta,), enc_hook=_text_of
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidWorkflow(f"workflow {self.name!r}: only plain data can be kept: {error}.") from None

    def _add(self, name: str, step: dict[str, Any]) -> Output:
        if name in self._steps:
            raise InvalidWorkflow(f"workflow {self.name!r}: two tasks are called {name!r}.")
        if "depends_on" in step:
            step["depends_on"] = _step_names(step["depends_on"])
        self._steps[name] = step
        return Output(name)


def _step_names(steps: Iterable[Output | str] | Output | str) -> list[str]:
    listed = [steps] if isinstance(steps, (Output, str)) else steps
    return [step._step if isinstance(step, Output) else step for step in listed]


def _task_name(task: Task[..., Any] | Callable[..., Any] | str) -> str:
    if isinstance(task, str):
        return task
    if isinstance(task, Task):
        if task._is_variant:
            raise InvalidWorkflow(
                f"A step runs task {task.name!r} as it is registered. Pass the options to the step, or to the "
                "decorator."
            )
        return task.name
    if inspect.isfunction(task) and "<" not in task.__qualname__:
        return f"{task.__module__}:{task.__qualname__}"
    raise InvalidWorkflow(f"A step runs a task, its name, or a function at the top of a module; found {task!r}.")


def _param(workflow: str, name: str, param: Any) -> dict[str, Any]:
    if isinstance(param, Param):
        plain: dict[str, Any] = msgspec.to_builtins(param)
        return plain
    if isinstance(param, Mapping):
        return dict(param)
    if isinstance(param, Hashable) and param in _PARAM_TYPES:
        return {"type": _PARAM_TYPES[param]}
    known = ", ".join(getattr(kind, "__name__", str(kind)) for kind in _PARAM_TYPES)
    raise InvalidWorkflow(
        f"workflow {workflow!r}: params.{name}: expected one of the types {known}, or a mapping as in "
        f'a file, such as {{"type": "date", "default": "today"}}; found {param!r}.'
    )


def _text_of(value: Any) -> Any:
    if isinstance(value, Reference):
        return str(value)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not plain data")
