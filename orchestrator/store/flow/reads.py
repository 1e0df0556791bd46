"""Runs of flows for people: the current node, the shared state, and the visits to nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain import timezones
from orchestrator.domain.flow.definition import node_at
from orchestrator.domain.flow.state import Calls, FlowState, Wait
from orchestrator.domain.ids import derived_id
from orchestrator.store.dag.plans import read_params
from orchestrator.store.flow import runs
from orchestrator.store.sql import Row, Statement

_MAX_CALLS = 5_000
"""Tasks to look up for one page of visits."""


class FlowRunView(NamedTuple):
    """A run of a flow."""

    id: UUID
    flow: str
    version: int
    status: str
    cancelling: bool
    params: Any
    shared: Any
    """The shared state; the final one if the run has ended."""
    cursor: str
    """The path of the current node, with the nodes that contain it; empty before the first and after the last node."""
    last_action: str
    steps: int
    """The number of nodes visited."""
    waits: str
    """What the run waits for: tasks, timer, signal, approval, or empty."""
    key: str
    """The key of the awaited signal or approval."""
    due: datetime | None
    """The time at which the timer or the timeout of the wait is due."""
    open_calls: int
    """Open tasks of the current node."""
    reason: str | None
    """The reason for an unsuccessful end."""
    request_id: str | None
    """The idempotency key with which the run was started."""
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    redact: tuple[str, ...] = ()
    """The `redact` patterns of the application's tasks in the flow."""


OF_OPTIONS = 'options.keyvalue() ? (@.key == "redact" || @.key == "inherited").value[*]'
"""The JSON path of the patterns in stored options."""
OF_FUNCTIONS = f"$.functions.*.{OF_OPTIONS}"
"""The JSON path of the patterns in a stored definition, for the tasks that it names."""
_COLUMNS = f"""r.id, r.workflow AS flow, r.version, r.status, r.cancelling, r.params::text AS params, r.state, r.reason,
       r.key AS request_id, r.created_at, r.started_at, r.ended_at,
       (SELECT jsonb_path_query_array(f.definition, '{OF_FUNCTIONS}') FROM orchestrator.flows f
         WHERE f.name = r.workflow AND f.version = r.version) AS redact"""
_SHOW = Statement[Row](f"""
SELECT /* flow_reads.one */ {_COLUMNS} FROM orchestrator.runs r WHERE r.id = %(id)s::uuid AND r.flow
""")
_LIST = Statement[Row](f"""
SELECT /* flow_reads.list */ {_COLUMNS} FROM orchestrator.runs r
 WHERE r.flow AND (%(flow)s::text IS NULL OR r.workflow = %(flow)s::text)
   AND (%(version)s::int IS NULL OR r.version = %(version)s::int)
   AND (%(states)s::text[] IS NULL OR r.status = ANY(%(states)s::text[]))
   AND (%(cancelling)s::boolean IS NULL OR r.cancelling = %(cancelling)s::boolean)
   AND (%(before)s::uuid IS NULL OR r.id < %(before)s::uuid) AND starts_with(r.workflow, %(within)s::text)
 ORDER BY r.id DESC LIMIT %(limit)s OFFSET %(offset)s
""")


def show(connection: Connection, run: bytes) -> FlowRunView | None:
    """Return a run of a flow; None if it does not exist."""
    row = _SHOW.first(connection, id=run)
    return None if row is None else _view(row)


class FlowRunFilter(NamedTuple):
    """Conditions on runs of flows. A condition that is None matches every run."""

    flow: str | None = None
    version: int | None = None
    states: tuple[str, ...] | None = None
    cancelling: bool | None = None
    within: str = ""
    """The prefix of the flows' names."""


def list_page(
    connection: Connection, wanted: FlowRunFilter, *, limit: int, before: UUID | None = None, offset: int = 0
) -> list[FlowRunView]:
    """Return runs of flows, newest first."""
    start = before.bytes if before else None
    return [_view(row) for row in _LIST(connection, wanted._asdict(), before=start, limit=limit, offset=offset)]


def _view(row: Row) -> FlowRunView:
    columns = row._asdict()
    stored = columns.pop("state")
    plain = None if stored is None else timezones.decode(bytes(stored))
    state = FlowState.from_plain(plain) if isinstance(plain, list) else FlowState()
    work = state.work if row.ended_at is None else None
    columns |= {"params": read_params(row.params or "{}"), "redact": tuple(row.redact or ())}
    return FlowRunView(
        **columns,
        shared=state.shared if plain is None or isinstance(plain, list) else plain,
        cursor=state.cursor,
        last_action=state.last_action,
        steps=state.steps,
        waits="tasks" if isinstance(work, Calls) else work.what if isinstance(work, Wait) else "",
        key=work.key if isinstance(work, Wait) else "",
        due=datetime.fromtimestamp(work.due, row.created_at.tzinfo) if isinstance(work, Wait) and work.due else None,
        open_calls=len(work.running) if isinstance(work, Calls) else 0,
    )


class NodeRunView(NamedTuple):
    """One attempt at a node, or at a branch of a node."""

    number: int
    """The number of the visit."""
    node: str
    kind: str
    branch: int | None
    """The branch of a parallel or foreach; None for the node as a whole."""
    attempt: int
    status: str
    action: str
    error: str | None
    input: Any
    output: Any
    worker: str | None
    task: UUID | None
    started_at: datetime | None
    ended_at: datetime
    redact: tuple[str, ...] = ()
    """The `redact` patterns of the application's tasks in the flow."""
    run: UUID | None = None
    """The run; None from a server of the previous release."""


_VISITS = Statement[Row]("""
SELECT /* flow_reads.visits */ number, node, kind, status, attempt, action, error, input, output, first_call, calls,
       started_at, ended_at
  FROM orchestrator.node_runs WHERE run_id = %(run)s::uuid AND number > %(after)s ORDER BY number LIMIT %(limit)s
""")
_TASKS = Statement[Row]("""
SELECT /* flow_reads.tasks */ id, status, attempt, position, payload, result, error, worker, started_at,
       ended_at
  FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[])
""")
_ATTEMPTS = Statement[Row]("""
SELECT /* flow_reads.attempts */ task_id, attempt, outcome, error, worker, started_at, ended_at
  FROM orchestrator.attempts WHERE task_id = ANY(%(ids)s::uuid[]) ORDER BY task_id, attempt
""")


def node_runs(connection: Connection, run: bytes, *, after: int = 0, limit: int = 1_000) -> list[NodeRunView]:
    """Return the visits of a run to nodes, in order, with each attempt of each task."""
    visits: Sequence[Any] = _VISITS(connection, run=run, after=after, limit=limit)
    if len(visits) < limit and (last := _interrupted_visit(connection, run)) is not None and last.number > after:
        visits = [*visits, last]
    ids: list[bytes] = []
    for count, visit in enumerate(visits, 1):
        ids += _calls(run, visit)
        if len(ids) >= _MAX_CALLS:
            visits = visits[:count]  # the next page has the remaining visits
            break
    tasks = {row.id: row for row in _TASKS(connection, ids=ids)} if ids else {}
    attempts: dict[UUID, list[Row]] = {}
    for row in _ATTEMPTS(connection, ids=ids) if ids else ():
        if row.outcome != "returned":
            attempts.setdefault(row.task_id, []).append(row)
    return [view for visit in visits for view in _views(run, visit, tasks, attempts)]


def _interrupted_visit(connection: Connection, run: bytes) -> Row | None:
    """Return the visit that a run's cancellation interrupted, in the form of a row: the leader does not store it."""
    row = _SHOW.first(connection, id=run)
    plain = None if row is None or row.state is None else timezones.decode(bytes(row.state))
    if row is None or row.status != "cancelled" or not isinstance(plain, list):
        return None
    state = FlowState.from_plain(plain)
    stored = runs.read(connection, row.flow, row.version)
    node = None if stored is None else node_at(stored.flow, state.cursor)
    if not state.frames or state.is_over or node is None:
        return None
    frame, work = state.frames[-1], state.work
    calls = work if isinstance(work, Calls) else None
    node_input = None if work is None or calls is not None else work.input
    return SimpleNamespace(
        number=state.recorded + 1,
        node=state.cursor,
        kind=node.kind,
        status="cancelled",
        attempt=frame.attempt,
        action="",
        error=None,
        input=None if node_input is None else timezones.encode(node_input),
        output=None,
        first_call=calls.first if calls else 0,
        calls=calls.created if calls else 0,
        started_at=datetime.fromtimestamp(frame.entered, row.created_at.tzinfo) if frame.entered else row.created_at,
        ended_at=row.ended_at,
    )


@Statement.function("""
SELECT /* flow_reads.last_visit */ coalesce(max(number), 0) FROM orchestrator.node_runs WHERE run_id = %(run)s::uuid
""")
def last_visit(connection: Connection, run: bytes) -> int:
    """Return the number of the last stored visit of a run. A retried run may have fewer steps."""


@Statement.function("""
SELECT /* flow_reads.visited */ DISTINCT node FROM orchestrator.node_runs
 WHERE run_id = %(run)s::uuid AND status = 'success'
""")
def visited(connection: Connection, run: bytes) -> list[str]:
    """Return the nodes that a run has visited successfully, each once."""


def _calls(run: bytes, visit: Row) -> list[bytes]:
    return [derived_id(run, "flow", visit.first_call + number) for number in range(visit.calls)]


def _views(run: bytes, visit: Row, tasks: dict[UUID, Row], attempts: dict[UUID, list[Row]]) -> Iterable[NodeRunView]:
    """Yield the attempts of a visit's tasks, and the visit as a whole unless it had a single task."""
    is_one = visit.kind == "executor"
    single: NodeRunView | None = None
    for branch, id in enumerate(UUID(bytes=identifier) for identifier in _calls(run, visit)):
        task = tasks.get(id)
        position = branch if task is None or task.position is None else task.position  # a retry runs only some branches
        shown_branch = None if is_one else position
        number = 0
        for number, row in enumerate(attempts.get(id, ()), 1):
            yield _of_task(visit, shown_branch, number, row, task, id)
        if task is not None:
            last = _of_task(visit, shown_branch, number + 1, task, task, id, is_last=True)
            if not is_one:
                yield last
            else:
                single = last
    if single is not None:
        yield single._replace(status=visit.status, action=visit.action, error=visit.error)
        return
    yield NodeRunView(
        visit.number,
        visit.node,
        visit.kind,
        None,
        visit.attempt,
        visit.status,
        visit.action,
        visit.error,
        _value(visit.input),
        _value(visit.output) if visit.output is not None else _branch_outputs(run, visit, tasks),
        None,
        None,
        visit.started_at,
        visit.ended_at,
    )


def _branch_outputs(run: bytes, visit: Row, tasks: dict[UUID, Row]) -> Any:
    """Return the outputs of a node's branches, in order."""
    if not visit.calls:
        return None
    tasks_in_order: Sequence[Row | None] = [tasks.get(UUID(bytes=identifier)) for identifier in _calls(run, visit)]
    return [None if task is None else _value(task.result) for task in tasks_in_order]


def _of_task(
    visit: Row, branch: int | None, attempt: int, ended: Row, task: Row | None, id: UUID, *, is_last: bool = False
) -> NodeRunView:
    """Return one ended attempt of a task; it failed unless it is the last one."""
    return NodeRunView(
        number=visit.number,
        node=visit.node,
        kind=visit.kind,
        branch=branch,
        attempt=attempt,
        status=ended.status if is_last else "failed",
        action="",
        error=_error(ended.error),
        input=None if task is None else _input(task.payload),
        output=_value(ended.result) if is_last else None,
        worker=ended.worker,
        task=id,
        started_at=ended.started_at,
        ended_at=ended.ended_at,
    )


def _value(data: Any) -> Any:
    return None if data is None else timezones.decode(bytes(data))


def _input(payload: Any) -> Any:
    call = _value(payload)
    return call[1].get("input") if isinstance(call, list) and len(call) > 1 else None


def _error(error: Any) -> str | None:
    return None if error is None else f"{error['kind']}: {error['message']}".rstrip(": ")


def waiting_for(view: FlowRunView) -> str:
    if view.waits == "tasks":
        return f"{view.open_calls} open task{'s' if view.open_calls != 1 else ''}"
    if view.waits == "signal":
        until = f", until {view.due:%Y-%m-%d %H:%M:%S}" if view.due else ""
        return f"a signal {view.key!r}{until}"
    if view.waits in ("timer", "retry", "turn") and view.due:
        return f"{view.due:%Y-%m-%d %H:%M:%S}"
    return ""
