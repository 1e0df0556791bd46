"""Where a task or run stands, in Celery's words."""

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
from orchestrator.sdk.names import module_name
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.values.payload import decode_call, decode_value

_RUNS = {RunState.SUCCESS: states.SUCCESS, RunState.FAILED: states.FAILURE, RunState.CANCELLED: states.REVOKED}
_EXPIRED = "TaskExpired"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Where something stands, and what it came to."""

    state: str = states.PENDING
    result: Any = None
    traceback: str | None = None
    date_done: Any = None
    retries: int = 0
    detail: Any = None


NOTHING = Outcome()


def find(result: Any) -> Outcome:
    """Return where a call or composition stands; what nobody knows is pending, as in Celery."""
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
        result._look_for_run()
    except OrchestratorError as error:
        return Outcome(state=states.FAILURE, result=of_end(app, error, result._around))
    return _of_run(result) if result._run is not None else NOTHING


def run_under(app: Any, task_id: str) -> Any:
    """Return the run that was started under an id that is no UUID, or under one of the caller's."""
    found = app.orchestrator._client.backend.insights.runs_under(f"celery:{task_id}")
    return app.orchestrator.run(found[0].run) if found else None


def _of_run(result: Any) -> Outcome:
    run = result._run
    assert run is not None
    status = run.status()
    state = _RUNS.get(RunState(status), states.PENDING)
    if state == states.SUCCESS:
        return Outcome(state=state, result=untagged(run.result(timeout=5)))
    if state == states.FAILURE:
        error = of_run(result.app, run)
        return Outcome(state=state, result=error, traceback=getattr(error, "celery_traceback", None))
    if state == states.REVOKED:
        return Outcome(state=state, result=revoked("revoked"))
    return Outcome(state=states.STARTED if status == RunState.RUNNING and _tracks(result.app) else state)


def _tracks(app: Any, name: str = "") -> bool:
    own = getattr(app.tasks.get(name), "track_started", None)
    return bool(app.conf.task_track_started if own is None else own)


def of_task(app: Any, detail: Any) -> Outcome:
    """Return where a task stands of which everything is known."""
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
        made = rebuilt(error.kind, error.message, error.data, error.traceback)
        state = states.REVOKED if error.kind == _EXPIRED else states.FAILURE
        return Outcome(state=state, result=made, traceback=error.traceback or None, **common)
    return _open(app, detail, common)


def _retries(detail: Any) -> int:
    return sum(one.outcome in ("postponed", "failed") for one in detail.attempts if one.ended_at is not None)


def _open(app: Any, detail: Any, common: Mapping[str, Any]) -> Outcome:
    """Return where a task stands that has not ended."""
    if detail.status == TaskState.RUNNING:
        said = app.orchestrator.handle(detail.id).progress()
        if said is not None and said.attempt == detail.attempt:
            try:
                found = json.loads(said.text)
                return Outcome(state=found["state"], result=untagged(found["meta"]), **common)
            except (ValueError, KeyError, TypeError):
                pass  # it is progress, and no state
        return Outcome(state=states.STARTED if _tracks(app, detail.name) else states.PENDING, **common)
    last = detail.attempts[-1] if detail.attempts else None
    if detail.status == TaskState.PENDING and last is not None and last.outcome in ("postponed", "failed"):
        error = last.error
        data = {} if error is None else error.data
        kind, message = (
            data.get("kind", error.kind if error else ""),
            data.get("message", error.message if error else ""),
        )
        made = rebuilt(kind, message, {}, error.traceback if error else "")
        return Outcome(state=states.RETRY, result=made, traceback=error.traceback if error else None, **common)
    return Outcome(**common)


def of_mark(mark: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the state and result that a task has given itself."""
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
_OURS = {"TaskExpired": exceptions.TaskRevokedError, "WorkerLost": exceptions.WorkerLostError}
"""Errors that the scheduler gives, as Celery's."""


def revoked(why: str) -> BaseException:
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
