"""Calls about schedules and backfills, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any, Protocol

from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.tasks.starts import CodeTarget
from orchestrator.domain.tasks.task import Id
from orchestrator.sdk.calls.checked import Label, WorkflowName
from orchestrator.sdk.calls.declaring import SYSTEM, Body, Kind, Rest, call
from orchestrator.store.schedules.backfills import BackfillView, NewBackfill
from orchestrator.store.schedules.definitions import SchedulePage, StoredSchedule

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=10_000)]
Limit = Annotated[int, Meta(ge=1, le=10_000)]


class ScheduleCalls(Protocol):
    """Calls about schedules and backfills."""

    @call(within={"within": Kind.WORKFLOW})
    def page(self, *, limit: Limit, after: str | None) -> SchedulePage:
        """Return a page of schedules, ordered by name."""

    @call(about={Kind.SCHEDULE: "key"})
    def find(self, key: str) -> StoredSchedule:
        """Return the schedule with the key workflow/name, or the only schedule of a workflow."""

    @call(about={Kind.SCHEDULE: "key"}, expensive=True)
    def upcoming(self, key: str, count: Count) -> list[datetime]:
        """Return the next fires of a schedule."""

    @call(Scope.OPERATE, about=SYSTEM, repeatable=True, expensive=True, body=Body.VALUES)
    def apply(
        self,
        definitions: Iterable[Definition],
        step: str,
        of_code: Iterable[tuple[WorkflowName, dict[str, Any], CodeTarget]],
    ) -> None:
        """Store workflows of one scheduled task each, without overwriting others, and schedules of code workflows."""

    @call(Scope.OPERATE, about=SYSTEM, repeatable=True)
    def claim_origin(self, origin: Label, keys: Sequence[Label], *, prune: bool) -> list[str]:
        """Record the schedules that an application declares. Return those no longer declared; `prune` deletes them."""

    @call(Scope.OPERATE, about={Kind.WORKFLOW: "workflow"}, repeatable=True)
    def set(self, workflow: str, data: dict[str, Any], version: int | None = None) -> StoredSchedule:
        """Set a schedule of a workflow or flow. `data` has the fields of a YAML file; `version` is that of a flow."""

    @call(Scope.OPERATE, about={Kind.WORKFLOW: "workflow", Kind.QUEUE: "target.queue"}, repeatable=True)
    def set_code(self, workflow: WorkflowName, data: dict[str, Any], target: CodeTarget) -> StoredSchedule:
        """Set a schedule of a workflow as code. `data` has the fields of a YAML file."""

    @call(Scope.OPERATE, about={Kind.SCHEDULE: "key"}, rest=Rest("POST /schedules/{workflow}/{name}/pause", "paused"))
    def pause(self, key: str) -> None:
        """Pause a schedule."""

    @call(Scope.OPERATE, about={Kind.SCHEDULE: "key"}, rest=Rest("POST /schedules/{workflow}/{name}/resume", "resumed"))
    def resume(self, key: str) -> None:
        """Resume a schedule."""

    @call(Scope.OPERATE, about={Kind.SCHEDULE: "key"}, rest=Rest("DELETE /schedules/{workflow}/{name}", "deleted"))
    def delete(self, key: str) -> StoredSchedule:
        """Delete a schedule."""

    @call(Scope.OPERATE, about={Kind.SCHEDULE: "key"}, repeatable=True)
    def trigger(self, key: str, run_id: Id) -> StoredSchedule:
        """Start a run of a schedule now, and return the schedule."""

    @call(Scope.OPERATE, about={Kind.SCHEDULE: "key"}, expensive=True)
    def backfill(
        self, key: str, start: datetime | str, end: datetime | str | None, concurrency: int | None, again: bool
    ) -> int:
        """Start a backfill: the runs of all fires in a range. Return the number of the backfill."""

    @call(about={Kind.SCHEDULE: "key"}, expensive=True)
    def preview_backfill(
        self, key: str, start: datetime | str, end: datetime | str | None, concurrency: int | None, again: bool
    ) -> tuple[NewBackfill, list[tuple[datetime, bool]]]:
        """Preview a backfill: all fires in the range, and whether each fire would get a run."""

    @call(about={Kind.BACKFILL: "number"}, rest=Rest("GET /backfills/{number}"))
    def show_backfill(self, number: Number) -> BackfillView:
        """Show the progress of a backfill."""

    @call(keeps={Kind.WORKFLOW: "workflow"})
    def list_backfills(self, limit: Count) -> list[BackfillView]:
        """Return the newest backfills."""

    @call(
        Scope.OPERATE, about={Kind.BACKFILL: "number"}, rest=Rest("POST /backfills/{number}/cancel", "cancelled", 202)
    )
    def cancel_backfill(self, number: Number) -> None:
        """Cancel a backfill."""
