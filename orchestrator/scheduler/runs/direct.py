"""Create runs that begin at once: a workflow of one task needs no planning, so run and task are written together.

Every other run is created pending, and begins in its turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace
from sqlalchemy.exc import IntegrityError

from orchestrator.domain.dag.scope import EvaluationBudget, Scope
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import REFUSALS, read_json
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidWorkflow
from orchestrator.scheduler.dag.creation import task_of
from orchestrator.scheduler.dag.planned import Compiled, DagRun, Evaluating
from orchestrator.scheduler.dag.plans import Dags
from orchestrator.scheduler.runs.creation import copy_begun, create_runs
from orchestrator.scheduler.tasks.creation import create_tasks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.driver import savepoint
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.runs.transitions import RunRow
from orchestrator.trace_context import below, run_span

_MIN_COPIED = 20
"""Runs from which on a bulk copy under a savepoint pays."""


def create_begun(tx: Transaction, dags: Dags, new: Sequence[NewRun]) -> set[bytes]:
    """Create runs that no other run waits for, once. Return the new ones.

    A run of one task begins here, unless a limit may hold it back or its input is slow to evaluate.
    """
    tasks: dict[bytes, NewTask] = {}
    begun: list[tuple[NewRun, bytes]] = []
    waiting: list[NewRun] = []
    work = Evaluating(tx.budget, "input")
    for run in new:
        compiled = _compiled(tx, dags, run)
        task = None if compiled is None else _only_task(tx, dags, work, run, compiled)
        if compiled is None or compiled.begun is None or task is None:
            waiting.append(run)
            continue
        tasks[run.id] = task
        tx.budget.created(run.id, len(task.payload))
        begun.append((run, compiled.begun[1]))
    if len(begun) >= _MIN_COPIED and _copy(tx, begun, tasks):
        created = create_runs(tx, waiting).union(tasks)
    else:
        rows = [run._replace(total=1, state=state, begun=True) for run, state in begun]
        created = create_runs(tx, rows + waiting)
        create_tasks(tx, [task for run, task in tasks.items() if run in created])
    if tx.is_watched:
        tx.result.outgoing.runs += [_row(run) for run, _ in begun if run.id in created]
    return created


def _copy(tx: Transaction, begun: Sequence[tuple[NewRun, bytes]], tasks: Mapping[bytes, NewTask]) -> bool:
    """Copy runs and their tasks in bulk. Return False if one of the runs exists already; nothing is created then."""
    new = list(tasks.values())
    if tx.has_spans:
        new = [replace(tasks[run.id], trace=run.trace and below(run.trace, run_span(run.id))) for run, _ in begun]
    try:
        with savepoint(tx.connection):
            copy_begun(tx, begun)
            create_tasks(tx, new, are_new=True)
    except IntegrityError:
        return False
    return True


def _compiled(tx: Transaction, dags: Dags, run: NewRun) -> Compiled | None:
    """Return the compiled definition of a DAG run that no limit can hold back, or None."""
    if run.code is not None or run.flow or run.lane is not None or run.workflow is None or run.version is None:
        return None
    return dags.compiled(tx, run.workflow, run.version)


def _only_task(tx: Transaction, dags: Dags, work: Evaluating, new: NewRun, compiled: Compiled) -> NewTask | None:
    """Return the single task of a run, or None.

    None also if there is no room now, or if the task cannot be made: the run is then planned, which reports why.
    """
    if compiled.begun is None:
        return None
    info = {"id": to_text(new.id), "workflow": new.workflow, "version": new.version, "fire_time": new.fire_time}
    run = DagRun(new.id, compiled, read_json(new.params or "{}"), info, compiled.begun[0])
    names = Scope({"params": run.params, "run": info}, EvaluationBudget(dags.max_payload))
    with work.on(run, 0, names) as may_be_done:
        if not may_be_done or not tx.budget.has_room_for_data(run.id):
            return None
        try:
            ((value, key),) = compiled.programs[0].instances(names, range(1), None)
            return task_of(run, 0, 0, None, value, key, dags.max_payload)
        except (InvalidWorkflow, *REFUSALS):
            return None


def _row(run: NewRun) -> RunRow:
    return RunRow(run.id, RunState.RUNNING, False, 1, 1, 0, 0, 0, 0, run.workflow, child_id=run.id, trace=run.trace)
