"""What a task says that runs as an execution of a Cloud Run job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from orchestrator.domain.executors.execution import Broken, Execution, Finished, Outcome
from orchestrator.domain.executors.options import OUTPUT_VARIABLE, ExecutorOptions

OWN_VARIABLE = "TASK_EXECUTION"
"""The variable that carries our name of an execution: Google gives its own."""
LARGEST_VARIABLE = 32_000
"""Bytes; Cloud Run takes no variable of more than 32 KiB."""
_PROJECT = re.compile(r"[a-z][-a-z0-9.:]{4,61}[a-z0-9]")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN = ("TASK_SPEC", "TASK_ID", "TASK_ATTEMPT", OWN_VARIABLE)


class CloudRun(ExecutorOptions, frozen=True, kw_only=True):
    """Runs a job that is deployed on Google Cloud Run. It has a result where it leaves one in the payload store."""

    executor: ClassVar[str] = "cloud_run"

    project: str
    location: str
    """The region, e.g. europe-west1."""
    job: str
    """The job, as it was deployed."""
    container: str = ""
    """The container that is told what to do, where the job has several."""
    args: list[str] = []
    """Its arguments, instead of those that it was deployed with."""
    env: dict[str, str] = {}
    """More variables of its environment; nothing secret, because options are stored and shown to people."""
    output: Literal["none", "store"] = "none"
    """What it has done: nothing that is read, or what `orchestrator run-task` leaves in the payload store."""
    tasks: int | None = None
    """How many tasks of Cloud Run do the work; as it was deployed if not given."""
    timeout: float | None = None
    """Seconds after which Google ends each of them; a little more than the task's own timeout if not given."""

    def problems(self) -> list[tuple[str, str]]:
        """Return what types cannot say."""
        found = []
        if not _PROJECT.fullmatch(self.project):
            found.append(("project", f"expected the id of a project of Google Cloud, found {self.project!r}."))
        for option, name in (("location", self.location), ("job", self.job)):
            if not _NAME.fullmatch(name):
                found.append((option, f"expected small letters, digits and -, found {name!r}."))
        for name in self.env:
            is_ours = name in _OWN or (name == OUTPUT_VARIABLE and self.output == "store")
            if not _VARIABLE.fullmatch(name) or is_ours:
                found.append(("env", f"{name!r} cannot be the name of a variable here."))
        if self.tasks is not None and not 1 <= self.tasks <= 10_000:
            found.append(("tasks", f"expected a number from 1 to 10,000, found {self.tasks}."))
        if self.output == "store" and self.tasks not in (None, 1):
            found.append(
                ("tasks", f"expected 1 where output is store, because each would leave one, found {self.tasks}.")
            )
        if self.timeout is not None and not self.timeout > 0:
            found.append(("timeout", f"expected more than zero seconds, found {self.timeout:g}."))
        return found

    @property
    def path(self) -> str:
        """Where the job is."""
        return f"projects/{self.project}/locations/{self.location}/jobs/{self.job}"


def overrides(execution: Execution, options: CloudRun, output: str = "") -> dict[str, Any]:
    """Return what is said to the job when it is run; it leaves its output at an address if there is one."""
    variables = {
        **options.env,
        OWN_VARIABLE: execution.name,
        "TASK_ID": execution.task_id,
        "TASK_ATTEMPT": str(execution.attempt),
        "TASK_SPEC": execution.specification.decode(),
        **({OUTPUT_VARIABLE: output} if output else {}),
    }
    container: dict[str, Any] = {"env": [{"name": name, "value": value} for name, value in variables.items()]}
    if options.container:
        container["name"] = options.container
    if options.args:
        container["args"] = options.args
    said: dict[str, Any] = {"containerOverrides": [container]}
    if options.tasks is not None:
        said["taskCount"] = options.tasks
    limit = options.timeout if options.timeout is not None else options.backstop(execution.timeout)
    if limit is not None:
        said["timeout"] = f"{limit:.3f}s"
    return {"overrides": said}


def name_of(found: Mapping[str, Any]) -> str:
    """Return our name of an execution that Google lists; nothing if it is not ours."""
    for container in found.get("template", {}).get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == OWN_VARIABLE:
                return str(variable.get("value", ""))
    return ""


def outcome_of(found: Mapping[str, Any]) -> Outcome | None:
    """Return how an execution ended; None if it has not."""
    if not found.get("completionTime"):
        return None
    completed: Mapping[str, Any] = next(
        (one for one in found.get("conditions") or () if one.get("type") == "Completed"), {}
    )
    if completed.get("state") == "CONDITION_SUCCEEDED":
        return Finished()
    if found.get("cancelledCount"):
        return Broken("ExecutionCancelled", "Somebody has cancelled the execution at Google.", False)
    why = completed.get("message") or completed.get("executionReason") or "and Google does not say why"
    count = f"{found.get('failedCount', 0)} of {found.get('taskCount', 1)} tasks failed"
    return Broken("ExecutionFailed", f"The execution failed: {why} ({count}).", detail=str(found.get("logUri", "")))
