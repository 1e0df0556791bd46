"""Workflow definitions: validate, apply, compare and start them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.bodies import MAX_BODY
from orchestrator.api.context import MAX_INT, MAX_PAGE_SIZE, PAGE_SIZE, Api, Done
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import NOTHING, WITHIN, WORKFLOW, check_definition, check_queue, check_workflow
from orchestrator.api.problems import invalid, refused
from orchestrator.domain import redaction
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.code.history import RunStarted
from orchestrator.domain.dag.definition import Condition, Definition, content_hash
from orchestrator.errors import InvalidWorkflow, WrongState
from orchestrator.sdk.checks import check_label, check_name, check_tags
from orchestrator.sdk.dag import definitions, document
from orchestrator.sdk.dag.registered import with_redaction
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE
from orchestrator.sdk.values.payload import encode_call
from orchestrator.store import insights
from orchestrator.store.dag import workflows
from orchestrator.store.insights import CodeStart, CodeWorkflowView

routes = Routes("workflows", "/api/v1/workflows")

_MAX_SECONDS = 100 * 365 * 86_400.0
"""The longest duration, in seconds."""

_EXAMPLE = {
    "name": "nightly",
    "tasks": {"fetch": {"task": "etl.fetch"}, "load": {"task": "etl.load", "depends_on": ["fetch"]}},
}


class WorkflowSummary(msgspec.Struct, frozen=True):
    """The newest version of one workflow."""

    name: str
    version: int
    description: str
    steps: list[str]
    params: list[str]
    created_at: datetime


class Workflows(msgspec.Struct, frozen=True):
    """Workflows: definitions, and code that live workers have or that has open runs."""

    workflows: list[WorkflowSummary]
    code: list[CodeWorkflowView]


class WorkflowAnswer(msgspec.Struct, frozen=True):
    """One version of a workflow."""

    name: str
    version: int
    hash: str
    created_at: datetime
    definition: dict[str, Any]
    """The definition, as in a file."""


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow: as data, or as YAML or JSON text."""

    definition: dict[str, Any] | None = None
    text: str | None = None


class Applied(msgspec.Struct, frozen=True):
    """A stored definition."""

    name: str
    version: int
    new: bool
    """Whether a new version was stored; an unchanged definition keeps its version."""
    hash: str
    """The hash of the definition; the `ETag`."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether a definition can be applied."""

    valid: bool
    name: str | None
    problems: list[str]


class Difference(msgspec.Struct, frozen=True):
    """The changes that applying a definition would make."""

    changed: bool
    version: int | None
    """The stored version; null if there is none."""
    stored: str
    given: str


class VersionQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which version; the newest by default."""

    version: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


class VersionsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which versions to list."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE
    cursor: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """`next` of the previous page."""


class Versions(msgspec.Struct, frozen=True):
    """Versions of a workflow, newest first."""

    items: list[workflows.Version]
    next: int | None
    """Pass it as `cursor` to get the next page; null on the last one."""


class NewRunOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to start a run; all but `params`, `key` and `tags` is for workflows as code only."""

    params: dict[str, Any] = {}
    """The parameters; for a workflow as code, the same as `kwargs`."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    key: str | None = None
    """The same key starts one run, however often the request is sent."""
    tags: list[str] = []
    queue: str | None = None
    """The queue of the turn tasks; by default that of the last run, or one whose workers have the workflow."""
    timeout: Annotated[float, Meta(gt=0, le=_MAX_SECONDS)] | None = None
    """Seconds that the run may take."""
    pinned: bool = False
    """Pin the run to the version that is newest now."""


class Started(msgspec.Struct, frozen=True):
    """A started run."""

    id: UUID


def read_definition(document: Document) -> Definition:
    """Parse a definition; raise InvalidWorkflow for its mistakes."""
    if (document.definition is None) == (document.text is None):
        raise InvalidWorkflow("Give either `definition`, as data, or `text`, as in a file.")
    if document.text is not None:
        return definitions.loads(document.text)
    return definitions.from_data(document.definition)


def answer(stored: workflows.Stored) -> WorkflowAnswer:
    return WorkflowAnswer(
        stored.name, stored.version, stored.hash, stored.created_at, document.to_data(stored.definition)
    )


def find(api: Api, name: str, version: int | None = None) -> workflows.Stored:
    """Return a version of a workflow; raise NotFound if there is none."""
    stored_workflows = api.backend.workflows
    return stored_workflows.latest(name) if version is None else stored_workflows.read(name, version)


def start(
    api: Api, name: str, request: NewRunOf, key: str | None, key_scope: KeyScope, fire_time: str | None = None
) -> UUID:
    """Start a run of the newest version of a workflow: a definition, or otherwise code.

    `fire_time` is the scheduled time that a run of a definition is for, if not now.
    """
    chosen_key = request.key or key
    key = None if chosen_key is None else check_label("key", chosen_key)
    tags = check_tags(request.tags)
    with api.reading() as connection:
        is_data = workflows.latest(connection, name) is not None
        code = None if is_data else insights.find_code_start(connection, name, DEFAULT_QUEUE)
    if code is not None:
        return _start_code(api, name, request, code, key_scope, key, tags)
    if is_data and (request.args or request.kwargs or request.queue or request.timeout or request.pinned):
        raise invalid(f"Workflow {name!r} is a definition: its runs accept only `params`, `key` and `tags`.")
    run = api.backend.workflows.start(name, request.params, new_id(), key=key, tags=tags, fire_time=fire_time)
    return UUID(bytes=run)


def _start_code(
    api: Api, name: str, request: NewRunOf, code: CodeStart, key_scope: KeyScope, key: str | None, tags: tuple[str, ...]
) -> UUID:
    """Start a run of a workflow as code. The worker checks its arguments."""
    if twice := request.params.keys() & request.kwargs.keys():
        raise invalid(f"{min(twice)!r} is both in `params` and in `kwargs`.")
    queue = code.queue if request.queue is None else check_name("queue", request.queue)
    check_queue(key_scope, queue)
    payload = encode_call(
        name, request.args, {**request.params, **request.kwargs}, api.settings.max_payload, "workflow"
    )
    run, _ = api.backend.code.start(
        new_id(),
        RunStarted(name, code.version, payload, queue),
        timeout=request.timeout,
        tags=msgspec.json.encode(tags).decode(),
        key=key,
        on_conflict="return",
        signal=None,
        pinned=request.pinned,
    )
    return UUID(bytes=run)


@routes.get("", about=WITHIN)
def list_workflows(api: Api, key_scope: KeyScope) -> Workflows:
    """List the newest version of each workflow."""
    with api.reading() as connection:
        stored_definitions = workflows.list_latest(connection, key_scope.workflows)
        code = insights.list_code_workflows(connection, key_scope.workflows)
    return Workflows([summary(stored) for stored in stored_definitions], code)


def summary(stored: workflows.Stored) -> WorkflowSummary:
    definition = stored.definition
    steps = [step.name for step in definition.steps]
    return WorkflowSummary(
        stored.name, stored.version, definition.description, steps, list(definition.params), stored.created_at
    )


@routes.post("/validate", about=NOTHING, scope=Scope.READ, examples=[{"definition": _EXAMPLE}], is_expensive=True)
def validate_workflow(api: Api, body: Document) -> Verdict:
    """Validate a definition: list all its errors, without storing it."""
    del api
    try:
        return Verdict(True, read_definition(body).name, [])
    except InvalidWorkflow as error:
        return Verdict(False, None, str(error).splitlines())


def hash_of(found: WorkflowAnswer | Applied) -> str:
    return found.hash


@routes.post("", about=WITHIN, etag=hash_of, examples=[{"definition": _EXAMPLE}], is_expensive=True, max_body=MAX_BODY)
def apply_workflow(api: Api, body: Document, key_scope: KeyScope, match: Condition) -> Applied:
    """Store a definition. A changed definition becomes a new version; runs in progress stay on theirs.

    With `If-Match`, the `ETag` of the version that was read before, nothing is stored if a newer version exists.
    With `If-None-Match: *`, nothing is stored if the workflow exists.
    """
    definition = read_definition(body)
    check_definition(key_scope, definition)
    redacted = api.names.redacted(step.task for step in definition.steps if step.task)
    definition = with_redaction(definition, redacted, redaction.split_patterns(api.settings.redact))
    try:
        version, is_new = api.backend.workflows.apply(definition, match)
    except WrongState as error:
        raise refused(412, "The condition does not hold", str(error)) from error
    return Applied(definition.name, version, is_new, content_hash(definition))


@routes.post("/diff", about=WITHIN, scope=Scope.READ, examples=[{"definition": _EXAMPLE}], is_expensive=True)
def diff_workflow(api: Api, body: Document, key_scope: KeyScope) -> Difference:
    """Show the changes that applying a definition would make."""
    definition = read_definition(body)
    check_workflow(key_scope, definition.name)
    stored = api.read(workflows.latest, definition.name)
    before, after = document.compared(None if stored is None else stored.definition, definition)
    return Difference(before != after, stored.version if stored else None, before, after)


@routes.get("/{name}/versions", about=WORKFLOW)
def list_versions(api: Api, name: str, query: VersionsQuery) -> Versions:
    """List the versions of a workflow, newest first. A version never changes."""
    found = api.read(workflows.list_versions, name, query.limit, query.cursor)
    if not found and query.cursor is None:
        api.backend.workflows.latest(name)  # raises NotFound with similar names
    return Versions(found, found[-1].version if len(found) == query.limit else None)


@routes.get("/{name}", about=WORKFLOW, etag=hash_of)
def show_workflow(api: Api, name: str, query: VersionQuery) -> WorkflowAnswer:
    """Show a version of a workflow."""
    return answer(find(api, name, query.version))


@routes.delete("/{name}", about=WORKFLOW)
def delete_workflow(api: Api, name: str) -> Done:
    """Delete a workflow and its schedules; runs in progress continue."""
    if not api.backend.workflows.delete(name):
        api.backend.workflows.latest(name)  # raises NotFound with similar names
    return Done("deleted")


@routes.post(
    "/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE, status=201, examples=[{"params": {"day": "2026-01-31"}}]
)
def start_run(api: Api, name: str, body: NewRunOf, key: str | None, key_scope: KeyScope) -> Started:
    """Start a run of the newest version of a workflow: a definition, or code that live workers have or that has run.

    The worker checks the arguments of a workflow as code.
    """
    return Started(start(api, name, body, key, key_scope))
