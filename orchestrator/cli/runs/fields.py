"""Prints one run as fields, and lists of runs as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from rich.text import Text

from orchestrator.cli.code.view import code_document, code_fields, repeated, watch_code
from orchestrator.cli.runs.progress import watch_run, watch_workflow
from orchestrator.cli.terminal.ids import IdFormat, existing
from orchestrator.cli.terminal.output import echo, hidden, print_fields, print_json, print_table, short_text, state
from orchestrator.cli.terminal.reading import open_calls
from orchestrator.domain.ids import successor_id, to_text
from orchestrator.domain.runs import CONTINUATION_REASONS
from orchestrator.domain.states import RunState
from orchestrator.monitoring.times import ago, between, when
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.calls.insights import list_runs
from orchestrator.sdk.calls.interface import Calls
from orchestrator.store.insights import CodeView, RunDetail, RunFilter, RunView, readable_params


def run_state(run: RunView) -> Text:
    """Return the state of a run, with a remark."""
    if run.stuck is not None:
        return state(run.status, "stuck")
    if run.shown_status != run.status:
        return state(run.shown_status)
    remark = "cancelling" if run.cancelling and run.ended_at is None else run.reason or ""
    return state(run.status, remark)


def _limit(run: RunDetail) -> str:
    more = f" and {len(run.held_by) - 3} or more others" if len(run.held_by) > 3 else ""
    holders = ", ".join(f"run {holder}" for holder in run.held_by[:3])
    return f"its limit of {run.limit:,} at once: {holders}{more}"


def _successor_text(run: RunDetail, successor_view: CodeView | None) -> str | None:
    """Return the id of the run that continues this one, and whether that is because of a reset."""
    if run.reason not in CONTINUATION_REASONS:
        return None
    remark = (
        f": it was reset, and is {repeated(successor_view.reset)}"
        if successor_view is not None and successor_view.reset is not None
        else ""
    )
    return f"{to_text(successor_id(run.id.bytes))}{remark}"


def _params(params: Mapping[str, Any] | str) -> str:
    if isinstance(params, str):
        return params
    return ", ".join(f"{name}={short_text(value)}" for name, value in params.items())


def print_run(run: RunDetail, code: CodeView | None, successor_view: CodeView | None, now: datetime) -> None:
    """Print a run. `successor_view` is the run that replaced it, if it was reset."""
    counters = {
        "open": run.open,
        "success": run.success,
        "failed": run.failed,
        "cancelled": run.cancelled,
        "skipped": run.skipped,
    }
    counts = ", ".join(f"{count:,} {what}" for what, count in counters.items() if count)
    print_fields(
        {
            "run": str(run.id),
            "name": run.name if run.name != run.workflow else None,
            "workflow": f"{run.workflow}, version {run.version}" if run.workflow is not None else None,
            "params": _params(run.params),
            "status": run_state(run),
            **({} if code is None else code_fields(run, code, now)),
            "continues as": _successor_text(run, successor_view),
            "stuck": f"{run.stuck['kind']}: {run.stuck['message']}" if run.stuck else None,
            **({"waits for": _limit(run)} if run.held_by else {}),
            "tasks": f"{run.total:,}: {counts}" if counts else f"{run.total:,}",
            "tags": ", ".join(run.tags),
            "attributes": _params(run.attributes or {}),
            "own id" if run.code else "key": run.key,
            "schedule": run.schedule,
            "fire time": when(run.fire_time, now),
            "parent": ", step ".join(map(str, filter(None, (run.parent_run, run.parent_step)))),
            "started by": None if run.parent_task is None else f"task {run.parent_task}",
            "created": when(run.created_at, now),
            "started": when(run.started_at, now),
            "ended": when(run.ended_at, now),
            "took": _took(run, now),
        }
    )


def _took(run: RunView, now: datetime) -> str:
    """Return a run's duration; for a retried one, the duration since the retry and since the first start."""
    took = between(run.began_at, run.ended_at or now)
    if run.retried_at is None:
        return took
    return f"{took} since it was retried, {between(run.started_at, run.ended_at or now)} since it first began"


def print_runs(runs: Sequence[RunView], format_id: IdFormat, now: datetime, empty: str = "") -> None:
    steps = any(run.parent_step for run in runs)
    tags = any(run.tags for run in runs)
    headers = ("id", "name…", "status…", "ended>?", "failed>", "total>", "created", "took>?")
    print_table(
        (*headers, *(["of step…?"] if steps else []), *(["tags…?"] if tags else [])),
        [
            (
                format_id(run.id),
                run.name,
                run_state(run),
                run.total - run.open,
                run.failed,
                run.total,
                ago(run.created_at, now),
                between(run.began_at, run.ended_at or now),
                *([run.parent_step] if steps else []),
                *([", ".join(run.tags)] if tags else []),
            )
            for run in runs
        ],
        empty=empty,
    )


MAX_CHILDREN = 100


def find_run(calls: Calls, run: UUID) -> RunDetail:
    run_view = existing(calls.insights.show_run(run), "run", run)
    shown = hidden().redacted
    return dataclasses.replace(
        run_view, params=shown(readable_params(run_view.params)), attributes=shown(run_view.attributes or {})
    )


def _find_code(calls: Calls, run: UUID) -> CodeView:
    return existing(calls.insights.show_code(run), "run", run)


def children_of(calls: Calls, run: UUID) -> list[RunView]:
    return list_runs(calls.insights, RunFilter(parent=run), limit=MAX_CHILDREN).runs


def run_document(calls: Calls, run: RunView) -> dict[str, Any]:
    """Return a run as JSON data, with its steps and its newest child runs."""
    document = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    steps = calls.insights.list_steps(run.id)
    code = calls.insights.show_code(run.id)
    code_data = {} if code is None else code_document(code)
    return document | code_data | {"steps": steps, "children": children_of(calls, run.id)}


def follow_run(app: Orchestrator, run: UUID, *, as_json: bool) -> int:
    """Follow a run until its end; return the exit code."""
    with open_calls() as calls:
        definition = calls.insights.definition_of_run(run)
        try:
            if not as_json and find_run(calls, run).code:
                ended = watch_code(app, run, lambda run: (find_run(calls, run), _find_code(calls, run)))
            elif definition is None or as_json:
                ended = watch_run(lambda: find_run(calls, run), quiet=as_json)
            else:
                ended = watch_workflow(app.run(run), lambda: (find_run(calls, run), calls.insights.list_steps(run)))
        except KeyboardInterrupt:
            echo(f"\nThe run continues. To cancel it: orchestrator runs cancel {run}", err=True)
            return 130
        if as_json:
            print_json(run_document(calls, ended))
    return 0 if ended.status == RunState.SUCCESS else 1
