"""Options of executors, as in `@app.task(executor=Process(command=["convert"]))`, and base classes for new executors.

docs/executors.md describes how to use and write executors.
"""

from typing import TYPE_CHECKING, Any

from orchestrator.domain.executors.builtin import Http, Process, Pull
from orchestrator.domain.executors.options import Broken, Execution, ExecutorOptions, ExecutorPlugin, Finished, Outcome
from orchestrator.domain.executors.registry import options_of
from orchestrator.workers.executors.protocol import Executor, Gone, Setup, Unequipped, Unreachable, Watcher

if TYPE_CHECKING:
    from orchestrator.plugins.executors.cloud_run import CloudRun
    from orchestrator.plugins.executors.dask import Dask
    from orchestrator.plugins.executors.kubernetes import Kubernetes
    from orchestrator.plugins.executors.ray import Ray
    from orchestrator.plugins.executors.rq import Rq

__all__ = [
    "Broken",
    "CloudRun",
    "Dask",
    "Execution",
    "Executor",
    "ExecutorOptions",
    "ExecutorPlugin",
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
_PLUGINS = {"CloudRun": "cloud_run", "Dask": "dask", "Kubernetes": "kubernetes", "Ray": "ray", "Rq": "rq"}


def __getattr__(name: str) -> Any:
    """Load the options of a plugin when they are first accessed."""
    if name not in _PLUGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return options_of(_PLUGINS[name])
