"""Calls about flow graphs and DAG workflows: publish, apply, start and delete them, and post events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.flow.definition import Flow
from orchestrator.domain.tasks.task import Id
from orchestrator.sdk.calls.checked import Composed, EventName, Key, PackedArguments, RunName, Tags
from orchestrator.sdk.calls.declaring import SYSTEM, Body, Kind, call
from orchestrator.store.dag.workflows import Application, Stored
from orchestrator.store.flow.reads import FlowRunView, NodeRunView
from orchestrator.store.flow.runs import FlowName, Published, StoredFlow

Limit = Annotated[int, Meta(ge=1, le=1_000)]
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class FlowCalls(Protocol):
    """Calls about flows, by name, and about their runs."""

    @call(Scope.OPERATE, about={Kind.FLOW: "name graph"}, repeatable=True, expensive=True, body=Body.VALUES)
    def publish(self, name: str, graph: Flow, version: int | None = None) -> Published:
        """Store a version of a flow."""

    @call(keeps={Kind.WORKFLOW: "name"})
    def names(self) -> list[FlowName]:
        """Return all flows."""

    @call(about={Kind.WORKFLOW: "name"})
    def latest(self, name: str) -> StoredFlow:
        """Return the newest version of a flow."""

    @call(about={Kind.WORKFLOW: "name"})
    def read(self, name: str, version: int) -> StoredFlow:
        """Return a version of a flow."""

    @call(Scope.ENQUEUE, about={Kind.WORKFLOW: "name"}, repeatable=True)
    def start(
        self,
        name: str,
        params: Mapping[str, Any],
        run_id: Id,
        *,
        version: int | None = None,
        key: Key = None,
        tags: Tags = (),
        shared: Mapping[str, Any] | None = None,
    ) -> Id:
        """Create a run of a flow. Return its id, or the id of the run that has the key."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"})
    def signal(self, run: Id, key: str, value: Any, why: str = "") -> None:
        """Send a value to a run under a key."""

    @call(Scope.OPERATE, about={Kind.RUN: "run"})
    def decide(self, run: Id, decision: Any, why: str = "", node: str | None = None) -> str:
        """Decide the approval for which a run waits, and return its key."""

    @call(about={Kind.RUN: "run"})
    def show(self, run: Id) -> FlowRunView:
        """Return the status of a run of a flow."""

    @call(Scope.ENQUEUE, about={Kind.RUN: "run"}, repeatable=True, for_programs=True)
    def shared(self, run: Id) -> Any:
        """Return the shared state of a run, without redaction."""

    @call(about={Kind.RUN: "run"})
    def visited(self, run: Id) -> list[str]:
        """Return the distinct nodes that a run has visited successfully."""

    @call(within={"within": Kind.WORKFLOW})
    def runs(self, workflow: str | None = None, state: str | None = None, limit: Limit = 50) -> list[FlowRunView]:
        """Return the newest runs of flows."""

    @call(about={Kind.RUN: "run"})
    def node_runs(self, run: Id, after: Number = 0, limit: Limit = 1_000) -> list[NodeRunView]:
        """Return the visits of a run to nodes, in order."""


class WorkflowCalls(Protocol):
    """Calls about workflows, by name."""

    @call(Scope.OPERATE, about={Kind.DEFINITION: "definition"}, repeatable=True, expensive=True, body=Body.VALUES)
    def apply(self, definition: Definition) -> Application:
        """Store a definition."""

    @call(Scope.OPERATE, about={Kind.WORKFLOW: "name"})
    def delete(self, name: str) -> bool:
        """Delete a workflow and its schedules. Return False if there is no such workflow."""

    @call(keeps={Kind.WORKFLOW: ""})
    def names(self) -> list[str]:
        """Return the names of all workflows."""

    @call(keeps={Kind.WORKFLOW: "name"}, expensive=True)
    def list_latest(self) -> list[Stored]:
        """Return the newest version of each workflow."""

    @call(about={Kind.WORKFLOW: "name"})
    def latest(self, name: str) -> Stored:
        """Return the newest version of a workflow."""

    @call(about={Kind.WORKFLOW: "name"})
    def read(self, name: str, version: int) -> Stored:
        """Return a version of a workflow."""

    @call(Scope.ENQUEUE, about={Kind.WORKFLOW: "name"}, repeatable=True)
    def start(self, name: str, params: Mapping[str, Any], run_id: Id, *, key: Key, tags: Tags) -> Id:
        """Create a run of the newest version of a workflow. Return its id, or the id of the run that has the key."""

    @call(Scope.ENQUEUE, about=SYSTEM, repeatable=True, expensive=True, body=Body.VALUES)
    def compose(
        self, definitions: Composed, args: PackedArguments, run_id: Id, *, name: RunName, key: Key, tags: Tags
    ) -> Id:
        """Create a run of a composition, the last definition. Return its id, or the id of the run that has the key."""

    @call(about=SYSTEM)
    def listeners(self, event: str) -> list[str]:
        """Return the workflows that an event can start."""

    @call(Scope.ENQUEUE, about=SYSTEM)
    def post_event(self, event_id: Id, name: EventName, payload: Any) -> None:
        """Post an event to the leader."""
