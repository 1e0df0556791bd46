"""The executor `cloud_run`: options of a task that runs as an execution of a Cloud Run job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from orchestrator.domain.executors.options import (
    OUTPUT_VARIABLE,
    ExecutorOptions,
    ExecutorPlugin,
    Problems,
    is_variable,
)

OWN_VARIABLE = "TASK_EXECUTION"
"""The variable with our name of an execution, since Google assigns its own."""
_PROJECT = re.compile(r"[a-z][-a-z0-9.:]{4,61}[a-z0-9]")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_MODEL = Path("/sys/class/dmi/id/product_name")
_METADATA_HINTS = ("GCE_METADATA_HOST", "K_SERVICE", "CLOUD_RUN_JOB", "KUBERNETES_SERVICE_HOST")
"""Variables that indicate that a metadata server may be available."""
_OWN = ("TASK_SPEC", "TASK_ID", "TASK_ATTEMPT", OWN_VARIABLE)


class CloudRun(ExecutorOptions, frozen=True, kw_only=True):
    """Runs a job deployed on Google Cloud Run. It has a result only if it leaves one in the payload store."""

    executor: ClassVar[str] = "cloud_run"

    project: str
    location: str
    """The region, e.g. europe-west1."""
    job: str
    """The name of the deployed job."""
    container: str = ""
    """The container that gets the specification, if the job has several."""
    args: list[str] = []
    """The arguments of the container, instead of the deployed ones."""
    env: dict[str, str] = {}
    """Additional environment variables. Nothing secret: options are stored, and shown to people."""
    output: Literal["none", "store"] = "none"
    """The source of the result: none, or the output that `orchestrator run-task` leaves in the payload store."""
    tasks: int | None = None
    """The number of Cloud Run tasks; by default as deployed."""
    timeout: float | None = None
    """Seconds after which Google ends each Cloud Run task; by default a little more than the task's timeout."""

    def problems(self) -> Problems:
        found = []
        if not _PROJECT.fullmatch(self.project):
            found.append(("project", f"expected the id of a Google Cloud project, found {self.project!r}."))
        for option, name in (("location", self.location), ("job", self.job)):
            if not _NAME.fullmatch(name):
                found.append((option, f"expected lowercase letters, digits and -, found {name!r}."))
        for name in self.env:
            is_ours = name in _OWN or (name == OUTPUT_VARIABLE and self.output == "store")
            if not is_variable(name) or is_ours:
                found.append(("env", f"{name!r} cannot be set as a variable here."))
        if self.tasks is not None and not 1 <= self.tasks <= 10_000:
            found.append(("tasks", f"expected a number from 1 to 10,000, found {self.tasks}."))
        if self.output == "store" and self.tasks not in (None, 1):
            found.append(
                ("tasks", f"expected 1 if output is store, because each task would write one, found {self.tasks}.")
            )
        if self.timeout is not None and not self.timeout > 0:
            found.append(("timeout", f"expected more than zero seconds, found {self.timeout:g}."))
        return found

    @property
    def path(self) -> str:
        return f"projects/{self.project}/locations/{self.location}/jobs/{self.job}"


def _equipment(environ: Mapping[str, str], model: Path = _MODEL) -> list[str]:
    """Announce the executor if there is a readable key, or if the machine is one of Google's."""
    if key := environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return ["cloud_run"] if os.access(key, os.R_OK) else []
    try:
        is_theirs = "Google" in model.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        is_theirs = False
    return ["cloud_run"] if is_theirs or any(environ.get(variable) for variable in _METADATA_HINTS) else []


PLUGIN = ExecutorPlugin(
    options=CloudRun, driver="orchestrator.plugins.executors.cloud_run.driver:CloudRunExecutor", equipment=_equipment
)
