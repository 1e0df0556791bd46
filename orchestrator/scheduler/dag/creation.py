"""Create the tasks and child runs of steps that start, as far as a tick has room for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from orchestrator.domain import timezones
from orchestrator.domain.dag.composed import POSITIONAL, child_id, child_params, is_composed
from orchestrator.domain.dag.definition import check_size, resolve_params
from orchestrator.domain.dag.placement import Origin
from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.scope import EvaluationBudget, Scope
from orchestrator.domain.dag.state import to_retry
from orchestrator.domain.ids import derived_id
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.runs import Nesting
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidWorkflow
from orchestrator.references import as_reference
from orchestrator.scheduler.dag.outputs import Outputs, RunStep
from orchestrator.scheduler.dag.planned import DagRun, Evaluating
from orchestrator.scheduler.runs.creation import create_runs, full_trees
from orchestrator.scheduler.tasks.creation import create_tasks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.dag.workflows import Stored
from orchestrator.store.runs import cancels as run_retries
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.tasks import revival

_GONE = "its earlier results are no longer kept: start a new run"


def retry_plan(tx: Transaction, run: bytes, plan: Plan, limit: int) -> bool:
    """Retry a run that has ended and begun again. Return False if old tasks must first be removed in another tick."""
    steps, state = plan.graph.steps, plan.state()
    singles = {
        step.name: step_index for step_index, step in enumerate(steps) if step.workflow and step_index not in state.fans
    }
    children = run_retries.with_children(tx.connection, run, list(singles)) if singles else set()
    retry = to_retry(plan.graph, state.steps, {*state.fans, *(singles[name] for name in children)})
    restarted = [steps[step_index].name for step_index in retry.restarted]
    if restarted and run_retries.delete_to_replan(tx.connection, run, restarted, limit) >= limit:
        return False
    doubtful = {
        steps[step_index].name: step_index for step_index in retry.resumed if plan.may_be_incomplete(step_index)
    }
    found = run_retries.created(tx.connection, run, list(doubtful)) if doubtful else {}
    plan.retry(retry.resumed, retry.restarted, tx.now.timestamp(), {doubtful[name]: found[name] for name in found})
    for step_index in retry.resumed:
        if plan.fan(step_index) is None:
            tx.result.wake.runs_to_begin = True
            if not run_retries.requeue_children(tx.connection, run, steps[step_index].name, tx.now, 1):
                plan.abandon(step_index, 1, _GONE)
    return True


def reopen_held(tx: Transaction, run: bytes, plan: Plan, step_index: int, limit: int) -> int:
    """Reopen tasks or child runs of a fan-out that had not succeeded before the retry. Return how many."""
    number = plan.reopen_held(step_index, limit)
    if not number:
        return 0
    step, until = plan.graph.steps[step_index], datetime.fromtimestamp(plan.retried_at, UTC)
    if step.workflow is not None:
        found = run_retries.requeue_children(tx.connection, run, step.name, until, number)
        tx.result.wake.runs_to_begin = True
    else:
        ids = run_retries.unfinished_tasks(tx.connection, run, step.name, until, number)
        moved = revival.revive(tx.connection, ids, cancelled=True).moved if ids else []
        found = len(moved)
        tx.result.wake.requests |= any(task.lane is not None for task in moved)
    if found < number:
        plan.fail_held(step_index, number - found, _GONE)
    return number


class Failure(NamedTuple):
    """Tasks or child runs of a step that cannot be created, and why."""

    run: DagRun
    step_index: int
    number: int
    reason: str


@dataclass
class _Created:
    """The tasks and child runs to create in one round."""

    tasks: list[NewTask] = field(default_factory=list)
    children: list[NewRun] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    latest: dict[str, Stored | None] = field(default_factory=dict)
    """The workflows of the child runs."""


class StepCreation:
    def __init__(self, outputs: Outputs, max_payload: int, slice_size: int, nesting: Nesting) -> None:
        self._outputs = outputs
        self._max_payload = max_payload
        self._slice = slice_size
        self._nesting = nesting

    def create(self, tx: Transaction, singles: list[RunStep], fans: list[RunStep], room: int) -> list[DagRun]:
        """Create tasks and child runs. Return the runs of which some could not be created."""
        started = [*singles, *fans]
        found = self._outputs.names(
            tx.connection, started, lambda program: program.creation_needs, results=tx.result.tasks.results
        )
        created = _Created()
        for (run, step_index), reason in found.refused:
            created.failed.append(Failure(run, step_index, 0 if run.plan.fan(step_index) else 1, reason))
        work = Evaluating(tx.budget, "input")
        for run, step_index in found.readable:
            names, fan = found.names[run.id], run.plan.fan(step_index)
            is_child = run.compiled.graph.steps[step_index].workflow is not None
            limit = tx.budget.room_for_children(run.id) if is_child else self._slice
            with work.on(run, step_index, names) as may_be_done:
                if not may_be_done or not limit or not tx.budget.has_room_for_data(run.id):
                    found.postponed.append((run, step_index))
                elif fan is None:
                    self._instantiate(tx, created, (run, step_index), range(1), None, names)
                else:
                    room -= reopen_held(tx, run.id, run.plan, step_index, min(self._slice, room))
                    positions = run.plan.create(step_index, min(self._slice, room, limit))
                    room -= len(positions)
                    if positions:
                        self._instantiate(tx, created, (run, step_index), positions, fan.total, names)
        for run, step_index in found.postponed:
            if run.plan.fan(step_index) is None:
                run.plan.put_back(step_index)
        if created.tasks:
            retried = {run.id for run, _ in started if run.plan.retried}
            before = [task.id for task in created.tasks if task.run_id in retried] if retried else []
            create_tasks(tx, created.tasks, run_retries.past_attempts(tx.connection, before) if before else {})
        if created.children:
            self._refuse_full_trees(tx, created, started)
            create_runs(tx, created.children)
        for failure in created.failed:
            failure.run.plan.abandon(failure.step_index, failure.number, failure.reason)
        return list({failure.run.id: failure.run for failure in created.failed}.values())

    def _refuse_full_trees(self, tx: Transaction, created: _Created, started: Iterable[RunStep]) -> None:
        """Refuse child runs of trees of runs that have grown too large."""
        full = full_trees(tx, created.children, self._nesting)
        if not full:
            return
        refused = Counter((child.parent_run, child.parent_step) for child in created.children if child.root in full)
        for run, step_index in started:
            step = run.compiled.graph.steps[step_index]
            if number := refused[run.id, step.name]:
                created.failed.append(Failure(run, step_index, number, self._nesting.too_many(step.workflow or "")))
        created.children = [child for child in created.children if child.root not in full]

    def _instantiate(
        self, tx: Transaction, created: _Created, step: RunStep, positions: range, count: int | None, names: Scope
    ) -> None:
        """Add tasks or child runs at positions of a step. An error refuses all; lack of room delays the rest."""
        run, step_index = step
        tasks: list[NewTask] = []
        children: list[NewRun] = []
        is_child = run.compiled.graph.steps[step_index].workflow is not None
        try:
            instances = run.compiled.programs[step_index].instances(names, positions, count)
            for position, (inputs, key) in zip(positions, instances, strict=False):
                if is_child:
                    children.append(self._child(tx, created, step, position, inputs, names.budget))
                    tx.budget.created_child(run.id, len(children[-1].params or ""))
                else:
                    tasks.append(task_of(run, step_index, position, count, inputs, key, self._max_payload))
                    tx.budget.created(run.id, len(tasks[-1].payload))
                if not tx.budget.has_room_for_data(run.id):
                    break
        except (InvalidWorkflow, *REFUSALS) as error:
            created.failed.append(Failure(run, step_index, len(positions), reason_of(tx, error)))
            return
        created.tasks.extend(tasks)
        created.children.extend(children)
        remaining = len(positions) - len(tasks) - len(children)
        if remaining:
            run.plan.undo_create(step_index, remaining)

    def _child(
        self,
        tx: Transaction,
        created: _Created,
        step_index: RunStep,
        position: int,
        params_given: dict[str, Any],
        budget: EvaluationBudget,
    ) -> NewRun:
        run, step = step_index[0], step_index[0].compiled.graph.steps[step_index[1]]
        workflow = step.workflow or ""
        if workflow not in created.latest:
            created.latest[workflow] = workflows.latest(tx.connection, workflow)
        stored = created.latest[workflow]
        if stored is None:
            raise InvalidWorkflow(f"There is no workflow {workflow!r}.")
        if is_composed(workflow):
            params_given = child_params(params_given)
        elif any(as_reference(value) is not None for value in params_given.values()):
            raise InvalidWorkflow(
                f"Step {step.name!r}: a parameter of workflow {workflow!r} is large and in the payload store, but "
                f"parameters are stored in the row of a run. Pass it to a task, or have that workflow compute it."
            )
        params = resolve_params(stored.definition, params_given, tx.now)
        if run.depth >= self._nesting.depth:
            raise InvalidWorkflow(self._nesting.too_deep(workflow, run.depth + 1))
        identifier = child_id(run.id, step.name, position, run.plan.retried)
        new = dags.new_run(stored.definition, stored.version, identifier, params, budget=budget)
        check_size(new.params or "", f"The parameters of workflow {workflow!r}", self._max_payload)
        return new._replace(
            parent_run=run.id,
            parent_step=step.name,
            parent_position=position,
            fire_time=run.info["fire_time"],
            depth=run.depth + 1,
            root=run.root,
        )


def task_of(
    run: DagRun,
    step_index: int,
    position: int,
    count: int | None,
    inputs: dict[str, Any],
    key: str | None,
    max_payload: int,
) -> NewTask:
    """Return a new task of a step."""
    step = run.compiled.graph.steps[step_index]
    context = {"workflow": run.info["workflow"], "step": step.name, "index": position, "count": count}
    by_place = inputs.pop(POSITIONAL, ()) if run.compiled.result is not None else ()
    payload = timezones.encode((by_place, inputs, context))
    if len(payload) > max_payload:
        raise InvalidWorkflow(
            f"The input of task {step.name!r} has {len(payload):,} bytes, and at most {max_payload:,} are "
            f"allowed. Let upstreams return references to large data, or raise the setting max_payload."
        )
    identifier = derived_id(run.id, step.name, position)
    return run.compiled.placements[step_index].new(identifier, payload, key, Origin(run.id, position, step.name))


def reason_of(tx: Transaction, error: Exception) -> str:
    """Return why a step cannot be evaluated, encrypted because it may quote a value."""
    return str(error) if tx.vault is None else tx.vault.seal_text(str(error))
