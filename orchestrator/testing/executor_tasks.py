"""The tasks of the conformance suite, which its workers import."""

from __future__ import annotations

from typing import Any

from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.task import Task

APP = "orchestrator.testing.executor_tasks:app"


def declare(app: Orchestrator) -> tuple[Task[..., Any], Task[..., int]]:
    """Declare a task for the executor, and one that workers run themselves."""

    @app.task(name="conformance.work")
    def work(**given: Any) -> Any:
        raise NotImplementedError

    @app.task(name="conformance.add")
    def add(a: int, b: int) -> int:
        return a + b

    return work, add


app = Orchestrator()
declare(app)
