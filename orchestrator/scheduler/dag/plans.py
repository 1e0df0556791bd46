"""Advance runs of DAGs: the planner says what starts, this creates the tasks and the child runs.

Plans are kept between ticks, because only the leader changes them; they are forgotten whenever a tick fails, and
rebuilt from what Postgres has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC
from functools import partial
from itertools import islice

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.dag import composed
from orchestrator.domain.dag.checks import MOST_STEPS
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

_PLANNED_STEPS = 200_000
"""Of the plans that are kept in memory; a step takes a quarter of a kilobyte there."""
_RUN_WEIGHT = 15
"""What a run weighs beside its steps and parameters, in steps."""
_BYTES_IN_MEMORY = 16
"""Of stored parameters: read into memory, so many weigh as much as a step."""
_COMPILED_STEPS = 30_000
"""Of the definitions that are kept in memory; a step takes some kilobytes there."""
_BYTES_OF_A_STEP = 2_000
"""Of stored parameters: to read so many takes as long as to plan a step."""
_FANS = 5
"""Fan-outs of which a full slice is created at once, or as many single steps: the rest waits for the next tick."""
_ROUND = 25
"""Steps as which it counts to look at what others have become, however few there are."""
_encode = timezones.encode


class Dags(PlannedRuns[DagRun]):
    """Plans the runs of DAGs."""

    name = "dag"
    has_hooks = True

    def __init__(self, backlog: Backlog, max_payload: int, slice_size: int, nesting: Nesting | None = None) -> None:
        super().__init__(_PLANNED_STEPS)
        self._backlog = backlog
        self.max_payload = max_payload
        self._slice = slice_size
        self._compiled: LruCache[tuple[str, int], Compiled] = LruCache(_COMPILED_STEPS)
        self._outputs = Outputs(max_payload)
        self._steps = StepCreation(self._outputs, max_payload, slice_size, nesting or Nesting())

    def rolled_back(self) -> None:
        """Undo plans after a rollback."""
        super().rolled_back()
        self._outputs.forget()

    def drop(self, ids: Sequence[bytes]) -> None:
        """Forget the plans of runs, and their outputs."""
        super().drop(ids)
        for run in ids if self._outputs.keeps_any else ():
            self._outputs.drop(run)

    # -- events

    def plans(self, changes: Sequence[RunChanges]) -> bool:
        """Say whether a plan of a DAG has to hear of changes of a run."""
        return any(one.is_for_plan for one in changes) and not any(one.of_flow for one in changes)

    def advance(self, tx: Transaction, changes: Mapping[bytes, Sequence[RunChanges]]) -> Advanced:
        """Notify plans of what happened to their runs, and start the steps that follow."""
        runs = self._load(tx, changes)
        settled: list[DagRun] = []
        for run in runs:
            for one in changes[run.id]:
                _apply_to_plan(run, one)
                if one.reopened or one.is_retried:
                    self._outputs.drop(run.id)
            if not any(one.is_retried for one in changes[run.id]) or self._retry(tx, run):
                settled.append(run)
        self._settle(tx, settled)
        going_on = {run.id for run in settled if run.plan.has_more}
        return Advanced({run.id: self._save(run, is_expanding=run.id in going_on) for run in runs})

    def _retry(self, tx: Transaction, run: DagRun) -> bool:
        """Retry a run. If that takes long, it continues when its turn comes, and nothing starts until then.

        A retry looks at the results of the tasks, so the plan first gets the pending changes of the run.
        """
        is_late = bool(self._backlog.waiting(tx, [run.id]))
        if not is_late and retry_plan(tx, run.id, run.plan, 10 * self._slice):
            return True
        self._backlog.add(tx, [(run.id, RunChanges(is_retried=True))])
        return False

    def sizes(self, versions: Mapping[bytes, Version]) -> Callable[[bytes], int]:
        """Return a function that counts the steps of runs of these versions; of others it returns 0.

        A definition that is not planned yet counts as the largest. Large parameters count as additional steps, because
        they take as long.
        """

        def size(run: bytes) -> int:
            if run not in versions:
                return 0
            workflow, version, stored = versions[run]
            compiled = self._compiled.get((workflow, version))
            return MOST_STEPS if compiled is None else len(compiled.graph.steps) + stored // _BYTES_OF_A_STEP

        return size

    def hooks(self, run: bytes, state: str) -> tuple[int, int]:
        """Return how many hooks follow this end of a run that was planned just now, and how much each is given."""
        kept = self._runs.get(run)
        if kept is None:
            return 0, 0
        return len(hooks_of(kept.compiled.definition, state)), kept.params_size

    def may_have_hooks(self, run: bytes, state: str) -> bool:
        """Say whether hooks may follow this end of a run: of one that is not in memory, that is not known."""
        kept = self._runs.get(run)
        return kept is None or bool(hooks_of(kept.compiled.definition, state))

    def outputs(self, tx: Transaction, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return what runs give to their parents: a composition its result, others the outputs of their last steps."""
        runs = self._load(tx, ids)
        last = [(run, place) for run in runs for place in run.compiled.last]
        names = self._outputs.names(tx.connection, last, is_urgent=True).names
        outputs = {run.id: _encode(run.compiled.output(names[run.id])) for run in runs}
        return outputs if tx.vault is None else {run: tx.vault.seal(VALUE, data) for run, data in outputs.items()}

    # -- loading and saving

    def _load(self, tx: Transaction, ids: Iterable[bytes]) -> list[DagRun]:
        found = {run: self._runs.get(run) for run in ids}
        missing = [run for run, kept in found.items() if kept is None]
        for row in dags.load(tx.connection, missing) if missing else ():
            compiled = self.compiled(tx, row.workflow, row.version)
            state = msgspec.msgpack.decode(row.state, type=DagState) if row.state is not None else None
            fire_time = row.fire_time.astimezone(UTC).isoformat()
            info = {"id": to_text(row.id), "workflow": row.workflow, "version": row.version, "fire_time": fire_time}
            plan = Plan(compiled.graph, state)
            if row.cancelling:
                plan.halt()
            if row.expanding:  # whatever the run hears first, it has more to start than that
                plan.resume()
            params = row.params
            if compiled.result is not None and isinstance(params, dict):
                params = composed.opened(params)
            run = DagRun(row.id, compiled, params, info, plan, row.depth, row.root, row.params_size)
            weight = _RUN_WEIGHT + len(compiled.graph.steps) + row.params_size // _BYTES_IN_MEMORY
            found[row.id] = self._runs.put(row.id, run, weight)
        return [run for run in found.values() if run is not None]

    def compiled(self, tx: Transaction, name: str, version: int) -> Compiled:
        """Return a version of a workflow with everything that can be worked out once."""
        compiled = self._compiled.get((name, version))
        if compiled is None:
            stored = workflows.read(tx.connection, name, version)
            assert stored is not None, f"the definition of {name} version {version} is gone"
            compiled = Compiled(stored.definition)
            self._compiled.put((name, version), compiled, 1 + len(compiled.graph.steps))
        return compiled

    @staticmethod
    def _save(run: DagRun, *, is_expanding: bool) -> Saved:
        delta, run.plan.delta = run.plan.delta, Delta()
        return Saved(delta, _encode(run.plan.state()), is_expanding, run.plan.is_open)

    # -- starting steps

    def _settle(self, tx: Transaction, runs: Sequence[DagRun]) -> None:
        """Evaluate candidates and create what they become, all runs together, as far as there is room.

        What there is no room for stays with the plans, and goes on in the next tick.
        """
        room = _FANS * self._slice
        unsettled = runs
        while unsettled and room:
            singles, room = self._decide(tx, unsettled, room)
            fans = [(run, place) for run in unsettled for place in list(run.plan.fans_with_room)]
            unsettled = self._steps.create(tx, singles, fans, max(room, self._slice)) if singles or fans else []
        for run in runs:
            if not run.plan.has_more:
                self._outputs.settled(run.id)

    def _decide(self, tx: Transaction, runs: Sequence[DagRun], room: int) -> tuple[list[RunStep], int]:
        """Evaluate what candidates become; return those that are single tasks, and how much room is left."""
        singles: list[RunStep] = []
        work = Evaluating(tx.budget, "decision")
        while candidates := list(islice(((run, place) for run in runs for place in _drain(run.plan)), room)):
            room = max(0, room - max(len(candidates), _ROUND))
            if all(run.compiled.programs[place].is_single for run, place in candidates):
                for run, place in candidates:
                    run.plan.open_single(place)
                singles += candidates
                continue
            found = self._outputs.names(
                tx.connection, candidates, lambda program: program.decision_needs, known=tx.result.tasks.results
            )
            for (run, place), reason in found.refused:
                run.plan.fail(place, reason)
            for run, place in found.readable:
                with work.on(run, place, found.names[run.id]) as may_be_done:
                    if not may_be_done:
                        found.late.append((run, place))
                    elif run.open(place, found.names[run.id], partial(reason_of, tx)):
                        singles.append((run, place))
            for run, place in found.late:
                run.plan.put_back(place)
            if found.late:
                return singles, 0
        return singles, room


def _apply_to_plan(run: DagRun, changes: RunChanges) -> None:
    plan, index = run.plan, run.compiled.graph.index
    if changes.begun:
        plan.begin()
    for (step, state), number in changes.ended.items():
        plan.task_ended(index[step], STATE_OF_TASK[state], number)
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
    while (place := plan.next_candidate()) is not None:
        yield place
