"""What the end of a run, or a posted event, sets off: hooks, and runs of workflows that wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain import zoned
from orchestrator.domain.dag.definition import Definition, EventTrigger, hooks_of, resolve_params
from orchestrator.domain.dag.expression import parse, parse_template
from orchestrator.domain.dag.placement import Origin, of_hook
from orchestrator.domain.dag.scope import Scope
from orchestrator.domain.ids import derived_id, to_text
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.runs.nesting import Nesting
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidWorkflow
from orchestrator.references import whole_reference
from orchestrator.scheduler.dag.plans import Dags
from orchestrator.scheduler.news import News
from orchestrator.scheduler.runs.creation import create_runs, full_trees
from orchestrator.scheduler.tasks.creation import create_tasks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sealing import CALL, CODE, Sealed, extension_of, open_data
from orchestrator.store.code import histories
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.dag.plans import WorkflowRun
from orchestrator.store.dag.workflows import Triggered
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.runs.life import RunRow
from orchestrator.telemetry import get_logger
from orchestrator.trace_context import below, run_span

log = get_logger("scheduler")
_SENT_AT_ONCE = 2_000_000
"""Bytes of hooks after which Postgres gets them: it may take a leader for one that has stopped."""
_triggers = msgspec.json.Decoder(tuple[EventTrigger, ...])


class Posted(NamedTuple):
    """Something that happened: an event that was posted, or a run that ended."""

    id: bytes
    name: str | None
    """The event's name; None for the end of a run."""
    body: Any
    workflow: str | None = None
    state: str | None = None
    depth: int = -1
    """Of the run that ended: how many started each other before it."""
    root: bytes | None = None
    trace: str | None = None
    """What comes of it belongs to this span."""


class TriggeredWorkflow(NamedTuple):
    """A workflow that something starts."""

    name: str
    version: int
    triggers: tuple[EventTrigger, ...]


class Triggers:
    """Knows which workflows wait for what; read again when a definition has changed."""

    def __init__(self, dags: Dags, nesting: Nesting | None = None) -> None:
        self._dags = dags
        self._nesting = nesting or Nesting()
        self._stamp: object = None
        self._waiting: list[TriggeredWorkflow] = []
        self._awaited: set[str | None] = set()
        """Workflows for whose ends others wait."""

    def runs_ended(self, tx: Transaction, news: News, ended: Iterable[RunRow]) -> None:
        """Run the hooks of runs that ended, and start the workflows that waited for them.

        Those of code have no hooks: their code does what is to follow.
        """
        self._refresh(tx)
        posted: list[Posted] = []
        hooks: list[NewTask] = []
        size = 0
        awaited = {row.id: row for row in ended if row.workflow in self._awaited or _may_have_hooks(row)}
        planned = [row.id for row in awaited.values() if row.is_planned]
        for run in dags.load(tx.connection, planned) if planned else ():
            state = awaited[run.id].status
            definition = self._dags.definition(tx, run.workflow, run.version)
            body = {"run_id": to_text(run.id), "workflow": run.workflow, "state": state, "params": run.params}
            trace = _trace(tx, awaited[run.id])
            for hook in _hooks(definition, run, state, body, tx.now):
                hooks.append(hook if trace is None else msgspec.structs.replace(hook, trace=trace))
                size += len(hook.payload)
                if size > _SENT_AT_ONCE:
                    create_tasks(tx, news, hooks)
                    hooks, size = [], 0
            posted.append(Posted(run.id, None, body, run.workflow, state, run.depth, run.root, trace))
        code = [row.id for row in awaited.values() if row.code]
        for run_id, started in (histories.beginnings(tx.connection, code) if code else {}).items():
            row = awaited[run_id]
            body = _end_of_code(row, started.payload)
            posted.append(Posted(row.id, None, body, row.workflow, row.status, trace=_trace(tx, row)))
        create_tasks(tx, news, hooks)
        if posted:
            self._fire(tx, news, posted)

    def events(self, tx: Transaction, news: News, posted: Iterable[Posted]) -> None:
        """Start the workflows that wait for these events, each once per event."""
        self._refresh(tx)
        self._fire(tx, news, posted)

    def _fire(self, tx: Transaction, news: News, posted: Iterable[Posted]) -> None:
        started: list[NewRun] = []
        for event in posted:
            for waiting in self._waiting:
                for place, trigger in enumerate(waiting.triggers):
                    if _matches(trigger, event, waiting.name):
                        started.extend(self._start(tx, waiting, place, event))
        create_runs(tx, news, self._within_limits(tx, started))

    def _start(self, tx: Transaction, waiting: TriggeredWorkflow, place: int, event: Posted) -> Iterable[NewRun]:
        depth = event.depth + 1
        try:
            if depth > self._nesting.depth:
                raise InvalidWorkflow(self._nesting.too_deep(waiting.name, depth))
            given = parse_template(waiting.triggers[place].params).render(_names(event))
            definition = self._dags.definition(tx, waiting.name, waiting.version)
            params = resolve_params(definition, given, tx.now)
            run = derived_id(event.id, "on", waiting.name, place)
            new = dags.new_run(definition, waiting.version, run, params)
            yield new._replace(depth=depth, root=event.root, trace=event.trace)
        except (InvalidWorkflow, *REFUSALS) as error:  # which is not the fault of whoever ended or posted
            whose = {"workflow": waiting.name, "event_id": to_text(event.id)}
            log.warning("workflow %s cannot be started by event %s: %s", *whose.values(), error, extra=whose)

    def _within_limits(self, tx: Transaction, started: list[NewRun]) -> list[NewRun]:
        """Return the runs that may be started; a chain of runs that has grown too large gets no more."""
        full = full_trees(tx, started, self._nesting)
        for run in started:
            if run.root in full:
                log.warning("%s", self._nesting.too_many(run.name))
        return [run for run in started if run.root not in full]

    def _refresh(self, tx: Transaction) -> None:
        stamp = workflows.stamp(tx.connection)
        if stamp != self._stamp:
            self._waiting = [*_readable(workflows.list_triggered(tx.connection))]
            self._awaited = {trigger.workflow for waiting in self._waiting for trigger in waiting.triggers}
            self._stamp = stamp


def _readable(found: Iterable[Triggered]) -> Iterable[TriggeredWorkflow]:
    for workflow in found:
        try:
            yield TriggeredWorkflow(workflow.name, workflow.version, _triggers.decode(workflow.triggers))
        except REFUSALS as error:  # of another release; whatever ends is not to blame
            log.error("what starts workflow %s cannot be read, so nothing does: %s", workflow.name, error)


def _matches(trigger: EventTrigger, event: Posted, workflow: str) -> bool:
    if trigger.event is not None:
        right = trigger.event == event.name
    else:
        right = event.name is None and trigger.workflow == event.workflow and trigger.state in (event.state, "ended")
    if not right or trigger.filter is None:
        return right
    try:
        return bool(parse(trigger.filter).evaluate(_names(event)))
    except (InvalidWorkflow, *REFUSALS) as error:
        log.warning(
            "workflow %s is not started by event %s: its filter %s does not fit it: %s",
            *(workflow, to_text(event.id), trigger.filter, error),
            extra={"workflow": workflow, "event_id": to_text(event.id)},
        )
        return False


def _names(event: Posted) -> Scope:
    """Return what the expressions of a trigger may name."""
    params = event.body.get("params") if isinstance(event.body, dict) else event.body
    is_sealed = isinstance(params, msgspec.msgpack.Ext) and params.code == CODE
    return Scope({"event": event.body}, sealed={"event"} if is_sealed else set())


def _trace(tx: Transaction, run: RunRow) -> str | None:
    """Return what that belongs to which comes of the end of a run."""
    return below(run.trace, run_span(run.id)) if run.trace is not None and tx.has_spans else run.trace


def _may_have_hooks(run: RunRow) -> bool:
    return run.is_planned and run.state is not RunState.CANCELLED


def _end_of_code(run: RunRow, call: bytes) -> dict[str, Any]:
    stored = whole_reference(call)
    try:
        args, params = zoned.decode(open_data(call, CALL)) if stored is None else [stored.extension()] * 2
    except Sealed:  # by a key that is not here: what only passes it on can
        args = params = msgspec.msgpack.Ext(CODE, extension_of(call))
    return {"run_id": to_text(run.id), "workflow": run.workflow, "state": run.status, "args": args, "params": params}


def _hooks(
    definition: Definition, run: WorkflowRun, state: str, body: dict[str, Any], now: datetime
) -> Iterable[NewTask]:
    for place, hook in enumerate(hooks_of(definition, state)):
        given = {"url": hook.webhook, "body": body} if hook.webhook is not None else body
        context = {"workflow": definition.name, "step": f"on_{state}", "index": place, "count": None}
        identifier = derived_id(run.id, "hook", state, place, now.isoformat())  # a retried run may end again
        key = hook.registered.key if hook.registered is not None else None
        payload = zoned.encode(((), given, context))
        yield of_hook(hook, definition.queue).new(identifier, payload, key, Origin())
