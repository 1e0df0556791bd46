"""Workflows that are data: validate, apply, compare and start them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.bodies import LARGEST_BODY
from orchestrator.api.context import LARGEST, LARGEST_PAGE, PAGE, Api, Done
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import NOTHING, WITHIN, WORKFLOW, check_definition, check_queue, check_workflow
from orchestrator.api.problems import refused, unfit
from orchestrator.domain import redaction
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.code.history import RunStarted
from orchestrator.domain.dag.definition import Condition, Definition, content_hash
from orchestrator.errors import InvalidWorkflow, WrongState
from orchestrator.sdk.checks import check_label, check_name, check_tags
from orchestrator.sdk.dag import definitions, document
from orchestrator.sdk.dag.registered import hiding
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE
from orchestrator.sdk.values.payload import encode_call
from orchestrator.store import insights
from orchestrator.store.dag import workflows
from orchestrator.store.insights import CodeStart, CodeWorkflowView

routes = Routes("workflows", "/api/v1/workflows")

_LONGEST = 100 * 365 * 86_400.0
"""Seconds of anything."""

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
    """Workflows: those that are data, and those that are code of live workers or have open runs."""

    workflows: list[WorkflowSummary]
    code: list[CodeWorkflowView]


class WorkflowAnswer(msgspec.Struct, frozen=True):
    """One version of a workflow."""

    name: str
    version: int
    hash: str
    created_at: datetime
    definition: dict[str, Any]
    """As a file would have it."""


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow: as data, or as the text of a file in YAML or JSON."""

    definition: dict[str, Any] | None = None
    text: str | None = None


class Applied(msgspec.Struct, frozen=True):
    """A definition that is stored."""

    name: str
    version: int
    new: bool
    """Whether this is a new version; the same body again changes nothing."""
    hash: str
    """Of its body; the `ETag`."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether a definition can be applied."""

    valid: bool
    name: str | None
    problems: list[str]


class Difference(msgspec.Struct, frozen=True):
    """The changes that applying a definition would make."""

    changed: bool
    version: int | None
    """The version that it is compared with; null where there is none."""
    stored: str
    given: str


class VersionQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which version; the newest if none is given."""

    version: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None


class VersionsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which versions to list."""

    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE)] = PAGE
    cursor: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None
    """`next` of the page before."""


class Versions(msgspec.Struct, frozen=True):
    """Versions of a workflow, newest first."""

    items: list[workflows.Version]
    next: int | None
    """Give it as `cursor` to get the next page; null on the last one."""


class NewRunOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a run is started; all but `params`, `key` and `tags` is for a workflow as code."""

    params: dict[str, Any] = {}
    """The parameters; of a workflow as code, the same as `kwargs`."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    key: str | None = None
    """The same key starts one run, however often it is tried."""
    tags: list[str] = []
    queue: str | None = None
    """The queue of the code: that of the last run, or one where the code is served, if none is given."""
    timeout: Annotated[float, Meta(gt=0, le=_LONGEST)] | None = None
    """Seconds that the run may take."""
    pinned: bool = False
    """Hold it to the newest version that there is now."""


class Started(msgspec.Struct, frozen=True):
    """A run that is stored, and will begin."""

    id: UUID


def read_definition(document: Document) -> Definition:
    """Return a definition, or raise what is wrong with it."""
    if (document.definition is None) == (document.text is None):
        raise InvalidWorkflow("Give either `definition`, as data, or `text`, as a file would have it.")
    if document.text is not None:
        return definitions.loads(document.text)
    return definitions.from_data(document.definition)


def answer(stored: workflows.Stored) -> WorkflowAnswer:
    return WorkflowAnswer(
        stored.name, stored.version, stored.hash, stored.created_at, document.to_data(stored.definition)
    )


def find(api: Api, name: str, version: int | None = None) -> workflows.Stored:
    """Return a version of a workflow, or say that there is none."""
    known = api.backend.workflows
    return known.latest(name) if version is None else known.read(name, version)


def start(
    api: Api, name: str, given: NewRunOf, key: str | None, key_scope: KeyScope, fire_time: str | None = None
) -> UUID:
    """Start a run of the newest version of a workflow: of one that is data, else of one that is code.

    `fire_time` is the time that a run of the former is for, if it is not for now.
    """
    chosen = given.key or key
    key = None if chosen is None else check_label("key", chosen)
    tags = check_tags(given.tags)
    with api.reading() as connection:
        is_data = workflows.latest(connection, name) is not None
        code = None if is_data else insights.find_code_start(connection, name, DEFAULT_QUEUE)
    if code is not None:
        return _start_code(api, name, given, code, key_scope, key, tags)
    if is_data and (given.args or given.kwargs or given.queue or given.timeout or given.pinned):
        raise unfit(f"Workflow {name!r} is a definition: its runs take `params`, `key` and `tags`, and nothing else.")
    run = api.backend.workflows.start(name, given.params, new_id(), key=key, tags=tags, fire_time=fire_time)
    return UUID(bytes=run)


def _start_code(
    api: Api, name: str, given: NewRunOf, code: CodeStart, key_scope: KeyScope, key: str | None, tags: tuple[str, ...]
) -> UUID:
    """Start a run of a workflow as code; the worker checks its arguments."""
    if twice := given.params.keys() & given.kwargs.keys():
        raise unfit(f"{min(twice)!r} stands in `params` and in `kwargs`.")
    queue = code.queue if given.queue is None else check_name("queue", given.queue)
    check_queue(key_scope, queue)
    payload = encode_call(name, given.args, {**given.params, **given.kwargs}, api.settings.max_payload, "workflow")
    run, _ = api.backend.code.start(
        new_id(),
        RunStarted(name, code.version, payload, queue),
        timeout=given.timeout,
        tags=msgspec.json.encode(tags).decode(),
        key=key,
        on_conflict="return",
        signal=None,
        pinned=given.pinned,
    )
    return UUID(bytes=run)


@routes.get("", about=WITHIN)
def list_workflows(api: Api, key_scope: KeyScope) -> Workflows:
    """List the newest version of each workflow."""
    with api.reading() as connection:
        found = workflows.list_latest(connection, key_scope.workflows)
        code = insights.list_code_workflows(connection, key_scope.workflows)
    return Workflows([summary(stored) for stored in found], code)


def summary(stored: workflows.Stored) -> WorkflowSummary:
    definition = stored.definition
    steps = [step.name for step in definition.steps]
    return WorkflowSummary(
        stored.name, stored.version, definition.description, steps, list(definition.params), stored.created_at
    )


@routes.post("/validate", about=NOTHING, scope=Scope.READ, examples=[{"definition": _EXAMPLE}], is_expensive=True)
def validate_workflow(api: Api, body: Document) -> Verdict:
    """Say everything that is wrong with a definition; nothing is stored."""
    del api
    try:
        return Verdict(True, read_definition(body).name, [])
    except InvalidWorkflow as error:
        return Verdict(False, None, str(error).splitlines())


def hash_of(found: WorkflowAnswer | Applied) -> str:
    return found.hash


@routes.post(
    "", about=WITHIN, etag=hash_of, examples=[{"definition": _EXAMPLE}], is_expensive=True, largest_body=LARGEST_BODY
)
def apply_workflow(api: Api, body: Document, key_scope: KeyScope, match: Condition) -> Applied:
    """Store a definition. A body that has changed becomes a new version; runs under way stay on theirs.

    With `If-Match`, the `ETag` of the version that was read before, nothing is stored where there is another by now;
    with `If-None-Match: *`, nothing where there is a workflow of this name.
    """
    definition = read_definition(body)
    check_definition(key_scope, definition)
    redacted = api.names.redacted(step.task for step in definition.steps if step.task)
    definition = hiding(definition, redacted, redaction.words(api.settings.redact))
    try:
        version, is_new = api.backend.workflows.apply(definition, match)
    except WrongState as error:
        raise refused(412, "The condition does not hold", str(error)) from error
    return Applied(definition.name, version, is_new, content_hash(definition))


@routes.post("/diff", about=WITHIN, scope=Scope.READ, examples=[{"definition": _EXAMPLE}], is_expensive=True)
def diff_workflow(api: Api, body: Document, key_scope: KeyScope) -> Difference:
    """Say what applying a definition would change."""
    definition = read_definition(body)
    check_workflow(key_scope, definition.name)
    stored = api.read(workflows.latest, definition.name)
    before, after = document.compared(None if stored is None else stored.definition, definition)
    return Difference(before != after, stored.version if stored else None, before, after)


@routes.get("/{name}/versions", about=WORKFLOW)
def list_versions(api: Api, name: str, query: VersionsQuery) -> Versions:
    """List the versions that a workflow has had, newest first. None of them ever changes."""
    found = api.read(workflows.list_versions, name, query.limit, query.cursor)
    if not found and query.cursor is None:
        api.backend.workflows.latest(name)  # says that there is none, and which are near
    return Versions(found, found[-1].version if len(found) == query.limit else None)


@routes.get("/{name}", about=WORKFLOW, etag=hash_of)
def show_workflow(api: Api, name: str, query: VersionQuery) -> WorkflowAnswer:
    """Show a version of a workflow."""
    return answer(find(api, name, query.version))


@routes.delete("/{name}", about=WORKFLOW)
def delete_workflow(api: Api, name: str) -> Done:
    """Delete a workflow and its schedules; runs under way go on."""
    if not api.backend.workflows.delete(name):
        api.backend.workflows.latest(name)  # says that there is none, and which are near
    return Done("deleted")


@routes.post(
    "/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE, status=201, examples=[{"params": {"day": "2026-01-31"}}]
)
def start_run(api: Api, name: str, body: NewRunOf, key: str | None, key_scope: KeyScope) -> Started:
    """Start a run of the newest version of a workflow: a definition, or code that live workers have or that has run.

    The worker checks the arguments of a workflow as code.
    """
    return Started(start(api, name, body, key, key_scope))
