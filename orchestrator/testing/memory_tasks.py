"""A leader and a worker in memory, for tasks.

    task.enqueue(…) ──▶ MemoryCalls ──▶ MemoryTasks ──▶ the worker's Runner ──▶ report ──▶ domain/tasks/outcomes.py
                        (for Postgres)  (queue, clock)                                      (consequences)

Tasks run in the worker's real `Runner`, and the leader's real code decides the consequences. Only database rows, Redis
streams, timeouts and other processes are left out.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.ids import to_text
from orchestrator.domain.limits.buckets import Buckets
from orchestrator.domain.limits.lane_limits import scoped
from orchestrator.domain.runs import RunCounters, verdict
from orchestrator.domain.states import ENDED_TASK_STATES, RunState, TaskState
from orchestrator.domain.tasks.callbacks import Callbacks, after_end, after_success
from orchestrator.domain.tasks.headers import headers_of
from orchestrator.domain.tasks.outcomes import AttemptReport, RetryTask, after_failure
from orchestrator.domain.tasks.starts import StartCode, StartMany, StartSteps, is_start, of_task
from orchestrator.domain.tasks.task import (
    Failed,
    KeyHolder,
    NewTask,
    Returned,
    Succeeded,
    TaskError,
    UniqueKey,
    caller_key,
)
from orchestrator.errors import Duplicate, NotFound, OrchestratorError, WrongState
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import decode_call
from orchestrator.sdk.values.sealing import outgoing_task
from orchestrator.store.tasks.unique import same_payload
from orchestrator.testing.memory_dags import Fire, MemoryDags, MemorySchedules
from orchestrator.testing.memory_worker import MemoryWorker
from orchestrator.testing.records import ManyTasks, StartedRun, TestedTask

P = ParamSpec("P")
R = TypeVar("R")
_MAX_ATTEMPTS = 10_000
"""Consecutive attempts at one time, or in one eager call, before they count as an endless loop."""
_MAX_BREADTH = 100
"""The factor between the limits of all attempts and of consecutive ones."""


class MemoryTasks:
    """Keeps tasks, runs those that are due, and advances the clock."""

    def __init__(self, app: Orchestrator, now: float, *, eager: bool) -> None:
        self._app = app
        self._eager = eager
        self.now = now
        self.tasks: dict[bytes, TestedTask] = {}
        self.started: list[StartedRun] = []
        self._schedules = MemorySchedules(app.schedules._declared.values(), now)
        self._runs: dict[bytes, ManyTasks] = {}
        self._keys: dict[str, tuple[TestedTask, UniqueKey, float | None]] = {}
        self._waiting: list[tuple[float, int, TestedTask]] = []
        self._ready: list[tuple[int, int, TestedTask]] = []
        self._serial = itertools.count()
        self._buckets = Buckets()
        self._random = random.Random(0)
        self._lock = threading.RLock()
        self.is_draining = False
        """Whether this or another thread is running tasks."""
        self.dags = MemoryDags(self.create, lambda: app.settings.max_payload)
        self._worker = MemoryWorker(app, self.tasks, self.send_tasks)
        self.close = self._worker.close

    # -- running

    def settle(self) -> None:
        """If eager, run all enqueued tasks to their end, with their consequences."""
        if self._eager and not self.is_draining:
            self.run_until(None)

    def run_until(self, until: float | None) -> list[TestedTask]:
        """Run all tasks due until a time. None means all tasks, but no schedules, which never end."""
        ran: list[TestedTask] = []
        last_time, earlier = self.now, 0
        depths: dict[bytes | None, int] = {}
        self.is_draining = True
        try:
            while True:
                task = self._claim()
                if task is not None:
                    ran.append(task)
                    depth = depths[task.new.id] = 1 + (depths.get(task.new.id) or depths.get(task.new.parent, 0))
                    if depth > _MAX_ATTEMPTS or len(ran) - earlier > _MAX_ATTEMPTS * _MAX_BREADTH:
                        raise OrchestratorError(
                            f"{len(ran) - earlier:,} attempts have run, {task!r} last, and tasks are still "
                            "pending. Does a task enqueue itself? Use recording(app), and run it step by step "
                            "with skip(…)."
                        )
                    self._apply(task, self._worker.attempt(task))
                elif not self._advance(until):
                    return ran
                if until is not None and self.now > last_time:  # the clock has advanced: count anew
                    last_time, earlier = self.now, len(ran)
                    depths.clear()
        finally:
            self.is_draining = False

    def _advance(self, until: float | None) -> bool:
        """Advance the clock to the next due task or schedule. Return False if none is due in time."""
        if (queued := self._schedules.take_queued()) is not None:
            self._fire(queued)
            return True
        with self._lock:
            fire = None if until is None else self._schedules.next_fire
            due = self._waiting[0][0] if self._waiting else None
            first = min((moment for moment in (fire, due) if moment is not None), default=None)
            if first is None or (until is not None and first > until):
                return False
            self.now = max(self.now, first)
            while self._waiting and self._waiting[0][0] <= self.now:
                _, serial, task = heapq.heappop(self._waiting)
                heapq.heappush(self._ready, (-task.new.priority, serial, task))
        if fire == first and (due_now := self._schedules.take()) is not None:
            self._fire(due_now)
        return True

    def _claim(self) -> TestedTask | None:
        with self._lock:
            while self._ready:
                _, serial, task = heapq.heappop(self._ready)
                if task.state != TaskState.PENDING:
                    continue
                if task.expires_at is not None and task.expires_at <= self.now:
                    waited = self.now - task.created_at
                    message = f"It had not started when it expired, after waiting for {waited:.3g} s."
                    self._end(task, TaskState.FAILED, error=TaskError("TaskExpired", message))
                elif task.due > self.now:
                    continue  # its arguments and delay were replaced
                elif (admitted := self._spend(task)) > self.now:
                    task.due = admitted
                    heapq.heappush(self._waiting, (task.due, serial, task))
                else:
                    task.state = TaskState.RUNNING
                    task.attempt += 1
                    task.expires_at = None
                    self._free_key(task, "pending")
                    return task
        return None

    def _spend(self, task: TestedTask) -> float:
        """Take a token from each rate limit of a task. Return now, or the time at which all have tokens."""
        rates = task.rates
        for name, rate in rates:
            if not self._buckets.admits(name, rate, self.now):
                return max(self._buckets.next_admission(name, rate, self.now), self.now + 1e-6)
        for name, rate in rates:
            self._buckets.spend(name, rate, self.now)
        return self.now

    def _apply(self, task: TestedTask, report: AttemptReport) -> None:
        with self._lock:
            if task.state != TaskState.RUNNING:
                return  # cancelled in the meantime
            match report:
                case Succeeded():
                    self._end(task, TaskState.SUCCESS, result=report.result)
                    self.send_tasks(report.children)
                case Failed():
                    task.error = report.error
                    decision = after_failure(report, task.options.retry, task.failures, self._random.random())
                    task.failures += decision.failures
                    if isinstance(decision, RetryTask):
                        self._wait(task, decision.delay)
                    else:
                        self._end(task, TaskState.FAILED, error=report.error)
                    if report.error.kind == "KeyboardInterrupt":
                        raise KeyboardInterrupt
                case Returned():
                    reason = f"is done by the executor {report.executor.name!r}" if report.executor else report.reason
                    message = f"Task {task.name!r} cannot run in memory ({reason}). Use the fixture orchestrator_app."
                    self._end(task, TaskState.FAILED, error=TaskError("ConfigurationError", message))

    def _wait(self, task: TestedTask, delay: float) -> None:
        task.state, task.due = TaskState.PENDING, self.now + delay
        self._push(task)

    def _push(self, task: TestedTask) -> None:
        """Queue a task for the time at which it is due or expires, whichever is first."""
        moment = task.due if task.expires_at is None else min(task.due, task.expires_at)
        heapq.heappush(self._waiting, (moment, next(self._serial), task))

    def _end(
        self, task: TestedTask, state: TaskState, *, result: bytes | None = None, error: TaskError | None = None
    ) -> None:
        task.state, task.encoded, task.error = state, result, error
        self._free_key(task, "pending", "running")
        if task.new.step is not None:
            self.dags.ended(task.new, state, result, error, self.now)
        if task.new.callbacks is None:
            return
        callbacks = msgspec.json.decode(task.new.callbacks, type=Callbacks)
        tasks: Iterable[NewTask] = ()
        if state == TaskState.SUCCESS:
            tasks = after_success(task.new.id, task.attempt, callbacks, result, task.new.trace, task.options.headers)
        elif state == TaskState.FAILED:
            tasks = after_end(task.new.id, task.attempt, callbacks, error, task.new.trace, task.options.headers)
        self.send_tasks(list(tasks))

    def _fire(self, fire: Fire) -> None:
        if fire.cancels:
            self.cancel(fire.still_open)
        if isinstance(fire.target, Task):
            created = self.create(outgoing_task(fire.target._new((), fire.params), self._app.settings))
            fire.still_open.append(self.tasks[created])
        else:
            self.start(new_id(), fire.target.name, fire.params)

    # -- requests of calls and running tasks

    def create(self, new: NewTask) -> bytes:
        """Create a task, or apply its policy if its unique key is taken. Return the id of the task with the key."""
        with self._lock:
            if new.id in self.tasks:
                return new.id
            holder = None if new.unique is None else self._holder(new.unique)
            if holder is None or new.unique is None:
                self._add(new)
                return new.id
            key = caller_key(new.name, new.unique.key)
            if new.unique.on_duplicate == "raise":
                raise Duplicate(f"Task {holder.id} already has the key {key!r}; this task was not enqueued.", holder.id)
            if new.unique.on_duplicate == "replace":
                if holder.state != TaskState.PENDING:
                    raise Duplicate(
                        f"Task {holder.id} has the key {key!r} and is no longer waiting, so its arguments "
                        "cannot be replaced; nothing was enqueued.",
                        holder.id,
                    )
                holder.new = msgspec.structs.replace(holder.new, payload=new.payload)
                self._wait(holder, max(0.0, new.delay))
            elif new.unique.same_call and not same_payload(holder.new.payload, new.payload):
                raise Duplicate.other_call(key, holder.id, "other arguments")
            return holder.new.id

    def create_all(self, tasks: Sequence[NewTask]) -> list[bytes]:
        """Create all tasks, or none if one is refused."""
        with self._lock:
            before = set(self.tasks)
            try:
                return [self.create(new) for new in tasks]
            except Duplicate:
                for task in [self.tasks.pop(id) for id in self.tasks.keys() - before]:
                    task.state = TaskState.CANCELLED
                    self._free_key(task, "pending", "running", "period")
                raise

    def _add(self, new: NewTask) -> TestedTask:
        task = self.tasks[new.id] = TestedTask(new, self._app.tasks.get(new.name), self.now)
        if new.unique is not None:
            until = None if new.unique.period is None else self.now + new.unique.period
            self._keys[new.unique.key] = task, new.unique, until
        self._push(task)
        return task

    def _holder(self, unique: UniqueKey) -> TestedTask | None:
        held = self._keys.get(unique.key)
        if held is None or (held[2] is not None and held[2] <= self.now):
            return None
        return held[0]

    def _free_key(self, task: TestedTask, *scopes: str) -> None:
        key = task.new.unique_key
        if key is not None and (held := self._keys.get(key)) and held[0] is task and held[1].scope in scopes:
            del self._keys[key]

    def start_many(self, run: bytes, name: str, tasks: Sequence[NewTask]) -> None:
        with self._lock:
            self._runs[run] = ManyTasks([self._add(new) for new in tasks])
            self.started.append(StartedRun(id=to_text(run), name=name, params={}))

    def start(self, run: bytes, name: str, params: Mapping[str, Any], key: str | None = None) -> None:
        self.started.append(StartedRun(id=to_text(run), name=name, params=params, key=key))

    def start_dag(
        self,
        run: bytes,
        workflow: str,
        params: Mapping[str, Any],
        key: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        called: str | None = None,
        definitions: Sequence[Definition] = (),
    ) -> None:
        """Record the start of a DAG, and run it if its definition is known."""
        with self._lock:
            self.dags.definitions.update((definition.name, definition) for definition in definitions)
            self.start(run, called or workflow, {} if definitions else params, key)
            if workflow in self.dags.definitions:
                self.dags.start(run, self.dags.definitions[workflow], params, headers or {}, self.now)

    def start_code(self, run: bytes, workflow: str, payload: bytes, key: str | None = None) -> None:
        signature = self._app.code_workflows.find(workflow, None)._signature
        arguments, keywords, *_ = decode_call(payload)
        self.start(run, workflow, signature.named(*signature.restore(arguments, keywords)), key)

    def find(self, task: bytes) -> TestedTask:
        task_record = self.tasks.get(task)
        if task_record is None:
            raise NotFound.by_id("task", to_text(task))
        return task_record

    def reopen(self, task: TestedTask) -> None:
        """Reopen a failed task, or a cancelled one that belongs to no run."""
        if task.state != TaskState.FAILED and (task.state != TaskState.CANCELLED or task.new.run_id is not None):
            raise WrongState(f"Cannot retry task {task.id}: it is in state {task.state.value!r}.")
        task.failures, task.expires_at, task.details = 0, None, None
        self._wait(task, 0.0)
        self.settle()

    def cancel(self, tasks: Sequence[TestedTask]) -> None:
        with self._lock:
            for task in tasks:
                if task.state not in ENDED_TASK_STATES:
                    self._end(task, TaskState.CANCELLED, error=TaskError("Cancelled", "Cancelled by request."))

    def cancel_run(self, run: bytes) -> None:
        """Cancel a run and its open tasks and child runs."""
        if (dag := self.dags.runs.get(run)) is None:
            self.many(run).cancelling = True
            self.cancel(self.many(run).tasks)
            return
        self.dags.cancel(dag)
        cancelled = {id for id, dag_run in self.dags.runs.items() if dag_run.state == RunState.CANCELLED}
        self.cancel([task for task in self.tasks.values() if task.new.run_id in cancelled])

    def many(self, run: bytes) -> ManyTasks:
        run_record = self._runs.get(run)
        if run_record is None:
            raise NotFound.by_id("run", to_text(run))
        return run_record

    def standing(self, run: bytes) -> tuple[RunState, RunCounters]:
        """Return the state of a run, and its tasks counted by state."""
        dag = self.dags.runs.get(run)
        tasks = (
            self.many(run).tasks if dag is None else [state for state in self.tasks.values() if state.new.run_id == run]
        )
        states = [task.state for task in tasks]
        ended = {
            state.value: states.count(state) for state in (TaskState.SUCCESS, TaskState.FAILED, TaskState.CANCELLED)
        }
        open_count = sum(state not in ENDED_TASK_STATES for state in states)
        counters = RunCounters(total=len(states), open=open_count, **ended)
        if dag is not None:
            return dag.state, counters
        return verdict(counters, self.many(run).cancelling) or RunState.RUNNING, counters

    def send_tasks(self, tasks: Sequence[NewTask]) -> Mapping[bytes, KeyHolder]:
        return {task.id: self._handed_over(task) for task in tasks}

    def _handed_over(self, new: NewTask) -> KeyHolder:
        if not is_start(new):
            try:
                return KeyHolder(self.create(new))
            except Duplicate as error:
                return KeyHolder(bytes.fromhex(error.task_id.replace("-", "")), is_other_call=True)
        match of_task(new):
            case StartMany(name=name, tasks=tasks):
                self.start_many(new.id, name, [msgspec.structs.replace(item, parent=new.parent) for item in tasks])
            case StartSteps(flow=True) as start:
                self.start(new.id, start.workflow, msgspec.json.decode(start.params), start.key)
            case StartSteps() as start:
                self.start_dag(
                    *(new.id, start.workflow, msgspec.json.decode(start.params), start.key),
                    headers=headers_of(new.options),
                    called=start.name,
                    definitions=[msgspec.json.decode(item, type=Definition) for item in start.definitions],
                )
            case StartCode(started=started, key=key):
                own = key and key.removeprefix(scoped(started.workflow, ""))
                self.start_code(new.id, started.workflow, started.payload, own)
        return KeyHolder(new.id)
