"""Advance runs of flows: notify the planner, and carry out its commands, for all runs of a tick together.

Definitions never change, and are cached. So are the last stored states of runs with open tasks, to save reading them
when the tasks end. These states are dropped when a tick fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.code import history
from orchestrator.domain.dag.state import Delta
from orchestrator.domain.flow import commands
from orchestrator.domain.flow.commands import Command, Event
from orchestrator.domain.flow.definition import size_of
from orchestrator.domain.flow.graph import Graph
from orchestrator.domain.flow.plan import Planner
from orchestrator.domain.flow.state import Calls, FlowState
from orchestrator.domain.ids import derived_id
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.runs import RunChanges
from orchestrator.domain.sealed import open_error
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import NewTask, error_text
from orchestrator.references import is_reference
from orchestrator.scheduler.flow.calls import Caller, CannotCall
from orchestrator.scheduler.runs.kinds import Advanced, LruCache, PlannedRuns, Saved
from orchestrator.scheduler.tasks.creation import cancel_tasks, create_tasks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sealing import VALUE
from orchestrator.store.code import expectations
from orchestrator.store.flow import runs as store
from orchestrator.store.flow.runs import FlowRun, Visit
from orchestrator.store.runs.transitions import RunRow

_CACHED_NODES = 30_000
"""Nodes of the cached flows, at most."""
_MIN_CACHED = 3
"""Flows that are cached however large they are: earlier releases accepted flows above the limit."""
_CACHED_BYTES = 8_000_000
"""Bytes of the cached states of runs, at most."""
_RUN_WEIGHT = 1_000
"""The weight of a run in addition to its state and parameters."""
_MEMORY_PER_PARAMETER_BYTE = 5
"""Bytes in memory for each byte of parameters as text."""
_MAX_STATE_PAYLOADS = 4
"""The largest state of a run, as a multiple of the largest payload."""
_MAX_DISPLAYED = 65_536
"""Bytes of a node's input or output that are stored for display, if no task of the node has them."""


class CompiledFlow(NamedTuple):
    """A version of a flow, compiled once for all its runs."""

    graph: Graph
    caller: Caller


class _Effects(msgspec.Struct):
    """The commands for all runs of a tick."""

    tasks: list[NewTask] = []
    cancelled: list[bytes] = []
    timers: list[tuple[bytes, bytes, float]] = []
    cancelled_timers: list[tuple[bytes, bytes]] = []
    visits: list[Visit] = []
    ends: list[tuple[bytes, RunState, str | None]] = []

    def add(self, other: _Effects) -> None:
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


class Flows(PlannedRuns[FlowRun]):
    """Plans the runs of flows, and caches those that wait for tasks."""

    name = "flow"
    ends_itself = True
    is_listened_to = False

    def __init__(self, max_payload: int) -> None:
        super().__init__(_CACHED_BYTES)
        self._max_payload = max_payload
        self._compiled: LruCache[tuple[str, int], CompiledFlow] = LruCache(_CACHED_NODES)

    def plans(self, changes: Sequence[RunChanges]) -> bool:
        """Return whether the planner of a flow must see these changes."""
        return any(item.of_flow for item in changes)

    def advance(self, tx: Transaction, changes: Mapping[bytes, Sequence[RunChanges]]) -> Advanced:
        """Notify planners of changes to their runs, and carry out their commands."""
        saved: dict[bytes, Saved] = {}
        effects = _Effects()
        postponed: set[bytes] = set()
        for run in self._load(tx, changes):
            compiled = self._version(tx, run)
            if compiled is None:
                postponed.add(run.id)
                continue
            if run.is_over:
                saved[run.id] = self._keep_signals(tx, compiled, run, changes[run.id])
                continue
            saved[run.id], own = self._advance(tx, compiled, run, changes[run.id])
            effects.add(own)
        self._apply(tx, effects)
        return Advanced(saved, effects.ends, postponed)

    def _load(self, tx: Transaction, changes: Mapping[bytes, Sequence[RunChanges]]) -> list[FlowRun]:
        """Return the runs that are still open, and ended ones that were sent signals before their end."""
        found = {run: self._runs.get(run) for run in changes}
        missing = [run for run, kept in found.items() if kept is None]
        late = [
            run
            for run in missing
            if any(isinstance(fact, history.SignalReceived) for item in changes[run] for fact in item.facts)
        ]
        if missing:
            found.update((run.id, run) for run in store.load(tx.connection, missing, late))
        return [run for run in found.values() if run is not None]

    def ended(self, tx: Transaction, rows: Sequence[RunRow]) -> None:
        """Remove the timers of ended runs."""
        store.forget(tx.connection, [row.id for row in rows], is_gathered=tx.gathers(len(rows)))

    def _keep_signals(
        self, tx: Transaction, compiled: CompiledFlow, run: FlowRun, changes: Sequence[RunChanges]
    ) -> Saved:
        """Keep signals for a run that is over: they were accepted, and a retry delivers them."""
        state = _read(run)
        planner = _planner(tx, compiled, run, state)
        for event in _events(changes):
            if isinstance(event, commands.Signalled):
                planner.keep_signal(event)
        data = _encode(tx, state)
        too_large = run.state is not None and len(data) > _MAX_STATE_PAYLOADS * self._max_payload
        return Saved(Delta(), run.state if run.state is not None and too_large else data)

    def _keep(self, run: FlowRun, state: FlowState, data: bytes) -> None:
        """Cache the state of a run that waits for tasks. Runs that wait for something else may do so for months."""
        if isinstance(state.work, Calls):
            kept = FlowRun(run.id, run.flow, run.version, run.params, data, run.size)
            self._runs.put(run.id, kept, _RUN_WEIGHT + len(data) + _MEMORY_PER_PARAMETER_BYTE * run.size)
        else:
            self._runs.drop(run.id)

    def _apply(self, tx: Transaction, effects: _Effects) -> None:
        create_tasks(tx, effects.tasks)
        started = {timer for _, timer, _ in effects.timers}
        if effects.timers:
            cancelled_timers = {timer for _, timer in effects.cancelled_timers}
            expectations.start_timers(
                tx.connection, [timer for timer in effects.timers if timer[1] not in cancelled_timers]
            )
            tx.result.wake.delayed = True
        remaining = [timer for timer in effects.cancelled_timers if timer[1] not in started]
        if remaining:
            expectations.forget_timers(tx.connection, remaining)
        if effects.visits:
            store.keep_visits(tx.connection, effects.visits, is_gathered=tx.gathers(len(effects.visits)))
        if effects.cancelled:
            cancel_tasks(tx, effects.cancelled)

    def _advance(
        self, tx: Transaction, compiled: CompiledFlow, run: FlowRun, changes: Sequence[RunChanges]
    ) -> tuple[Saved, _Effects]:
        state, delta = _read(run), Delta()
        events = [*_events(changes)]
        if not isinstance(run.params, dict):
            reason = "Its parameters are sealed with a data key that the scheduler does not have."
            return self._abort(tx, compiled, run, events, reason)
        cursor = state.cursor
        planner = _planner(tx, compiled, run, state)
        effects = _Effects()
        waiting = deque(events)
        while waiting:
            event = waiting.popleft()
            _count_begin(event, state, delta)
            waiting.extend(self._collect(tx, compiled, run, planner.handle(event), effects, delta))
        try:
            data = _encode(tx, state)
        except REFUSALS as error:
            node = f"Node {cursor!r}: " if cursor else ""
            reason = f"{node}The state of the run cannot be stored: {error}."
            return self._abort(tx, compiled, run, events, reason)
        limit = _MAX_STATE_PAYLOADS * self._max_payload
        if len(data) > limit:
            node = f"Node {cursor!r}: " if cursor else ""
            return self._abort(
                tx,
                compiled,
                run,
                events,
                f"{node}The run would have to remember {len(data):,} bytes for its shared state and its open node; at "
                f"most {limit:,} are allowed. Have nodes return references to large data, or raise the setting "
                f"max_payload, of which that is {_MAX_STATE_PAYLOADS} times as much.",
            )
        self._keep(run, state, data)
        return Saved(delta, data), effects

    def _abort(
        self, tx: Transaction, compiled: CompiledFlow, run: FlowRun, events: Sequence[Event], error: str
    ) -> tuple[Saved, _Effects]:
        """End a run that cannot go on. Of the events, apply ends of calls and, if they can be stored, signals."""
        kept = self._aborted(tx, compiled, run, events, error)
        if kept is None:
            without_signals = [item for item in events if not isinstance(item, commands.Signalled)]
            kept = self._aborted(tx, compiled, run, without_signals, error)
        assert kept is not None, "a state that was stored can be stored again"
        return kept

    def _aborted(
        self, tx: Transaction, compiled: CompiledFlow, run: FlowRun, events: Sequence[Event], error: str
    ) -> tuple[Saved, _Effects] | None:
        """Return the state and commands that end a run; None if the state cannot be stored because of signals."""
        state, delta = _read(run), Delta()
        self._runs.drop(run.id)
        effects = _Effects()
        for event in events:
            if isinstance(event, commands.Retried):
                _count_begin(event, state, delta)
        if not state.frames:
            delta.total += 1
            delta.opened += 1
        self._collect(tx, compiled, run, _planner(tx, compiled, run, state).abort(error, events), effects, delta)
        has_signals = any(isinstance(event, commands.Signalled) for event in events)
        try:
            data = _encode(tx, state)
        except REFUSALS:
            if has_signals:
                return None
            raise
        if has_signals and len(data) > _MAX_STATE_PAYLOADS * self._max_payload:
            return None
        return Saved(delta, data), effects

    def _version(self, tx: Transaction, run: FlowRun) -> CompiledFlow | None:
        """Return the definition of a run; None if this tick has read many definitions, and a later one must read it."""
        compiled = self._compiled.get((run.flow, run.version))
        if compiled is None and tx.budget.may_read_nodes():
            found = store.read(tx.connection, run.flow, run.version)
            assert found is not None, f"the definition of flow {run.flow} version {run.version} is gone"
            rule = store.rules(tx.connection, [(run.flow, run.version)])[run.flow, run.version]
            compiled = CompiledFlow(Graph(found.flow, rule), Caller(found.flow))
            size = 1 + size_of(found.flow)
            tx.budget.read_nodes += size
            self._compiled.put((run.flow, run.version), compiled, min(size, _CACHED_NODES // _MIN_CACHED))
        return compiled

    def _collect(
        self,
        tx: Transaction,
        compiled: CompiledFlow,
        run: FlowRun,
        answers: Iterable[Command],
        effects: _Effects,
        delta: Delta,
    ) -> Sequence[Event]:
        """Collect the planner's commands. Return the events for calls that cannot be made."""
        refused: list[Event] = []
        for answer in answers:
            match answer:
                case commands.Call():
                    try:
                        effects.tasks.append(compiled.caller.new_task(run, answer, self._max_payload))
                    except CannotCall as error:
                        refused.append(commands.CallEnded(answer.id, error=str(error)))
                    else:
                        delta.total += 1
                        delta.opened += 1
                case commands.CancelCalls(ids=ids):
                    effects.cancelled.extend(ids)
                case commands.StartTimer(id=id, due=due):
                    effects.timers.append((run.id, id, due))
                case commands.CancelTimer(id=id):
                    effects.cancelled_timers.append((run.id, id))
                case commands.NodeRun():
                    effects.visits.append(_visit(tx, run.id, answer))
                case commands.End(error=error):
                    delta.opened -= 1
                    name = "success" if error is None else "failed"
                    delta.counts[name] = delta.counts.get(name, 0) + 1
                    state = RunState.SUCCESS if error is None else RunState.FAILED
                    effects.ends.append((run.id, state, error))
        return refused


def _planner(tx: Transaction, compiled: CompiledFlow, run: FlowRun, state: FlowState) -> Planner:
    params = run.params if isinstance(run.params, dict) else {}
    return Planner(compiled.graph, params, state, tx.now.timestamp(), partial(derived_id, run.id, "flow"))


def _read(run: FlowRun) -> FlowState:
    return FlowState() if run.state is None else FlowState.from_plain(timezones.decode(run.state))


def _encode(tx: Transaction, state: FlowState) -> bytes:
    data = timezones.encode(state.to_plain())
    return data if tx.vault is None else tx.vault.seal(VALUE, data)


def _count_begin(event: Event, state: FlowState, delta: Delta) -> None:
    """Count the flow itself as an open task while it is open, so that the run stays open with it."""
    if isinstance(event, commands.Begun) and not state.frames:
        delta.total += 1
        delta.opened += 1
    elif isinstance(event, commands.Retried):
        name = "failed" if state.is_over else "cancelled"
        delta.counts[name] = delta.counts.get(name, 0) - 1
        delta.opened += 1


_STORED = (
    "The result is large and in the payload store, which the scheduler does not read, but a flow keeps results in its "
    "shared state. Return less data, or raise the setting inline_payload."
)


def _events(changes: Sequence[RunChanges]) -> Iterator[Event]:
    """Convert the changes of a run to events of its planner."""
    for item in changes:
        if item.begun:
            yield commands.Begun()
        for fact in item.facts:
            if isinstance(fact, history.TaskCompleted) and is_reference(fact.result):
                yield commands.CallEnded(fact.id, error=_STORED)
            elif isinstance(fact, history.TaskCompleted):
                yield commands.CallEnded(fact.id, timezones.decode(fact.result))
            elif isinstance(fact, history.TaskFailed):
                error = open_error(fact.error)
                yield commands.CallEnded(fact.id, error=error_text(error.kind, error.message))
            elif isinstance(fact, history.TaskCancelled):
                yield commands.CallEnded(fact.id, error="The task was cancelled.")
            elif isinstance(fact, history.TimerFired):
                yield commands.TimerFired(fact.id)
            elif isinstance(fact, history.SignalReceived):
                value, by, why = timezones.decode(fact.value)
                yield commands.Signalled(fact.name, value, by, why)
        if item.is_retried:
            yield commands.Retried()


def _visit(tx: Transaction, run: bytes, node: commands.NodeRun) -> Visit:
    node_input, output = (None, None) if node.calls else (_for_display(tx, node.input), _for_display(tx, node.output))
    return Visit(run, *node._replace(input=node_input, output=output), tx.now.timestamp())


def _for_display(tx: Transaction, value: Any) -> bytes | None:
    """Return a value encoded for display; None if it is too large."""
    if value is None:
        return None
    data = timezones.encode(value)
    if len(data) > _MAX_DISPLAYED:
        return None
    return data if tx.vault is None else tx.vault.seal(VALUE, data)
