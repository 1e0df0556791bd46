"""Calls about flow graphs and their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.dag.definition import check_size
from orchestrator.domain.flow.definition import Flow, Rule
from orchestrator.domain.flow.graph import parameters, signal_path
from orchestrator.domain.flow.paths import look_up
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import stored_json, unstorable
from orchestrator.domain.schedules.schedule import from_data
from orchestrator.errors import InvalidWorkflow, NotFound, did_you_mean
from orchestrator.sdk.backend.flow_signals import FlowSignals
from orchestrator.sdk.backend.part import reading
from orchestrator.sdk.backend.workflows import create_run
from orchestrator.sdk.calls.flows import FlowCalls
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.dag.schedule_fields import checked_schedule
from orchestrator.sdk.values.display import as_json
from orchestrator.store.flow import reads
from orchestrator.store.flow import runs as flow_runs
from orchestrator.store.flow.reads import FlowRunFilter, FlowRunView, NodeRunView
from orchestrator.store.flow.runs import Published, StoredFlow
from orchestrator.store.schedules import definitions as schedules
from orchestrator.store.schedules.fires import Target, run_of


def _find(connection: Connection, name: str, version: int | None = None) -> StoredFlow | None:
    if "\0" in name:  # Postgres refuses it in texts
        return None
    return flow_runs.latest(connection, name) if version is None else flow_runs.read(connection, name, version)


def _latest(connection: Connection, name: str) -> StoredFlow:
    found = _find(connection, name)
    if found is not None:
        return found
    if any(one.name == name for one in flow_runs.list_names(connection)):
        raise NotFound(f"No version of flow {name!r} is published.")
    raise NotFound(f"There is no flow {name!r}. Publish it with `orchestrator flows publish FILE`.")


def _read(connection: Connection, name: str, version: int) -> StoredFlow:
    found = _find(connection, name, version)
    if found is None:
        newest = _latest(connection, name)
        raise NotFound(f"Flow {name!r} has no version {version}; the newest is {newest.version}.")
    return found


def _versions(connection: Connection, name: str) -> list[StoredFlow]:
    return [] if "\0" in name else flow_runs.versions(connection, name)


def _show(connection: Connection, run: bytes) -> FlowRunView:
    found = reads.show(connection, run)
    if found is None:
        raise NotFound(f"No run of a flow has the id {to_text(run)}.")
    return _shown(found)


def _node_runs(connection: Connection, run: bytes, after: int = 0, limit: int = 1_000) -> list[NodeRunView]:
    redact = _show(connection, run).redact
    return [
        view._replace(input=as_json(view.input), output=as_json(view.output), redact=redact, run=UUID(bytes=run))
        for view in reads.node_runs(connection, run, after=after, limit=min(limit, 1_000))
    ]


class FlowBackend(FlowSignals, FlowCalls):
    """Calls about flows and their runs."""

    names = reading(flow_runs.list_names)
    find = reading(_find)
    latest = reading(_latest)
    read = reading(_read)
    rule = reading(flow_runs.rule_of)
    versions = reading(_versions)
    show = reading(_show)
    last_visit = reading(reads.last_visit)
    visited = reading(reads.visited)
    node_runs = reading(_node_runs)

    # -- definitions

    def declare(self, name: str) -> None:
        with self._connections.changing(f"flow {name!r} was stored", nudge=False) as connection:
            flow_runs.declare(connection, name)
            self._connections.record(connection, "declare", "flow", name)

    def publish(
        self, name: str, graph: Flow, version: int | None = None, *, published: bool = True, rule: Rule = "fail"
    ) -> Published:
        """Store a version of a flow, and the schedule in its file. The same body again is a no-op."""
        check_name("flow", name)
        if version is not None and version < 1:
            raise InvalidWorkflow(f"Flow {name!r}: expected a version from 1 on, found {version}.")
        if problem := unstorable(graph.schedule or {}):
            raise InvalidWorkflow(f"schedule: {problem}.")
        if graph.schedule is not None:
            checked_schedule(graph.schedule)
        written, is_scheduled = f"flow {name!r} was stored", graph.schedule is not None
        with self._connections.changing(written, nudge=is_scheduled) as connection:
            result = flow_runs.publish(connection, name, graph, rule, version, published=published)
            if published:
                _declare_schedule(connection, name, result.version, graph.schedule)
            if result.created:
                self._connections.record(connection, "publish", "flow", name, version=result.version)
        return result

    # -- runs

    def start(
        self,
        name: str,
        params: Mapping[str, Any],
        run_id: bytes,
        *,
        version: int | None = None,
        key: str | None = None,
        tags: Sequence[str] = (),
        shared: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Create a run of a flow with an initial shared state. Return its id, or the id of the run that has the key."""
        stored = self.latest(name) if version is None else self.read(name, version)
        self._check_parameters(stored, params)
        if problem := unstorable(dict(params)):
            raise InvalidWorkflow(f"The parameters of flow {name!r} cannot be kept as JSON: {problem}.")
        initial = self._checked_shared(stored, shared or {})
        run = flow_runs.new_run(name, stored.version, run_id, dict(params), tags, initial)._replace(key=key)
        check_size(run.params or "", f"The parameters of flow {name!r}", self._limit)
        return create_run(self, run, params)

    def _checked_shared(self, stored: StoredFlow, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return an initial shared state. Refuse a state that cannot be stored or that decides an approval."""
        subject = f"The shared state of flow {stored.name!r}"
        if problem := unstorable(dict(shared)):
            raise InvalidWorkflow(f"{subject} cannot be kept as JSON: {problem}.")
        check_size(stored_json(dict(shared)), subject, self._limit)
        for key, node in stored.flow.nodes.items():
            path = signal_path(key, node) if node.kind == "approval" else None
            if path is not None and path.root == "shared" and look_up(shared, path.parts) is not None:
                raise InvalidWorkflow(f"{subject} decides approval {key!r} at {path.key!r}: use `approve` for that.")
        return dict(shared)

    def _check_parameters(self, stored: StoredFlow, params: Mapping[str, Any]) -> None:
        """Refuse a parameter that no node and no function of a flow can use, if they use other parameters.

        Versions from the previous release, or without the rule `fail`, accept any parameter.
        """
        known = parameters(stored.flow) if params else None
        unknown = [name for name in params if name not in known] if known else []
        if known and unknown and self.rule(stored) == "fail":
            hint = did_you_mean(unknown[0], known)
            names = ", ".join(sorted(known))
            raise InvalidWorkflow(
                f"Flow {stored.name!r} has no parameter {unknown[0]!r:.200}.{hint} Its parameters: {names:.1000}."
            )

    # -- reading

    def shared(self, run: bytes) -> Any:
        return self.show(run).shared

    def runs(
        self, workflow: str | None = None, state: str | None = None, limit: int = 50, within: str = ""
    ) -> list[FlowRunView]:
        states = None if state is None else (state,)
        return self.list_page(FlowRunFilter(workflow, None, states, within=within), limit=limit)

    def list_page(self, run_filter: FlowRunFilter, *, limit: int, offset: int = 0) -> list[FlowRunView]:
        """Return a page of the runs that match, newest first."""
        if "\0" in (run_filter.flow or ""):
            return []
        with self._connections.reading() as connection:
            return [_shown(view) for view in reads.list_page(connection, run_filter, limit=limit, offset=offset)]


def _declare_schedule(connection: Connection, name: str, version: int, data: dict[str, Any] | None) -> None:
    now = schedules.clock(connection)
    schedule = None if data is None else from_data(data)
    if schedule is not None:
        run_of(
            Target(name, version, None, flow=True), schedule, now, bytes(16), name
        )  # raises if the schedule is invalid
    schedules.declare_flow(connection, name, schedule, now)


def _shown(view: FlowRunView) -> FlowRunView:
    return view._replace(params=as_json(view.params), shared=as_json(view.shared))
