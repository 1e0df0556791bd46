"""The state and result of a task or run, in Celery's terms."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from uuid import UUID

from orchestrator.compat.celery import exceptions, states
from orchestrator.compat.celery.request import ARGS, MARK, MESSAGE, current
from orchestrator.compat.celery.tags import untagged
from orchestrator.domain.states import RunState, ShownRunState, TaskState
from orchestrator.errors import OrchestratorError, RunFailed, TaskCancelled, TaskFailed
from orchestrator.sdk.names import module_name, type_name
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.values.payload import decode_call, decode_value

_RUNS = {RunState.SUCCESS: states.SUCCESS, RunState.FAILED: states.FAILURE, RunState.CANCELLED: states.REVOKED}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state of a task or run, and its result or exception."""

    state: str = states.PENDING
    result: Any = None
    traceback: str | None = None
    date_done: Any = None
    retries: int = 0
    detail: Any = None


NOTHING = Outcome()


def find(result: Any) -> Outcome:
    """Return the outcome of a call or composition. An unknown id is pending, as in Celery."""
    if result._run is not None:
        return _of_run(result)
    app = result.app
    if (running := current.get()) is not None and running[1].id == str(result.id) and running[1].native is not None:
        state, meta = running[1].state or (states.STARTED if _tracks(app, running[0].name) else states.PENDING, None)
        return Outcome(state=state, result=meta, retries=running[1].retries)
    detail = app.orchestrator._client.backend.insights.show_task(UUID(bytes=result._handle._id))
    if detail is not None:
        return of_task(app, detail)
    try:
        result._find_run()
    except OrchestratorError as error:
        exception = of_end(app, error, result._enclosing_run)
        return Outcome(state=_state_of(exception), result=exception)
    return _of_run(result) if result._run is not None else NOTHING


def run_under(app: Any, task_id: str) -> Any:
    """Return the run that was started under a caller's own id, if any."""
    matches = app.orchestrator._client.backend.insights.runs_under(f"celery:{task_id}")
    return app.orchestrator.run(matches[0].run) if matches else None


def _of_run(result: Any) -> Outcome:
    run = result._run
    assert run is not None
    status = run.status()
    state = _RUNS.get(RunState(status), states.PENDING)
    if state == states.SUCCESS:
        return Outcome(state=state, result=untagged(run.result(timeout=5)))
    if state == states.FAILURE:
        error = of_run(result.app, run)
        return Outcome(state=_state_of(error), result=error, traceback=getattr(error, "celery_traceback", None))
    if state == states.REVOKED:
        return Outcome(state=state, result=revoked("revoked"))
    return Outcome(state=states.STARTED if status == RunState.RUNNING and _tracks(result.app) else state)


def _state_of(error: BaseException) -> str:
    return states.REVOKED if isinstance(error, exceptions.TaskRevokedError) else states.FAILURE


def _tracks(app: Any, name: str = "") -> bool:
    own = getattr(app.tasks.get(name), "track_started", None)
    return bool(app.conf.task_track_started if own is None else own)


def of_task(app: Any, detail: Any) -> Outcome:
    """Return the outcome of a task from its stored details."""
    status = detail.status
    common: dict[str, Any] = {"date_done": detail.ended_at, "detail": detail, "retries": _retries(detail)}
    if status == TaskState.SUCCESS:
        value = None if detail.result is None else untagged(decode_value(detail.result))
        if type(value) is dict and MARK in value and "state" in value[MARK]:
            state, value = of_mark(value[MARK])
            return Outcome(state=state, result=value, **common)
        return Outcome(state=states.SUCCESS, result=value, **common)
    if status == TaskState.CANCELLED:
        return Outcome(state=states.REVOKED, result=revoked("revoked"), **common)
    if status in (TaskState.FAILED, TaskState.SKIPPED):
        error = detail.error
        if error is None:
            return Outcome(state=states.FAILURE, result=revoked("skipped"), **common)
        if "state" in error.data and error.kind.endswith(".Ignore"):
            state, value = of_mark(error.data)
            return Outcome(state=state, result=value, **common)
        exception = rebuilt(error.kind, error.message, error.data, error.traceback)
        return Outcome(state=_state_of(exception), result=exception, traceback=error.traceback or None, **common)
    return _of_open_task(app, detail, common)


def _retries(detail: Any) -> int:
    return sum(one.outcome in ("postponed", "failed") for one in detail.attempts if one.ended_at is not None)


def _of_open_task(app: Any, detail: Any, common: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a task that has not ended."""
    if detail.status == TaskState.RUNNING:
        progress = app.orchestrator.handle(detail.id).progress()
        if progress is not None and progress.attempt == detail.attempt:
            try:
                report = json.loads(progress.text)
                return Outcome(state=report["state"], result=untagged(report["meta"]), **common)
            except (ValueError, KeyError, TypeError):
                pass  # the text is progress, not a state of update_state
        return Outcome(state=states.STARTED if _tracks(app, detail.name) else states.PENDING, **common)
    last = detail.attempts[-1] if detail.attempts else None
    if detail.status == TaskState.PENDING and last is not None and last.outcome in ("postponed", "failed"):
        error = last.error
        data = {} if error is None else error.data
        kind, message = (
            data.get("kind", error.kind if error else ""),
            data.get("message", error.message if error else ""),
        )
        exception = rebuilt(kind, message, {}, error.traceback if error else "")
        return Outcome(state=states.RETRY, result=exception, traceback=error.traceback if error else None, **common)
    return Outcome(**common)


def of_mark(mark: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the state and result that a task has set itself."""
    state, meta = mark.get("state") or states.IGNORED, untagged(mark.get("meta"))
    if state in states.PROPAGATE_STATES and isinstance(meta, Mapping) and "exc_type" in meta:
        message = meta.get("exc_message", "")
        return state, named(str(meta["exc_type"]), [message] if isinstance(message, str) else list(message))
    if state in states.PROPAGATE_STATES:
        return state, named("Exception", [str(meta)])
    return state, meta


def arguments(detail: Any) -> tuple[list[Any] | None, dict[str, Any] | None]:
    if detail is None:
        return None, None
    args, kwargs = untagged(decode_call(detail.payload)[:2])
    return list(args), {name: value for name, value in kwargs.items() if name != MESSAGE}


_InMain = type("_InMain", (), {"__module__": "__main__"})
_NATIVE_ERRORS = {
    "TaskExpired": exceptions.TaskRevokedError,
    "WorkerLost": exceptions.WorkerLostError,
    **{type_name(native): celerys for native, celerys in exceptions.INTERRUPTIONS.items()},
}
"""Celery's exceptions for errors that the scheduler and workers report."""


def revoked(why: str) -> BaseException:
    return exceptions.TaskRevokedError(why)


def of_end(app: Any, error: OrchestratorError, run: CompositionHandle[Any] | None) -> BaseException:
    """Return the exception that a task raised, from the error that its handle raised."""
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
    """Return the exception of a run's first failed task; a ChordError if that is in a chord's header."""
    failure = _first_failure(app, run)
    if failure is None and app.orchestrator._client.backend.runs.progress(run._id)[1].cancelled:
        return revoked("revoked")
    if failure is None:
        return RunFailed(f"{run!r} failed.")
    step, identifier, error = failure
    exception = rebuilt(error.kind, error.message, error.data, error.traceback)
    if not _is_header(run, step):
        return exception
    chord = exceptions.ChordError(f"Dependency {identifier} raised {exception!r}")
    chord.__cause__ = exception
    return chord


def _first_failure(app: Any, run: CompositionHandle[Any]) -> tuple[str | None, UUID, Any] | None:
    """Return the step, the task's id and the error of the first failure in a run or in its child runs."""
    from orchestrator.store.insights import RunFilter, TaskFilter

    insights = app.orchestrator._client.backend.insights
    identifier = UUID(bytes=run._id)
    failed = TaskFilter(run=identifier, statuses=(TaskState.FAILED,))
    for task in insights.page_of_tasks(failed, limit=1, before=None).tasks:
        detail = insights.show_task(task.id)
        if detail is not None and detail.error is not None:
            return task.step, task.id, detail.error
    failed_children = RunFilter(parent=identifier, statuses=(ShownRunState.FAILED,))
    for child in insights.page_of_runs(failed_children, limit=1, before=None).runs:
        failure = _first_failure(app, app.orchestrator._client.run_handle(child.id.bytes))
        if failure is not None:
            steps = [step.name for step in insights.list_steps(identifier) if step.state == "failed"]
            return steps[0] if steps else None, failure[1], failure[2]
    return None


def _is_header(run: CompositionHandle[Any], step: str | None) -> bool:
    """Return whether a step is part of a chord's header: a later step depends on it and on others."""
    definition = run._definition()
    if definition is None or step is None:
        return False
    fan_outs = {other.name for other in definition.steps if other.foreach is not None}
    after = [other for other in definition.steps if step in other.depends_on]
    return any(step in fan_outs or len(other.depends_on) > 1 for other in after)


def rebuilt(kind: str, message: str, data: Mapping[str, Any] | None, traceback: str = "") -> BaseException:
    data = dict(data or {})
    args = data.pop(ARGS, None)
    values = tuple(untagged(args)) if isinstance(args, list) else ((message,) if message else ())
    error = named(kind, values, message)
    for name, value in data.items():
        with suppress(Exception):  # the attribute may be a property
            if getattr(error, name, None) is None:
                setattr(error, name, value)
    if traceback:
        with suppress(Exception):
            error.celery_traceback = traceback  # type: ignore[attr-defined]
    return error


def named(kind: str, args: Sequence[Any], message: str = "") -> BaseException:
    """Return an exception of the class of this name, if a loaded module has it; otherwise of a new class."""
    cls = _NATIVE_ERRORS.get(kind) or _loaded_class(kind) or _new_class(kind)
    if not issubclass(cls, Exception):  # e.g. SystemExit, which must not end the process that reads the result
        return exceptions.WorkerLostError(f"Worker exited prematurely: {kind}({message})")
    for arguments in (tuple(args), (message,) if message else ()):
        with suppress(Exception):  # the constructor may take other arguments than those in `args`
            return cls(*arguments)
    with suppress(Exception):  # other classes, e.g. ExceptionGroup, need more arguments
        error = cls.__new__(cls)
        error.args = tuple(args)
        return error
    return _new_class(kind)(*args)


def _loaded_class(kind: str) -> type[BaseException] | None:
    module, _, name = kind.rpartition(".")
    scope: Any = sys.modules.get(module or "builtins")
    if scope is None and module:  # a class nested in another one
        outer, _, owner = module.rpartition(".")
        scope = getattr(sys.modules.get(outer), owner, None)
    if scope is None and module == module_name(_InMain):
        scope = sys.modules["__main__"]
    cls = getattr(scope, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, BaseException) else None


@lru_cache(maxsize=256)
def _new_class(kind: str) -> type[BaseException]:
    module, _, name = kind.rpartition(".")
    return type(name or "TaskError", (Exception,), {"__module__": module or "celery.backends.base"})
