"""Advance runs of flows: notify the planner of what happened, and carry out its commands, all runs of a tick at once.

Definitions never change, and are kept. Of runs whose tasks are under way the leader also keeps what it has written
last, as it was written: so it need not read that again when they end. It forgets all of that whenever a tick fails.
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

_GRAPHS = 30_000
"""Nodes of the flows that are kept in memory."""
_LEAST_KEPT = 3
"""So many flows are kept however large they are: earlier releases took some that have more nodes than that."""
_KEPT = 8_000_000
"""Bytes of the states of runs that are kept in memory."""
_RUN_WEIGHT = 1_000
"""The weight of a run beside that, and beside its parameters."""
_PARAMS = 5
"""Bytes in memory for each that parameters have as text."""
_STATES = 4
"""A run's state may be so many times as large as one payload."""
_LARGEST_SHOWN = 65_536
"""Bytes of what a node took in or gave, if it had no task that keeps them."""


class Known(NamedTuple):
    """One version of a flow, worked out once for all its runs."""

    graph: Graph
    caller: Caller


class _Effects(msgspec.Struct):
    """Commands for runs."""

    tasks: list[NewTask] = []
    cancelled: list[bytes] = []
    timers: list[tuple[bytes, bytes, float]] = []
    gone: list[tuple[bytes, bytes]] = []
    visits: list[Visit] = []
    ends: list[tuple[bytes, RunState, str | None]] = []

    def add(self, other: _Effects) -> None:
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


class Flows(PlannedRuns[FlowRun]):
    """Plans the runs of flows; those that wait for tasks are kept."""

    name = "flow"
    ends_itself = True
    is_listened_to = False

    def __init__(self, max_payload: int) -> None:
        super().__init__(_KEPT)
        self._max_payload = max_payload
        self._known: LruCache[tuple[str, int], Known] = LruCache(_GRAPHS)

    def plans(self, changes: Sequence[RunChanges]) -> bool:
        """Say whether the planner of a flow has to hear of changes of a run."""
        return any(one.of_flow for one in changes)

    def advance(self, tx: Transaction, changes: Mapping[bytes, Sequence[RunChanges]]) -> Advanced:
        """Notify planners of what happened to their runs, and do what they command."""
        saved: dict[bytes, Saved] = {}
        effects = _Effects()
        late: set[bytes] = set()
        for run in self._load(tx, changes):
            known = self._version(tx, run)
            if known is None:
                late.add(run.id)
                continue
            if run.is_over:
                saved[run.id] = self._keep_signals(tx, known, run, changes[run.id])
                continue
            saved[run.id], own = self._advance(tx, known, run, changes[run.id])
            effects.add(own)
        self._apply(tx, effects)
        return Advanced(saved, effects.ends, late)

    def _load(self, tx: Transaction, changes: Mapping[bytes, Sequence[RunChanges]]) -> list[FlowRun]:
        """Return those of these runs that go on, and others that were sent signals before they ended."""
        found = {run: self._runs.get(run) for run in changes}
        missing = [run for run, kept in found.items() if kept is None]
        late = [
            run
            for run in missing
            if any(isinstance(fact, history.SignalReceived) for one in changes[run] for fact in one.facts)
        ]
        if missing:
            found.update((run.id, run) for run in store.load(tx.connection, missing, late))
        return [run for run in found.values() if run is not None]

    def ended(self, tx: Transaction, rows: Sequence[RunRow]) -> None:
        """Forget the timers of runs that have ended."""
        store.forget(tx.connection, [row.id for row in rows], is_gathered=tx.gathers(len(rows)))

    def _keep_signals(self, tx: Transaction, known: Known, run: FlowRun, changes: Sequence[RunChanges]) -> Saved:
        """Keep signals for a run that is over: the senders were told that they are accepted, and a retry finds them."""
        state = _read(run)
        planner = _planner(tx, known, run, state)
        for event in _events(changes):
            if isinstance(event, commands.Signalled):
                planner.keep(event)
        data = _encode(tx, state)
        too_large = run.state is not None and len(data) > _STATES * self._max_payload
        return Saved(Delta(), run.state if run.state is not None and too_large else data)

    def _keep(self, run: FlowRun, state: FlowState, data: bytes) -> None:
        """Remember how a run stands that waits for tasks; what waits for something else may do so for months."""
        if isinstance(state.work, Calls):
            kept = FlowRun(run.id, run.flow, run.version, run.params, data, run.size)
            self._runs.put(run.id, kept, _RUN_WEIGHT + len(data) + _PARAMS * run.size)
        else:
            self._runs.drop(run.id)

    def _apply(self, tx: Transaction, effects: _Effects) -> None:
        create_tasks(tx, effects.tasks)
        started = {timer for _, timer, _ in effects.timers}
        if effects.timers:
            gone = {timer for _, timer in effects.gone}
            expectations.start_timers(tx.connection, [timer for timer in effects.timers if timer[1] not in gone])
            tx.result.wake.delayed = True
        left = [timer for timer in effects.gone if timer[1] not in started]
        if left:
            expectations.forget_timers(tx.connection, left)
        if effects.visits:
            store.keep_visits(tx.connection, effects.visits, is_gathered=tx.gathers(len(effects.visits)))
        if effects.cancelled:
            cancel_tasks(tx, effects.cancelled)

    def _advance(
        self, tx: Transaction, known: Known, run: FlowRun, changes: Sequence[RunChanges]
    ) -> tuple[Saved, _Effects]:
        state, delta = _read(run), Delta()
        happened = [*_events(changes)]
        if not isinstance(run.params, dict):
            reason = "Its parameters are sealed with a data key that the scheduler does not have."
            return self._abort(tx, known, run, happened, reason)
        cursor = state.cursor
        planner = _planner(tx, known, run, state)
        effects = _Effects()
        waiting = deque(happened)
        while waiting:
            event = waiting.popleft()
            _count_begin(event, state, delta)
            waiting.extend(self._do(tx, known, run, planner.tell(event), effects, delta))
        try:
            data = _encode(tx, state)
        except REFUSALS as error:
            node = f"Node {cursor!r}: " if cursor else ""
            reason = f"{node}What the run would have to remember cannot be kept: {error}."
            return self._abort(tx, known, run, happened, reason)
        most = _STATES * self._max_payload
        if len(data) > most:
            node = f"Node {cursor!r}: " if cursor else ""
            return self._abort(
                tx,
                known,
                run,
                happened,
                f"{node}The run would have to remember {len(data):,} bytes in its shared state and of its open node, "
                f"and at most {most:,} are allowed. Let nodes give references to large data, or raise the setting "
                f"max_payload, of which that is {_STATES} times as much.",
            )
        self._keep(run, state, data)
        return Saved(delta, data), effects

    def _abort(
        self, tx: Transaction, known: Known, run: FlowRun, happened: Sequence[Event], error: str
    ) -> tuple[Saved, _Effects]:
        """End a run that cannot go on, as it was before this was found out, but for what has ended meanwhile and for
        signals, as far as they can be kept.
        """
        kept = self._aborted(tx, known, run, happened, error)
        if kept is None:
            quiet = [one for one in happened if not isinstance(one, commands.Signalled)]
            kept = self._aborted(tx, known, run, quiet, error)
        assert kept is not None, "a state that was stored can be stored again"
        return kept

    def _aborted(
        self, tx: Transaction, known: Known, run: FlowRun, happened: Sequence[Event], error: str
    ) -> tuple[Saved, _Effects] | None:
        """Return how a run ends that cannot go on; None if that cannot be kept because of signals."""
        state, delta = _read(run), Delta()
        self._runs.drop(run.id)
        effects = _Effects()
        for event in happened:
            if isinstance(event, commands.Retried):
                _count_begin(event, state, delta)
        if not state.frames:
            delta.total += 1
            delta.opened += 1
        self._do(tx, known, run, _planner(tx, known, run, state).abort(error, happened), effects, delta)
        has_signals = any(isinstance(event, commands.Signalled) for event in happened)
        try:
            data = _encode(tx, state)
        except REFUSALS:
            if has_signals:
                return None
            raise
        if has_signals and len(data) > _STATES * self._max_payload:
            return None
        return Saved(delta, data), effects

    def _version(self, tx: Transaction, run: FlowRun) -> Known | None:
        """Return the definition of a run; None if it is to be read in a later tick, because this one has read many."""
        known = self._known.get((run.flow, run.version))
        if known is None and tx.budget.may_read_nodes():
            found = store.read(tx.connection, run.flow, run.version)
            assert found is not None, f"the definition of flow {run.flow} version {run.version} is gone"
            rule = store.rules(tx.connection, [(run.flow, run.version)])[run.flow, run.version]
            known = Known(Graph(found.flow, rule), Caller(found.flow))
            size = 1 + size_of(found.flow)
            tx.budget.read_nodes += size
            self._known.put((run.flow, run.version), known, min(size, _GRAPHS // _LEAST_KEPT))
        return known

    def _do(
        self, tx: Transaction, known: Known, run: FlowRun, answers: Iterable[Command], effects: _Effects, delta: Delta
    ) -> Sequence[Event]:
        """Take note of what the planner wants; return what happens to calls that cannot be made."""
        refused: list[Event] = []
        for answer in answers:
            match answer:
                case commands.Call():
                    try:
                        effects.tasks.append(known.caller.new_task(run, answer, self._max_payload))
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
                    effects.gone.append((run.id, id))
                case commands.NodeRun():
                    effects.visits.append(_visit(tx, run.id, answer))
                case commands.End(error=error):
                    delta.opened -= 1
                    name = "success" if error is None else "failed"
                    delta.counts[name] = delta.counts.get(name, 0) + 1
                    state = RunState.SUCCESS if error is None else RunState.FAILED
                    effects.ends.append((run.id, state, error))
        return refused


def _planner(tx: Transaction, known: Known, run: FlowRun, state: FlowState) -> Planner:
    params = run.params if isinstance(run.params, dict) else {}
    return Planner(known.graph, params, state, tx.now.timestamp(), partial(derived_id, run.id, "flow"))


def _read(run: FlowRun) -> FlowState:
    return FlowState() if run.state is None else FlowState.from_plain(timezones.decode(run.state))


def _encode(tx: Transaction, state: FlowState) -> bytes:
    data = timezones.encode(state.to_plain())
    return data if tx.vault is None else tx.vault.seal(VALUE, data)


def _count_begin(event: Event, state: FlowState, delta: Delta) -> None:
    """Count the flow itself: it is open as long as it goes on, and the run with it."""
    if isinstance(event, commands.Begun) and not state.frames:
        delta.total += 1
        delta.opened += 1
    elif isinstance(event, commands.Retried):
        name = "failed" if state.is_over else "cancelled"
        delta.counts[name] = delta.counts.get(name, 0) - 1
        delta.opened += 1


_STORED = (
    "The result is large and in the payload store, which the scheduler does not read, and a flow keeps results in its "
    "shared state. Return less, or raise the setting inline_payload."
)


def _events(changes: Sequence[RunChanges]) -> Iterator[Event]:
    """Yield what happened to a run, as its planner knows it."""
    for one in changes:
        if one.begun:
            yield commands.Begun()
        for fact in one.facts:
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
        if one.is_retried:
            yield commands.Retried()


def _visit(tx: Transaction, run: bytes, node: commands.NodeRun) -> Visit:
    given, output = (None, None) if node.calls else (_shown(tx, node.input), _shown(tx, node.output))
    return Visit(run, *node._replace(input=given, output=output), tx.now.timestamp())


def _shown(tx: Transaction, value: Any) -> bytes | None:
    """Return a value as people may look at it, unless it is large."""
    if value is None:
        return None
    data = timezones.encode(value)
    if len(data) > _LARGEST_SHOWN:
        return None
    return data if tx.vault is None else tx.vault.seal(VALUE, data)
