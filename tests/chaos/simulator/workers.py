"""Worker processes: the product's own reporter and table of held attempts, and a model of the rest.

The model follows `workers/parent/supervisor.py` (heartbeats, orders, doubtful workers, the death of a child),
`workers/receiving.py` and `workers/running/pool.py` (running, handing back). It performs one small action at a time, so
that any event can happen between two actions.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import exc

from orchestrator.domain.ids import derived_id
from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.domain.tasks.task import (
    Dispatch,
    Enqueued,
    Failed,
    Lost,
    NewTask,
    Returned,
    Started,
    Succeeded,
    TaskError,
    UniqueKey,
)
from orchestrator.store.tasks import completions
from orchestrator.transport.codec import Heartbeat, encode, names_digest
from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.transport.keys import private_queue
from orchestrator.transport.worker import Received, StreamsGone
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.reporting.kept import PendingReport, split
from orchestrator.workers.reporting.reporter import _POLL_INTERVAL, Reporter
from orchestrator.workers.running.failures import unknown
from orchestrator.workers.running.job import Bundle, Job, Stage
from tests.chaos.simulator.limits import LIMITED, OPTIONS, STORED
from tests.chaos.simulator.memory import MemoryWorkerStreams
from tests.unit.flows.made import SERVICES, service

if TYPE_CHECKING:
    from tests.chaos.simulator.world import World

NAMES = sorted(["child", "claimant", "exact", "job", "list", "parent", "poison", "queued", *OPTIONS, *SERVICES])
NEW = {"exact", "list"}
"""Tasks known only to the newer half of the workers, in plans with two releases of the application."""
QUEUES = ("default", LIMITED)
_HAND_BACK_AFTER = 0.2
_HAND_BACK_PLACED_AFTER = 10.0
_ANNOUNCE_AFTER = 0.05
_TIMEOUT = 5.0
_MAX_RECEIVE_DELAY = 2.0
_encode = msgspec.msgpack.encode


@dataclass
class Execution:
    """One execution of a task's code."""

    task: bytes
    attempt: int
    worker: str
    name: str
    began: float
    ended: float | None = None
    outcome: str = ""
    """`success`, `failed`, `killed` or `aborted`."""
    result: bytes = b""
    children: list[bytes] = field(default_factory=list)
    """Tasks enqueued by running code, which the leader has acknowledged."""
    promised: list[bytes] = field(default_factory=list)
    """Tasks that the success enqueues."""
    heard: bool = True
    """Whether the worker's heartbeats have had no gap as long as its TTL since the worker got the attempt."""


class _Run:
    """A job with running code."""

    def __init__(self, job: Job, execution: Execution, ends_at: float, steps: list[NewTask]) -> None:
        self.job = job
        self.execution = execution
        self.ends_at = ends_at
        self.enqueues = steps
        self.waits_for: threading.Event | None = None


class _Child:
    """A worker process: the state that is lost when it dies, and the table of attempts, which the parent shares."""

    def __init__(self, world: World, identifier: str, shard: int) -> None:
        self.id = identifier
        self.queues = (*QUEUES, private_queue(identifier))
        self.held = HeldAttempts(capacity=500)
        redis = world.redis[shard]
        self.streams = MemoryWorkerStreams(redis, identifier)
        self.reporter = Reporter(MemoryWorkerStreams(redis, identifier), identifier, self.held)  # type: ignore[arg-type]
        self.backlog: list[PendingReport] = []
        self.polled_at = 0.0
        self.waiting: list[Job] = []
        self.runs: list[_Run] = []
        self.joined = ""
        self.may_start = True
        self.draining = False
        self.drained_at = 0.0
        self.doubtful = False
        self.started_at = world.now
        self.starves_until = 0.0
        self.asked_for_work_at = 0.0
        self.unread: list[Received] = []
        """Messages received from Redis that the process has not handled, with their generation."""


class WorkerMachine:
    """A supervisor and its one child process, which is replaced when it dies."""

    def __init__(self, world: World, name: str, slots: int, rate: float, shard: int = 0) -> None:
        self._world = world
        self.shard = shard
        self._slots = slots
        self._rate = rate
        self._random = Random(f"{world.plan.seed} {name}")
        self._children = 0
        self._beats = 0
        self.name = name
        has_others = any(worker.shard == shard for worker in world.workers)
        is_old = world.plan.seed % 4 == 3 and int(name[1:]) % 2 == 0 and has_others
        self._names = [task_name for task_name in NAMES if not (is_old and task_name in NEW)]
        self.sleeps_until = 0.0
        self.heard_at = world.now
        self._boot()

    def _boot(self) -> None:
        """Start a new supervisor without any state."""
        self._streams = MemoryWorkerStreams(self._world.redis[self.shard], self.name)
        self._lost: list[Flush] = []
        self._gone: list[str] = []
        self._unheard: set[tuple[bytes, int]] = set()
        self._beat_at = 0.0
        self._last_beat: float | None = None
        self._beats = 0
        self._start_child()

    def _start_child(self) -> None:
        self._children += 1
        self.child = _Child(self._world, f"{self.name}.{self._children}", self.shard)
        self._inbox = self._streams.order_inbox()
        self._inbox.add(self.child.id)
        self._beat_at = 0.0
        self._greeted = False

    @property
    def now(self) -> float:
        """The machine's own clock."""
        return 500.0 + self._rate * self._world.now

    @property
    def is_silent(self) -> bool:
        """Return whether heartbeats have been missing for about a TTL."""
        return self._world.now - self.heard_at >= 0.9 * self._world.settings.worker_ttl

    @property
    def is_idle(self) -> bool:
        child = self.child
        nothing_held = not child.held.snapshot()[0]
        return not (child.waiting or child.runs or child.backlog or self._lost) and nothing_held

    # -- a turn

    def turn(self) -> None:
        """Perform one or two small actions."""
        if self._world.now < self.sleeps_until:
            return
        if self.now >= self._beat_at:
            self._attempt(self._beat)
        if self._world.now < self.child.starves_until:
            self._attempt(self._report_lost)
            return
        self._accept()
        actions = [self._report_lost, self._obey, self._take, self._work, self._flush]
        for action in self._random.sample(actions, 2):
            self._attempt(action)
        if self.child.draining:
            self._drain()

    def _attempt(self, action: Any) -> None:
        try:
            action()
        except UNAVAILABLE:
            self._world.trace(f"{self.child.id} cannot reach Redis: {action.__name__}")

    # -- the supervisor

    def _beat(self) -> None:
        child, now, ttl = self.child, self.now, self._world.settings.worker_ttl
        if self._last_beat is not None and now - self._last_beat > ttl:
            child.doubtful = True
            child.may_start = False
        held, running = child.held.snapshot()
        self._beats += 1
        beat = Heartbeat(
            worker=child.id,
            host=self.name,
            pid=self._children,
            queues=list(QUEUES),
            slots=self._slots,
            names=names_digest(self._names),
            generation="",
            started_at=child.started_at,
            held=held,
            running=running,
            doubtful=child.doubtful,
            draining=child.draining,
            number=self._beats,
        )
        self._streams.beat([beat], self._names, ttl)
        self._last_beat = now
        self._beat_at = now + self._world.settings.heartbeat
        self._note_heard()
        if not self._greeted:
            self._streams.greet()
            self._greeted = True

    def _note_heard(self) -> None:
        if self.is_silent:
            self.forgive()
        self.heard_at = self._world.now

    def forgive(self) -> None:
        """Mark all attempts as unheard: heartbeats were missing, so the leader may have given the tasks to other
        workers."""
        for run in self.child.runs:
            run.execution.heard = False
        for execution in self._world.executions:
            if execution.worker == self.child.id:
                execution.heard = False
        self._unheard = {(job.dispatch.id, job.dispatch.attempt) for job in self.child.waiting}

    def _obey(self) -> None:
        child = self.child
        self._inbox.ask(0.0)
        for _, order in self._inbox.read():
            if order.stop:
                self._revoke({(attempt.id, attempt.attempt) for attempt in order.stop})
            self._spare({(attempt.id, attempt.attempt) for attempt in order.spare})
            if order.go_on and child.doubtful:
                child.doubtful = False
                child.may_start = True

    def _revoke(self, attempts: set[tuple[bytes, int]]) -> None:
        child = self.child
        for run in [run for run in child.runs if (run.job.dispatch.id, run.job.dispatch.attempt) in attempts]:
            self._world.trace(f"{child.id} aborts {run.execution.task.hex()[-6:]}#{run.execution.attempt}")
            self._end(run, "aborted", Failed(run.execution.task, run.execution.attempt, 0.1, TaskError("Aborted", "")))
        for job in [job for job in child.waiting if (job.dispatch.id, job.dispatch.attempt) in attempts]:
            self._hand_back(job, "cancelled")

    def _report_lost(self) -> None:
        streams = self._streams
        while self._gone:
            streams.deregister([self._gone[0]], [])
            self._gone.pop(0)
        while self._lost:
            generation = streams.generation()
            if generation is None or streams.flush(generation, encode(self._lost[0]), {}).entry is None:
                return
            self._lost.pop(0)

    # -- failures

    def kill_child(self) -> None:
        """Kill the child process. The parent reports its attempts as lost, and starts another child."""
        child = self.child
        self._world.trace(f"{child.id} dies")
        self._kill_runs()
        if unended := child.held.unended():
            begun = child.held.begun()
            reports: list[Report] = [
                Lost(*attempt, alone=False)
                if attempt in begun or begun.isdisjoint(unended)
                else Returned(*attempt, "its process died")
                for attempt in unended
            ]
            self._lost.append(Flush(child.id, reports))
        self._gone.append(child.id)
        self._start_child()

    def kill_machine(self, away: float) -> None:
        """Kill parent and child; the machine boots again after some seconds."""
        self._world.trace(f"{self.name} is switched off")
        self._kill_runs()
        self._boot()
        self.sleeps_until = self._world.now + away

    def sleep(self, seconds: float) -> None:
        """Freeze the machine for some seconds."""
        self._world.trace(f"{self.name} stands still")
        self.sleeps_until = self._world.now + seconds

    def drain(self) -> None:
        """Finish running jobs, hand back the others, and restart."""
        self._world.trace(f"{self.child.id} drains")
        self.child.draining = True
        self.child.drained_at = self._world.now
        for job in list(self.child.waiting):
            self._hand_back(job, "worker stops")

    def _drain(self) -> None:
        child = self.child
        for job in list(child.waiting):
            self._hand_back(job, "worker stops")
        if child.runs:
            child.drained_at = self._world.now
            return
        unapplied = child.backlog or child.reporter._unapplied or child.reporter._queue
        if not unapplied or self._world.now > child.drained_at + _TIMEOUT:
            self.kill_child()

    def _kill_runs(self) -> None:
        for run in self.child.runs:
            run.execution.ended, run.execution.outcome = self._world.now, "killed"

    # -- the process

    def _take(self) -> None:
        child = self.child
        room = min(self._slots - len(child.waiting) - len(child.runs), child.held.room)
        if not child.may_start or child.draining or room <= 0:
            return
        try:
            if not child.joined or child.joined != child.reporter.generation:
                generation = child.streams.generation()
                if generation is None:
                    return
                child.streams.join(generation, child.queues)
                child.joined = generation
                if not child.reporter.generation:
                    child.reporter.generation = generation
            received = child.streams.take(child.joined, child.id, child.queues, room, 0.0)
        except StreamsGone:
            child.joined = ""
            return
        except UNAVAILABLE:
            child.joined = ""
            raise
        child.unread = received
        child.asked_for_work_at = self._world.now
        starves = self._world.armed("after take")
        if starves is not None and received:
            self._world.trace(f"{child.id} starves")
            child.starves_until = self._world.now + float(starves)
        else:
            self._accept()

    def _accept(self) -> None:
        child = self.child
        unread, child.unread = child.unread, []
        for generation, queue, entry, tasks in unread:
            bundle = Bundle(generation, queue, entry, len(tasks))
            for task in tasks:
                self._world.trace(f"{child.id} takes {task.id.hex()[-6:]}#{task.attempt}")
                child.waiting.append(Job(task, bundle, child.held.add(task.id, task.attempt), self.now))
        if not child.may_start or (unread and self._world.now - child.asked_for_work_at > _MAX_RECEIVE_DELAY):
            for job in list(child.waiting):
                self._hand_back(job, "doubtful or too late")

    def _spare(self, attempts: set[tuple[bytes, int]]) -> None:
        for job in list(self.child.waiting):
            if (job.dispatch.id, job.dispatch.attempt) in attempts:
                self._hand_back(job, "other workers have free slots")

    def _hand_back(self, job: Job, reason: str) -> None:
        self.child.waiting.remove(job)
        if job.take_back():
            self.child.reporter.report(Returned(job.dispatch.id, job.dispatch.attempt, reason), job)

    def _work(self) -> None:
        """End finished jobs, start new ones in free slots, and hand back jobs that have waited too long."""
        child = self.child
        for run in list(child.runs):
            self._continue(run)
            if child is not self.child:
                return  # the task killed its process
        while child.waiting and len(child.runs) < self._slots:
            self._begin(child.waiting.pop(0))
            if child is not self.child:
                return
        for job in list(child.waiting):
            if self.now - job.received_at > (_HAND_BACK_PLACED_AFTER if job.is_placed else _HAND_BACK_AFTER):
                self._hand_back(job, "no free slot")

    def _begin(self, job: Job) -> None:
        if not job.begin(self.now):
            return
        self.child.held.mark_begun(job.slot)
        if job.dispatch.name not in self._names:
            self.child.reporter.report(unknown(job), job)
            return
        dispatch, world = job.dispatch, self._world
        arguments = msgspec.msgpack.decode(dispatch.payload)[1]
        execution = Execution(dispatch.id, dispatch.attempt, self.child.id, dispatch.name, world.now)
        execution.heard = (dispatch.id, dispatch.attempt) not in self._unheard and not self.is_silent
        world.note_execution(execution)
        dice = Random(f"{world.plan.seed} {dispatch.id.hex()} {dispatch.attempt}")
        seconds = float(arguments.get("seconds", 0.1)) * dice.uniform(0.7, 1.3)
        enqueues: list[NewTask] = []
        if dispatch.name == "parent":
            enqueues = [self._offspring(execution, number) for number in (1, 2)]
            execution.promised = [enqueues[1].id]
        run = _Run(job, execution, world.now + seconds, enqueues)
        self.child.runs.append(run)
        self.child.held.write_running(len(self.child.runs))
        if dispatch.name == "poison":
            self._poison(run)

    def _poison(self, run: _Run) -> None:
        """Kill the process of a task: its own process if it runs alone, else the child with all its tasks."""
        if run.job.dispatch.alone:
            self._end(run, "killed", Lost(run.execution.task, run.execution.attempt, alone=True))
        else:
            self.kill_child()

    @staticmethod
    def _offspring(execution: Execution, number: int) -> NewTask:
        payload = _encode(((), {"seconds": 0.05}))
        return NewTask(derived_id(execution.task, execution.attempt, number), "child", "default", payload)

    @staticmethod
    def _keyed(execution: Execution, key: str) -> NewTask:
        payload = _encode(((), {"seconds": 0.3, "fails": 0.4}))
        identifier = derived_id(execution.task, execution.attempt, 1)
        key_of = UniqueKey(key, "running")
        return NewTask(identifier, "unique", "default", payload, options=STORED["unique"], unique=key_of)

    def _continue(self, run: _Run) -> None:
        job, execution = run.job, run.execution
        if not job.announced and self.now - job.started_at > _ANNOUNCE_AFTER:
            job.announced = True
            self.child.reporter.report(Started(execution.task, execution.attempt, self.now - job.started_at))
        if self._world.now < run.ends_at:
            return
        if execution.name == "parent" and run.waits_for is None:
            run.waits_for = threading.Event()
            self.child.reporter._enqueue(PendingReport(Enqueued(run.enqueues[:1]), None, run.waits_for.set))
            return
        if run.waits_for is not None:
            if not run.waits_for.is_set():
                return
            execution.children = [run.enqueues[0].id]
        self._finish(run)

    def _finish(self, run: _Run) -> None:
        dispatch, execution = run.job.dispatch, run.execution
        arguments = msgspec.msgpack.decode(dispatch.payload)[1]
        dice = Random(f"{self._world.plan.seed} {dispatch.id.hex()} {dispatch.attempt} end")
        if dice.random() < float(arguments.get("fails", 0.0)):
            error = TaskError("ValueError", "not this time")
            self._end(run, "failed", Failed(dispatch.id, dispatch.attempt, 0.1, error))
            return
        value: Any = arguments["items"] if dispatch.name == "list" else [dispatch.attempt, self.child.id]
        if dispatch.name in SERVICES:
            try:
                value = service(dispatch.name, arguments["input"], arguments["params"])
            except ValueError as refusal:
                error = TaskError("ValueError", str(refusal))
                self._end(run, "failed", Failed(dispatch.id, dispatch.attempt, 0.1, error))
                return
        execution.result = _encode(value)
        if dispatch.name == "exact":
            self._complete(run, dies=dice.random() < 0.3)
            return
        promised = run.enqueues[1:]
        if dispatch.name == "claimant":
            promised = [self._keyed(execution, arguments["key"])]
        self._end(run, "success", Succeeded(dispatch.id, dispatch.attempt, 0.1, execution.result, promised))

    def _complete(self, run: _Run, *, dies: bool) -> None:
        """Complete the run as `ctx.transaction()` does, then report it or die before the report."""
        dispatch, execution = run.job.dispatch, run.execution
        if not self._commit(dispatch, execution.result):
            error = TaskError("AttemptOver", "")
            self._end(run, "aborted", Failed(dispatch.id, dispatch.attempt, 0.1, error))
        elif dies:
            self._world.trace(f"{self.child.id} has completed {dispatch.id.hex()[-6:]}#{dispatch.attempt}")
            execution.ended, execution.outcome = self._world.now, "success"
            self.child.runs.remove(run)
            self.kill_child()
        else:
            self._end(run, "success", Succeeded(dispatch.id, dispatch.attempt, 0.1, execution.result))

    def _commit(self, dispatch: Dispatch, result: bytes) -> bool:
        """Complete the task in a transaction; return False if the attempt is over or a paused leader locks the row."""
        self._world.set_clocks()
        attempt = {"id": dispatch.id.hex(), "attempt": dispatch.attempt}
        with self._world.database.engine_of(self.shard).connect() as connection:
            try:
                if not completions.begin(connection, dispatch.id, dispatch.attempt):
                    return False
                connection.exec_driver_sql("SET LOCAL lock_timeout = '50ms'")
                connection.exec_driver_sql("INSERT INTO simulated.ledger VALUES (%(id)s::uuid, %(attempt)s)", attempt)
                return completions.commit(connection, dispatch.id, dispatch.attempt, result, 0.1)
            except exc.OperationalError:
                return False

    def _end(self, run: _Run, outcome: str, report: Any) -> None:
        run.execution.ended, run.execution.outcome = self._world.now, outcome
        self.child.runs.remove(run)
        self.child.held.write_running(len(self.child.runs))
        if run.job.stage is Stage.RUNNING and run.job.finish():
            self.child.reporter.report(report, run.job)

    # -- the reporter

    def _flush(self) -> None:
        """Do one round of `Reporter._run`."""
        child, reporter = self.child, self.child.reporter
        child.backlog.extend(reporter._gather())
        polls = (reporter._unapplied or not reporter.generation) and self.now >= child.polled_at
        if not child.backlog and not polls:
            return
        child.polled_at = self.now + _POLL_INTERVAL
        batch, rest = split(child.backlog)
        child.backlog = [*batch, *rest]
        child.backlog = [*reporter._flush(batch), *rest]
