"""Workflows that are data: apply, start and delete them, and post events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from orchestrator.domain.access import Scope
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.tasks.task import Id
from orchestrator.sdk.calls.checked import Composed, EventName, Key, PackedArguments, RunName, Tags
from orchestrator.sdk.calls.declaring import SYSTEM, Body, Kind, call
from orchestrator.store.dag.workflows import Application, Stored


class WorkflowCalls(Protocol):
    """Calls about workflows, by name."""

    @call(Scope.OPERATE, about={Kind.DEFINITION: "definition"}, repeatable=True, expensive=True, body=Body.VALUES)
    def apply(self, definition: Definition) -> Application:
        """Store a definition."""

    @call(Scope.OPERATE, about={Kind.WORKFLOW: "name"})
    def delete(self, name: str) -> bool:
        """Delete a workflow and its schedules; False if there is none."""

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
        """Create a run of the newest version of a workflow; return its id, or that of the run that has the key."""

    @call(Scope.ENQUEUE, about=SYSTEM, repeatable=True, expensive=True, body=Body.VALUES)
    def compose(
        self, definitions: Composed, args: PackedArguments, run_id: Id, *, name: RunName, key: Key, tags: Tags
    ) -> Id:
        """Create a run of a composition: of the last of these definitions. Return the run that has the key, if any."""

    @call(about=SYSTEM)
    def listeners(self, event: str) -> list[str]:
        """Return the workflows that an event may start."""

    @call(Scope.ENQUEUE, about=SYSTEM)
    def post_event(self, event_id: Id, name: EventName, payload: Any) -> None:
        """Tell the leader that something happened."""
