"""The leader of `WorkflowTest` gives random programs the same histories as the real leader.

Both receive the same events, one at a time, and the code takes its turns in the same order. The real leader plays all
programs at once, on a clock whose moves are much longer than a test takes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from orchestrator.domain.code import history
from orchestrator.domain.code.activation import Activation
from orchestrator.domain.code.ends import REQUESTED, end_of, run_state
from orchestrator.domain.code.promises import Resolution
from orchestrator.domain.ids import derived_id, to_text
from orchestrator.domain.runs import Nesting
from orchestrator.domain.tasks.outcomes import Report
from orchestrator.domain.tasks.task import Dispatch, Failed, Returned, Succeeded, TaskError
from orchestrator.sdk.backend.code_requests import add_request
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.values.payload import encode_call, encode_value
from orchestrator.store.code import histories
from orchestrator.store.inbox import RequestKind
from orchestrator.testing.leader import MemoryLeader
from orchestrator.testing.memory_run import Run
from orchestrator.transport.codec import decode
from tests.fuzzing import in_batches
from tests.integration.stage import System, Worker, fresh_system, raw
from tests.unit.code_workflows import programs

"""Programs that are played at once."""
ROUNDS = 24
MOVE = 500
"""Seconds that the clock moves at a time. Timers are due at even moves, and timeouts of runs at odd moves."""
DEPTH = 3
LIMIT = 1_000_000
NO = TaskError("ValueError", "no")


def steps(random: random.Random, depth: int = 2) -> list[Any]:
    return [step(random, depth) for _ in range(random.randint(1, 4))]


def step(random: random.Random, depth: int) -> list[Any]:
    leaves = ["task", "sleep", "timer", "promise", "shield", "operation", "state", "tell", "signal", "put"]
    leaves += ["drop", "open", "open", "fail", "again", "condition", "finished", "ask", "ask"]
    branches = ["gather", "group", "first", "as completed", "wait for", "timeout", "cancel", "child", "start", "start"]
    kind = random.choice(leaves + branches * 2 if depth else leaves)
    seconds = random.choice([2, 4, 6]) * MOVE
    match kind:
        case "sleep" | "timer" | "promise" | "shield" | "condition" | "finished":
            return [kind, seconds]
        case "task" | "operation" | "state" | "tell":
            return [kind, random.randint(0, 9)]
        case "ask":
            return [kind, random.choice(["signal", "cancel", "await", "await"]), seconds]
        case "again":
            return [kind, [one for one in steps(random, 0) if one[0] != "again"]]
        case "gather":
            return [kind, [steps(random, depth - 1) for _ in range(2)], random.random() < 0.5]
        case "group" | "first" | "as completed":
            return [kind, [steps(random, depth - 1) for _ in range(2)]]
        case "wait for" | "timeout" | "cancel":
            return [kind, seconds, steps(random, depth - 1)]
        case "child":
            return [kind, steps(random, depth - 1), random.choice(["cancel", "wait", "abandon"]), random.random() < 0.5]
        case "start":
            time = random.choice([None, None, 3 * MOVE])
            how = random.choice(["cancel", "wait", "abandon"])
            policy = random.choice([None, "cancel", "terminate", "abandon", "abandon"])
            return [kind, steps(random, depth - 1), how, policy, time]
        case _:
            return [kind]


class Program:
    """A program, as the in-memory leader plays it."""

    def __init__(self, seed: int, engine: Engine) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.steps = steps(self.random)
        self.leader = MemoryLeader(engine, programs.app.code_workflows.find, 0.0)
        self.leader.grace = 2.0 * MOVE
        self.leader.nesting = Nesting(DEPTH)
        self.asked: dict[bytes, tuple[Run, bool | None]] = {}
        """Requests: the run, and whether one that needs no code was applied."""

    @property
    def open_runs(self) -> list[Run]:
        return [run for run in self.leader.runs.values() if run.end is None]

    def settle(self) -> None:
        for _ in range(200):
            run = next((run for run in self.open_runs if run.has_unseen_facts), None)
            if run is None:
                return
            self.leader.now += 1e-6  # later events are due later, as in reality
            self.leader.activate(run)
            assert run.stuck is None, (self.seed, self.steps, run.stuck)
        raise AssertionError(f"program {self.seed} never comes to rest: {self.steps}")

    def move(self) -> None:
        """Let time pass; within a tick, timers fire before runs time out."""
        self.leader.now += MOVE
        due = self.leader._due
        for is_timer in (True, False):
            self.leader._due = sorted(one for one in due if (one[-1] is not None) == is_timer)
            while (next_due := self.leader.next_due()) is not None and next_due <= self.leader.now:
                self.leader.fire_next()
            due = [one for one in due if (one[-1] is not None) != is_timer] + self.leader._due
        self.leader._due = sorted(due)

    def happen(self, real: Real) -> None:
        """Let a random event happen in both worlds."""
        tasks = [(run, task) for run in self.open_runs for task in run.tasks]
        chances = ["task"] * 6 * bool(tasks) + ["signal", "promise", "update", "nothing"] + ["cancel"] * bool(tasks)
        runs = self.open_runs
        if not runs:
            return
        run = self.random.choice(runs)
        request = derived_id(run.id, "request", len(run.history) + 1000 * len(self.asked))
        match self.random.choice(chances):
            case "task":
                owner, task = self.random.choice(tasks)
                is_done = self.random.random() < 0.8
                result = encode_value(f"worked {self.random.randrange(10)}", "result", LIMIT)
                fact = history.TaskCompleted(task, result) if is_done else history.TaskFailed(task, NO)
                self.leader.settle(owner, task, fact)
                real.end_task(task, result if is_done else None)
            case "signal":
                value = encode_value(self.random.choice(["hello", "hard"]), "signal", LIMIT)
                for _ in range(self.random.randint(1, 3)):
                    name = self.random.choice(["signal", "note"])
                    self.leader.append(run, history.SignalReceived(name, value))
                    real.ask(RequestKind.SIGNAL, run, name=name, value=value)
            case "promise":
                value = encode_value(1, "promise", LIMIT)
                self.asked[request] = run, self.leader.settle_promise(run, Resolution("promise", value))
                real.ask(RequestKind.RESOLVE, run, request=request, name="promise", value=value)
            case "update":
                payload = encode_call("poke", ["me"], {}, LIMIT)
                self.asked[request] = run, None
                self.leader.append(run, history.UpdateRequested(request, "poke", payload))
                once: dict[str, bool] = self.random.choice([{}, {"once": True}])
                for _ in range(1 + len(once)):  # with the sender's id, applied once
                    real.ask(RequestKind.UPDATE, run, request=request, name="poke", value=payload, **once)
            case "cancel":
                self.leader.cancel(run, REQUESTED)
                real.ask(RequestKind.CANCEL_RUN, run)


class Real:
    """The real leader, with a worker that does everything in the order of the in-memory leader."""

    def __init__(self, system: System, played: Sequence[Program]) -> None:
        self.system = system
        self.played = played
        self.engine = Engine(programs.app.code_workflows.find, LIMIT, capacity=10_000)
        self.worker: Worker = system.worker(knows=("program", "child", "work"), slots=10_000)
        self.tasks: dict[bytes, Dispatch] = {}
        self.turns: dict[bytes, Dispatch] = {}
        self.followed = 0

    def end_task(self, task: bytes, result: bytes | None) -> None:
        sent = self.tasks.pop(task)
        if result is None:
            self.worker.report(Failed(task, sent.attempt, 0.1, NO, False))
        else:
            assert sent.run_id is not None
            turn = self.engine.follow(sent.run_id, task, result, lambda attempt: attempt)
            self.followed += turn is not None
            self.worker.report(Succeeded(task, sent.attempt, 0.1, result), turns=[] if turn is None else [turn])

    def ask(self, kind: RequestKind, run: Run, **body: Any) -> None:
        with self.system.engine.begin() as connection:
            add_request(connection, kind, run.id, **body)

    def move(self) -> None:
        self.system.scheduler._leadership._clock_offset += timedelta(seconds=MOVE)
        for cached in self.engine._cache.values():
            cached.shown_at -= MOVE

    def settle(self) -> None:
        owners = {run: program for program in self.played for run in program.leader.runs}
        order = {run: place for program in self.played for place, run in enumerate(program.leader.runs)}
        for _ in range(300):
            self.system.pass_seconds()
            for sent in self.worker.take():
                (self.turns if sent.is_turn_task else self.tasks)[sent.id] = sent
            if not self.turns:
                return
            unknown = self.turns.keys() - owners.keys()
            assert not unknown, [to_text(run) for run in unknown]
            first: dict[int, bytes] = {}
            for run in sorted(self.turns, key=order.__getitem__):
                first.setdefault(owners[run].seed, run)
            last = self._last_events(list(first.values()))
            self.worker.report(*(self._turn(self.turns.pop(run), last[run]) for run in first.values()))
        raise AssertionError("the code never comes to rest")

    def _turn(self, sent: Dispatch, last_event: int) -> Report:
        """Let code take a turn; return the turn unused if there are newer events, which the code knows."""
        activation = decode(Activation, sent.payload)
        if activation.through < last_event:
            return Returned(sent.id, sent.attempt, "there is more")
        return self.engine.activate(activation, sent.id, sent.attempt)

    def _last_events(self, runs: list[bytes]) -> dict[bytes, int]:
        found = self.system.sql(
            "SELECT id, last_event FROM orchestrator.runs WHERE id = ANY(CAST(:ids AS uuid[]))",
            ids=[to_text(run) for run in runs],
        )
        return {row["id"].bytes: row["last_event"] for row in found}


def _comparable_events(whats: list[history.HistoryItem]) -> list[history.HistoryItem]:
    """Return the events that do not depend on how many facts came with a turn: a timer is cancelled before or after it
    is sent. A run that ends without code may learn before that its tasks are cancelled; nobody sees that."""
    if not any(isinstance(what, history.EndRecord) for what in whats):
        while isinstance(whats[-1], history.TaskCancelled):
            whats = whats[:-1]
    given_up = {what.id for what in whats if isinstance(what, history.TimerCancelled)}
    left_out = (history.ActivationApplied, history.TimerCancelled)
    return [
        what
        for what in whats
        if not isinstance(what, left_out) and not (isinstance(what, history.TimerStarted) and what.id in given_up)
    ]


def differences(program: Program, real: Real) -> Iterator[str]:
    """Yield how the real leader played a program differently."""
    for run in program.leader.runs.values():
        with real.system.engine.connect() as connection:
            found = [event.what for event in histories.read(connection, run.id)]
        here, there = _comparable_events([event.what for event in run.history]), _comparable_events(found)
        if here != there:
            same = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            same = min(len(here), len(there)) if same is None else same
            yield f"run {to_text(run.id)} after {here[:same]}:\n  test {here[same:]}\n  real {there[same:]}"
        row = real.system.sql("SELECT status FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=to_text(run.id))
        ended = "running" if run.end is None else run_state(end_of(run.id, run.end), run.timed_out)
        if [one["status"] for one in row] != [ended]:
            yield f"run {to_text(run.id)} is {ended} in the test and {row} in reality"


def play(system: System, first: int, number: int) -> list[str]:
    """Play programs in both worlds; return the differences."""
    here = Engine(programs.app.code_workflows.find, LIMIT, capacity=10_000)
    played = [Program(seed, here) for seed in range(first, first + number)]
    workflow = system.app.workflow(name="program")(programs.program.function)
    real = Real(system, played)
    for program in played:
        started = workflow._begin(program.steps)
        program.leader.start(started, raw(workflow.start(program.steps)))
        program.settle()
    real.settle()
    for number in range(ROUNDS):
        for program in played:
            if number % 4 == 3:
                program.move()
            else:
                program.happen(real)
            program.settle()
        if number % 4 == 3:
            real.move()
        real.settle()
    found = [f"{p.seed} {p.steps}\n{one}" for p in played for one in differences(p, real)]
    here.close()
    real.engine.close()
    assert real.followed
    return found


def check_leaders_agree(engine: Any, database_url: str, redis_url: str, first: int, number: int) -> None:
    given = {"run_timeout_grace": 2.0 * MOVE, "max_depth": DEPTH}
    with fresh_system(engine, database_url, redis_url, **given) as system:
        found = play(system, first, number)
    assert not found, f"{len(found)} differences\n" + "\n\n".join(found[:5])


@in_batches("LEADER_PROGRAMS", 10000)
def test_both_leaders_give_random_programs_the_same_histories(
    engine: Any, database_url: str, redis_url: str, first: int, number: int
) -> None:
    check_leaders_agree(engine, database_url, redis_url, first, number)
