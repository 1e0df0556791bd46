"""The calls of a client, on tasks in memory instead of Postgres and Redis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn
from uuid import UUID

import msgspec

from orchestrator.domain.code.history import RunStarted
from orchestrator.domain.dag.composed import ARGS
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.dag.state import StepState
from orchestrator.domain.ids import to_text
from orchestrator.domain.runs import RunCounters
from orchestrator.domain.states import ENDED_RUN_STATES, ENDED_TASK_STATES, TaskState
from orchestrator.domain.tasks.headers import of_start
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import OrchestratorError, WrongState
from orchestrator.sdk.backend.connections import no_connection, refuse_replacing
from orchestrator.sdk.tasks.logs import LogEntry, LogPage, TaskProgress
from orchestrator.sdk.waiting.steps import Pause, Steps, Stream
from orchestrator.store.dag.workflows import Application
from orchestrator.store.insights.run_lists import RunFilter, RunPage
from orchestrator.store.insights.steps import StepTimes, StepView, view_of
from orchestrator.testing.memory_tasks import MemoryTasks
from orchestrator.testing.records import TestedTask
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

_PAUSE = 0.01
"""Seconds between two checks for tasks that another thread runs."""


class MemoryCalls:
    """All calls of a client, by subject. Calls that need real services raise an error."""

    is_in_memory = True

    def __init__(self, tasks: MemoryTasks) -> None:
        self._leader = tasks
        self.tasks = _Tasks(tasks, "tasks")
        self.runs = _Runs(tasks, "runs")
        self.workflows = _Workflows(tasks, "workflows")
        self.flows = _Flows(tasks, "flows")
        self.insights = _Insights(tasks, "insights")
        self.code = _Code(tasks, "code")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Subject(self._leader, name)

    def close(self) -> None:
        """Do nothing: tasks stay in memory until the end of the test."""


class _Subject:
    def __init__(self, tasks: MemoryTasks, subject: str) -> None:
        self._leader = tasks
        self._subject = subject

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise OrchestratorError(
                f"{self._subject}.{name} is not available in memory. Test it on real services, with the fixture "
                "orchestrator_app; WorkflowTest runs workflows as code."
            )

        return refuse


class _Tasks(_Subject):
    retries = 0

    def enqueue(self, task: NewTask) -> bytes:
        created = self._leader.create(task)
        self._leader.settle()
        return created

    async def aenqueue(self, task: NewTask) -> bytes:
        return self.enqueue(task)

    def enqueue_in(self, given: object, task: NewTask) -> bytes:
        if given is None:
            raise no_connection(given)
        refuse_replacing(task)
        return self.enqueue(task)

    def enqueue_many(self, tasks: Iterable[NewTask]) -> list[bytes]:
        created = self._leader.create_all([*tasks])
        self._leader.settle()
        return created

    def cancel(self, task: bytes) -> None:
        record = self._leader.find(task)
        if record.state in ENDED_TASK_STATES and record.state != TaskState.CANCELLED:
            raise WrongState(f"Cannot cancel task {record.id}: it is in state {record.state.value!r}.")
        self._leader.cancel([record])

    def retry(self, task: bytes) -> None:
        self._leader.reopen(self._leader.find(task))

    def status(self, task: bytes) -> str:
        return self._leader.find(task).state

    def progress(self, task: bytes) -> TaskProgress | None:
        mark = self._leader.find(task).progress
        if mark is None:
            return None
        return TaskProgress(fraction=mark.fraction, text=mark.text, attempt=mark.attempt, age=0.0)

    def log(self, task: bytes, after: str = "", wait: float = 0.0, attempt: int | None = None) -> LogPage:  # noqa: ARG002
        found = self._leader.find(task)
        lines = [] if after else [line for line in found.lines if attempt in (None, line.attempt)]
        return LogPage([LogEntry(line.at, line.attempt, line.level, line.text, task=found.id) for line in lines], "1-0")

    def wait(self, task: bytes, limit: TimeLimit) -> Steps[Ended | None]:  # noqa: ARG002
        record = self._leader.find(task)
        while record.state not in ENDED_TASK_STATES:
            if not self._leader.is_draining:
                raise OrchestratorError(
                    f"Task {record.name!r} {record.id} has not run, and cannot run while this waits: call "
                    "drain(), or skip(…) if it is due later."
                )
            yield Pause(_PAUSE)
        return _ended(record)

    def wait_each(self, tasks: Sequence[bytes], limit: TimeLimit) -> Stream[Ended]:
        for task in tasks:
            ended = yield from self.wait(task, limit)
            if ended is not None:
                yield ended


class _Runs(_Subject):
    def start(self, run_id: bytes, name: str, tasks: Iterable[NewTask]) -> None:
        self._leader.start_many(run_id, name, list(tasks))
        self._leader.settle()

    def cancel(self, run: bytes) -> None:
        self._leader.cancel_run(run)

    def progress(self, run: bytes) -> tuple[str, RunCounters]:
        return self._leader.standing(run)

    def ends(self, run: bytes) -> Iterator[Ended]:
        return (_ended(task) for task in self._leader.many(run).tasks)

    def outputs(self, run: bytes, steps: Sequence[str] | None = None) -> dict[str, Any]:
        dag = self._leader.dags.runs[run]
        ended = [step for step in dag.run.compiled.graph.steps if steps is None or step.name in steps]
        skipped = {number for number, state in dag.step_states() if state == StepState.SKIPPED}
        index = dag.run.compiled.graph.index
        return {step.name: dag.output(step.name) for step in ended if steps or index[step.name] not in skipped}

    def wait(self, run: bytes, limit: TimeLimit) -> Steps[Ended | None]:  # noqa: ARG002
        while (state := self._leader.standing(run)[0]) not in ENDED_RUN_STATES:
            if not self._leader.is_draining:
                raise OrchestratorError(
                    f"Run {to_text(run)} has tasks that have not run, and cannot run while this waits: call drain()."
                )
            yield Pause(_PAUSE)
        return Ended(run, state)


class _Workflows(_Subject):
    def apply(self, definition: Definition, condition: object = None) -> Application:  # noqa: ARG002
        is_new = self._leader.dags.definitions.get(definition.name) != definition
        self._leader.dags.definitions[definition.name] = definition
        return Application(1, is_new)

    def start(self, name: str, params: Mapping[str, Any], run_id: bytes, *, key: str | None = None, **_: Any) -> bytes:
        self._leader.start_dag(run_id, name, params, key, headers=of_start.get())
        self._leader.settle()
        return run_id

    def compose(
        self, definitions: Sequence[Definition], args: str, run_id: bytes, *, name: str, key: str | None, **_: Any
    ) -> bytes:
        last = definitions[-1].name
        self._leader.start_dag(
            *(run_id, last, {ARGS: args}, key), headers=of_start.get(), called=name, definitions=definitions
        )
        self._leader.settle()
        return run_id


class _Insights(_Subject):
    def definition_of_run(self, run: UUID) -> Definition | None:
        dag = self._leader.dags.runs.get(run.bytes)
        return None if dag is None else dag.definition

    def list_steps(self, run: UUID) -> list[StepView]:
        dag = self._leader.dags.runs[run.bytes]
        plan, steps = dag.run.plan.state(), dag.definition.steps
        errors = {index: msgspec.structs.asdict(error) for index, error in dag.errors.items() if error is not None}
        return [
            view_of(
                *(steps[index], state, plan.fans.get(index), plan.reasons.get(index)),
                StepTimes(error=errors.get(index)),
            )
            for index, state in dag.step_states()
        ]

    def page_of_runs(self, wanted: RunFilter, **_: Any) -> RunPage:
        below: list[Any] = [
            SimpleNamespace(id=UUID(bytes=run), status=dag.state)
            for run, dag in self._leader.dags.runs.items()
            if dag.parent is not None and dag.parent[0].run.id == (wanted.parent and wanted.parent.bytes)
            if dag.state in (wanted.statuses or (dag.state,))
        ]
        return RunPage(below, None)


class _Flows(_Subject):
    def start(self, name: str, params: Mapping[str, Any], run_id: bytes, *, key: str | None = None, **_: Any) -> bytes:
        self._leader.start(run_id, name, params, key)
        return run_id


class _Code(_Subject):
    def start(self, run_id: bytes, started: RunStarted, *, key: str | None = None, **_: Any) -> tuple[bytes, None]:
        self._leader.start_code(run_id, started.workflow, started.payload, key)
        return run_id, None


def _ended(task: TestedTask) -> Ended:
    return Ended(task.new.id, task.state, task.encoded, task.error)
