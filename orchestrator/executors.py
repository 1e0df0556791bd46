"""Executors: what a task says to them, `@app.task(executor=Process(command=["convert"]))`, and what a new one is.

How each is used, and how to write one: docs/executors.md.
"""

from orchestrator.domain.executors.cloud_run import CloudRun
from orchestrator.domain.executors.dask import Dask
from orchestrator.domain.executors.execution import Broken, Execution, Finished, Outcome
from orchestrator.domain.executors.http import Http
from orchestrator.domain.executors.kubernetes import Kubernetes
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.process import Process
from orchestrator.domain.executors.pull import Pull
from orchestrator.domain.executors.ray import Ray
from orchestrator.domain.executors.rq import Rq
from orchestrator.workers.executors.protocol import Executor, Gone, Setup, Unequipped, Unreachable, Watcher

__all__ = [
    "Broken",
    "CloudRun",
    "Dask",
    "Execution",
    "Executor",
    "ExecutorOptions",
    "Finished",
    "Gone",
    "Http",
    "Kubernetes",
    "Outcome",
    "Process",
    "Pull",
    "Ray",
    "Rq",
    "Setup",
    "Unequipped",
    "Unreachable",
    "Watcher",
]
