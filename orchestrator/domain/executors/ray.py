"""What a task says that a Ray cluster runs as a job, and what the job's end means."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from orchestrator.domain.executors.execution import Broken, Execution, Outcome
from orchestrator.domain.executors.options import ExecutorOptions

LARGEST_INPUT = 100_000
"""Bytes; Linux takes no variable of more than 128 KiB, and Ray passes it on inside of another one."""
END = "orchestrator-end"
"""Begins the line of a job's log that says how the function ended."""
_SPECIFICATION, _EXECUTION, _PROGRAM = "TASK_SPEC", "TASK_EXECUTION", "TASK_PROGRAM"
_START = f'import os; exec(os.environ["{_PROGRAM}"])'
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OVER = ("SUCCEEDED", "FAILED", "STOPPED")


class Ray(ExecutorOptions, frozen=True, kw_only=True):
    """A function that a Ray cluster runs as a job; its id there is the name of the execution."""

    executor: ClassVar[str] = "ray"

    function: str
    """What is called, with the task's arguments: `package.module:function`, which the job can import."""
    address_variable: str = "RAY_API_SERVER_ADDRESS"
    """The variable in the environment of our workers that holds the address of the cluster's Jobs API, e.g.
    http://head:8265."""
    runtime_env: dict[str, Any] = {}
    """The job's environment as Ray understands it: `pip`, `working_dir` (an address, no folder), `env_vars`. Nothing
    secret, because options are stored and shown to people."""
    cpus: float = 0.0
    """Processors that the function itself takes; what it starts on the cluster has its own."""
    gpus: float = 0.0
    memory: int = 0
    """Bytes that a node must have for it."""
    resources: dict[str, float] = {}
    """What else a node must have, as Ray counts it."""
    python: str = "python"
    """The program that runs it there."""

    @property
    def wants(self) -> str:
        """The variable: workers say which of them they were given."""
        return f"{self.executor} {self.address_variable}"

    def problems(self) -> list[tuple[str, str]]:
        """Return what types cannot say."""
        found = []
        if not _FUNCTION.fullmatch(self.function):
            found.append(("function", f"expected package.module:function, found {self.function!r}."))
        if not _VARIABLE.fullmatch(self.address_variable):
            found.append(("address_variable", f"expected the name of a variable, found {self.address_variable!r}."))
        variables = self.runtime_env.get("env_vars", {})
        if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
            found.append(("runtime_env", "expected env_vars to give texts by name."))
        elif own := {_SPECIFICATION, _EXECUTION, _PROGRAM} & variables.keys():
            found.append(("runtime_env", f"the variable {min(own)} is ours."))
        for option, amount in (("cpus", self.cpus), ("gpus", self.gpus), ("memory", self.memory)):
            if not amount >= 0:
                found.append((option, f"expected zero or more, found {amount:g}."))
        for name, amount in self.resources.items():
            if not amount > 0:
                found.append(("resources", f"{name}: expected more than zero, found {amount:g}."))
        return found


def submission(execution: Execution, options: Ray, program: str) -> dict[str, Any]:
    """Return what Ray is asked to run; the program, which has nothing of ours, calls the function."""
    own = {
        _SPECIFICATION: execution.specification.decode(),
        _EXECUTION: execution.name,
        _PROGRAM: program,
    }
    said: dict[str, Any] = {
        "submission_id": execution.name,
        "entrypoint": shlex.join([options.python, "-c", _START, options.function]),
        "runtime_env": {**options.runtime_env, "env_vars": {**options.runtime_env.get("env_vars", {}), **own}},
        "metadata": {"task": execution.task, "task_id": execution.task_id, "attempt": str(execution.attempt)},
    }
    reserved = {
        "entrypoint_num_cpus": options.cpus,
        "entrypoint_num_gpus": options.gpus,
        "entrypoint_memory": options.memory,
        "entrypoint_resources": options.resources,
    }
    return said | {name: amount for name, amount in reserved.items() if amount}


def input_size(execution: Execution) -> int:
    """Return how much of a variable the input takes, as Ray passes it on."""
    return len(json.dumps(execution.specification.decode()))


def is_over(found: Mapping[str, Any]) -> bool:
    """Say whether a job has ended."""
    return found.get("status") in _OVER


def split_log(text: str, name: str) -> tuple[list[str], dict[str, Any] | None]:
    """Return the lines of a job's log, and what its last word says, if it came to that."""
    lines = text.splitlines()
    mark = f"{END} {name} "
    last = next((place for place in reversed(range(len(lines))) if lines[place].startswith(mark)), None)
    if last is None:
        return lines, None
    try:
        end = msgspec.json.decode(lines[last][len(mark) :], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return lines, None
    return lines[:last], end


def failure(found: Mapping[str, Any]) -> Outcome:
    """Return how a job failed whose function did not come to say anything."""
    said = str(found.get("message") or "and Ray does not say why")
    first, _, rest = said.partition("\n")
    kind = "".join(word.capitalize() for word in str(found.get("error_type") or "job_failed").split("_"))
    return Broken(kind, f"The job failed at Ray: {first}", detail=rest)
