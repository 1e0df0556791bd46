"""Runs of any kind: list, show and rerun them, with their steps, outputs and logs."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import LARGEST_PAGE, PAGE, Api, Page, filter_fields, made_from
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import RUN, WITHIN
from orchestrator.api.redacting import error_shown, shown
from orchestrator.api.routes.tasks import Log, Stored, WaitQuery, shown_log, stored_at
from orchestrator.api.routes.workflows import Started
from orchestrator.domain.access import KeyScope
from orchestrator.domain.plain import whole
from orchestrator.domain.redaction import Redaction
from orchestrator.errors import NotFound
from orchestrator.references import RESULT, Reference
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.display import as_json, call_of, stored_value
from orchestrator.sdk.waiting.steps import Steps as Waiting
from orchestrator.store import insights
from orchestrator.store.insights import CodeView, ErrorView, OpenView, RunDetail, RunFilter, RunView, StepView
from orchestrator.time_limits import TimeLimit

routes = Routes("runs", "/api/v1/runs")

LARGEST_OUTPUTS = 16_000_000
"""Bytes from the payload store that one answer has of all outputs together: more is read task by task."""


class RunQuery(filter_fields(RunFilter, "within", "part")):  # type: ignore[misc]
    """Which runs to list, and how many."""

    cursor: UUID | None = None
    """`next` of the page before."""
    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE)] = PAGE


class CodeAnswer(msgspec.Struct, frozen=True):
    """Details of a run of code beside its counters."""

    args: list[Any]
    kwargs: dict[str, Any]
    result: Any
    error: ErrorView | None
    state: dict[str, Any]
    """The state that its code has set for people."""
    turn: str | None
    """Its code is `waiting`, `ready` for a worker, `unknown` to all workers, or `running`; null when it has ended."""
    places: list[str]
    """Where in the code it waits."""
    signals: list[str]
    """Names of signals that it waits for."""
    updates: list[str]
    """Names of updates that have no answer yet."""
    waits_for: list[OpenView]
    """The first of what it has asked for that has not ended."""
    more: bool
    """There is more of that."""
    handlers: list[tuple[str, str, list[str]]] = []
    """What its code answers: `query`, `update` or `signal`, the name, and the names of the arguments."""
    result_stored: Stored | None = None
    """Where the result is, if it is too large for this answer; then `result` is null."""
    args_stored: Stored | None = None
    """Where the arguments are, if they are too large for this answer; then `args` and `kwargs` are empty."""
    unseen: int = 0
    """How many signals and updates its code has not been shown; a thousand stands for more."""


class RunAnswer(msgspec.Struct, frozen=True):
    """All that is known of one run but its tasks."""

    run: RunDetail
    steps: list[StepView]
    """Of a run of a definition."""
    code: CodeAnswer | None
    """Of a run of a workflow as code: what it was given, what it waits for, what came of it."""


class Steps(msgspec.Struct, frozen=True):
    """The steps of one run, in order."""

    steps: list[StepView]


class Outputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outputs of the steps of a run, by name."""

    outputs: dict[str, Any]
    stored: dict[str, list[Stored]] = {}
    """By step, where values are that are too large for this answer; null stands for them in `outputs`."""


class Rerun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run is started over."""

    from_step: str | None = None
    """Keep what is not below this step."""


def list_page(api: Api, query: RunQuery, key_scope: KeyScope, *, may_lag: bool = False) -> Page[RunView]:
    """Return a page of runs; one that `may_lag` comes from the read replica."""
    wanted = made_from(RunFilter, query, within=key_scope.workflows)
    read = api.read_list if may_lag else api.read
    return Page(*read(insights.page_of_runs, wanted, limit=query.limit, before=query.cursor))


def find(api: Api, id: UUID) -> RunAnswer:
    """Return a run with all that belongs to it, or say that there is none."""
    with api.reading() as connection:
        run = insights.show_run(connection, id)
        if run is None:
            raise NotFound.by_id("run", str(id))
        code = insights.show_code(connection, id) if run.code else None
        steps = insights.list_steps(connection, id) if run.workflow and not run.code else []
    run = shown(api, dataclasses.replace(run, params=insights.readable_params(run.params)))
    return RunAnswer(run, steps, None if code is None else _of_code(id, code, api.redaction_of_run(id)))


def _of_code(id: UUID, code: CodeView, hidden: Redaction) -> CodeAnswer:
    given, returned = stored_at(id, code.payload, "arguments"), stored_at(id, code.result, "result")
    arguments, keywords = ([], {}) if given else hidden.call_shown(*call_of(code.payload))
    return made_from(
        CodeAnswer,
        code,
        args=as_json(arguments),
        kwargs=as_json(keywords),
        result=None if code.result is None or returned else as_json(hidden.shown(stored_value(code.result))),
        error=error_shown(hidden, code.error),
        state=as_json(hidden.shown({name: stored_value(value) for name, value in code.state.items()})),
        result_stored=returned,
        args_stored=given,
    )


@routes.get("", about=WITHIN)
def list_runs(api: Api, query: RunQuery, key_scope: KeyScope) -> Page[RunView]:
    """List runs, newest first."""
    return list_page(api, query, key_scope, may_lag=True)


@routes.get("/{id}", about=RUN)
def show_run(api: Api, id: UUID, query: WaitQuery) -> RunAnswer | Waiting[RunAnswer]:
    """Show all that is known of one run but its tasks, which `/tasks?run=` lists.

    With `wait`, it is answered as soon as the run has ended, or after so many seconds.
    """
    return _when_ended(api, id, query.wait) if query.wait else find(api, id)


def _when_ended(api: Api, id: UUID, seconds: float) -> Waiting[RunAnswer]:
    yield from api.backend.runs.wait(id.bytes, TimeLimit(seconds))
    return find(api, id)


@routes.get("/{id}/steps", about=RUN)
def show_steps(api: Api, id: UUID) -> Steps:
    """Show the steps of a run of a definition."""
    return Steps(find(api, id).steps)


@routes.get("/{id}/outputs", about=RUN, is_expensive=True)
def show_outputs(api: Api, id: UUID) -> Outputs:
    """Show what the steps of a run of a definition came to; of what is very large, where it is."""
    api.backend.runs.progress(id.bytes)  # there is such a run
    outputs, left = api.backend.runs.outputs_within(id.bytes, LARGEST_OUTPUTS)
    stored = {step: [_where(reference) for reference in some] for step, some in left.items()}
    return Outputs(api.redaction_of_run(id).shown(outputs), stored)


def _where(reference: Reference) -> Stored:
    what = "result" if reference.what == RESULT else "arguments"
    return Stored(reference.size, f"/api/v1/tasks/{UUID(bytes=reference.task)}/{what}")


class RunLogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From which place on lines are shown."""

    cursor: Annotated[str, Meta(pattern=whole("[0-9]{1,19}-[0-9]{1,9}"))] = ""


@routes.get("/{id}/logs", about=RUN)
def run_log(api: Api, id: UUID, query: RunLogQuery) -> Log:
    """Show what the tasks of a run said, printed and logged: a page of it, the oldest first."""
    api.backend.runs.progress(id.bytes)  # there is such a run
    return shown_log(api.backend.runs.log(id.bytes, query.cursor))


@routes.post("/{id}/rerun", about=RUN, status=201, examples=[{"from_step": "load"}], is_expensive=True)
def rerun(api: Api, id: UUID, body: Rerun) -> Started:
    """Start a run over, with the same version and parameters."""
    api.backend.runs.progress(id.bytes)  # there is such a run
    new = new_id()
    api.backend.runs.rerun(id.bytes, new, body.from_step)
    return Started(UUID(bytes=new))
