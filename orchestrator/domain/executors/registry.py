"""The executors that come with the package: their names, and what can be said to each.

Each has a class of options in a file of its own here, and does its work in a file of the same name in
`workers/executors`, which is named in `workers/executors/registry.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from orchestrator.domain.executors.call import ExecutorCall
from orchestrator.domain.executors.cloud_run import CloudRun
from orchestrator.domain.executors.dask import Dask
from orchestrator.domain.executors.http import Http
from orchestrator.domain.executors.kubernetes import Kubernetes
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.process import Process
from orchestrator.domain.executors.pull import Pull
from orchestrator.domain.executors.ray import Ray
from orchestrator.domain.executors.rq import Rq
from orchestrator.domain.plain import unstorable
from orchestrator.errors import did_you_mean

IN_WORKER = "python"
"""The worker's own Python: what runs a task that names no other executor."""
BUILT_IN: dict[str, type[ExecutorOptions]] = {
    kind.executor: kind for kind in (CloudRun, Dask, Http, Kubernetes, Process, Pull, Ray, Rq)
}

_REASON = " - at `$"


def task_name(executor: str) -> str:
    """Return what the task of a step is called that names an executor and no task."""
    return f"executor:{executor}"


def call_of(options: ExecutorOptions) -> ExecutorCall:
    """Return options as they travel with a task."""
    wants = options.wants
    return ExecutorCall(options.executor, msgspec.to_builtins(options), "" if wants == options.executor else wants)


def call_from(executor: str, given: Mapping[str, Any]) -> ExecutorCall:
    """Return options that have been checked where they were given; one that is not of ours wants nothing more."""
    kind = BUILT_IN.get(executor)
    return ExecutorCall(executor, dict(given)) if kind is None else call_of(msgspec.convert(given, kind))


def unknown_executor(name: str, known: Iterable[str]) -> str:
    """Return what to say of an executor that does not exist."""
    names = sorted({*known, IN_WORKER})
    return f"unknown executor {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}."


def option_problems(kind: type[ExecutorOptions], given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is wrong with options, each with its name; empty where that is about all of them."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    found: list[tuple[str, str]] = []
    for name, value in given.items():
        if name not in fields:
            advice = did_you_mean(name, fields) or f" Known: {', '.join(fields)}."
            found.append((name, f"executor {kind.executor} has no such option.{advice}"))
            continue
        try:
            msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            reason, _, place = str(error).partition(_REASON)
            found.append((name, f"{reason[:1].lower()}{reason[1:]}{f' at {place[:-1]}' if place[:-1] else ''}."))
            continue
        if (why := unstorable(value)) is not None:
            found.append((name, f"{why}."))
    found += [
        ("", f"option {name!r} of executor {kind.executor} is missing.")
        for name, field in fields.items()
        if field.required and name not in given
    ]
    return found or msgspec.convert(given, kind).problems()
