"""Calls about DAG workflows: definitions, starts and events."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection

from orchestrator.domain.dag import composed
from orchestrator.domain.dag.definition import ALWAYS, Condition, Definition, check_size, resolve_params
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import read_json, stored_json, unstorable
from orchestrator.domain.tasks.headers import headers_of_start
from orchestrator.errors import NotFound, PayloadError, did_you_mean
from orchestrator.references import may_hold_references
from orchestrator.sdk.backend.part import Part, Shared, reading
from orchestrator.sdk.calls.flows import WorkflowCalls
from orchestrator.store import inbox, insights
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.inbox import RequestKind
from orchestrator.store.insights import CodeWorkflowView
from orchestrator.store.runs import creation
from orchestrator.store.runs.creation import NewRun
from orchestrator.trace_context import current_trace


def described(view: CodeWorkflowView) -> str:
    versions = ", ".join(map(str, view.versions))
    return f"live workers that have it: {view.workers}; open runs: {view.open_runs}; versions: {versions}"


def _latest(connection: Connection, name: str) -> workflows.Stored:
    stored = workflows.latest(connection, name)
    if stored is None:
        code = {view.name: view for view in insights.list_code_workflows(connection)}
        names = [other.name for other in workflows.list_latest(connection)]
        raise NotFound(
            f"Workflow {name!r} is code, and has no definition: {described(code[name])}."
            if name in code
            else f"There is no workflow {name!r}.{did_you_mean(name, [*names, *code])} "
            f"Apply it with `orchestrator workflows apply FILE`."
        )
    return stored


def _read(connection: Connection, name: str, version: int) -> workflows.Stored:
    stored = workflows.read(connection, name, version)
    if stored is None:
        newest = _latest(connection, name)
        raise NotFound(f"Workflow {name!r} has no version {version}; the newest is {newest.version}.")
    return stored


def _names(connection: Connection) -> list[str]:
    return [stored.name for stored in workflows.list_latest(connection)]


def _listeners(connection: Connection, event: str) -> list[str]:
    return [
        workflow.name
        for workflow in workflows.list_triggered(connection)
        if any(trigger.get("event") == event for trigger in read_json(workflow.triggers))
    ]


def create_run(part: Part, run: NewRun, params: Mapping[str, Any]) -> bytes:
    """Insert a run of a workflow or flow, with the caller's trace. Return its id, or the id of the run with its key."""
    run, existing = run._replace(trace=current_trace(), headers=headers_of_start()), None
    with part._connections.writing(f"run {to_text(run.id)} was stored") as connection:
        if not creation.create(connection, [dags.sealed(run, part._vault)]) and run.key is not None:
            existing = dags.find_same(connection, run, params)
    part._connections.nudge()
    return existing or run.id


class WorkflowBackend(Part, WorkflowCalls):
    """Calls about workflows, by name."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._composed: set[str] = set()
        """Names of definitions of compositions that this program has stored."""

    names = reading(_names)
    list_latest = reading(workflows.list_latest)
    latest = reading(_latest)
    read = reading(_read)
    listeners = reading(_listeners)

    def apply(self, definition: Definition, condition: Condition = ALWAYS) -> workflows.Application:
        """Store a definition, if the condition holds for the definition that it replaces."""
        written, is_scheduled = f"workflow {definition.name!r} was stored", definition.schedule is not None
        with self._connections.changing(written, nudge=is_scheduled) as connection:
            application = workflows.apply(connection, definition, condition)
            if application.created:
                name, version = definition.name, application.version
                self._connections.record(connection, "apply", "workflow", name, version=version)
        return application

    def delete(self, name: str) -> bool:
        with self._connections.changing(f"workflow {name!r} was deleted", nudge=False) as connection:
            is_deleted = workflows.delete(connection, name)
            if is_deleted:
                self._connections.record(connection, "delete", "workflow", name)
            return is_deleted

    def start(
        self,
        name: str,
        params: Mapping[str, Any],
        run_id: bytes,
        *,
        key: str | None,
        tags: Iterable[str],
        fire_time: str | None = None,
    ) -> bytes:
        stored = self.latest(name)
        resolved = resolve_params(stored.definition, params, datetime.now(UTC))
        run = dags.new_run(stored.definition, stored.version, run_id, resolved, tags)._replace(
            key=key, fire_time=fire_time
        )
        check_size(run.params or "", f"The parameters of workflow {name!r}", self._limit)
        return create_run(self, run, params)

    def compose(
        self,
        definitions: Sequence[Definition],
        args: str,
        run_id: bytes,
        *,
        name: str,
        key: str | None,
        tags: Iterable[str],
    ) -> bytes:
        """Create a run of the last definition. Do not send definitions that this program has already stored."""
        params = {composed.ARGS: args}
        run = dags.new_run(definitions[-1], 1, run_id, params, tags)._replace(
            name=name, key=key, trace=current_trace(), headers=headers_of_start()
        )
        check_size(run.params or "", f"The arguments of composition {name!r}", self._limit)
        sealed, existing = dags.sealed(run, self._vault), None
        with self._connections.writing(f"run {to_text(run_id)} was stored") as connection:
            is_stored_before = self._composed.issuperset(definition.name for definition in definitions)
            if not (is_stored_before and creation.create_defined(connection, sealed)):
                workflows.compose(connection, definitions)
                if not creation.create_defined(connection, sealed) and key is not None:
                    # References to the payload store differ each time, so arguments with references cannot be compared.
                    is_stored = may_hold_references(base64.b64decode(args))
                    existing = dags.find_same(connection, run, () if is_stored else params)
        self._composed.update(definition.name for definition in definitions)
        self._connections.nudge()
        return existing or run_id

    def post_event(self, event_id: bytes, name: str, payload: Any) -> None:
        if problem := unstorable(payload):
            raise PayloadError(f"The payload of event {name!r} cannot be kept as JSON: {problem}.")
        body = stored_json({"name": name, "payload": payload})
        if len(body) > self._limit:
            raise PayloadError(
                f"The payload of event {name!r} has {len(body):,} bytes, and at most {self._limit:,} are allowed. "
                f"Pass a reference to the data instead, or raise the setting max_payload."
            )
        if self._vault is not None:
            body = stored_json({"name": name, "payload": self._vault.seal_text(stored_json(payload))})
        with self._connections.writing(f"event {name!r} was stored") as connection:
            inbox.add(connection, RequestKind.EVENT, event_id, body)
        self._connections.nudge()
