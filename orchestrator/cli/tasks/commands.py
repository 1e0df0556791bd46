"""`orchestrator tasks`."""

from __future__ import annotations

import dataclasses
import sys
from datetime import datetime
from typing import Any
from uuid import UUID

import click
from rich.text import Text

from orchestrator.cli.tasks.progress import bar, read_progress, watch_task
from orchestrator.cli.terminal.ids import RUN, TASK, IdFormat, existing, task_argument
from orchestrator.cli.terminal.logs import color_option, print_logs
from orchestrator.cli.terminal.options import (
    certain_option,
    json_option,
    moment,
    page_options,
    status_option,
    yes_option,
)
from orchestrator.cli.terminal.output import as_json as data_json
from orchestrator.cli.terminal.output import (
    call_of,
    call_text,
    confirm,
    confirm_if_asked,
    counted,
    data_text,
    echo,
    json_text,
    print_fields,
    print_json,
    print_table,
    short_text,
    state,
    stored_value,
)
from orchestrator.cli.terminal.reading import ask_each, open_app, open_calls
from orchestrator.domain.states import ENDED_TASK_STATES, TaskState
from orchestrator.domain.tasks.task import error_text
from orchestrator.errors import NotFound
from orchestrator.monitoring.times import ago, between, present, when
from orchestrator.sdk.calls.insights import list_tasks
from orchestrator.sdk.calls.interface import Calls
from orchestrator.sdk.tasks.logs import TaskProgress
from orchestrator.store.insights import AttemptView, Lineage, TaskDetail, TaskFilter, TaskView
from orchestrator.store.insights.attempts import unbegun, why_skipped
from orchestrator.store.tasks.redrive import FailedFilter


@click.group("tasks")
def command() -> None:
    """List, watch, cancel and retry tasks.

    \b
    Example:
      orchestrator tasks list --status failed
    """


@command.command("list")
@status_option(TaskState)
@click.option("--queue", help="Only tasks of this queue.")
@click.option("--name", help="Only tasks with this full name: shop.tasks.resize.")
@click.option("--run", type=RUN, metavar="ID", help="Only tasks of this run, the oldest first.")
@click.option("--since", type=moment, metavar="TIME", help="Only ended since: 2h (ago), or 2024-01-31T09:30.")
@click.option("--until", type=moment, metavar="TIME", help="Only ended before this time.")
@click.option("--error", metavar="TEXT", help="Only if the error's type or message contains this.")
@click.option("--kind", metavar="TYPE", help="Only if the error has exactly this type.")
@click.option("--release", help="Only if a worker of this release of your code ran the last attempt.")
@click.option("--after", type=TASK, metavar="ID", help="With --run: continue after this id.")
@page_options(TASK)
@json_option
def list_(
    statuses: tuple[str, ...], limit: int, before: UUID | None, after: UUID | None, as_json: bool, **matching: Any
) -> None:
    """List tasks, open and ended, newest first. With --since, --until, --error, or only unsuccessful states: ended
    tasks, the last ended first. With --run: the oldest first.

    \b
    Example:
      orchestrator tasks list --status failed --status cancelled --queue mail
      orchestrator tasks list --error ConnectionError --since 2h
      orchestrator tasks list --run 0199b2f4-… --json
    """
    wanted = TaskFilter(statuses=tuple(TaskState(status) for status in statuses), **matching)
    _check_filter(wanted, before, after)
    with open_calls() as calls:
        tasks, more = list_tasks(calls.insights, wanted, limit=limit, before=after or before)
        short = IdFormat(calls, "task", [task.id for task in tasks])
    if as_json:
        print_json({"tasks": tasks, "next": more})
        return
    now = present()
    print_table(
        ("id", "name…", "status…", "ended" if wanted.by_end else "created", "queue…?", "took>?", "attempt>?"),
        [
            (
                short(task.id),
                task.name,
                _state(task, now),
                ago(task.ended_at if wanted.by_end else task.created_at, now),
                task.queue,
                between(task.started_at, task.ended_at or now),
                task.attempt,
            )
            for task in tasks
        ],
        empty="No task matches."
        if before or after or wanted != TaskFilter()
        else "There is no task yet. Enqueue one: orchestrator enqueue NAME",
    )
    if more:
        echo(
            f"More of them: add --after {short(more)}" if wanted.run else f"Older ones: add --before {short(more)}",
            err=True,
        )


def _check_filter(wanted: TaskFilter, before: UUID | None, after: UUID | None) -> None:
    """Refuse filter options that contradict each other."""
    if wanted.by_end and wanted.statuses and not {*ENDED_TASK_STATES} & {*wanted.statuses}:
        raise click.UsageError(
            "--since, --until and --error select tasks that have ended: they cannot be combined with an open --status."
        )
    if (before is not None and wanted.run) or (after is not None and not wanted.run):
        raise click.UsageError(
            "Use --before to continue a list; the tasks of a run, which are listed oldest first, continue with --after."
        )


@command.command()
@task_argument
@json_option
def show(task: UUID, as_json: bool) -> None:
    """Show one task: its call, progress, result, attempts and error.

    \b
    Example:
      orchestrator tasks show 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    with open_calls() as calls:
        detail = _find_task(calls, task)
        progress = read_progress(calls, task.bytes)
        lineage = _lineage(calls, task)
    if as_json:
        print_json(_document(detail) | {"progress": progress, "children": lineage.children})
    else:
        _print(detail, progress, lineage)


@command.command()
@task_argument
@json_option
def watch(task: UUID, as_json: bool) -> None:
    """Follow a task until its end, with a bar if it reports progress; exit with 1 unless it succeeds.

    \b
    Example:
      orchestrator tasks watch 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    with open_app() as app, open_calls() as calls:
        detail = _find_task(calls, task)
        try:
            ended = watch_task(app, task.bytes, detail.name, quiet=as_json)
        except KeyboardInterrupt:
            echo(f"\nThe task continues. To cancel it: orchestrator tasks cancel {task}", err=True)
            sys.exit(130)
        if as_json:
            print_json(_document(_find_task(calls, task)))
    sys.exit(0 if ended == TaskState.SUCCESS else 1)


@command.command()
@task_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the end; with --json, one document per line.")
@click.option("--attempt", type=click.IntRange(1, 2**31), metavar="NUMBER", help="Only lines of this attempt.")
@click.option("--last", type=click.IntRange(0), metavar="NUMBER", help="Only this many lines from the end.")
@color_option
@json_option
def logs(task: UUID, follow: bool, attempt: int | None, last: int | None, colour: str, as_json: bool) -> None:
    """Show what a task printed, logged and wrote with `ctx.log`, attempt by attempt.

    \b
    Example:
      orchestrator tasks logs 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 --follow
      orchestrator tasks logs 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 --attempt 2 --last 20
    """
    with open_app() as app, open_calls() as calls:
        tasks = app._client.backend.tasks
        is_open = tasks.status(task.bytes) not in ENDED_TASK_STATES
        if attempt is not None and not (follow and is_open):
            _check_attempt(_find_task(calls, task), attempt)

        def has_ended() -> bool:
            if tasks.status(task.bytes) in ENDED_TASK_STATES:
                return True
            return attempt is not None and _is_past(_find_task(calls, task), attempt)

        try:
            print_logs(
                lambda after, wait: tasks.log(task.bytes, after, wait, attempt),
                has_ended,
                follow=follow,
                as_json=as_json,
                last=last,
                colour=colour,
                with_attempts=attempt is None,
            )
        except KeyboardInterrupt:
            sys.exit(130)


def _check_attempt(task: TaskDetail, attempt: int) -> None:
    """Refuse an attempt number that the task has not reached, or that was skipped."""
    if reason := why_skipped(task.attempts, task.attempt, attempt):
        raise NotFound(f"Task {task.id} has no attempt {attempt}: attempts {reason}.")
    if attempt > task.attempt:
        attempts = counted(task.attempt, "attempt") if task.attempt else "no attempt"
        raise NotFound(f"Task {task.id} has had {attempts}: there is no attempt {attempt}.")


def _is_past(task: TaskView, attempt: int) -> bool:
    """Return whether an attempt of an open task has ended: a later one has begun or is pending."""
    return task.attempt > attempt or (task.attempt == attempt and task.status == TaskState.PENDING)


@command.command()
@click.argument("tasks", type=TASK, metavar="ID…", nargs=-1, required=True)
@certain_option
def cancel(tasks: tuple[UUID, ...], yes: bool) -> None:
    """Cancel tasks in any state. With several, it asks first.

    The leading scheduler cancels them at once; without one, the next scheduler does. A running task is interrupted.

    \b
    Example:
      orchestrator tasks cancel 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    confirm_if_asked(f"Cancel {counted(len(tasks), 'task')}?", yes=yes or len(tasks) == 1)
    ask_each(tasks, lambda app, task: app.handle(task).cancel(), "Asked to cancel task {}.")


@command.command()
@click.argument("tasks", type=TASK, metavar="[ID…]", nargs=-1)
@click.option("--queue", help="Failed tasks of this queue.")
@click.option("--name", help="Failed tasks with this full name: shop.tasks.resize.")
@click.option("--error", metavar="TEXT", help="Failed tasks whose error's type or message contains this.")
@click.option("--since", type=moment, metavar="TIME", help="Failed since: 2h (ago), or 2024-01-31T09:30.")
@click.option("--until", type=moment, metavar="TIME", help="Failed until this time.")
@click.option("--dry-run", is_flag=True, help="Only show the matching tasks.")
@yes_option
def retry(tasks: tuple[UUID, ...], dry_run: bool, yes: bool, **filters: Any) -> None:
    """Reopen failed or skipped tasks with a fresh retry budget: by id, or all failed ones that match.

    \b
    Example:
      orchestrator tasks retry 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
      orchestrator tasks retry --queue mail --error ConnectionError --since 2h
    """
    matching = FailedFilter(**filters)
    if bool(tasks) == (matching != FailedFilter()):
        raise click.UsageError("Give the ids of tasks, or select failed tasks with --queue, --name, --error, …")
    if tasks:
        ask_each(tasks, lambda app, task: app.handle(task).retry(), "Asked to retry task {}.")
        return
    count = _preview(matching)
    if dry_run or not count:
        return
    confirm(f"Retry {counted(count, 'task')}?", yes=yes)
    with open_app() as app:
        echo(f"Asked to retry {counted(app.retry_failed(**filters), 'task')}.")


def _preview(filters: FailedFilter) -> int:
    """Print the failed tasks that match, by error; return their number."""
    with open_calls() as calls:
        groups = calls.tasks.preview_retry(filters)
    print_table(
        ("tasks>", "name…", "queue…", "error…"),
        [
            (group.tasks, group.name, group.queue, error_text(group.kind, group.example).partition("\n")[0])
            for group in groups
        ],
        empty="No failed task matches.",
    )
    return sum(group.tasks for group in groups)


def _find_task(calls: Calls, task: UUID) -> TaskDetail:
    return existing(calls.insights.show_task(task), "task", task)


def _lineage(calls: Calls, task: UUID) -> Lineage:
    """Return the parent and the children of a task; none if the API's release is too old to know them."""
    try:
        return calls.insights.lineage(task)
    except NotFound:
        return Lineage(parent=None, children=[], is_part=False)


def _state(task: TaskView, now: datetime) -> Text:
    if task.status != TaskState.PENDING:
        return state(task.status, _reason(task.reason) if task.reason != task.status else "")
    if task.blockers:
        return state(task.status, f"waits for {task.blockers}")
    if task.hold:
        return state(task.status, task.hold)
    next_try = f"try {task.failures + 1}" if task.failures else ""
    return state(
        task.status, f"{next_try} {ago(task.wake_at, now) if task.wake_at and task.wake_at > now else ''}".strip()
    )


def _reason(reason: str | None) -> str:
    """Return why a task did not succeed; the type of an exception without its module."""
    return (reason or "") if " " in (reason or "") else (reason or "").rpartition(".")[2]


def _document(detail: TaskDetail) -> dict[str, Any]:
    """Return the task as JSON data, with the decoded `args` and `kwargs` in place of the payload."""
    document = {field.name: getattr(detail, field.name) for field in dataclasses.fields(detail)}
    arguments, keywords = call_of(document.pop("payload"), detail.options)
    result = None if detail.result is None else data_json(stored_value(detail.result, detail.options))
    return document | {"args": data_json(arguments), "kwargs": data_json(keywords), "result": result}


def _print(detail: TaskDetail, progress: TaskProgress | None, lineage: Lineage) -> None:
    now = present()
    print_fields(
        {
            "task": str(detail.id),
            "call": call_text(detail.name, detail.payload, detail.options),
            "status": _state(detail, now),
            "waits for": detail.waits_for,
            "progress": None if progress is None or detail.status in ENDED_TASK_STATES else bar(progress),
            "result": None if detail.result is None else short_text(stored_value(detail.result, detail.options)),
            "queue": detail.queue + (f", priority {detail.priority}" if detail.priority else ""),
            "options": data_text(detail.options) if detail.options else None,
            "run": f"{detail.run_id}, position {detail.position}" if detail.run_id else None,
            "enqueued by": None if detail.parent_id is None else _parent(detail.parent_id, lineage),
            "worker": detail.worker,
            "created": when(detail.created_at, now),
            "started": when(detail.started_at, now),
            "ended": when(detail.ended_at, now),
            "took": between(detail.started_at, detail.ended_at),
        }
    )
    if detail.attempts:
        echo()
        print_table(
            ("attempt>", "outcome", "release…?", "worker…?", "started?", "took>?", "error…"),
            [
                (
                    attempt.attempt,
                    state(attempt.outcome),
                    attempt.release,
                    attempt.worker,
                    ago(attempt.started_at, now),
                    between(attempt.started_at, attempt.ended_at or now),
                    _error(attempt),
                )
                for attempt in detail.attempts
            ],
        )
    for number, why in unbegun(detail.attempts, detail.attempt).items():
        echo(f"Attempt {number} {why}." if why.startswith("was") else f"Attempts {why}.")
    if lineage.children:
        echo(f"\nTasks that it enqueued{', the first of them' if lineage.is_part else ''}:")
        print_table(
            ("id", "kind", "name…", "status", "queue…?", "created?"),
            [
                (str(child.id), child.kind, child.name, state(child.status), child.queue, ago(child.created_at, now))
                for child in lineage.children
            ],
        )
    failed = next((attempt.error for attempt in reversed(detail.attempts) if attempt.error), detail.error)
    if failed and detail.status != TaskState.CANCELLED:
        echo(f"\nLast error: {error_text(failed.kind, failed.message)}")
        if failed.data:
            echo(f"Its data: {json_text(failed.data)}")
        if failed.traceback:
            echo(f"\nRemote traceback:\n{failed.traceback.rstrip()}")


def _parent(task: UUID, lineage: Lineage) -> str:
    return f"{task}, {lineage.parent.name}" if lineage.parent is not None else f"{task}, which is no longer kept"


def _error(attempt: AttemptView) -> str:
    return error_text(attempt.error.kind, attempt.error.message).partition("\n")[0] if attempt.error else ""
