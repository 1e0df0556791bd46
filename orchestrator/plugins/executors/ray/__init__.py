"""The executor `ray`: options of a task that runs as a job of a Ray cluster."""

from __future__ import annotations

from typing import Any, ClassVar

from orchestrator.domain.executors.options import (
    ExecutorOptions,
    ExecutorPlugin,
    Problems,
    address_variables,
    function_problems,
    resource_problems,
    variable_problems,
)

SPECIFICATION, EXECUTION, PROGRAM = "TASK_SPEC", "TASK_EXECUTION", "TASK_PROGRAM"
"""Environment variables that are reserved for us."""


class Ray(ExecutorOptions, frozen=True, kw_only=True):
    """A function that a Ray cluster runs as a job. The job's id is the name of the execution."""

    executor: ClassVar[str] = "ray"

    function: str
    """The function, called with the task's arguments: `package.module:function`, importable by the job."""
    address_variable: str = "RAY_API_SERVER_ADDRESS"
    """The environment variable of our workers that has the address of the cluster's Jobs API, e.g. http://head:8265."""
    runtime_env: dict[str, Any] = {}
    """The job's runtime environment for Ray: `pip`, `working_dir` (a URL, not a folder), `env_vars`. Nothing secret:
    options are stored, and shown to people."""
    cpus: float = 0.0
    """Processors reserved for the function itself. Work that it starts on the cluster reserves its own."""
    gpus: float = 0.0
    memory: int = 0
    """Bytes of memory that a node must have."""
    resources: dict[str, float] = {}
    """Other resources that a node must have, by Ray's accounting."""
    python: str = "python"
    """The Python program on the cluster."""

    @property
    def wants(self) -> str:
        """The variable: workers announce which variables they have."""
        return f"{self.executor} {self.address_variable}"

    def problems(self) -> Problems:
        found = function_problems(self.function) + variable_problems("address_variable", self.address_variable)
        variables = self.runtime_env.get("env_vars", {})
        if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
            found.append(("runtime_env", "expected env_vars to map names to strings."))
        elif own := {SPECIFICATION, EXECUTION, PROGRAM} & variables.keys():
            found.append(("runtime_env", f"the variable {min(own)} is reserved."))
        for option, amount in (("cpus", self.cpus), ("gpus", self.gpus), ("memory", self.memory)):
            if not amount >= 0:
                found.append((option, f"expected zero or more, found {amount:g}."))
        return found + resource_problems(self.resources)


PLUGIN = ExecutorPlugin(
    options=Ray,
    driver="orchestrator.plugins.executors.ray.driver:RayExecutor",
    equipment=address_variables("ray", "http", "https"),
)
