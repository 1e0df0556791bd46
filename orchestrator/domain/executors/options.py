"""Options of executors, and how an executor is declared.

Each executor has a class of options, checked where a task is declared or a workflow is applied.
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
"""The variable that holds the folder for a container's output."""
_LATER = 10.0
"""Seconds; the worker that watches goes first, and says why."""
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_VARIABLE = 200

Problems = list[tuple[str, str]]
"""Options, and what is wrong with each."""


class ExecutorOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options of a task for its executor. They are constants: values that differ from task to task are input."""

    executor: ClassVar[str]
    """The name under which files and tasks ask for it."""
    is_local: ClassVar[bool] = False
    """The work is done on the machine of the worker that starts it, and only a worker there can watch it."""

    @property
    def wants(self) -> str:
        """The requirement of a worker: the executor itself, and perhaps something that only some workers have."""
        return self.executor

    @staticmethod
    def backstop(limit: float | None) -> float | None:
        """Return after how many seconds the other side may end the work by itself, if no worker has by then."""
        return None if limit is None else limit + _LATER

    def problems(self) -> Problems:
        """Return what types cannot say: the option, and what is wrong with it."""
        return []


@dataclass(frozen=True, kw_only=True)
class ExecutorPlugin:
    """An executor as an entry point declares it, where clients and the scheduler need not load what does the work."""

    options: type[ExecutorOptions]
    driver: str | type[Any]
    """The class that does the work, or where workers find it: `package.module:Class`."""
    needs: tuple[str, ...] = ()
    """Packages without which a worker does not have this executor."""
    equipment: Callable[[Mapping[str, str]], list[str]] | None = None
    """Returns, for the environment of a worker, what that worker has (the `wants` of options); if it is not given, the
    executor itself. What a worker lacks it does not announce, and tasks wait for a worker that has it."""


def address_variables(executor: str, *schemes: str, or_given: bool = False) -> Callable[[Mapping[str, str]], list[str]]:
    """Return an `equipment` that announces each variable whose value is an address: `rq RQ_REDIS_URL`.

    A task names the variable, because addresses may hold secrets, and options are shown to people. With `or_given`, a
    task may give the address instead, and needs nothing but the executor.
    """

    prefixes = tuple(f"{scheme}://" for scheme in schemes)

    def found(environ: Mapping[str, str]) -> list[str]:
        given = (one for one, value in environ.items() if value.startswith(prefixes) and len(one) <= _LONGEST_VARIABLE)
        return [*([executor] if or_given else []), *(f"{executor} {variable}" for variable in sorted(given))]

    return found


def function_problems(function: str) -> Problems:
    """Return what is wrong with the name of a function, given as the option `function`."""
    is_right = _FUNCTION.fullmatch(function)
    return [] if is_right else [("function", f"expected package.module:function, found {function!r}.")]


def variable_problems(option: str, variable: str) -> Problems:
    """Return what is wrong with an option that names a variable of the environment."""
    return [] if is_variable(variable) else [(option, f"expected the name of a variable, found {variable!r}.")]


def resource_problems(resources: Mapping[str, float]) -> Problems:
    """Return what is wrong with amounts of resources, given as the option `resources`."""
    return [
        ("resources", f"{name}: expected more than zero, found {amount:g}.")
        for name, amount in resources.items()
        if not amount > 0
    ]


def is_variable(name: str) -> bool:
    """Say whether this can be the name of a variable of the environment."""
    return _VARIABLE.fullmatch(name) is not None


# -- one piece of work outside the worker's own Python, and how it ends.
#
# An execution has a name that is chosen, and stored with the attempt, before anything is started under it. If its
# watcher dies or is stopped, the next one finds it by that name and does not start it again. It belongs to one try of
# the task: after a failure that counts, the next try has another name.


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution, as its executor gets it."""

    name: str
    """Unique for each try of a task, the same for all its watchers: letters, digits and `-`, at most 63, so that it can
    be the name of a job elsewhere."""
    task: str
    """The name of the task."""
    task_id: str
    attempt: int
    """The first attempt that this execution was started by; later ones watch it."""
    queue: str
    options: ExecutorOptions
    arguments: tuple[Any, ...] = ()
    input: Mapping[str, Any] = field(default_factory=dict)
    """Plain data: the keywords of a call, or the merged input of a step."""
    timeout: float | None = None
    """Seconds that it may run in all; then the worker cancels it."""
    run_id: str | None = None
    workflow: str | None = None
    step: str | None = None
    index: int | None = None
    count: int | None = None

    @property
    def specification(self) -> bytes:
        """The specification for a program that does the work, as one JSON document."""
        said = {
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
        known = {name: value for name, value in said.items() if value not in (None, ())}
        return strict_json(known, f"The input of task {self.task!r}")


@dataclass(frozen=True)
class Finished:
    """It has done its work."""

    output: Any = None
    """Plain data."""


@dataclass(frozen=True)
class Broken:
    """It has failed. Where the executor itself cannot be reached there is no outcome yet: it goes on trying."""

    kind: str
    """As the name of an exception: `ExitCode`, `ServiceError`, `JobFailed`."""
    message: str
    retryable: bool = True
    """Another try may succeed; whether there is one, the task's own policy says."""
    detail: str = ""
    """Details for people: the end of stderr, a remote traceback."""
    delay: float | None = None
    """Seconds before the next try; None: the task's own policy says."""


Outcome = Finished | Broken


def strict_json(value: Any, what: str) -> bytes:
    """Return plain data as JSON, or say which number of it JSON does not have: NaN or infinity would arrive as null."""
    data = msgspec.json.encode(value)
    if b"null" in data:  # which stands for None as well
        found = _no_number(value)
        if found is not None:
            place, number = found
            at = f" at `{place}`" if place else ""
            raise PayloadError(
                f"{what} goes out as JSON, which has no NaN and no infinity; found {number!r}{at}. Give null or a text."
            )
    return data


def _no_number(value: Any) -> tuple[str, float] | None:
    """Return a number that JSON does not have, with its place, if there is one."""
    left = [("", value)]
    while left:
        place, item = left.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return place, item
        elif isinstance(item, dict):
            left += [(f"{place}.{key}" if place else str(key), inner) for key, inner in item.items()]
        elif isinstance(item, (list, tuple)):
            left += [(f"{place}[{number}]", inner) for number, inner in enumerate(item)]
    return None
