"""Runs of any kind: list, show and rerun them, with their steps, outputs and logs."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import MAX_PAGE_SIZE, PAGE_SIZE, Api, Page, build_from, filter_fields
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import RUN, WITHIN
from orchestrator.api.redacting import redacted, redacted_error
from orchestrator.api.routes.tasks import Log, Stored, WaitQuery, log_answer, stored_at
from orchestrator.api.routes.workflows import Started
from orchestrator.domain.access import KeyScope
from orchestrator.domain.plain import anchored
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

MAX_OUTPUTS = 16_000_000
"""Bytes from the payload store in one response with all outputs; larger outputs are read task by task."""


class RunQuery(filter_fields(RunFilter, "within", "part")):  # type: ignore[misc]
    """Which runs to list, and how many."""

    cursor: UUID | None = None
    """`next` of the previous page."""
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE


class CodeAnswer(msgspec.Struct, frozen=True):
    """Details of a run of a workflow as code."""

    args: list[Any]
    kwargs: dict[str, Any]
    result: Any
    error: ErrorView | None
    state: dict[str, Any]
    """The state that the code has published for people."""
    turn: str | None
    """The code is `waiting`, `ready` for a worker, `unknown` to all workers, or `running`; null once the run has
    ended."""
    places: list[str]
    """The places in the code at which it waits."""
    signals: list[str]
    """The names of signals that the code waits for."""
    updates: list[str]
    """The names of updates without an answer."""
    waits_for: list[OpenView]
    """The first tasks, timers and other items that the code has started and that have not ended."""
    more: bool
    """Whether there are more of them."""
    handlers: list[tuple[str, str, list[str]]] = []
    """The handlers of the code: `query`, `update` or `signal`, the name, and the names of the arguments."""
    result_stored: Stored | None = None
    """The location of a result that is too large for this response; then `result` is null."""
    args_stored: Stored | None = None
    """The location of arguments that are too large for this response; then `args` and `kwargs` are empty."""
    unseen: int = 0
    """The number of signals and updates that the code has not received; a thousand stands for more."""


class RunAnswer(msgspec.Struct, frozen=True):
    """A run with its details, without its tasks."""

    run: RunDetail
    steps: list[StepView]
    code: CodeAnswer | None
    """The details of a run of a workflow as code."""


class Steps(msgspec.Struct, frozen=True):
    """The steps of one run, in order."""

    steps: list[StepView]


class Outputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outputs of the steps of a run, by name."""

    outputs: dict[str, Any]
    stored: dict[str, list[Stored]] = {}
    """By step, the locations of values that are too large for this response; they are null in `outputs`."""


class Rerun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to rerun a run."""

    from_step: str | None = None
    """Keep the results of steps that do not depend on this step."""


def list_page(api: Api, query: RunQuery, key_scope: KeyScope, *, may_lag: bool = False) -> Page[RunView]:
    """Return a page of runs. With `may_lag` it comes from the read replica."""
    run_filter = build_from(RunFilter, query, within=key_scope.workflows)
    read = api.read_list if may_lag else api.read
    return Page(*read(insights.page_of_runs, run_filter, limit=query.limit, before=query.cursor))


def find(api: Api, id: UUID) -> RunAnswer:
    """Return a run with its details; raise NotFound if there is none."""
    with api.reading() as connection:
        run = insights.show_run(connection, id)
        if run is None:
            raise NotFound.by_id("run", str(id))
        code = insights.show_code(connection, id) if run.code else None
        steps = insights.list_steps(connection, id) if run.workflow and not run.code else []
    run = redacted(api, dataclasses.replace(run, params=insights.readable_params(run.params)))
    return RunAnswer(run, steps, None if code is None else _of_code(id, code, api.redaction_of_run(id)))


def _of_code(id: UUID, code: CodeView, hidden: Redaction) -> CodeAnswer:
    args_stored, result_stored = stored_at(id, code.payload, "arguments"), stored_at(id, code.result, "result")
    arguments, keywords = ([], {}) if args_stored else hidden.redacted_call(*call_of(code.payload))
    return build_from(
        CodeAnswer,
        code,
        args=as_json(arguments),
        kwargs=as_json(keywords),
        result=None if code.result is None or result_stored else as_json(hidden.redacted(stored_value(code.result))),
        error=redacted_error(hidden, code.error),
        state=as_json(hidden.redacted({name: stored_value(value) for name, value in code.state.items()})),
        result_stored=result_stored,
        args_stored=args_stored,
    )


@routes.get("", about=WITHIN)
def list_runs(api: Api, query: RunQuery, key_scope: KeyScope) -> Page[RunView]:
    """List runs, newest first."""
    return list_page(api, query, key_scope, may_lag=True)


@routes.get("/{id}", about=RUN)
def show_run(api: Api, id: UUID, query: WaitQuery) -> RunAnswer | Waiting[RunAnswer]:
    """Show a run with its details. Its tasks are listed by `/tasks?run=`.

    With `wait`, the response is sent once the run has ended, or after this many seconds.
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
    """Show the outputs of the steps of a run of a definition; for very large outputs, their location."""
    api.backend.runs.progress(id.bytes)  # raises NotFound if there is no such run
    outputs, too_large = api.backend.runs.outputs_within(id.bytes, MAX_OUTPUTS)
    stored = {step: [_location(reference) for reference in references] for step, references in too_large.items()}
    return Outputs(api.redaction_of_run(id).redacted(outputs), stored)


def _location(reference: Reference) -> Stored:
    what = "result" if reference.what == RESULT else "arguments"
    return Stored(reference.size, f"/api/v1/tasks/{UUID(bytes=reference.task)}/{what}")


class RunLogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cursor after which lines are listed."""

    cursor: Annotated[str, Meta(pattern=anchored("[0-9]{1,19}-[0-9]{1,9}"))] = ""


@routes.get("/{id}/logs", about=RUN)
def run_log(api: Api, id: UUID, query: RunLogQuery) -> Log:
    """Show what the tasks of a run printed and logged: a page, the oldest first."""
    api.backend.runs.progress(id.bytes)  # raises NotFound if there is no such run
    return log_answer(api.backend.runs.log(id.bytes, query.cursor))


@routes.post("/{id}/rerun", about=RUN, status=201, examples=[{"from_step": "load"}], is_expensive=True)
def rerun(api: Api, id: UUID, body: Rerun) -> Started:
    """Start a new run with the same version and parameters."""
    api.backend.runs.progress(id.bytes)  # raises NotFound if there is no such run
    new = new_id()
    api.backend.runs.rerun(id.bytes, new, body.from_step)
    return Started(UUID(bytes=new))
