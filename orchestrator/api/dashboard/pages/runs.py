"""Runs of any kind: lists, graphs, timelines, resets, and bulk actions."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.arguments import Argument, find_runs_by_argument
from orchestrator.api.context import MAX_INT, Api, Page, build_from
from orchestrator.api.dashboard.gantt import gantt_of_events, gantt_of_steps
from orchestrator.api.dashboard.graph import critical_path, ends_of, fold, urgency
from orchestrator.api.dashboard.layout import draw
from orchestrator.api.dashboard.list_notes import (
    Span,
    active_filters,
    check_times,
    progress_of,
    progress_of_runs,
    run_notes,
    suggest_run_filters,
    task_calls,
    task_errors,
    within_span,
)
from orchestrator.api.dashboard.pages import checked_actions
from orchestrator.api.dashboard.pages import flows as flow_pages
from orchestrator.api.dashboard.pages.tasks import IN_ANOTHER_STATE, check_marked, outcome_of_marked
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages, redirect, visitor
from orchestrator.api.dashboard.story import Sentence, story
from orchestrator.api.dashboard.words import run_name, with_query
from orchestrator.api.key_scope import RUN, WITHIN, check_runs, is_within
from orchestrator.api.problems import invalid, refused
from orchestrator.api.routes import code as code_routes
from orchestrator.api.routes import runs as run_routes
from orchestrator.api.routes import tasks as task_routes
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.code import attributes
from orchestrator.domain.code.history import PromiseCreated
from orchestrator.domain.code.resets import allowed
from orchestrator.domain.states import ENDED_RUN_STATES, RunState, ShownRunState
from orchestrator.errors import InvalidWorkflow, WrongState
from orchestrator.monitoring.times import present
from orchestrator.sdk.code.recording import Recording
from orchestrator.store import audit
from orchestrator.store.inbox import RequestKind
from orchestrator.store.insights import (
    Relative,
    RunDetail,
    RunFilter,
    RunSort,
    RunView,
    StepView,
    find_failed_task,
    find_relative,
    find_step_task,
    first_attempts,
    limited_until,
    list_runs,
    page_of_runs,
    runs_of_code,
    seconds_of_steps,
)
from orchestrator.store.insights.approvals import schema_of

routes, actions = pages("/ui/runs"), page_actions("/ui/runs")

_MAX_TASKS = 50
_MAX_EVENTS = 300
_FIRST_STEPS, _MAX_STEPS, _MAX_ERRORS = 25, 80, 5
"""Rows on the first page of a large run's table, rows of its other pages, and errors that are shown."""


class RunsQuery(run_routes.RunQuery):
    """Which runs to list, and from which period."""

    span: Span = ""
    sort: RunSort = "-when"
    argument: Argument = ""
    """An argument or parameter with this value, or a named one: `customer=42`."""

    def __post_init__(self) -> None:
        """Reject invalid times and attributes; in the API, the list rejects attributes."""
        check_times(self)
        try:
            attributes.parse_filters(self.attributes)
        except InvalidWorkflow as error:
            raise ValueError(str(error)) from error


@routes.get("", about=WITHIN)
def show_runs(api: Api, query: RunsQuery, key_scope: KeyScope) -> Response:
    """List runs."""
    filters, query = active_filters(query), within_span(query)
    run_filter = build_from(RunFilter, query, within=key_scope.workflows)
    limits: Any = {"limit": query.limit, "before": query.cursor, "sort": query.sort}
    if query.argument:
        found = Page(*find_runs_by_argument(api, run_filter, query.argument, **limits))
    else:
        found = Page(*api.read_list(list_runs, run_filter, **limits))
    notes, progress = run_notes(api, found.items), progress_of_runs(api, found.items)
    near = [] if found.items or query.cursor else suggest_run_filters(api, query.workflow, key_scope)
    return page(
        "runs.html",
        query=query,
        asked=filters,
        found=found,
        near=near,
        texts=attributes.text_ranges(query.attributes),
        states=list(ShownRunState),
        notes=notes,
        done=progress,
    )


class StepsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which groups of a large graph are expanded, and which of its steps are listed."""

    open: Annotated[tuple[str, ...], Meta(max_length=20)] = ()
    state: Literal["", "waiting", "open", "success", "failed", "skipped", "cancelled"] = ""
    """The state of the listed steps."""
    start: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """The index of the first step in the table."""
    step: str = ""
    """Redirect to the task of this step."""


@routes.get("/{id}", about=RUN)
def show_run(api: Api, id: UUID, query: StepsQuery) -> Response:
    """Show one run."""
    key_scope = visitor().key_scope
    found = run_routes.find(api, id)
    if query.step:
        return _go_to_step(api, id, found.steps, query.step)
    children = run_routes.list_page(api, run_routes.RunQuery(parent=id, limit=_MAX_TASKS), key_scope)
    values: dict[str, Any] = {"found": found, "run": found.run, "children": children.items, "more": children.next}
    values["notes"] = run_notes(api, children.items)
    values["origin"] = api.read(audit.origin, id, found.run.created_at)
    values["before"] = before = run_before(api, found.run, key_scope)
    values["after"] = run_before(api, found.run, key_scope, "when") if found.run.ended_at and not before else None
    values["starter"] = _starter(api, found.run.parent_task, key_scope)
    if found.code is not None:
        return page("run_code.html", **values, **_of_code(api, found.run))
    if found.run.flow:
        return page("run_flow.html", **values, **flow_pages.of_run(api, id))
    if found.steps:
        return page("run_steps.html", **values, **_of_steps(api, found.run, found.steps, query, before))
    tasks = task_routes.list_tasks(api, task_routes.TaskQuery(run=id, limit=_MAX_TASKS), key_scope)
    done = progress_of(api, tasks.items)
    calls, errors = task_calls(api, tasks.items), task_errors(api, tasks.items)
    return page(
        "run_many.html", **values, tasks=tasks.items, more_tasks=tasks.next, done=done, calls=calls, errors=errors
    )


def _go_to_step(api: Api, run: UUID, steps: list[StepView], name: str) -> Response:
    """Redirect to the task of a step: in a fan-out to the first failed one, or to all tasks of the run."""
    step = next((candidate for candidate in steps if candidate.name == name), None)
    if step is None:
        raise refused(404, "There is no such step", f"Run {run} has no step {name!r:.100}.")
    failed = api.read(find_failed_task, run, name) if step.failed else None
    task = failed or (None if step.fan_out else api.read(find_step_task, run, name, 0))
    if task is None and step.state == "skipped":
        raise refused(404, "The step has no task", f"Step {name!r:.100} of run {run} was skipped.")
    return redirect(f"/ui/tasks/{task}" if task else f"/ui/tasks?run={run}")


def _starter(api: Api, task: UUID | None, key_scope: KeyScope) -> Relative | None:
    """Return the task that started a run, if it still exists and is within the key scope."""
    if task is None:
        return None
    found = api.read(find_relative, task)
    return found if found is not None and is_within(key_scope, found) else None


def _of_steps(
    api: Api, run: RunDetail, steps: list[StepView], query: StepsQuery, before: UUID | None
) -> dict[str, Any]:
    critical = critical_path(steps)
    folded = fold(steps, critical, query.open)
    is_large = len(steps) > _FIRST_STEPS + 5
    states = Counter(step.state for step in sorted(steps, key=urgency))
    matching = [step for step in steps if query.state in ("", step.state)]
    end = query.start + (_MAX_STEPS if query.start else _FIRST_STEPS) if is_large else len(steps)
    listed = sorted(matching, key=urgency)[query.start : end] if is_large else matching
    failed = [step for step in steps if step.error is not None]
    drawn = [step.name for step in folded.steps if step.kind != "group"]
    limited = api.read(limited_until, run.id, [folded.firsts.get(step.name, step).name for step in folded.steps])
    ends = ends_of(steps)
    return {
        "graph": draw(folded.steps, folded.critical, folded.frames),
        "groups": folded.groups,
        "query": query,
        "listed": listed,
        "next": end if end < len(matching) else None,
        "states": states,
        "gantt": gantt_of_steps(
            *(run, folded.steps, folded.critical, present(), limited, folded.firsts, ends),
            tried=api.read(first_attempts, run.id, drawn),
        ),
        "critical": critical,
        "earlier": api.read(seconds_of_steps, before, [step.name for step in listed]) if before else {},
        "failed": failed[:_MAX_ERRORS],
        "more_failed": len(failed[_MAX_ERRORS:]),
    }


def run_before(api: Api, run: RunDetail, key_scope: KeyScope, sort: RunSort = "-when") -> UUID | None:
    """Return the last successful run of the same workflow before this one; with `sort="when"`, the first after it."""
    if not run.workflow:
        return None
    query = run_routes.RunQuery(workflow=run.workflow, statuses=(ShownRunState.SUCCESS,))
    run_filter = build_from(RunFilter, query, within=key_scope.workflows)
    found, _ = api.read(page_of_runs, run_filter, limit=1, before=run.id, sort=sort)
    return found[0].id if found else None


def events_of(api: Api, run: UUID) -> tuple[Recording, list[dict[str, Any]]]:
    """Return the history of a run of code, and its events, redacted for display."""
    recording = api.backend.code.history(run.bytes)
    return recording, msgspec.json.decode(recording.to_json(api.redaction_of_run(run)))["events"]


def _of_code(api: Api, run: RunDetail) -> dict[str, Any]:
    recording, events = events_of(api, run.id)
    return {
        "story": story(events[-_MAX_EVENTS:]),
        "left_out": max(0, len(events) - _MAX_EVENTS),
        "gantt": gantt_of_events(run, events, present()),
        "resettable": frozenset(allowed(recording.events)),
        "schemas": {
            UUID(bytes=event.what.id): schema_of(event.what.schema)
            for event in recording.events
            if isinstance(event.what, PromiseCreated)
        },
    }


class ResetQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Up to which event the run would be repeated."""

    to: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


@routes.get("/{id}/reset", about=RUN, scope=Scope.OPERATE)
def preview_reset(api: Api, id: UUID, query: ResetQuery) -> Response:
    """Preview a reset."""
    run = run_routes.find(api, id).run
    if query.to is None:
        return _reset_page(run)
    try:
        lines = code_routes.preview_reset(api, id, code_routes.ResetQuery(query.to)).lines
    except WrongState as error:
        return _reset_page(run, query.to, wrong=str(error), status=409)
    return _reset_page(run, query.to, lines, _sentence(api, id, query.to))


def _reset_page(
    run: RunDetail,
    to: int | None = None,
    lines: list[code_routes.ResetLine] | None = None,
    event: Sentence | None = None,
    wrong: str = "",
    status: int = 200,
) -> Response:
    return page("reset.html", status, run=run, to=to, lines=lines, event=event, wrong=wrong)


def _sentence(api: Api, id: UUID, number: int) -> Sentence | None:
    """Return the sentence of the last event that a reset would keep; None if it has none."""
    return next((one for one in story(events_of(api, id)[1][:number]) if one.number == number), None)


MAX_AT_ONCE = 500
"""Runs that one form acts on."""
_MAX_PAGES = 5
"""Pages of the list, each of some thousand rows, that a preview reads."""
_Act = Literal["cancel", "retry", "delete"]


@routes.get("/cancel", about=WITHIN, scope=Scope.OPERATE)
def preview_cancel(api: Api, query: RunsQuery, key_scope: KeyScope) -> Response:
    """Preview which open runs would be cancelled."""
    return _preview(api, query, key_scope, "cancel")


@routes.get("/retry", about=WITHIN, scope=Scope.OPERATE)
def preview_retry(api: Api, query: RunsQuery, key_scope: KeyScope) -> Response:
    """Preview which failed or stuck runs would be retried."""
    return _preview(api, query, key_scope, "retry")


@routes.get("/delete", about=WITHIN, scope=Scope.OPERATE)
def preview_delete(api: Api, query: RunsQuery, key_scope: KeyScope) -> Response:
    """Preview which ended runs would be deleted."""
    return _preview(api, query, key_scope, "delete")


def _preview(api: Api, query: RunsQuery, key_scope: KeyScope, act: _Act) -> Response:
    """Show the matching runs by workflow and state. The form lists each id, so that the action affects no other run."""
    if query.argument:
        raise invalid("The filter by argument may not find every run: select the runs in the list instead.")
    selected: list[RunView] = []
    cursor, is_part = None, False
    if filters := {name: value for name, value in active_filters(query).items() if name != "sort"}:
        page_query = msgspec.structs.replace(within_span(query), limit=MAX_AT_ONCE)
        for _ in range(_MAX_PAGES):
            found = run_routes.list_page(api, msgspec.structs.replace(page_query, cursor=cursor), key_scope)
            selected += _applicable(api, act, found.items)
            cursor = found.next
            if cursor is None or len(selected) >= MAX_AT_ONCE:
                break
        is_part = cursor is not None or len(selected) > MAX_AT_ONCE
        selected = selected[:MAX_AT_ONCE]
    groups = Counter((run_name(run) or "many tasks", _state(run)) for run in selected).most_common()
    back = with_query("/ui/runs", active_filters(query))
    return page("bulk_runs.html", act=act, asked=filters, back=back, groups=groups, chosen=selected, is_part=is_part)


def _applicable(api: Api, act: _Act, runs: list[RunView]) -> list[RunView]:
    """Return the runs that an action applies to. Of runs of code, only stuck ones can be retried."""
    if act == "cancel":
        return [run for run in runs if run.status not in ENDED_RUN_STATES and not run.cancelling]
    if act == "delete":
        return [run for run in runs if run.status in ENDED_RUN_STATES and run.parent_run is None]
    failed = [run.id for run in runs if run.status == RunState.FAILED]
    of_code = api.read(runs_of_code, [id.bytes for id in failed])
    return [run for run in runs if (run.id in failed and run.id not in of_code) or _state(run) == "stuck"]


def _state(run: RunView) -> str:
    return "stuck" if run.stuck and run.ended_at is None else run.status


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selected runs."""

    id: Annotated[list[checked_actions.Marked], Meta(max_length=MAX_AT_ONCE)] = []


@actions.post("/cancel-chosen", about=WITHIN)
def cancel_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Cancel the selected runs."""
    return _request_for_all(api, body.id, key_scope, RequestKind.CANCEL_RUN, "being cancelled")


@actions.post("/retry-chosen", about=WITHIN)
def retry_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Retry the selected runs."""
    why = f"{IN_ANOTHER_STATE}, or are failed runs of code, which can only be rerun"
    return _request_for_all(api, body.id, key_scope, RequestKind.RETRY_RUN, "being retried", why)


@actions.post("/delete-chosen", about=WITHIN)
def delete_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Delete the selected runs."""
    return _request_for_all(api, body.id, key_scope, RequestKind.DELETE_RUN, "being deleted")


def _request_for_all(
    api: Api, marked: list[str], key_scope: KeyScope, kind: RequestKind, done: str, why: str = IN_ANOTHER_STATE
) -> Note:
    """Store a request for each selected run within the key scope. Runs that have changed since are skipped."""
    check_marked(marked, "runs")
    ids, versions = checked_actions.split(marked)
    if key_scope.is_bound:
        check_runs(api, key_scope, set(ids))
    requested = api.backend.ask_all(kind, [id.bytes for id in ids], versions)
    return outcome_of_marked(len(requested), len(ids), "runs", done, why)
