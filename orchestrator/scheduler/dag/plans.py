"""Advance runs of DAGs: the planner decides which steps start, and this module creates their tasks and child runs.

Plans are cached between ticks, because only the leader changes them. The cache is cleared when a tick fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC
from functools import partial
from itertools import islice

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.dag import composed
from orchestrator.domain.dag.checks import MAX_STEPS
from orchestrator.domain.dag.definition import hooks_of
from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.state import STATE_OF_TASK, DagState, Delta
from orchestrator.domain.ids import to_text
from orchestrator.domain.runs import Nesting, RunChanges
from orchestrator.scheduler.dag.creation import StepCreation, reason_of, retry_plan
from orchestrator.scheduler.dag.outputs import Outputs, RunStep
from orchestrator.scheduler.dag.planned import Compiled, DagRun, Evaluating
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.scheduler.runs.kinds import Advanced, LruCache, PlannedRuns, Saved
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sealing import VALUE
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.dag.plans import Version

_MAX_PLANNED_STEPS = 200_000
"""Steps in the cached plans, at most. A step takes a quarter of a kilobyte."""
_RUN_WEIGHT = 15
"""The weight of a run in addition to its steps and parameters, in steps."""
_PARAMETER_BYTES_PER_WEIGHT = 16
"""Bytes of stored parameters that weigh as much as a step in memory."""
_MAX_COMPILED_STEPS = 30_000
"""Steps in the cached definitions, at most. A step takes some kilobytes."""
_PARAMETER_BYTES_PER_STEP = 2_000
"""Bytes of stored parameters that take as long to read as it takes to plan a step."""
_FANS_PER_TICK = 5
"""Fan-outs of which a slice is created in one tick, or as many slices of single steps. The rest waits."""
_MIN_ROUND_COST = 25
"""Steps that one round of decisions counts as, at least."""
_encode = timezones.encode


class Dags(PlannedRuns[DagRun]):
    """Plans the runs of DAGs."""

    name = "dag"
    has_hooks = True

    def __init__(self, backlog: Backlog, max_payload: int, slice_size: int, nesting: Nesting | None = None) -> None:
        super().__init__(_MAX_PLANNED_STEPS)
        self._backlog = backlog
        self.max_payload = max_payload
        self._slice = slice_size
        self._compiled: LruCache[tuple[str, int], Compiled] = LruCache(_MAX_COMPILED_STEPS)
        self._outputs = Outputs(max_payload)
        self._steps = StepCreation(self._outputs, max_payload, slice_size, nesting or Nesting())

    def rolled_back(self) -> None:
        super().rolled_back()
        self._outputs.forget()

    def drop(self, ids: Sequence[bytes]) -> None:
        super().drop(ids)
        for run in ids if self._outputs.keeps_any else ():
            self._outputs.drop(run)

    # -- events

    def plans(self, changes: Sequence[RunChanges]) -> bool:
        """Return whether a plan of a DAG must see these changes."""
        return any(change.is_for_plan for change in changes) and not any(change.of_flow for change in changes)

    def advance(self, tx: Transaction, changes: Mapping[bytes, Sequence[RunChanges]]) -> Advanced:
        """Apply changes to plans, and start the steps that follow."""
        runs = self._load(tx, changes)
        settled: list[DagRun] = []
        for run in runs:
            for change in changes[run.id]:
                _apply_to_plan(run, change)
                if change.reopened or change.is_retried:
                    self._outputs.drop(run.id)
            if not any(change.is_retried for change in changes[run.id]) or self._retry(tx, run):
                settled.append(run)
        self._settle(tx, settled)
        going_on = {run.id for run in settled if run.plan.has_more}
        return Advanced({run.id: self._save(run, is_expanding=run.id in going_on) for run in runs})

    def _retry(self, tx: Transaction, run: DagRun) -> bool:
        """Retry a run. If that takes long, continue in a later tick, and start nothing until then.

        A retry examines the results of tasks, so the plan first needs all pending changes of the run.
        """
        is_late = bool(self._backlog.waiting(tx, [run.id]))
        if not is_late and retry_plan(tx, run.id, run.plan, 10 * self._slice):
            return True
        self._backlog.add(tx, [(run.id, RunChanges(is_retried=True))])
        return False

    def sizes(self, versions: Mapping[bytes, Version]) -> Callable[[bytes], int]:
        """Return a function that maps a run to its number of steps; 0 if its version is not in `versions`.

        A definition that is not compiled yet counts as the largest possible. Large parameters count as extra steps.
        """

        def size(run: bytes) -> int:
            if run not in versions:
                return 0
            workflow, version, stored = versions[run]
            compiled = self._compiled.get((workflow, version))
            return MAX_STEPS if compiled is None else len(compiled.graph.steps) + stored // _PARAMETER_BYTES_PER_STEP

        return size

    def hooks(self, run: bytes, state: str) -> tuple[int, int]:
        """Return how many hooks follow the end of a run planned in this tick, and the bytes of each one's input."""
        cached = self._runs.get(run)
        if cached is None:
            return 0, 0
        return len(hooks_of(cached.compiled.definition, state)), cached.params_size

    def may_have_hooks(self, run: bytes, state: str) -> bool:
        """Return whether hooks may follow this end of a run; True if its definition is not in memory."""
        cached = self._runs.get(run)
        return cached is None or bool(hooks_of(cached.compiled.definition, state))

    def outputs(self, tx: Transaction, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the results of runs for their parents: of a composition its result, otherwise the last outputs."""
        runs = self._load(tx, ids)
        last = [(run, step_index) for run in runs for step_index in run.compiled.last]
        names = self._outputs.names(tx.connection, last, is_urgent=True).names
        outputs = {run.id: _encode(run.compiled.output(names[run.id])) for run in runs}
        return outputs if tx.vault is None else {run: tx.vault.seal(VALUE, data) for run, data in outputs.items()}

    # -- loading and saving

    def _load(self, tx: Transaction, ids: Iterable[bytes]) -> list[DagRun]:
        found = {run: self._runs.get(run) for run in ids}
        missing = [run for run, cached in found.items() if cached is None]
        for row in dags.load(tx.connection, missing) if missing else ():
            compiled = self.compiled(tx, row.workflow, row.version)
            state = msgspec.msgpack.decode(row.state, type=DagState) if row.state is not None else None
            fire_time = row.fire_time.astimezone(UTC).isoformat()
            info = {"id": to_text(row.id), "workflow": row.workflow, "version": row.version, "fire_time": fire_time}
            plan = Plan(compiled.graph, state)
            if row.cancelling:
                plan.stop_starting()
            if row.expanding:  # the run has steps left to start, in addition to these changes
                plan.resume()
            params = row.params
            if compiled.result is not None and isinstance(params, dict):
                params = composed.decoded_params(params)
            run = DagRun(row.id, compiled, params, info, plan, row.depth, row.root, row.params_size)
            weight = _RUN_WEIGHT + len(compiled.graph.steps) + row.params_size // _PARAMETER_BYTES_PER_WEIGHT
            found[row.id] = self._runs.put(row.id, run, weight)
        return [run for run in found.values() if run is not None]

    def compiled(self, tx: Transaction, name: str, version: int) -> Compiled:
        """Return the compiled definition of a version of a workflow."""
        compiled = self._compiled.get((name, version))
        if compiled is None:
            stored = workflows.read(tx.connection, name, version)
            assert stored is not None, f"the definition of {name} version {version} was deleted"
            compiled = Compiled(stored.definition)
            self._compiled.put((name, version), compiled, 1 + len(compiled.graph.steps))
        return compiled

    @staticmethod
    def _save(run: DagRun, *, is_expanding: bool) -> Saved:
        delta, run.plan.delta = run.plan.delta, Delta()
        return Saved(delta, _encode(run.plan.state()), is_expanding, run.plan.is_open)

    # -- starting steps

    def _settle(self, tx: Transaction, runs: Sequence[DagRun]) -> None:
        """Decide and create the next steps of all runs together, while there is room. The rest stays in the plans."""
        room = _FANS_PER_TICK * self._slice
        unsettled = runs
        while unsettled and room:
            singles, room = self._decide(tx, unsettled, room)
            fans = [(run, step_index) for run in unsettled for step_index in list(run.plan.fans_with_room)]
            unsettled = self._steps.create(tx, singles, fans, max(room, self._slice)) if singles or fans else []
        for run in runs:
            if not run.plan.has_more:
                self._outputs.settled(run.id)

    def _decide(self, tx: Transaction, runs: Sequence[DagRun], room: int) -> tuple[list[RunStep], int]:
        """Decide the candidate steps. Return those that are single tasks, and the remaining room."""
        singles: list[RunStep] = []
        work = Evaluating(tx.budget, "decision")
        while candidates := list(islice(((run, step_index) for run in runs for step_index in _drain(run.plan)), room)):
            room = max(0, room - max(len(candidates), _MIN_ROUND_COST))
            if all(run.compiled.programs[step_index].is_single for run, step_index in candidates):
                for run, step_index in candidates:
                    run.plan.open_single(step_index)
                singles += candidates
                continue
            found = self._outputs.names(
                tx.connection, candidates, lambda program: program.decision_needs, results=tx.result.tasks.results
            )
            for (run, step_index), reason in found.refused:
                run.plan.fail(step_index, reason)
            for run, step_index in found.readable:
                with work.on(run, step_index, found.names[run.id]) as may_be_done:
                    if not may_be_done:
                        found.postponed.append((run, step_index))
                    elif run.open(step_index, found.names[run.id], partial(reason_of, tx)):
                        singles.append((run, step_index))
            for run, step_index in found.postponed:
                run.plan.put_back(step_index)
            if found.postponed:
                return singles, 0
        return singles, room


def _apply_to_plan(run: DagRun, changes: RunChanges) -> None:
    plan, index = run.plan, run.compiled.graph.index
    if changes.begun:
        plan.begin()
    for (step, state), number in changes.ended.items():
        plan.task_ended(index[step], STATE_OF_TASK[state], number)
    for step in changes.withheld:
        if step in index:
            plan.withhold(index[step])
    if changes.stopped:
        plan.stop()
    if changes.closed:
        plan.close()
    if changes.reopened:
        plan.reopen(
            (index[step], STATE_OF_TASK[state])
            for (step, state), number in changes.reopened.items()
            for _ in range(number)
        )
    if changes.is_expanding:
        plan.resume()


def _drain(plan: Plan) -> Iterable[int]:
    while (step_index := plan.next_candidate()) is not None:
        yield step_index
