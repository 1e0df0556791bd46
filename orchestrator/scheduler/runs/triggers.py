"""Followers of the end of a run or of a posted event: hooks, and runs of workflows that wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.dag.definition import Definition, EventTrigger, hidden_by, hooks_of, resolve_params
from orchestrator.domain.dag.expression import parse, parse_template
from orchestrator.domain.dag.placement import Origin, of_hook
from orchestrator.domain.dag.scope import ENOUGH_WORK, Scope
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

_MOST_WORK = 2 * ENOUGH_WORK
"""After filters that cost this much together, the remaining ones are evaluated in the next tick."""

Position = tuple[bool, str, int]
"""A place in the order of listeners: whether it has a filter, its workflow, and which of the triggers of that it is."""


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
    """The span of the runs that it starts."""
    after: Position | None = None
    """The listener that was asked last, if some were in an earlier tick."""


class Listener(NamedTuple):
    """One of the triggers of a workflow."""

    workflow: str
    version: int
    place: int
    trigger: EventTrigger

    @property
    def position(self) -> Position:
        return self.trigger.filter is not None, self.workflow, self.place

    def name(self, event: Posted) -> bytes:
        """Return the name under which the time of evaluating an event is counted."""
        return b"listener %b %d %b" % (event.id, self.place, self.workflow.encode())

    def is_for(self, event: Posted) -> bool:
        """Say whether it waits for such an event, whatever its filter says."""
        return self.trigger.event is not None or self.trigger.state in (event.state, "ended")


class Listeners:
    """All that wait for events, and for ends of runs, in their order."""

    def __init__(self, found: Iterable[Listener] = ()) -> None:
        self._for_events: dict[str, list[Listener]] = {}
        self._for_ends: dict[str | None, list[Listener]] = {}
        for listener in sorted(found, key=lambda one: one.position):
            if listener.trigger.event is not None:
                self._for_events.setdefault(listener.trigger.event, []).append(listener)
            else:
                self._for_ends.setdefault(listener.trigger.workflow, []).append(listener)

    def are_for_end(self, workflow: str | None, state: str) -> bool:
        """Say whether a workflow waits for a run that ends like this."""
        return any(one.trigger.state in (state, "ended") for one in self._for_ends.get(workflow, ()))

    def _of(self, event: Posted) -> Sequence[Listener]:
        if event.name is not None:
            return self._for_events.get(event.name, ())
        return self._for_ends.get(event.workflow, ())

    def in_turn(
        self, budget: TickBudget, posted: Sequence[Posted], left: dict[int, Position | None]
    ) -> Iterator[tuple[Posted, Listener]]:
        """Yield workflows and events to evaluate, as long as there is time; the first one in any case.

        `left` holds events for which some workflows are left, and the last workflow that was evaluated.
        """
        for place, event in enumerate(posted):
            last = event.after
            for listener in self._of(event):
                if not listener.is_for(event) or (event.after is not None and listener.position <= event.after):
                    continue
                if budget.asked and not _has_room(budget, event):
                    left[place] = last
                    break
                budget.asked += 1
                yield event, listener
                last = listener.position


def _has_room(budget: TickBudget, event: Posted) -> bool:
    """Say whether one more may be asked in this tick."""
    if budget.asked >= budget.slice or budget.asking_cost > _MOST_WORK or budget.is_spent:
        return False
    return budget.has_room_for_data(event.root or event.id)


log = get_logger("scheduler")
_SENT_AT_ONCE = 2_000_000
"""Bytes of hooks after which Postgres gets them: it may take a leader for one that has stopped."""
_triggers = msgspec.json.Decoder(tuple[EventTrigger, ...])
_ENDS = 10
"""Ended runs that are read between two looks at the clock: they may have large parameters."""


class Triggers:
    """Knows which workflows wait for what; read again when a definition has changed."""

    def __init__(self, dags: Dags, nesting: Nesting | None = None) -> None:
        self._dags = dags
        self._nesting = nesting or Nesting()
        self._stamp: object = None
        self._listeners = Listeners()

    def runs_ended(self, tx: Transaction, ended: Sequence[tuple[RunKind, RunRow]]) -> None:
        """Run the hooks of runs that ended, and have the workflows asked that wait for them.

        Those are asked by a request of its own, so that none of them keeps a run from ending. Runs of code have no
        hooks: their code does what is to follow.
        """
        self._refresh(tx)
        self._run_hooks(
            tx, {row.id: row for kind, row in ended if kind.has_hooks and row.state is not RunState.CANCELLED}
        )
        heard = [
            inbox.NewRequest(row.id, _heard(tx, row))
            for kind, row in ended
            if kind.is_listened_to and self._listeners.are_for_end(row.workflow, row.status)
        ]
        if heard:
            inbox.add_all(tx.connection, RequestKind.RUN_ENDED, heard)
            tx.result.wake.requests = True

    def _run_hooks(self, tx: Transaction, ended: Mapping[bytes, RunRow]) -> None:
        hooks: list[NewTask] = []
        size = 0
        wanted = [run for run, row in ended.items() if self._dags.may_have_hooks(run, row.status)]
        for run in dags.load(tx.connection, wanted) if wanted else ():
            state = ended[run.id].status
            definition = self._dags.compiled(tx, run.workflow, run.version).definition
            trace = _trace(tx, ended[run.id])
            for hook in _hooks(definition, run, state, _end_of_plan(run, state), tx.now):
                hooks.append(hook if trace is None else msgspec.structs.replace(hook, trace=trace))
                size += len(hook.payload)
                if size > _SENT_AT_ONCE:
                    create_tasks(tx, hooks)
                    hooks, size = [], 0
        create_tasks(tx, hooks)

    def hear_events(self, tx: Transaction, items: Sequence[Request]) -> set[int]:
        """Start the workflows that wait for these events, each once per event; return the requests that go on."""
        self._refresh(tx)
        posted = [
            Posted(item.target, item.body["name"], open_json(item.body["payload"]), after=_after(item))
            for item in items
        ]
        return self._fire(tx, items, posted)

    def hear_ends(self, tx: Transaction, items: Sequence[Request]) -> set[int]:
        """Start the workflows that wait for the ends of these runs; return the requests that go on."""
        self._refresh(tx)
        unfinished: set[int] = set()
        for start in range(0, len(items), _ENDS):
            some = items[start : start + _ENDS]
            if start and tx.budget.is_spent:
                unfinished.update(item.id for item in some)
            else:
                unfinished |= self._fire(tx, *_ends(tx, some))
        return unfinished

    def _fire(self, tx: Transaction, items: Sequence[Request], posted: Sequence[Posted]) -> set[int]:
        """Evaluate the filters of listening workflows, as far as there is time; return the requests with some left."""
        left: dict[int, Position | None] = {}
        turn = self._listeners.in_turn(tx.budget, posted, left)
        if tx.is_bisecting:
            for pair in turn:
                isolate(tx, [pair], self._ask, _leave_out)
        else:
            self._ask(tx, turn)
        for place, last in left.items():
            if last is not None and last != posted[place].after:
                inbox.go_on(tx.connection, items[place].id, stored_json({"after": last}))
        return {items[place].id for place in left}

    def _ask(self, tx: Transaction, pairs: Iterable[tuple[Posted, Listener]]) -> None:
        started: list[NewRun] = []
        for event, listener in pairs:
            whom = listener.name(event)
            if whom in tx.budget.refused:
                tx.budget.met.add(whom)
                _warn(event, listener, "asking it takes longer than everybody else can wait")
                continue
            with tx.budget.charging([whom]):
                run = self._start(tx, listener, event)
            if run is not None:
                started.append(run)
                tx.budget.created(event.root or event.id, len(run.params or ""))
        create_runs(tx, self._within_limits(tx, started))

    def _start(self, tx: Transaction, listener: Listener, event: Posted) -> NewRun | None:
        """Return the run that an event starts. Its errors do not fail the run or client that the event comes from."""
        names, depth = _names(event), event.depth + 1
        try:
            if not _lets_through(listener, event, names):
                return None
            if depth > self._nesting.depth:
                raise InvalidWorkflow(self._nesting.too_deep(listener.workflow, depth))
            names.budget.begin()
            given = parse_template(listener.trigger.params).render(names)
            definition = self._dags.compiled(tx, listener.workflow, listener.version).definition
            params = resolve_params(definition, given, tx.now)
            run = derived_id(event.id, "on", listener.workflow, listener.place)
            new = dags.new_run(definition, listener.version, run, params, budget=names.budget)
            return new._replace(depth=depth, root=event.root, trace=event.trace)
        except (InvalidWorkflow, *REFUSALS) as error:
            _warn(event, listener, error)
            return None
        finally:
            tx.budget.asking_cost += names.budget.spent

    def _within_limits(self, tx: Transaction, started: list[NewRun]) -> list[NewRun]:
        """Return the runs that may be started; a chain of runs that has grown too large gets no more."""
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
        except REFUSALS as error:  # of another release; whatever ends is not to blame
            log.error("workflow.triggers_unreadable workflow=%s error=%s: no event starts it", workflow.name, error)
        else:
            for place, trigger in enumerate(triggers):
                yield Listener(workflow.name, workflow.version, place, trigger)


def _lets_through(listener: Listener, event: Posted, names: Scope) -> bool:
    wanted = listener.trigger.filter
    if wanted is None:
        return True
    try:
        return bool(parse(wanted).evaluate(names))
    except (InvalidWorkflow, *REFUSALS) as error:
        whose = {"workflow": listener.workflow, "event_id": to_text(event.id)}
        log.warning(
            "workflow.not_triggered workflow=%s event_id=%s filter=%s error=%s",
            *(*whose.values(), wanted, error),
            extra=whose,
        )
        return False


def _warn(event: Posted, listener: Listener, error: object) -> None:
    whose = {"workflow": listener.workflow, "event_id": to_text(event.id)}
    log.warning("workflow.not_triggered workflow=%s event_id=%s error=%s", *whose.values(), error, extra=whose)


def _leave_out(_: Transaction, pair: tuple[Posted, Listener], error: Exception) -> None:
    """Go on without a listener with which the scheduler fails."""
    event, listener = pair
    whose = {"workflow": listener.workflow, "event_id": to_text(event.id)}
    log.error("workflow.trigger_failed workflow=%s event_id=%s: a defect", *whose.values(), exc_info=error, extra=whose)


def _after(item: Request) -> Position | None:
    """Return the last workflow that was evaluated for the event of a request."""
    after = item.body.get("after")
    return None if after is None else (after[0], after[1], after[2])


def _names(event: Posted) -> Scope:
    """Return what the expressions of a trigger may name."""
    params = event.body.get("params") if isinstance(event.body, dict) else event.body
    is_sealed = isinstance(params, msgspec.msgpack.Ext) and params.code == CODE
    return Scope({"event": event.body}, sealed={"event"} if is_sealed else set())


def _trace(tx: Transaction, run: RunRow) -> str | None:
    """Return what that belongs to which comes of the end of a run."""
    return below(run.trace, run_span(run.id)) if run.trace is not None and tx.has_spans else run.trace


def _heard(tx: Transaction, run: RunRow) -> str:
    """Return what a request has to say about a run that ended: it may be opened again before all have been asked."""
    return stored_json({"workflow": run.workflow, "state": run.status, "code": run.code, "trace": _trace(tx, run)})


def _ends(tx: Transaction, items: Sequence[Request]) -> tuple[list[Request], list[Posted]]:
    """Return what happened to runs that ended, as far as they are still there."""
    code = [item.target for item in items if item.body["code"]]
    planned = [item.target for item in items if not item.body["code"]]
    begun = histories.beginnings(tx.connection, code) if code else {}
    runs = {run.id: run for run in dags.load(tx.connection, planned)} if planned else {}
    found: list[tuple[Request, Posted]] = []
    for item in items:
        workflow, state = item.body["workflow"], item.body["state"]
        known = {"workflow": workflow, "state": state, "trace": item.body["trace"], "after": _after(item)}
        if item.target in runs:
            run = runs[item.target]
            body = _end_of_plan(run, state)
            found.append((item, Posted(run.id, None, body, depth=run.depth, root=run.root, **known)))
        elif item.target in begun:
            body = _end_of_code(item.target, workflow, state, begun[item.target].payload)
            found.append((item, Posted(item.target, None, body, **known)))
    return [item for item, _ in found], [posted for _, posted in found]


def _end_of_plan(run: WorkflowRun, state: str) -> dict[str, Any]:
    return {"run_id": to_text(run.id), "workflow": run.workflow, "state": state, "params": run.params}


def _end_of_code(run: bytes, workflow: str, state: str, call: bytes) -> dict[str, Any]:
    stored = whole_reference(call)
    try:
        args, params = timezones.decode(open_data(call, CALL)) if stored is None else [stored.extension()] * 2
    except Sealed:  # by a key that is not here: what only passes it on can
        args = params = msgspec.msgpack.Ext(CODE, extension_of(call))
    return {"run_id": to_text(run), "workflow": workflow, "state": state, "args": args, "params": params}


def _hooks(
    definition: Definition, run: WorkflowRun, state: str, body: dict[str, Any], now: datetime
) -> Iterable[NewTask]:
    hidden = hidden_by(step.registered for step in definition.steps)
    for place, hook in enumerate(hooks_of(definition, state)):
        given = {"url": hook.webhook, "body": body} if hook.webhook is not None else body
        context = {"workflow": definition.name, "step": f"on_{state}", "index": place, "count": None}
        identifier = derived_id(run.id, "hook", state, place, now.isoformat())  # a retried run may end again
        key = hook.registered.key if hook.registered is not None else None
        payload = timezones.encode(((), given, context))
        new = of_hook(hook, definition.queue).new(identifier, payload, key, Origin())
        options = with_inherited(new.options, hidden)
        if run.headers is not None:
            options = inheriting(options, read_json(run.headers))
        yield msgspec.structs.replace(new, options=options)
