"""Where a task or run stands, in Celery's words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from orchestrator.compat.celery import failures, states
from orchestrator.compat.celery.request import MARK, MESSAGE, current
from orchestrator.compat.celery.tags import untagged
from orchestrator.domain.states import RunState, TaskState
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.values.payload import decode_call, decode_value

_RUNS = {
    RunState.SUCCESS: states.SUCCESS,
    RunState.FAILED: states.FAILURE,
    RunState.CANCELLED: states.REVOKED,
}
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
        return Outcome(state=states.FAILURE, result=failures.of_end(app, error, result._around))
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
        error = failures.of_run(result.app, run)
        return Outcome(state=state, result=error, traceback=getattr(error, "celery_traceback", None))
    if state == states.REVOKED:
        return Outcome(state=state, result=failures.revoked("revoked"))
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
        return Outcome(state=states.REVOKED, result=failures.revoked("revoked"), **common)
    if status in (TaskState.FAILED, TaskState.SKIPPED):
        error = detail.error
        if error is None:
            return Outcome(state=states.FAILURE, result=failures.revoked("skipped"), **common)
        if "state" in error.data and error.kind.endswith(".Ignore"):
            state, value = of_mark(error.data)
            return Outcome(state=state, result=value, **common)
        made = failures.rebuilt(error.kind, error.message, error.data, error.traceback)
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
        made = failures.rebuilt(kind, message, {}, error.traceback if error else "")
        return Outcome(state=states.RETRY, result=made, traceback=error.traceback if error else None, **common)
    return Outcome(**common)


def of_mark(mark: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the state and result that a task has given itself."""
    state, meta = mark.get("state") or states.IGNORED, untagged(mark.get("meta"))
    if state in states.PROPAGATE_STATES and isinstance(meta, Mapping) and "exc_type" in meta:
        message = meta.get("exc_message", "")
        return state, failures.named(str(meta["exc_type"]), [message] if isinstance(message, str) else list(message))
    if state in states.PROPAGATE_STATES:
        return state, failures.named("Exception", [str(meta)])
    return state, meta


def arguments(detail: Any) -> tuple[list[Any] | None, dict[str, Any] | None]:
    """Return the arguments of a task."""
    if detail is None:
        return None, None
    args, kwargs = untagged(decode_call(detail.payload)[:2])
    return list(args), {name: value for name, value in kwargs.items() if name != MESSAGE}
