"""Which executors a worker process has, and the class of each: loaded when the first task for it comes."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from orchestrator.domain.executors.call import announced
from orchestrator.sdk.tasks.executors import load_executor, offered
from orchestrator.workers.executors.equipment import equipment
from orchestrator.workers.executors.protocol import Executor, Setup


class _Place(NamedTuple):
    """Where the class of an executor is."""

    module: str
    name: str
    given: Literal["setup", "settings"] = "setup"
    """What it is made with."""
    needs: tuple[str, ...] = ()
    """Packages without which a worker does not have it."""


_BUILT_IN: dict[str, _Place] = {
    "cloud_run": _Place("cloud_run", "CloudRunExecutor", "settings"),
    "dask": _Place("dask", "DaskExecutor", "settings", ("distributed",)),
    "http": _Place("http", "HttpExecutor", "settings"),
    "kubernetes": _Place("kubernetes", "KubernetesExecutor", "settings"),
    "process": _Place("process", "ProcessExecutor"),
    "pull": _Place("pull", "PullExecutor", "settings"),
    "ray": _Place("ray", "RayExecutor", "settings"),
    "rq": _Place("rq", "RqExecutor", "settings", ("rq",)),
}
"""By name: the module here, the class in it, and the packages that it needs."""


def announcements(setup: Setup) -> list[str]:
    """Return which executors a worker has, as it announces them."""
    names = [name for name, place in _BUILT_IN.items() if all(find_spec(package) for package in place.needs)]
    return [announced(want) for name in (*names, *offered()) for want in equipment(name, setup)]


def create(name: str, setup: Setup) -> Executor | None:
    """Return an executor for this worker process; None if it has none of that name."""
    if (place := _BUILT_IN.get(name)) is not None:
        if not all(find_spec(package) for package in place.needs):
            return None
        kind: Any = getattr(import_module(f"orchestrator.workers.executors.{place.module}"), place.name)
        given = (setup,) if place.given == "setup" else (setup.settings,)
    elif (point := offered().get(name)) is not None:
        kind, given = load_executor(point), (setup,)
    else:
        return None
    executor: Executor = kind(*given)
    return executor
