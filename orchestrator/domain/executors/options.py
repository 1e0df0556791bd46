"""Base class for the options of executors, and the declaration of an executor.

Options are checked when a task is declared or a workflow is applied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from orchestrator.errors import PayloadError

OUTPUT_VARIABLE = "TASK_OUTPUT_PATH"
"""The environment variable with the output folder of a container."""
_BACKSTOP_DELAY = 10.0
"""Seconds after the timeout: the worker should stop the work first and report why."""
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_VARIABLE = 200

Problems = list[tuple[str, str]]
"""Pairs of an option and the problem with it."""


class ExecutorOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options of a task for its executor. They are constants: values that differ between tasks belong to the input."""

    executor: ClassVar[str]
    """The executor's name in files and task declarations."""
    is_local: ClassVar[bool] = False
    """The work runs on the machine of the worker that starts it, and only a worker there can watch it."""

    @property
    def wants(self) -> str:
        """The requirement for a worker: the executor, perhaps with something that only some workers have."""
        return self.executor

    @staticmethod
    def backstop(limit: float | None) -> float | None:
        """Return the seconds after which the external service may stop the work if no worker has done so."""
        return None if limit is None else limit + _BACKSTOP_DELAY

    def problems(self) -> Problems:
        """Return problems that types cannot express: the option, and what is wrong with it."""
        return []


@dataclass(frozen=True, kw_only=True)
class ExecutorPlugin:
    """The declaration of an executor by an entry point. Clients and the scheduler need not load the driver."""

    options: type[ExecutorOptions]
    driver: str | type[Any]
    """The class that does the work, or its path `package.module:Class`, which only workers import."""
    needs: tuple[str, ...] = ()
    """Packages that a worker must have installed to offer this executor."""
    equipment: Callable[[Mapping[str, str]], list[str]] | None = None
    """Returns what a worker with this environment can offer: the `wants` that it announces. Default: the executor
    itself. Tasks wait for a worker that announces what they need."""


def address_variables(executor: str, *schemes: str, or_given: bool = False) -> Callable[[Mapping[str, str]], list[str]]:
    """Return an `equipment` function that announces each environment variable with an address: `rq RQ_REDIS_URL`.

    A task names the variable instead of the address, because addresses may hold secrets and options are displayed. With
    `or_given`, a task may contain the address itself, and then needs only the executor.
    """

    prefixes = tuple(f"{scheme}://" for scheme in schemes)

    def equipment(environ: Mapping[str, str]) -> list[str]:
        names = (name for name, value in environ.items() if value.startswith(prefixes) and len(name) <= _MAX_VARIABLE)
        return [*([executor] if or_given else []), *(f"{executor} {variable}" for variable in sorted(names))]

    return equipment


def function_problems(function: str) -> Problems:
    """Return what is wrong with the option `function`."""
    is_right = _FUNCTION.fullmatch(function)
    return [] if is_right else [("function", f"expected package.module:function, found {function!r}.")]


def variable_problems(option: str, variable: str) -> Problems:
    """Return what is wrong with an option that names an environment variable."""
    return [] if is_variable(variable) else [(option, f"expected the name of a variable, found {variable!r}.")]


def resource_problems(resources: Mapping[str, float]) -> Problems:
    """Return what is wrong with the option `resources`."""
    return [
        ("resources", f"{name}: expected more than zero, found {amount:g}.")
        for name, amount in resources.items()
        if not amount > 0
    ]


def is_variable(name: str) -> bool:
    """Return whether a text is a valid name of an environment variable."""
    return _VARIABLE.fullmatch(name) is not None


# -- executions: work outside the worker's own Python, and its outcome.
#
# The name of an execution is chosen and stored with the attempt before the execution starts. If the worker that watches
# it dies or is stopped, the next one finds it by that name and does not start it again. After a failure that counts,
# the next try is a new execution with another name.


@dataclass(frozen=True, kw_only=True)
class Execution:
    """An execution, as given to its executor."""

    name: str
    """Unique for each try of a task, and the same for all workers that watch it. Letters, digits and `-`, at most 63,
    so that it is a valid job name in other systems."""
    task: str
    task_id: str
    attempt: int
    """The attempt that started this execution. Later attempts only watch it."""
    queue: str
    options: ExecutorOptions
    arguments: tuple[Any, ...] = ()
    input: Mapping[str, Any] = field(default_factory=dict)
    """Plain data: the keyword arguments of a call, or the merged input of a step."""
    timeout: float | None = None
    """Seconds that it may run in total before the worker cancels it."""
    run_id: str | None = None
    workflow: str | None = None
    step: str | None = None
    index: int | None = None
    count: int | None = None

    @property
    def specification(self) -> bytes:
        """The task and its input for the program that does the work, as one JSON document."""
        fields = {
            "task": self.task,
            "task_id": self.task_id,
            "attempt": self.attempt,
            "run_id": self.run_id,
            "workflow": self.workflow,
            "step": self.step,
            "parallel_index": self.index,
            "parallel_count": self.count,
            "arguments": self.arguments,
            "input": self.input,
        }
        present = {name: value for name, value in fields.items() if value not in (None, ())}
        return strict_json(present, f"The input of task {self.task!r}")


@dataclass(frozen=True)
class Finished:
    """The execution succeeded."""

    output: Any = None
    """The result, as plain data."""


@dataclass(frozen=True)
class Broken:
    """The execution failed. An executor that cannot be reached is not a failure: the worker keeps trying."""

    kind: str
    """The kind of error, like the name of an exception: `ExitCode`, `ServiceError`, `JobFailed`."""
    message: str
    retryable: bool = True
    """Another try may succeed. The task's retry policy decides whether there is one."""
    detail: str = ""
    """Details for display: the end of stderr, a remote traceback."""
    delay: float | None = None
    """Seconds before the next try. None: the task's retry policy decides."""


Outcome = Finished | Broken


def strict_json(value: Any, what: str) -> bytes:
    """Return plain data as JSON, or raise PayloadError if it holds NaN or infinity, which would arrive as null."""
    data = msgspec.json.encode(value)
    if b"null" in data:  # msgspec writes NaN and infinity as null, like None
        non_finite = _find_non_finite(value)
        if non_finite is not None:
            path, number = non_finite
            at = f" at `{path}`" if path else ""
            raise PayloadError(
                f"{what} is sent as JSON, which has no NaN and no infinity; found {number!r}{at}. Pass null or a "
                f"string."
            )
    return data


def _find_non_finite(value: Any) -> tuple[str, float] | None:
    """Return the path and the value of a NaN or infinity in the data, or None."""
    pending = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return path, item
        elif isinstance(item, dict):
            pending += [(f"{path}.{key}" if path else str(key), inner) for key, inner in item.items()]
        elif isinstance(item, (list, tuple)):
            pending += [(f"{path}[{index}]", inner) for index, inner in enumerate(item)]
    return None
