"""DAGs and schedules in memory."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.dag import composed
from orchestrator.domain.dag.definition import Definition, resolve_params
from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.scope import Scope
from orchestrator.domain.dag.state import ENDED, STATE_OF_TASK, StepState, step_output
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.schedules.schedule import Schedule, delay_of, fire_text, from_data, next_fire
from orchestrator.domain.states import ENDED_TASK_STATES, RunState
from orchestrator.domain.tasks.headers import inheriting
from orchestrator.domain.tasks.task import NewTask, TaskError
from orchestrator.errors import InvalidWorkflow
from orchestrator.scheduler.dag.creation import task_of
from orchestrator.scheduler.dag.planned import Compiled, DagRun
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.dag.schedule_fields import checked_schedule
from orchestrator.sdk.schedule_declarations import CodeDeclaration, TaskDeclaration, plain_times
from orchestrator.sdk.tasks.task import Task
from orchestrator.testing.records import TestedTask

_SLICE = 1_000
"""Tasks of a fan-out to create at once."""


class MemoryDag:
    """A run of a DAG, with the results of its steps."""

    def __init__(self, run: DagRun, headers: Mapping[str, str], parent: tuple[MemoryDag, int, int] | None) -> None:
        self.run = run
        self.headers = headers
        """Headers that are added to those of each task."""
        self.parent = parent
        """The parent run, the step that started this run, and its position in the step."""
        self.results: dict[int, dict[int, bytes | None]] = {}
        """Encoded results of tasks and child runs, by step and position; None without success."""
        self.errors: dict[int, TaskError | None] = {}
        """The error of a failed task, by step."""
        self.state = RunState.RUNNING

    @property
    def definition(self) -> Definition:
        return self.run.compiled.definition

    def output(self, step: str) -> Any:
        index = self.run.compiled.graph.index[step]
        results = self.results.get(index, {}).items()
        return step_output(self.run.plan.step_state(index), self.run.plan.fan(index), results, timezones.decode)

    def names(self, indexes: Sequence[int]) -> Scope:
        """Return the scope of expressions that need these steps."""
        steps = self.run.compiled.graph.steps
        outputs = {steps[index].name: self.output(steps[index].name) for index in indexes}
        return Scope({"params": self.run.params, "run": self.run.info, **outputs})

    def step_states(self) -> list[tuple[int, StepState]]:
        return [(index, self.run.plan.step_state(index)) for index in range(len(self.run.compiled.graph.steps))]


class MemoryDags:
    """Runs DAGs: creates the tasks of steps, and handles their ends."""

    def __init__(self, create: Callable[[NewTask], object], limit: Callable[[], int]) -> None:
        self._create = create
        self._limit = limit
        self.definitions: dict[str, Definition] = {}
        self.runs: dict[bytes, MemoryDag] = {}

    def start(
        self,
        run_id: bytes,
        definition: Definition,
        arguments: Mapping[str, Any],
        headers: Mapping[str, str],
        now: float,
        parent: tuple[MemoryDag, int, int] | None = None,
    ) -> None:
        fire_time = datetime.fromtimestamp(now, UTC)
        params = resolve_params(definition, arguments, fire_time)
        info = {
            "id": to_text(run_id),
            "workflow": definition.name,
            "version": definition.version or 1,
            "fire_time": fire_time.isoformat(),
        }
        compiled = Compiled(definition)
        if compiled.result is not None:
            params = composed.decoded_params(params)
        dag = MemoryDag(DagRun(run_id, compiled, params, info, Plan(compiled.graph)), headers, parent)
        self.runs[run_id] = dag
        dag.run.plan.begin()
        self._advance(dag, now)

    def ended(self, task: NewTask, state: str, result: bytes | None, error: TaskError | None, now: float) -> None:
        """Handle the end of a task of a run, and start its successors."""
        dag = self.runs.get(task.run_id or b"")
        if dag is None or task.step is None:
            return
        index = dag.run.compiled.graph.index[task.step]
        if error is not None:
            dag.errors.setdefault(index, error)
        self._note(dag, index, task.position or 0, state, result, now)

    def cancel(self, dag: MemoryDag) -> None:
        """Stop a run and its child runs."""
        dag.run.plan.stop()
        for child in [child for child in self.runs.values() if child.parent is not None and child.parent[0] is dag]:
            self.cancel(child)
        if dag.state == RunState.RUNNING:
            dag.state = RunState.CANCELLED

    def _note(self, dag: MemoryDag, index: int, position: int, state: str, result: bytes | None, now: float) -> None:
        dag.results.setdefault(index, {})[position] = result
        dag.run.plan.task_ended(index, STATE_OF_TASK[state])
        self._advance(dag, now)

    def _advance(self, dag: MemoryDag, now: float) -> None:
        run, plan = dag.run, dag.run.plan
        while plan.has_more:
            while (index := plan.next_candidate()) is not None:
                if run.open(index, dag.names(run.compiled.programs[index].decision_needs)):
                    self._instantiate(dag, index, range(1), None, now)
            for index in list(plan.fans_with_room):
                fan = plan.fan(index)
                if fan is not None and (positions := plan.create(index, _SLICE)):
                    self._instantiate(dag, index, positions, fan.total, now)
        states = [state for _, state in dag.step_states()]
        if dag.state == RunState.RUNNING and all(state in ENDED for state in states):
            is_failed = StepState.FAILED in states or StepState.CANCELLED in states
            self._end(dag, RunState.FAILED if is_failed else RunState.SUCCESS, now)

    def _instantiate(self, dag: MemoryDag, index: int, positions: range, count: int | None, now: float) -> None:
        """Create the tasks or child runs at some positions of a step: all, or none after an error."""
        run = dag.run
        step, program = run.compiled.graph.steps[index], run.compiled.programs[index]
        tasks: list[NewTask] = []
        children: list[tuple[int, Definition, Mapping[str, Any]]] = []
        try:
            instances = program.instances(dag.names(program.creation_needs), positions, count)
            for position, (inputs, key) in zip(positions, instances, strict=False):
                if step.workflow is None:
                    tasks.append(task_of(run, index, position, count, inputs, key, self._limit()))
                    continue
                if step.workflow not in self.definitions:
                    raise InvalidWorkflow(f"There is no workflow {step.workflow!r}.")
                if composed.is_composed(step.workflow):
                    inputs = composed.child_params(inputs)
                children.append((position, self.definitions[step.workflow], inputs))
        except (InvalidWorkflow, *REFUSALS) as error:
            run.plan.abandon(index, len(positions), str(error))
            return
        if skipped_count := len(positions) - len(tasks) - len(children):
            run.plan.undo_create(index, skipped_count)
        for task in tasks:
            self._create(msgspec.structs.replace(task, options=inheriting(task.options, dag.headers)))
        for position, definition, child in children:
            identifier = composed.child_id(run.id, step.name, position)
            self.start(identifier, definition, child, dag.headers, now, (dag, index, position))

    def _end(self, dag: MemoryDag, state: RunState, now: float) -> None:
        dag.state = state
        if dag.parent is None:
            return
        parent, index, position = dag.parent
        compiled = dag.run.compiled
        output = timezones.encode(compiled.output(dag.names(compiled.last))) if state == RunState.SUCCESS else None
        self._note(parent, index, position, state, output, now)


@dataclass
class Fire:
    """A fire of a schedule."""

    target: Task[..., Any] | CodeWorkflow[..., Any]
    params: dict[str, Any]
    cancels: bool
    """Cancel the tasks in `still_open`."""
    still_open: list[TestedTask]
    """Unfinished tasks of the schedule. The task started now is added."""


class MemorySchedules:
    """Computes when declared schedules fire."""

    def __init__(self, declared: Iterable[TaskDeclaration | CodeDeclaration], now: float) -> None:
        self._due: list[tuple[float, int, TaskDeclaration | CodeDeclaration]] = []
        self._open: dict[int, list[TestedTask]] = {}
        """Tasks that had not ended at the last fire, by the position of their schedule."""
        self._queued: dict[int, deque[Fire]] = {}
        """Fires that wait for these tasks (`overlap="queue"`), by the position of their schedule."""
        for position, declaration in enumerate(declared):
            self._plan(declaration, position, now)

    @property
    def next_fire(self) -> float | None:
        return self._due[0][0] if self._due else None

    def take(self) -> Fire | None:
        """Return the next fire, and plan the following one. Return None if the fire is skipped or must wait."""
        due, position, declared = heapq.heappop(self._due)
        overlap = self._plan(declared, position, due).overlap
        still_open = [task for task in self._open.get(position, ()) if task.state not in ENDED_TASK_STATES]
        if still_open and overlap == "skip":
            return None
        self._open[position] = still_open
        waiting = self._queued.setdefault(position, deque())
        run_info = {"workflow": declared.target.name, "fire_time": fire_text(datetime.fromtimestamp(due, UTC))}
        params = parse_template(dict(declared.params)).render({"run": run_info})
        fire = Fire(declared.target, params, overlap == "cancel_previous", still_open)
        if overlap != "queue" or not (still_open or waiting):
            return fire
        waiting.append(fire)
        return None

    def take_queued(self) -> Fire | None:
        """Return a queued fire whose predecessor has ended."""
        for position, waiting in self._queued.items():
            if waiting and all(task.state in ENDED_TASK_STATES for task in self._open[position]):
                fire = waiting.popleft()
                self._open[position] = fire.still_open = []
                return fire
        return None

    def _plan(self, declared: TaskDeclaration | CodeDeclaration, position: int, after: float) -> Schedule:
        schedule = from_data(checked_schedule(plain_times(declared.times)))
        fire = None if schedule.paused else next_fire(schedule, datetime.fromtimestamp(after, UTC))
        if fire is not None:
            due = (fire + delay_of(schedule, declared.key)).timestamp()
            heapq.heappush(self._due, (due, position, declared))
        return schedule
