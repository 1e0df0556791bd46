"""Start the followers of ended runs and posted events: hooks, and runs of listening workflows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.dag.definition import Definition, EventTrigger, hidden_by, hooks_of, resolve_params
from orchestrator.domain.dag.expression import parse, parse_template
from orchestrator.domain.dag.placement import Origin, of_hook
from orchestrator.domain.dag.scope import WORK_PER_TICK, Scope
from orchestrator.domain.ids import derived_id, to_text
from orchestrator.domain.plain import REFUSALS, read_json, stored_json
from orchestrator.domain.runs import Nesting
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.headers import inheriting
from orchestrator.domain.tasks.task import NewTask, with_inherited
from orchestrator.errors import InvalidWorkflow
from orchestrator.references import whole_reference
from orchestrator.scheduler.budget import TickBudget
from orchestrator.scheduler.dag.plans import Dags
from orchestrator.scheduler.runs.creation import create_runs, full_trees
from orchestrator.scheduler.runs.kinds import RunKind
from orchestrator.scheduler.tasks.creation import create_tasks
from orchestrator.scheduler.transaction import Transaction, isolate
from orchestrator.sealing import CALL, CODE, Sealed, extension_of, open_data, open_json
from orchestrator.store import inbox
from orchestrator.store.code import histories
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.dag.plans import WorkflowRun
from orchestrator.store.dag.workflows import Triggered
from orchestrator.store.inbox import Request, RequestKind
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.runs.transitions import RunRow
from orchestrator.telemetry import get_logger
from orchestrator.trace_context import below, run_span

_MAX_WORK = 2 * WORK_PER_TICK
"""The cost of filters in one tick, beyond which the remaining ones wait for the next."""

Position = tuple[bool, str, int]
"""The sort key of a listener: whether it has a filter, its workflow, and the index of its trigger."""


class Posted(NamedTuple):
    """A posted event, or the end of a run."""

    id: bytes
    name: str | None
    """The event's name; None for the end of a run."""
    body: Any
    workflow: str | None = None
    state: str | None = None
    depth: int = -1
    """The nesting depth of the run that ended."""
    root: bytes | None = None
    trace: str | None = None
    """The parent span of started runs."""
    after: Position | None = None
    """The last listener evaluated, if an earlier tick evaluated some."""


class Listener(NamedTuple):
    """A trigger of a workflow."""

    workflow: str
    version: int
    trigger_index: int
    trigger: EventTrigger

    @property
    def position(self) -> Position:
        return self.trigger.filter is not None, self.workflow, self.trigger_index

    def name(self, event: Posted) -> bytes:
        """Return the id under which a slow evaluation is recorded."""
        return b"listener %b %d %b" % (event.id, self.trigger_index, self.workflow.encode())

    def is_for(self, event: Posted) -> bool:
        """Return whether the trigger matches such an event, apart from its filter."""
        return self.trigger.event is not None or self.trigger.state in (event.state, "ended")


class Listeners:
    """All listeners for events and ends of runs, in order."""

    def __init__(self, found: Iterable[Listener] = ()) -> None:
        self._for_events: dict[str, list[Listener]] = {}
        self._for_ends: dict[str | None, list[Listener]] = {}
        for listener in sorted(found, key=lambda listener: listener.position):
            if listener.trigger.event is not None:
                self._for_events.setdefault(listener.trigger.event, []).append(listener)
            else:
                self._for_ends.setdefault(listener.trigger.workflow, []).append(listener)

    def are_for_end(self, workflow: str | None, state: str) -> bool:
        """Return whether a workflow listens for runs of `workflow` that end in `state`."""
        return any(listener.trigger.state in (state, "ended") for listener in self._for_ends.get(workflow, ()))

    def _of(self, event: Posted) -> Sequence[Listener]:
        if event.name is not None:
            return self._for_events.get(event.name, ())
        return self._for_ends.get(event.workflow, ())

    def in_turn(
        self, budget: TickBudget, posted: Sequence[Posted], remaining: dict[int, Position | None]
    ) -> Iterator[tuple[Posted, Listener]]:
        """Yield pairs of event and listener to evaluate, while there is time, and always the first.

        `remaining` receives the events with listeners left, and the last listener that was evaluated.
        """
        for index, event in enumerate(posted):
            last = event.after
            for listener in self._of(event):
                if not listener.is_for(event) or (event.after is not None and listener.position <= event.after):
                    continue
                if budget.triggers_evaluated and not _has_room(budget, event):
                    remaining[index] = last
                    break
                budget.triggers_evaluated += 1
                yield event, listener
                last = listener.position


def _has_room(budget: TickBudget, event: Posted) -> bool:
    if budget.triggers_evaluated >= budget.slice or budget.trigger_cost > _MAX_WORK or budget.is_spent:
        return False
    return budget.has_room_for_data(event.root or event.id)


log = get_logger("scheduler")
_MAX_HOOK_BYTES = 2_000_000
"""Bytes of hooks sent to Postgres at once: it may take a leader that sends nothing for a stopped one."""
_triggers = msgspec.json.Decoder(tuple[EventTrigger, ...])
_MAX_ENDS = 10
"""Ended runs read between two checks of the clock. They may have large parameters."""


class Triggers:
    """Caches which workflows listen for what, and reloads that when a definition changes."""

    def __init__(self, dags: Dags, nesting: Nesting | None = None) -> None:
        self._dags = dags
        self._nesting = nesting or Nesting()
        self._stamp: object = None
        self._listeners = Listeners()

    def runs_ended(self, tx: Transaction, ended: Sequence[tuple[RunKind, RunRow]]) -> None:
        """Create the hooks of ended runs, and request the evaluation of listening workflows.

        The request is separate, so that no listener keeps a run from ending. Code runs have no hooks.
        """
        self._refresh(tx)
        self._run_hooks(
            tx, {row.id: row for kind, row in ended if kind.has_hooks and row.state is not RunState.CANCELLED}
        )
        requests = [
            inbox.NewRequest(row.id, _end_request(tx, row))
            for kind, row in ended
            if kind.is_listened_to and self._listeners.are_for_end(row.workflow, row.status)
        ]
        if requests:
            inbox.add_all(tx.connection, RequestKind.RUN_ENDED, requests)
            tx.result.wake.requests = True

    def _run_hooks(self, tx: Transaction, ended: Mapping[bytes, RunRow]) -> None:
        hooks: list[NewTask] = []
        size = 0
        with_hooks = [run for run, row in ended.items() if self._dags.may_have_hooks(run, row.status)]
        for run in dags.load(tx.connection, with_hooks) if with_hooks else ():
            state = ended[run.id].status
            definition = self._dags.compiled(tx, run.workflow, run.version).definition
            trace = _trace(tx, ended[run.id])
            for hook in _hooks(definition, run, state, _end_of_plan(run, state), tx.now):
                hooks.append(hook if trace is None else msgspec.structs.replace(hook, trace=trace))
                size += len(hook.payload)
                if size > _MAX_HOOK_BYTES:
                    create_tasks(tx, hooks)
                    hooks, size = [], 0
        create_tasks(tx, hooks)

    def start_on_events(self, tx: Transaction, items: Sequence[Request]) -> set[int]:
        """Start the workflows that listen for these events, once per event. Return the requests to continue later."""
        self._refresh(tx)
        posted = [
            Posted(item.target, item.body["name"], open_json(item.body["payload"]), after=_after(item))
            for item in items
        ]
        return self._fire(tx, items, posted)

    def hear_ends(self, tx: Transaction, items: Sequence[Request]) -> set[int]:
        """Start the workflows that listen for the ends of these runs. Return the requests to continue later."""
        self._refresh(tx)
        unfinished: set[int] = set()
        for start in range(0, len(items), _MAX_ENDS):
            batch = items[start : start + _MAX_ENDS]
            if start and tx.budget.is_spent:
                unfinished.update(item.id for item in batch)
            else:
                unfinished |= self._fire(tx, *_ends(tx, batch))
        return unfinished

    def _fire(self, tx: Transaction, items: Sequence[Request], posted: Sequence[Posted]) -> set[int]:
        """Evaluate listeners while there is time. Return the requests with listeners left."""
        remaining: dict[int, Position | None] = {}
        turn = self._listeners.in_turn(tx.budget, posted, remaining)
        if tx.is_bisecting:
            for pair in turn:
                isolate(tx, [pair], self._evaluate, _log_defect)
        else:
            self._evaluate(tx, turn)
        for index, last in remaining.items():
            if last is not None and last != posted[index].after:
                inbox.save_progress(tx.connection, items[index].id, stored_json({"after": last}))
        return {items[index].id for index in remaining}

    def _evaluate(self, tx: Transaction, pairs: Iterable[tuple[Posted, Listener]]) -> None:
        started: list[NewRun] = []
        for event, listener in pairs:
            trigger_id = listener.name(event)
            if trigger_id in tx.budget.refused:
                tx.budget.resolved.add(trigger_id)
                _warn(event, listener, "evaluating it takes too long; other work would have to wait")
                continue
            with tx.budget.charging([trigger_id]):
                run = self._start(tx, listener, event)
            if run is not None:
                started.append(run)
                tx.budget.created(event.root or event.id, len(run.params or ""))
        create_runs(tx, self._within_limits(tx, started))

    def _start(self, tx: Transaction, listener: Listener, event: Posted) -> NewRun | None:
        """Return the run that an event starts, or None. Errors do not affect the source of the event."""
        names, depth = _names(event), event.depth + 1
        try:
            if not _passes_filter(listener, event, names):
                return None
            if depth > self._nesting.depth:
                raise InvalidWorkflow(self._nesting.too_deep(listener.workflow, depth))
            names.budget.begin()
            values = parse_template(listener.trigger.params).render(names)
            definition = self._dags.compiled(tx, listener.workflow, listener.version).definition
            params = resolve_params(definition, values, tx.now)
            run = derived_id(event.id, "on", listener.workflow, listener.trigger_index)
            new = dags.new_run(definition, listener.version, run, params, budget=names.budget)
            return new._replace(depth=depth, root=event.root, trace=event.trace)
        except (InvalidWorkflow, *REFUSALS) as error:
            _warn(event, listener, error)
            return None
        finally:
            tx.budget.trigger_cost += names.budget.spent

    def _within_limits(self, tx: Transaction, started: list[NewRun]) -> list[NewRun]:
        """Return the runs that may start. A tree of runs that has grown too large gets none."""
        full = full_trees(tx, started, self._nesting)
        for run in started:
            if run.root in full:
                log.warning("workflow.nested_too_deeply workflow=%s: %s", run.name, self._nesting.too_many(run.name))
        return [run for run in started if run.root not in full]

    def _refresh(self, tx: Transaction) -> None:
        stamp = workflows.stamp(tx.connection)
        if stamp != self._stamp:
            self._listeners = Listeners(_readable(workflows.list_triggered(tx.connection)))
            self._stamp = stamp


def _readable(found: Iterable[Triggered]) -> Iterable[Listener]:
    for workflow in found:
        try:
            triggers = _triggers.decode(workflow.triggers)
        except REFUSALS as error:  # stored by another release; the run that ended is not to blame
            log.error("workflow.triggers_unreadable workflow=%s error=%s: no event starts it", workflow.name, error)
        else:
            for index, trigger in enumerate(triggers):
                yield Listener(workflow.name, workflow.version, index, trigger)


def _passes_filter(listener: Listener, event: Posted, names: Scope) -> bool:
    condition = listener.trigger.filter
    if condition is None:
        return True
    try:
        return bool(parse(condition).evaluate(names))
    except (InvalidWorkflow, *REFUSALS) as error:
        ids = {"workflow": listener.workflow, "event_id": to_text(event.id)}
        log.warning(
            "workflow.not_triggered workflow=%s event_id=%s filter=%s error=%s",
            *(*ids.values(), condition, error),
            extra=ids,
        )
        return False


def _warn(event: Posted, listener: Listener, error: object) -> None:
    ids = {"workflow": listener.workflow, "event_id": to_text(event.id)}
    log.warning("workflow.not_triggered workflow=%s event_id=%s error=%s", *ids.values(), error, extra=ids)


def _log_defect(_: Transaction, pair: tuple[Posted, Listener], error: Exception) -> None:
    """Skip a listener whose evaluation fails with a defect."""
    event, listener = pair
    ids = {"workflow": listener.workflow, "event_id": to_text(event.id)}
    log.error("workflow.trigger_failed workflow=%s event_id=%s: a defect", *ids.values(), exc_info=error, extra=ids)


def _after(item: Request) -> Position | None:
    after = item.body.get("after")
    return None if after is None else (after[0], after[1], after[2])


def _names(event: Posted) -> Scope:
    """Return the names that the expressions of a trigger may use."""
    params = event.body.get("params") if isinstance(event.body, dict) else event.body
    is_sealed = isinstance(params, msgspec.msgpack.Ext) and params.code == CODE
    return Scope({"event": event.body}, sealed={"event"} if is_sealed else set())


def _trace(tx: Transaction, run: RunRow) -> str | None:
    """Return the parent trace for tasks and runs that the end of a run starts."""
    return below(run.trace, run_span(run.id)) if run.trace is not None and tx.has_spans else run.trace


def _end_request(tx: Transaction, run: RunRow) -> str:
    """Return the request body for a run that ended. The run may be reopened before all listeners are evaluated."""
    return stored_json({"workflow": run.workflow, "state": run.status, "code": run.code, "trace": _trace(tx, run)})


def _ends(tx: Transaction, items: Sequence[Request]) -> tuple[list[Request], list[Posted]]:
    """Return the ended runs that still exist, with their requests."""
    code = [item.target for item in items if item.body["code"]]
    planned = [item.target for item in items if not item.body["code"]]
    begun = histories.starts_of(tx.connection, code) if code else {}
    runs = {run.id: run for run in dags.load(tx.connection, planned)} if planned else {}
    found: list[tuple[Request, Posted]] = []
    for item in items:
        workflow, state = item.body["workflow"], item.body["state"]
        common = {"workflow": workflow, "state": state, "trace": item.body["trace"], "after": _after(item)}
        if item.target in runs:
            run = runs[item.target]
            body = _end_of_plan(run, state)
            found.append((item, Posted(run.id, None, body, depth=run.depth, root=run.root, **common)))
        elif item.target in begun:
            body = _end_of_code(item.target, workflow, state, begun[item.target].payload)
            found.append((item, Posted(item.target, None, body, **common)))
    return [item for item, _ in found], [posted for _, posted in found]


def _end_of_plan(run: WorkflowRun, state: str) -> dict[str, Any]:
    return {"run_id": to_text(run.id), "workflow": run.workflow, "state": state, "params": run.params}


def _end_of_code(run: bytes, workflow: str, state: str, call: bytes) -> dict[str, Any]:
    stored = whole_reference(call)
    try:
        args, params = timezones.decode(open_data(call, CALL)) if stored is None else [stored.extension()] * 2
    except Sealed:  # sealed by a key missing here; a workflow that only passes the value on can still start
        args = params = msgspec.msgpack.Ext(CODE, extension_of(call))
    return {"run_id": to_text(run), "workflow": workflow, "state": state, "args": args, "params": params}


def _hooks(
    definition: Definition, run: WorkflowRun, state: str, body: dict[str, Any], now: datetime
) -> Iterable[NewTask]:
    hidden = hidden_by(step.registered for step in definition.steps)
    for index, hook in enumerate(hooks_of(definition, state)):
        args = {"url": hook.webhook, "body": body} if hook.webhook is not None else body
        context = {"workflow": definition.name, "step": f"on_{state}", "index": index, "count": None}
        identifier = derived_id(run.id, "hook", state, index, now.isoformat())  # a retried run may end again
        key = hook.registered.key if hook.registered is not None else None
        payload = timezones.encode(((), args, context))
        new = of_hook(hook, definition.queue).new(identifier, payload, key, Origin())
        options = with_inherited(new.options, hidden)
        if run.headers is not None:
            options = inheriting(options, read_json(run.headers))
        yield msgspec.structs.replace(new, options=options)
