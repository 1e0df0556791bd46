"""The simulated world: actors take turns, only turns advance the clock, and faults occur between and within turns."""

from __future__ import annotations

import heapq
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from orchestrator.scheduler import leadership
from orchestrator.scheduler.tasks import reports as status
from orchestrator.settings import Settings
from orchestrator.store.inbox import RequestKind
from orchestrator.workers.reporting import reporter
from tests.chaos.simulator.clients import Clients
from tests.chaos.simulator.leaders import SchedulerProcess
from tests.chaos.simulator.limits import limit_queue, too_many
from tests.chaos.simulator.memory import MemoryRedis
from tests.chaos.simulator.person import Person
from tests.chaos.simulator.plan import FAULT_TIME, Fault, Plan
from tests.chaos.simulator.poison import Poisons
from tests.chaos.simulator.postgres import SimulatedDatabase
from tests.chaos.simulator.resharding import Operator
from tests.chaos.simulator.workers import Execution, WorkerMachine

QUIET_WITHIN = 240.0
"""Seconds of virtual time after the last fault within which everything must come to rest."""


class _NeverWaits(threading.Event):
    """An event whose `wait` returns at once: actors take turns, and time passes between the turns."""

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return self.is_set()


class World:
    """One simulation."""

    def __init__(self, database: SimulatedDatabase, plan: Plan) -> None:
        self.database = database
        self.plan = plan
        self.settings = Settings(lease=3.0, worker_ttl=3.0, heartbeat=1.0, batch=plan.batch, shards=plan.shards)
        self.now = 0.0
        self.violations: list[str] = []
        self.was_stopped = False
        """Whether an invariant was violated during the run; later results are meaningless."""
        self.executions: list[Execution] = []
        self.history: list[str] = []
        self._random = Random(f"{plan.seed} turns")
        self._database_skew = 0.0
        self._armed: dict[str, list[str]] = defaultdict(list)
        self._call_faults: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._cut_until: dict[str, float] = {}
        self._highest_term: Counter[int] = Counter()
        self._faults = list(plan.faults)
        self._actions = list(plan.actions)
        self._healed = False
        self._remember_at = 0.0
        self._names: Counter[str] = Counter()
        self.redis: list[MemoryRedis] = []
        """The Redis of each shard, in order; shards that were given up may have left data there."""
        self.database.clear()
        while self.database.reshard(plan.shards):
            pass  # a closing shard is removed in the next round
        self.set_clocks()
        self.clients = Clients(self)
        self.poisons = Poisons(self)
        rates = [self._random.uniform(0.97, 1.03) for _ in range(plan.schedulers + plan.workers)]
        self._rates = rates
        self.schedulers: list[SchedulerProcess] = []
        self.workers: list[WorkerMachine] = []
        self.operator = Operator(self)
        self._turns: list[tuple[float, int, Any]] = []
        self._actors = 0
        self.deploy(plan.shards)
        self._add(Person(self), 0.0)
        if any(fault.kind == "reshard" for fault in plan.faults):
            self._add(self.operator, 0.0)
        if plan.shards > 1 or any(action.kind == "limited" for action in plan.actions):
            limit_queue(self)

    def _add(self, actor: Any, at: float) -> None:
        heapq.heappush(self._turns, (at, self._actors, actor))
        self._actors += 1

    def deploy(self, shards: int) -> None:
        """Deploy schedulers and workers for a number of shards; existing schedulers restart."""
        plan = self.plan
        self.settings = replace(self.settings, shards=shards)
        while len(self.redis) < shards:
            self.redis.append(MemoryRedis(lambda: self.now, self._call_fault))
        gone: list[SchedulerProcess | WorkerMachine] = [member for member in self.schedulers if member.shard >= shards]
        gone += [member for member in self.workers if member.shard >= shards]
        self._turns = [turn for turn in self._turns if turn[2] not in gone]
        heapq.heapify(self._turns)
        for scheduler in self.schedulers:
            scheduler.stop() if scheduler in gone else scheduler.crash()
        served = {member.shard for member in self.schedulers} - {member.shard for member in gone}
        self.schedulers = [member for member in self.schedulers if member not in gone]
        self.workers = [member for member in self.workers if member not in gone]
        new = [shard for shard in range(shards) if shard not in served]
        added: list[Any] = []
        for _ in range(plan.schedulers):
            for shard in new:
                added.append(SchedulerProcess(self, f"s{self._next_number('s')}", self._rate(), shard))
        for number in range(max(plan.workers, len(new)) if new else 0):
            shard = new[number % len(new)]
            added.append(WorkerMachine(self, f"w{self._next_number('w')}", plan.slots, self._rate(), shard))
        self.schedulers += [member for member in added if isinstance(member, SchedulerProcess)]
        self.workers += [member for member in added if isinstance(member, WorkerMachine)]
        for actor in added:
            self._add(actor, self.now + self._random.uniform(0.0, 0.3))

    def _next_number(self, kind: str) -> int:
        self._names[kind] += 1
        return self._names[kind]

    def _rate(self) -> float:
        return self._rates.pop() if self._rates else self._random.uniform(0.97, 1.03)

    @property
    def redis_in_use(self) -> list[MemoryRedis]:
        """The Redis of each shard that has schedulers."""
        return self.redis[: self.settings.shards]

    @property
    def is_any_scheduler_paused(self) -> bool:
        return any(scheduler.paused for scheduler in self.schedulers)

    def left_over(self) -> list[str]:
        """Return all entries of the streams."""
        return [entry for redis in self.redis_in_use for entry in redis.left_over()]

    # -- time

    def run(self) -> None:
        with _without_waiting(self.plan.seed), self.poisons.injected():
            try:
                self.run_until(FAULT_TIME)
                self._heal()
                if self.poisons.poisoned:
                    self._rest("the last fault, but for poisoned runs,", self._is_quiet_but_for_poison)
                    self._lift_poison()
                self._rest("the last fault", self._is_quiet)
            finally:
                for scheduler in self.schedulers:
                    scheduler.close()

    def _rest(self, since: str, is_quiet: Callable[[], bool]) -> None:
        deadline = self.now + QUIET_WITHIN
        while not self.was_stopped and not is_quiet():
            if self.now > deadline:
                self._stop(f"not at rest {QUIET_WITHIN:g} s after {since}")
            self.run_until(self.now + 0.5)

    def run_until(self, end: float) -> None:
        """Let the actors take turns until a time. Calls nest while a scheduler is paused in the middle of its turn."""
        while self._turns and self._turns[0][0] <= end and not self.was_stopped:
            at, number, actor = heapq.heappop(self._turns)
            self._move_to(max(at, self.now))
            self._attempt(actor.turn)
            if isinstance(actor, Person | Operator):
                pause = actor.PAUSE
            else:
                pause = self._random.uniform(*((0.02, 0.15) if isinstance(actor, SchedulerProcess) else (0.03, 0.2)))
            heapq.heappush(self._turns, (self.now + pause, number, actor))
        self._move_to(max(end, self.now))

    def _attempt(self, turn: Any) -> None:
        try:
            turn()
        except Exception:  # noqa: BLE001  # an unexpected exception is a defect
            self._stop(f"died of a defect:\n{traceback.format_exc()}")

    def _move_to(self, moment: float) -> None:
        """Advance the time; perform the client actions and faults that are due on the way."""
        while True:
            planned = [fault.at for fault in self._faults[:1]] + [action.at for action in self._actions[:1]]
            due = [at for at in planned if at <= moment and not self._healed]
            if not due:
                break
            self.now = max(self.now, min(due))
            if self._actions and self._actions[0].at <= self.now:
                action = self._actions.pop(0)
                self.trace(f"client: {action.kind}")
                self.clients.act(action)
            elif self._faults:
                self._inject(self._faults.pop(0))
        self.now = moment
        for redis in self.redis:
            redis.deliver_late()
        if self.now >= self._remember_at and any(fault.kind == "fail over" for fault in self._faults):
            for redis in self.redis:
                redis.remember()
            self._remember_at = self.now + 0.7

    def set_clocks(self) -> None:
        self.database.set_clock(1_000.0 + self.now + self._database_skew)

    def trace(self, message: str) -> None:
        self.history.append(f"{self.now:8.3f} {message}")

    # -- faults

    def _inject(self, fault: Fault) -> None:
        self.trace(f"FAULT {fault.kind} {' '.join(map(str, fault.details))}")
        kind, details = fault.kind, fault.details
        if kind == "strike":
            self._armed[details[0]].append(details[1])
        elif kind == "call":
            self._call_faults[details[0], details[1]].append(details[2])
        elif kind == "clock":
            self._database_skew += details[0]
        elif kind == "cut off":
            self._cut_off(*details)
        elif kind == "poison":
            self.poisons.add(*details)
        elif kind == "lose message":
            redis = self.redis[details[0] % len(self.redis)]
            redis.lose_message(lambda standing: standing[details[0] % len(standing)])
        elif kind == "reshard":
            self.operator.request(*details)
        elif kind in ("flush all", "restart", "fail over", "set clock"):
            for redis in self.redis:
                getattr(redis, kind.replace(" ", "_"))(*details)
        else:
            worker = self.workers[details[0] % len(self.workers)]
            getattr(worker, kind.replace(" ", "_"))(*details[1:])

    def _cut_off(self, target: str, number: int, seconds: float) -> None:
        if target == "worker":
            names = [self.workers[number % len(self.workers)].name]
        elif target == "leader":
            names = [scheduler.name for scheduler in self.schedulers if scheduler.leading]
        else:
            names = [scheduler.name for scheduler in self.schedulers] + [worker.name for worker in self.workers]
        for name in names:
            self._cut_until[name] = self.now + seconds

    def armed(self, boundary: str) -> str | None:
        """Return the action of a fault planned for this boundary, and remove the fault."""
        waiting = self._armed.get(boundary)
        return waiting.pop(0) if waiting else None

    def _call_fault(self, caller: str, operation: str) -> str | None:
        if self._cut_until.get(caller.split(".")[0], 0.0) > self.now:
            return "refused"
        role = {"s": "leader", "w": "worker", "c": "client"}[caller[0]]
        waiting = self._call_faults.get((role, operation))
        if not waiting:
            return None
        fault_kind = waiting.pop(0)
        self.trace(f"{caller} {operation}: {fault_kind}")
        return fault_kind

    def _heal(self) -> None:
        self.trace("the faults are over")
        self._healed = True
        self._armed.clear()
        self._call_faults.clear()

    def _is_quiet_but_for_poison(self) -> bool:
        """Return whether all has ended except poisoned runs, and each of these is stuck or waits for a stuck run."""
        (row,) = self.database.sql(
            "SELECT NOT EXISTS (SELECT FROM orchestrator.tasks)"
            " AND NOT EXISTS (SELECT FROM orchestrator.inbox) AS quiet"
        )
        if not row["quiet"]:
            return False
        unended = self.database.sql("SELECT id, lane, lane_limit, stuck FROM orchestrator.runs WHERE ended_at IS NULL")
        held = Counter(row["lane"] for row in unended if row["stuck"] is not None)
        return all(
            row["stuck"] is not None or (row["lane"] is not None and held[row["lane"]] >= row["lane_limit"])
            for row in unended
        )

    def _lift_poison(self) -> None:
        """Lift the poison, and retry the stuck runs."""
        found = self.database.sql(
            "SELECT id, stuck FROM orchestrator.runs WHERE stuck IS NOT NULL AND ended_at IS NULL"
        )
        for row in found:
            if row["id"].bytes not in self.poisons.met:
                self._stop(f"run {row['id'].hex} is stuck, and was never poisoned: {row['stuck']}")
            if not row["stuck"].get("message"):
                self._stop(f"run {row['id'].hex} is stuck, and nobody says why")
        self.trace(f"the poison is lifted, and {len(found)} runs are retried")
        self.poisons.lift()
        self.set_clocks()
        self.clients.retry_all([row["id"].bytes for row in found])

    # -- invariants checked during the run

    def _stop(self, violation: str) -> None:
        self.trace(f"VIOLATION {violation}")
        self.violations.append(violation)
        self.was_stopped = True

    def note_commit(self, shard: int, term: int) -> None:
        """Record a leader's write; a write of an older term must not follow."""
        if term < self._highest_term[shard]:
            self._stop(f"term {term} of shard {shard} wrote after term {self._highest_term[shard]}")
        self._highest_term[shard] = term

    def give_up(self, shard: int) -> None:
        """Remove a shard: nothing reads its streams any more, and a later shard with its number starts with new
        terms."""
        del self._highest_term[shard]
        self.redis[shard].data.queues.clear()
        self.redis[shard].data.events.clear()

    def _was_taken_back(self, task: bytes) -> bool:
        """Return whether clients have cancelled a task and retried its run; the cancelled attempt may run for a
        moment."""
        if (RequestKind.CANCEL_TASK, task) not in self.clients.requested:
            return False
        statement = "SELECT run_id FROM orchestrator.tasks WHERE id = %(id)s::uuid AND run_id IS NOT NULL"
        rows = self.database.sql(statement, id=task.hex())
        return any((RequestKind.RETRY_RUN, row["run_id"].bytes) in self.clients.requested for row in rows)

    def note_execution(self, execution: Execution) -> None:
        """Record an execution's start. No other live worker with heartbeats may run the task or have finished it."""
        living = {worker.child.id for worker in self.workers if not worker.is_silent}
        for other in self.executions:
            if other.task != execution.task or not other.heard or other.worker not in living or not execution.heard:
                continue
            if self._was_taken_back(execution.task):
                continue
            if other.ended is None or other.outcome == "success":
                doing = "is running" if other.ended is None else "has finished"
                self._stop(
                    f"{execution.worker} begins attempt {execution.attempt} of {execution.task.hex()}, while "
                    f"{other.worker}, alive and heard, {doing} attempt {other.attempt}"
                )
        if wrong := too_many(self, execution):
            self.violations.append(wrong)
        self.trace(f"{execution.worker} runs {execution.task.hex()[-6:]}#{execution.attempt}")
        self.executions.append(execution)

    def _is_quiet(self) -> bool:
        if any(redis.late for redis in self.redis) or self.left_over() or not self.operator.is_idle:
            return False
        if not all(worker.is_idle for worker in self.workers):
            return False
        (row,) = self.database.sql(
            "SELECT NOT EXISTS (SELECT FROM orchestrator.tasks) AND NOT EXISTS (SELECT FROM orchestrator.inbox)"
            " AND NOT EXISTS (SELECT FROM orchestrator.runs WHERE ended_at IS NULL) AS quiet"
        )
        return bool(row["quiet"])


@contextmanager
def _without_waiting(seed: int) -> Iterator[None]:
    """Replace waiting, randomness and the host name in the product's code."""
    threads = SimpleNamespace(Event=_NeverWaits, Lock=threading.Lock, RLock=threading.RLock, Thread=threading.Thread)
    dice = SimpleNamespace(random=Random(f"{seed} jitter").random)
    host = SimpleNamespace(gethostname=lambda: "simulated"), SimpleNamespace(getpid=lambda: 1)
    with (
        patch.multiple(leadership, socket=host[0], os=host[1]),
        patch.object(reporter, "threading", threads),
        patch.object(status, "random", dice),
    ):
        yield
