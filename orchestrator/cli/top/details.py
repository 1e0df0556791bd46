"""One task or run, in lines to be read."""

from __future__ import annotations

from uuid import UUID

from orchestrator.cli.terminal.data import call_text, data_text, hidden, short_text, stored_value
from orchestrator.cli.terminal.reading import reading
from orchestrator.monitoring.times import between, duration, present, when
from orchestrator.settings import Settings
from orchestrator.store import insights


def task_lines(settings: Settings, task: str) -> list[str]:
    """Return a title, and all that is known of a task."""
    with reading(settings) as connection:
        found = insights.show_task(connection, UUID(task))
    if found is None:
        return [f"Task {task}", "It is no longer kept."]
    now = present()
    lines = [
        f"Task {found.name}",
        f"id        {found.id}",
        f"call      {call_text(found.name, found.payload, found.options)}",
        f"status    {found.status}{f' ({found.reason})' if found.reason else ''}",
        f"queue     {found.queue}, priority {found.priority}",
        f"worker    {found.worker or 'none yet'}",
        f"created   {when(found.created_at, now)}",
        f"started   {when(found.started_at, now) or 'not yet'}",
        f"took      {between(found.started_at, found.ended_at or now)}",
    ]
    if found.run_id is not None:
        lines.append(f"run       {found.run_id}")
    if found.options:
        lines.append(f"options   {data_text(found.options)}")
    if found.result is not None:
        lines.append(f"result    {short_text(stored_value(found.result, found.options))}")
    for attempt in found.attempts:
        took = between(attempt.started_at, attempt.ended_at or now)
        said = f": {attempt.error.kind}: {attempt.error.message}" if attempt.error else ""
        lines.append(f"attempt   {attempt.attempt} {attempt.outcome} after {took or 'nothing'}{said}")
    error = next((attempt.error for attempt in reversed(found.attempts) if attempt.error), found.error)
    if error is not None and error.traceback:
        lines += ["", *error.traceback.rstrip().split("\n")]
    return lines


def run_lines(settings: Settings, run: str) -> list[str]:
    """Return a title, and how far a run has come."""
    with reading(settings) as connection:
        found = insights.show_run(connection, UUID(run))
        steps = insights.list_steps(connection, UUID(run)) if found is not None else []
    if found is None:
        return [f"Run {run}", "It is no longer kept."]
    now = present()
    lines = [
        f"Run {found.name}",
        f"id        {found.id}",
        f"status    {found.status}{f' ({found.reason})' if found.reason else ''}",
        f"workflow  {found.workflow or 'none'}{f', version {found.version}' if found.version else ''}",
        f"params    {data_text(hidden().shown(insights.readable_params(found.params)))}",
        f"started   {when(found.started_at, now) or 'not yet'}",
        f"took      {between(found.started_at, found.ended_at or now)}",
        f"tasks     {found.total - found.open:,} of {found.total:,} ended, {found.failed:,} failed",
    ]
    if found.stuck:
        lines.append(f"stuck     {data_text(found.stuck)}")
    lines += ["", *(f"{step.state:<10} {step.name}" for step in steps)]
    return lines if steps else [*lines[:-1], f"open for  {duration((now - found.created_at).total_seconds())}"]
