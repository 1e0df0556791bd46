"""One run in fields, all that is known of it but its steps and child runs; and runs in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.text import Text

from orchestrator.cli.code.view import code_fields, repeated
from orchestrator.cli.terminal.data import short_text
from orchestrator.cli.terminal.ids import Shown
from orchestrator.cli.terminal.output import print_fields, print_table, state
from orchestrator.domain.ids import successor_id, to_text
from orchestrator.domain.runs.verdict import GOES_ON
from orchestrator.monitoring.times import ago, between, when
from orchestrator.store.insights import CodeView, RunDetail, RunView


def run_state(run: RunView) -> Text:
    """Return the state of a run, with a remark on it."""
    if run.stuck is not None:
        return state(run.status, "stuck")
    if run.shown_status != run.status:
        return state(run.shown_status)
    remark = "cancelling" if run.cancelling and run.ended_at is None else run.reason or ""
    return state(run.status, remark)


def _limit(run: RunDetail) -> str:
    """Say what a run waits for that has not begun."""
    more = f" and {len(run.held_by) - 3} or more others" if len(run.held_by) > 3 else ""
    who = ", ".join(f"run {holder}" for holder in run.held_by[:3])
    return f"its limit of {run.limit:,} at once: {who}{more}"


def _goes_on(run: RunDetail, successor_view: CodeView | None) -> str | None:
    """Say which run took the place of one that has ended, and how that came."""
    if run.reason not in GOES_ON:
        return None
    how = (
        f": it was reset, and is {repeated(successor_view.reset)}"
        if successor_view is not None and successor_view.reset is not None
        else ""
    )
    return f"{to_text(successor_id(run.id.bytes))}{how}"


def _params(params: Mapping[str, Any] | str) -> str:
    if isinstance(params, str):
        return params
    return ", ".join(f"{name}={short_text(value)}" for name, value in params.items())


def print_run(run: RunDetail, code: CodeView | None, successor_view: CodeView | None, now: datetime) -> None:
    """Print a run; `successor_view` is the one in whose place it goes on, if it was reset."""
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
            "goes on as": _goes_on(run, successor_view),
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
            "took": between(run.started_at, run.ended_at or now),
        }
    )


def print_runs(runs: Sequence[RunView], shown: Shown, now: datetime, empty: str = "") -> None:
    """Print runs, a line each."""
    steps = any(run.parent_step for run in runs)
    tags = any(run.tags for run in runs)
    headers = ("id", "name…", "status…", "ended>?", "failed>", "total>", "created", "took>?")
    print_table(
        (*headers, *(["of step…?"] if steps else []), *(["tags…?"] if tags else [])),
        [
            (
                shown(run.id),
                run.name,
                run_state(run),
                run.total - run.open,
                run.failed,
                run.total,
                ago(run.created_at, now),
                between(run.started_at, run.ended_at or now),
                *([run.parent_step] if steps else []),
                *([", ".join(run.tags)] if tags else []),
            )
            for run in runs
        ],
        empty=empty,
    )
