"""The executor `ray`: what a task says that a Ray cluster runs as a job."""

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
"""Variables of a job that are ours."""


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

    def problems(self) -> Problems:
        found = function_problems(self.function) + variable_problems("address_variable", self.address_variable)
        variables = self.runtime_env.get("env_vars", {})
        if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
            found.append(("runtime_env", "expected env_vars to give texts by name."))
        elif own := {SPECIFICATION, EXECUTION, PROGRAM} & variables.keys():
            found.append(("runtime_env", f"the variable {min(own)} is ours."))
        for option, amount in (("cpus", self.cpus), ("gpus", self.gpus), ("memory", self.memory)):
            if not amount >= 0:
                found.append((option, f"expected zero or more, found {amount:g}."))
        return found + resource_problems(self.resources)


PLUGIN = ExecutorPlugin(
    options=Ray,
    driver="orchestrator.plugins.executors.ray.driver:RayExecutor",
    equipment=address_variables("ray", "http", "https"),
)
