"""Exceptions of tasks, in the caller: the same class if the program has it, or one of the same name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from uuid import UUID

from orchestrator.compat.celery import exceptions
from orchestrator.compat.celery.request import ARGS
from orchestrator.compat.celery.tags import untagged
from orchestrator.domain.states import RunState, ShownRunState, TaskState
from orchestrator.errors import OrchestratorError, RunFailed, TaskCancelled, TaskFailed
from orchestrator.sdk.names import module_name
from orchestrator.sdk.tasks.composition_handle import CompositionHandle

_InMain = type("_InMain", (), {"__module__": "__main__"})
_OURS = {"TaskExpired": exceptions.TaskRevokedError, "WorkerLost": exceptions.WorkerLostError}
"""Errors that the scheduler gives, as Celery's."""


def revoked(why: str) -> BaseException:
    """Return the error of a task that was revoked."""
    return exceptions.TaskRevokedError(why)


def of_end(app: Any, error: OrchestratorError, run: CompositionHandle[Any] | None) -> BaseException:
    """Return what a task raised, of the error with which its handle tells that."""
    if isinstance(error, TaskFailed):
        text = str(error.args[0])
        message = text.partition(f"failed: {error.kind}: ")[2] if error.kind else text
        return rebuilt(error.kind, message, error.data, error.traceback)
    if isinstance(error, TaskCancelled):
        return revoked("revoked")
    if run is not None:
        if run.status() == RunState.CANCELLED:
            return revoked("revoked")
        return of_run(app, run)
    return error


def of_run(app: Any, run: CompositionHandle[Any]) -> BaseException:
    """Return what the first task of a run raised that failed; in the header of a chord, that is a ChordError."""
    found = _first(app, run)
    if found is None:
        return RunFailed(f"{run!r} failed.")
    step, identifier, error = found
    made = rebuilt(error.kind, error.message, error.data, error.traceback)
    if not _is_header(run, step):
        return made
    chord = exceptions.ChordError(f"Dependency {identifier} raised {made!r}")
    chord.__cause__ = made
    return chord


def _first(app: Any, run: CompositionHandle[Any]) -> tuple[str | None, UUID, Any] | None:
    """Return the step, the task and the error of what failed first in a run, or in a run below it."""
    from orchestrator.store.insights import RunFilter, TaskFilter

    insights = app.orchestrator._client.backend.insights
    identifier = UUID(bytes=run._id)
    failed = TaskFilter(run=identifier, statuses=(TaskState.FAILED,))
    for task in insights.page_of_tasks(failed, limit=1, before=None).tasks:
        detail = insights.show_task(task.id)
        if detail is not None and detail.error is not None:
            return task.step, task.id, detail.error
    below = RunFilter(parent=identifier, statuses=(ShownRunState.FAILED,))
    for child in insights.page_of_runs(below, limit=1, before=None).runs:
        found = _first(app, app.orchestrator._client.run_handle(child.id.bytes))
        if found is not None:
            steps = [step.name for step in insights.list_steps(identifier) if step.state == "failed"]
            return steps[0] if steps else None, found[1], found[2]
    return None


def _is_header(run: CompositionHandle[Any], step: str | None) -> bool:
    """Say whether another step waits for a step and others beside it."""
    definition = run._definition()
    if definition is None or step is None:
        return False
    fan_outs = {one.name for one in definition.steps if one.foreach is not None}
    after = [one for one in definition.steps if step in one.depends_on]
    return any(step in fan_outs or len(one.depends_on) > 1 for one in after)


def rebuilt(kind: str, message: str, data: Mapping[str, Any] | None, traceback: str = "") -> BaseException:
    """Return an exception from its data."""
    data = dict(data or {})
    args = data.pop(ARGS, None)
    given = tuple(untagged(args)) if isinstance(args, list) else ((message,) if message else ())
    error = named(kind, given, message)
    for name, value in data.items():
        with suppress(Exception):  # an attribute may be computed
            if getattr(error, name, None) is None:
                setattr(error, name, value)
    if traceback:
        with suppress(Exception):
            error.celery_traceback = traceback  # type: ignore[attr-defined]
    return error


def named(kind: str, args: Sequence[Any], message: str = "") -> BaseException:
    """Return an exception of the class of that name, if a loaded module has it; else of a new class of that name."""
    found = _OURS.get(kind) or _loaded(kind) or _made(kind)
    if not issubclass(found, Exception):  # SystemExit, say: it ends a worker, and never who asks for the result
        return exceptions.WorkerLostError(f"Worker exited prematurely: {kind}({message})")
    for given in (tuple(args), (message,) if message else ()):
        with suppress(Exception):  # a class may take other arguments than it keeps
            return found(*given)
    with suppress(Exception):  # and be made in no other way, as an ExceptionGroup
        error = found.__new__(found)
        error.args = tuple(args)
        return error
    return _made(kind)(*args)


def _loaded(kind: str) -> type[BaseException] | None:
    module, _, name = kind.rpartition(".")
    scope: Any = sys.modules.get(module or "builtins")
    if scope is None and module:  # of a class within another
        outer, _, owner = module.rpartition(".")
        scope = getattr(sys.modules.get(outer), owner, None)
    if scope is None and module == module_name(_InMain):
        scope = sys.modules["__main__"]
    found = getattr(scope, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


@lru_cache(maxsize=256)
def _made(kind: str) -> type[BaseException]:
    module, _, name = kind.rpartition(".")
    return type(name or "TaskError", (Exception,), {"__module__": module or "celery.backends.base"})
