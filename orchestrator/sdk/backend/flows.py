"""Flow graphs: published, started, signalled, and looked at."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection

from orchestrator.domain.dag.definition import check_size
from orchestrator.domain.flow.decisions import check_decision
from orchestrator.domain.flow.definition import Flow
from orchestrator.domain.flow.graph import approvals, signal_path
from orchestrator.domain.flow.paths import parse, write
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import stored_json, unstorable
from orchestrator.domain.schedules.schedule import from_data
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.errors import ExpressionError, InvalidWorkflow, NotFound, PayloadError, WrongState
from orchestrator.sdk import acting
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.dag.schedule_fields import checked_schedule
from orchestrator.sdk.values.payload import encode_value
from orchestrator.sdk.values.shown import as_json
from orchestrator.store import inbox
from orchestrator.store.dag import plans as dags
from orchestrator.store.flow import definitions, reads
from orchestrator.store.flow import runs as flow_runs
from orchestrator.store.flow.definitions import FlowName, Published, StoredFlow
from orchestrator.store.flow.reads import FlowRunFilter, FlowRunView, NodeRunView
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import creation
from orchestrator.store.schedules import definitions as schedules
from orchestrator.store.schedules.fires import Target, run_of


class FlowBackend:
    """What a client can do with flows, and with their runs."""

    def __init__(self, connections: Connections, max_payload: int, actor: str) -> None:
        self._connections = connections
        self._vault = connections.keys.vault
        self._limit = max_payload
        self._actor = actor

    # -- definitions

    def declare(self, name: str) -> None:
        """Note that there is a flow."""
        with self._connections.writing(f"flow {name!r} was stored", transaction=True) as connection:
            definitions.declare(connection, name)
            self._connections.record(connection, "declare", "flow", name)

    def publish(self, name: str, graph: Flow, version: int | None = None, *, published: bool = True) -> Published:
        """Store a version of a flow, and the schedule in its file; the same body again is a no-op."""
        check_name("flow", name)
        if problem := unstorable(graph.schedule or {}):
            raise InvalidWorkflow(f"schedule: {problem}.")
        if graph.schedule is not None:
            checked_schedule(graph.schedule)
        with self._connections.writing(f"flow {name!r} was stored", transaction=True) as connection:
            done = definitions.publish(connection, name, graph, version, published=published)
            if published:
                _declare_schedule(connection, name, done.version, graph.schedule)
            if done.created:
                self._connections.record(connection, "publish", "flow", name, version=done.version)
        if graph.schedule is not None:
            self._connections.nudge()
        return done

    def names(self) -> list[FlowName]:
        """Return all flows."""
        with self._connections.reading() as connection:
            return definitions.list_names(connection)

    def find(self, name: str, version: int | None = None) -> StoredFlow | None:
        """Return a flow, in its newest version if none is named; None if there is no such one."""
        if "\0" in name:  # which Postgres cannot be asked for
            return None
        with self._connections.reading() as connection:
            if version is None:
                return definitions.latest(connection, name)
            return definitions.read(connection, name, version)

    def latest(self, name: str) -> StoredFlow:
        """Return the newest version of a flow."""
        found = self.find(name)
        if found is None:
            if any(one.name == name for one in self.names()):
                raise NotFound(f"No version of flow {name!r} is published.")
            raise NotFound(f"There is no flow {name!r}. Publish it with `orchestrator flows publish FILE`.")
        return found

    def read(self, name: str, version: int) -> StoredFlow:
        """Return a version of a flow."""
        found = self.find(name, version)
        if found is None:
            newest = self.latest(name)
            raise NotFound(f"Flow {name!r} has no version {version}; the newest is {newest.version}.")
        return found

    def versions(self, name: str) -> list[StoredFlow]:
        """Return the versions of a flow, newest first."""
        if "\0" in name:
            return []
        with self._connections.reading() as connection:
            return definitions.versions(connection, name)

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
    ) -> bytes:
        """Create a run of a flow; return its id, or that of the run that has the key."""
        stored = self.latest(name) if version is None else self.read(name, version)
        if problem := unstorable(dict(params)):
            raise InvalidWorkflow(f"The parameters of flow {name!r} cannot be kept as JSON: {problem}.")
        run = flow_runs.new_run(name, stored.version, run_id, dict(params), tags)._replace(key=key)
        check_size(run.params or "", f"The parameters of flow {name!r}", self._limit)
        with self._connections.writing(f"run {to_text(run_id)} was stored") as connection:
            if not creation.create(connection, [dags.sealed(run, self._vault)]) and key is not None:
                run_id = dags.find_same(connection, run, params) or run_id
        self._connections.nudge()
        return run_id

    def signal(self, run: bytes, key: str, value: Any, why: str = "") -> None:
        """Send a value to a run under a key; if no node waits for it, it is there when one does."""
        view = self.show(run)
        path = parse(key)
        if path.root != "shared" or not path.parts:
            raise ExpressionError(
                f"Signal {key!r} cannot be sent: it is written into the shared state, such as `paid`."
            )
        flow = self.read(view.flow, view.version).flow
        for node, name in approvals(flow):
            if path.key == name or (node == view.cursor and path.key == name.rpartition("/")[2]):
                check_decision(flow, node, value)
                break
        else:
            if isinstance(view.shared, dict):
                write({**view.shared}, path.key, value)  # or it says why it cannot stand there
        self._send(view, run, key, value, why, "signal")

    def decide(self, run: bytes, decision: Any, why: str = "", node: str | None = None) -> str:
        """Decide the approval for which a run waits; return its key. One that has not come yet must be named."""
        view = self.show(run)
        if node is not None:
            key = self._approval_key(view, node)
        elif view.waits == "signal" and self._kind(view, view.cursor) == "approval":
            key = view.key
        else:
            waits = reads.waiting_for(view) or "nothing"
            raise WrongState(
                f"Run {to_text(run)} waits for no approval: it stands at {view.cursor or 'no node'!r} and waits for "
                f"{waits}. To decide one that is still to come, name its node."
            )
        act = str(decision) if isinstance(decision, str) else "decide"
        self._send(view, run, key, decision, why, act, is_decision=True)
        return key

    @staticmethod
    def _refuse_second(connection: Connection, run: bytes, key: str) -> None:
        """Refuse a decision of what is decided: it was taken over by the leader, or is on its way to it."""
        under_way = flow_runs.take_turn(connection, run)  # before the state, into which it goes when it leaves there
        state = reads.standing(connection, run)
        known = f"Approval {key!r} of run {to_text(run)} is decided already"
        if key in state.deciders:
            by, at, why = state.deciders[key]
            moment = datetime.fromtimestamp(at, UTC)
            because = f" ({why})" if why else ""
            raise WrongState(f"{known}, by {by or 'somebody'} at {moment:%Y-%m-%d %H:%M:%S} UTC{because}.")
        if key in under_way:
            raise WrongState(f"{known}, a moment ago.")
        if state.is_over:
            raise WrongState(f"Run {to_text(run)} hears nothing any more: it has ended.")

    def _kind(self, view: FlowRunView, path: str) -> str:
        flow: Flow | None = self.read(view.flow, view.version).flow
        kind = ""
        for key in path.split("/"):
            if flow is None or key not in flow.nodes:
                return ""
            kind, flow = flow.nodes[key].kind, flow.nodes[key].subflow
        return kind

    def _approval_key(self, view: FlowRunView, path: str) -> str:
        flow: Flow | None = self.read(view.flow, view.version).flow
        *above, last = path.split("/")
        for key in above:
            flow = flow.nodes[key].subflow if flow is not None and key in flow.nodes else None
        node = flow.nodes.get(last) if flow is not None else None
        if node is None or node.kind != "approval":
            raise NotFound(f"Flow {view.flow!r} has no approval {path!r}.")
        return "/".join([*above, signal_path(last, node).key])

    def _send(
        self, view: FlowRunView, run: bytes, key: str, value: Any, why: str, act: str, *, is_decision: bool = False
    ) -> None:
        if RunState(view.status) in ENDED_RUN_STATES:
            raise WrongState(f"Run {to_text(run)} hears nothing any more: it is in state {view.status!r}.")
        parse(key)  # or it says what is wrong with that
        who = acting.current(self._actor)
        data = encode_value([value, who.who, why], f"Signal {key!r}", self._limit)
        if (problem := unstorable(key)) or (problem := unstorable(why)):
            raise PayloadError(f"Signal {key!r} cannot be kept: {problem}.")
        body = stored_json({"key": key, "value": base64.b64encode(data).decode()})
        with self._connections.writing(f"signal {key!r} was stored", transaction=True) as connection:
            if is_decision:
                self._refuse_second(connection, run, key)
            inbox.add(connection, RequestKind.FLOW_SIGNAL, run, body)
            detail = {"key": key, "node": view.cursor, "why": why} if why else {"key": key, "node": view.cursor}
            self._connections.record(connection, act, "run", to_text(run), **detail)
        self._connections.nudge()

    # -- looking

    def show(self, run: bytes) -> FlowRunView:
        """Return where a run of a flow stands."""
        with self._connections.reading() as connection:
            found = reads.show(connection, run)
        if found is None:
            raise NotFound(f"No run of a flow has the id {to_text(run)}.")
        return _shown(found)

    def shared(self, run: bytes) -> Any:
        """Return the shared state of a run, for a program."""
        return self.show(run).shared

    def last_visit(self, run: bytes) -> int:
        """Return the number of the last visit of a run to a node."""
        with self._connections.reading() as connection:
            return reads.last_visit(connection, run)

    def visited(self, run: bytes) -> list[str]:
        """Return the nodes that a run has visited with success, each once."""
        with self._connections.reading() as connection:
            return reads.visited(connection, run)

    def runs(
        self, workflow: str | None = None, state: str | None = None, limit: int = 50, within: str = ""
    ) -> list[FlowRunView]:
        """Return the newest runs of flows."""
        states = None if state is None else (state,)
        return self.list_page(FlowRunFilter(workflow, None, states, within=within), limit=limit)

    def list_page(self, wanted: FlowRunFilter, *, limit: int, offset: int = 0) -> list[FlowRunView]:
        """Return a page of the runs that match, newest first."""
        if "\0" in (wanted.flow or ""):
            return []
        with self._connections.reading() as connection:
            return [_shown(view) for view in reads.list_page(connection, wanted, limit=limit, offset=offset)]

    def node_runs(self, run: bytes, after: int = 0, limit: int = 1_000) -> list[NodeRunView]:
        """Return the visits of a run to nodes, in order."""
        redact = self.show(run).redact
        with self._connections.reading() as connection:
            found = reads.node_runs(connection, run, after=after, limit=min(limit, 1_000))
        return [view._replace(input=as_json(view.input), output=as_json(view.output), redact=redact) for view in found]


def _declare_schedule(connection: Connection, name: str, version: int, data: dict[str, Any] | None) -> None:
    now = schedules.clock(connection)
    schedule = None if data is None else from_data(data)
    if schedule is not None:
        run_of(Target(name, version, None, flow=True), schedule, now, bytes(16), name)  # or it says what is wrong
    schedules.declare_flow(connection, name, schedule, now)


def _shown(view: FlowRunView) -> FlowRunView:
    return view._replace(params=as_json(view.params), shared=as_json(view.shared))
