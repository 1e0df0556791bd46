"""Starts of runs whose form says when its page was made: one that somebody else has started since is asked about."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec

from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import Note, page_actions
from orchestrator.api.key_scope import RUN, WORKFLOW
from orchestrator.api.problems import refused
from orchestrator.api.routes import flows, runs, schedules, workflows
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.store import audit

actions = page_actions("/ui")

RERUN = "rerun"
"""In the audit log, of the run that is started over, with the same parameters or with others."""
_START = "start"
"""The same of a workflow or a flow."""


class Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the page was made."""

    since: datetime | None = None


class SeenRun(Seen, frozen=True, forbid_unknown_fields=True):
    """A run that is started over."""

    from_step: str | None = None


class NewRun(workflows.NewRunOf, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of a workflow."""

    since: datetime | None = None


class NewFlowRun(flows.NewFlowRun, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of a flow."""

    since: datetime | None = None


def started_since(api: Api, target: str, act: str, since: datetime | None) -> str:
    """Say who has started such a run since a page was made; nothing if nobody has."""
    known = None if since is None else api.read(audit.last_act, target, act, since)
    return "" if known is None else f"A run like it was started {known}, after this page was made. Start one more?"


def record(api: Api, act: str, kind: str, target: str, run: UUID) -> Note:
    """Write that a run was started, and lead to it."""
    connections = api.backend.connections
    with connections.changing("the line of the audit log was written") as connection:
        connections.record(connection, act, kind, target, new=str(run))
    return Note("the run is started: this is it", to=f"/ui/runs/{run}")


def _check(api: Api, target: str, act: str, since: datetime | None) -> None:
    if said := started_since(api, target, act, since):
        raise refused(409, "The run is not started yet", said)


@actions.post("/runs/{id}/rerun", about=RUN, is_expensive=True)
def rerun(api: Api, id: UUID, body: SeenRun) -> Note:
    """Start a run over."""
    _check(api, str(id), RERUN, body.since)
    new = runs.rerun(api, id, runs.Rerun(body.from_step)).id
    return Note("the run is started over: this is the new one", to=f"/ui/runs/{new}")


@actions.post("/schedules/{workflow}/{name}/trigger", about=WORKFLOW)
def trigger(api: Api, workflow: str, name: str, body: Seen) -> Note:
    """Start a run of a schedule now."""
    _check(api, f"{workflow}/{name}", "trigger", body.since)
    new = schedules.trigger_schedule(api, workflow, name).id
    return Note("a run is started: this is it", to=f"/ui/runs/{new}")


@actions.post("/workflows/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE)
def start_run(api: Api, name: str, body: NewRun, key_scope: KeyScope) -> Note:
    """Start a run of a workflow. One with a key starts once."""
    _check(api, name, _START, None if body.key else body.since)
    return record(api, _START, "workflow", name, workflows.start(api, name, body, None, key_scope))


@actions.post("/flows/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE)
def start_flow(api: Api, name: str, body: NewFlowRun) -> Note:
    """Start a run of a flow."""
    _check(api, name, _START, body.since)
    return record(api, _START, "flow", name, flows.start_flow(api, name, body, None).id)
