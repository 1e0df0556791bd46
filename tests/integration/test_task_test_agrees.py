"""`TaskTest` and the real leader, with a worker's runner, lead random programs to the same outcomes.

Both get the same input, and time moves in both by the same steps, each much longer than a test takes. Tasks without
unique keys run at even moves and tasks with keys at odd ones, so that the holder of a key is certain at any time.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from orchestrator import (
    Composition,
    Duplicate,
    GiveUp,
    Handle,
    Orchestrator,
    Retry,
    RetryLater,
    Settings,
    TaskContext,
    TaskFailure,
    WrongState,
    chain,
    chord,
)
from orchestrator.domain.tasks.task import Enqueued, KeyHolder, NewTask, Noted
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.testing import TaskTest
from orchestrator.transport.codec import LogLine, ProgressMark
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from tests.fuzzing import in_batches
from tests.integration.stage import System, Worker, fresh_system

"""Programs that are played at once."""
MOVE = 1_000.0
"""Seconds that each move advances the clock."""
MOVES = 12

Script = dict[str, Any]


def scripts(random: random.Random, seed: int) -> list[Script]:
    """Return the initial calls of a program."""
    count = iter(range(1_000))
    keyed = {key: script(random, f"{seed}.{key}", [], {}, depth=0) for key in ("k1", "k2", "k3")}
    return [script(random, str(seed), count, keyed, depth=2) for _ in range(random.randint(1, 3))]


def script(random: random.Random, label: str, count: Any, keyed: Mapping[str, Script], depth: int) -> Script:
    """Return what a task does and how it is enqueued."""
    number = next(count, None) if depth or count else None
    retries = random.randint(0, 3)
    children = random.randint(0, 3) if depth and keyed else 0
    return {
        "label": label if number is None else f"{label}.{number}",
        "how": random.choice(["enqueue", "enqueue", "many", "on success", "together", "chain", "chord"]),
        "key": None,
        "delay": random.choice([0, 0, 2, 4]),
        "retries": [2 * random.randint(0, 2) for _ in range(retries)],
        "later": random.choice([0, 0, 0, 1, 2]),
        "fails": random.choice([0, 0, 1, 2, 4]),
        "gives up": random.random() < 0.1,
        "expires": random.choice([None, None, None, 1.5, 3.5]),
        "follow": random.random() < 0.5,
        "keep": random.random() < 0.8,
        "priority": random.randint(-2, 2),
        "first": [child(random, label, count, keyed, depth - 1) for _ in range(children // 2)],
        "then": [child(random, label, count, keyed, depth - 1) for _ in range(children - children // 2)],
    }


def child(random: random.Random, label: str, count: Any, keyed: Mapping[str, Script], depth: int) -> Script:
    if random.random() < 0.4:
        key = random.choice(list(keyed))
        # One scope for all calls with a key: which of two simultaneous calls is first is not certain, and must not
        # matter.
        scope = keyed[key].setdefault("scope", random.choice(["pending", "running", "once", 100 * MOVE]))
        return keyed[key] | {"how": "enqueue", "key": f"{label}.{key}", "scope": scope, "delay": 1, "expires": None}
    return script(random, label, count, keyed, depth)


class Program:
    """The tasks of all programs, in one of the two systems."""

    def __init__(self, app: Orchestrator) -> None:
        self.app = app
        self.done = app.task(name="done")(done)
        self.failed = app.task(name="failed")(failed)
        self.echo = app.task(name="echo")(echo)

        @app.task(name="act")
        def act(ctx: TaskContext, script: Script) -> str:
            label: str = script["label"]
            ctx.heartbeat([*(ctx.details or []), ctx.attempt])
            if ctx.attempt == 1:
                self.enqueue_all(script["first"])
            if ctx.attempt <= script["later"]:
                raise RetryLater(2 * MOVE)
            if ctx.attempt <= script["later"] + script["fails"]:
                raise GiveUp(label) if script["gives up"] else ValueError(label)
            self.enqueue_all(script["then"])
            return f"{label} {ctx.details}"

        self.act = act

    def enqueue_all(self, scripts: Sequence[Script]) -> list[Handle[Any]]:
        return [handle for one in scripts for handle in self.enqueue(one)]

    def enqueue(self, script: Script, **more: Any) -> list[Handle[Any]]:
        task, inside = self.optioned(script, more), more == {} and script.get("inside", True)
        if script["key"] is not None:
            with suppress(Duplicate):
                return [task.enqueue(script)]
            return []
        match script["how"]:
            case "chain" | "chord":
                self.compose(script).start()
                return []
            case "many":
                self.app.start_many(task, [(script,)])
                return []
            case "together":
                return self.app.enqueue_many(task, [(script,)])
            case "on success" if inside:
                return [task.options(on_success=True).enqueue(script)] if not script["follow"] else []
        return [task.enqueue(script)]

    def compose(self, script: Script) -> Composition[Any]:
        """Return a composition whose first call does what the script says."""
        plain = script | {"expires": None, "follow": False, "delay": 0, "keep": True}
        first = self.optioned(plain, {}).si(script)
        second = self.act.si(script | {"label": f"{script['label']}.second", "first": [], "then": [], "fails": 1})
        if script["how"] == "chain":
            return chain(first, self.done.s(), second)
        return chord([first, second, self.echo.s(1) | self.echo.s()], self.done.s())

    def optioned(self, script: Script, more: Mapping[str, Any]) -> Task[..., Any]:
        options: dict[str, Any] = {
            "delay": script["delay"] * MOVE,
            "retries": Retry(backoff=[wait * MOVE for wait in script["retries"]], jitter=0.0)
            if script["retries"]
            else 0,
            "expires": None if script["expires"] is None else script["expires"] * MOVE,
            "priority": script["priority"],
            "store_result": script["keep"],
        }
        if script["follow"]:
            options |= {"on_failure": self.failed} | ({"on_success": self.done} if script["keep"] else {})
        if script["key"] is not None and script["scope"] == "once":
            options["idempotency_key"] = script["key"]
        elif script["key"] is not None:
            options |= {"unique_key": script["key"], "unique_for": script["scope"]}
        return self.act.options(**{**options, **more})


def done(label: Any) -> None: ...


def failed(failure: TaskFailure) -> None: ...


def echo(number: int) -> int:
    return number


Became = Counter[tuple[Any, ...]]
"""Outcomes of tasks: name, label, state, attempts, failures, and the result or the error."""


def became(name: str, payload: bytes, state: str, attempt: int, failures: int, result: Any, error: Any) -> Any:
    (given,), *_ = decode_call(payload)
    label = given["label"] if name == "act" else str(given)
    if name == "failed":  # it says how long it has waited, which differs
        label = given["kind"] if given["kind"] == "TaskExpired" else given["message"]
    return name, label, state, attempt, failures, result, error


class Memory:
    """The system of `TaskTest`."""

    def __init__(self) -> None:
        self.app = Orchestrator(Settings())
        self.program = Program(self.app)
        self.test = TaskTest(self.app)

    def settle(self) -> None:
        self.test.drain()

    def move(self) -> None:
        self.test.skip(MOVE)

    def became(self) -> Became:
        return Counter(
            became(
                *(one.name, one.new.payload, one.state, one.attempt, one.failures),
                one.encoded and decode_value(one.encoded) if one.state == "success" else None,
                one.error.kind if one.error is not None and one.state == "failed" else None,
            )
            for one in self.test.enqueued()
        )


class Real:
    """The system with the real leader and a real worker's runner."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.program = Program(system.app)
        self.worker: Worker = system.worker(knows=("act", "done", "failed", "echo"), slots=10_000)
        self.runner = Runner(system.app, self, Allowed(system.app, ()))

    # -- the outbox of running tasks

    def send_tasks(self, tasks: Sequence[NewTask]) -> Mapping[bytes, KeyHolder] | None:
        self.worker.report(Enqueued(list(tasks)))
        return None

    def publish_progress(self, task: bytes, mark: ProgressMark) -> None: ...

    def log(self, job: Job, line: LogLine) -> None: ...

    log_lines = log

    def save_details(self, job: Job, details: bytes) -> None:
        job.noted = details

    def page(self, job: Job, number: int) -> bytes | None:  # noqa: ARG002
        return None

    # -- time and outcomes

    def settle(self) -> None:
        idle = 0
        for _ in range(200):
            self.system.pass_seconds()
            taken = self.worker.take()
            for sent in taken:
                job = Job(sent, Bundle("", sent.queue, "", 1), 0, time.monotonic())
                job.begin(time.monotonic())
                report = self.runner.run(job)
                if job.noted is not None:
                    self.worker.report(Noted(sent.id, sent.attempt, job.noted))
                self.worker.report(report)
            waits = self.system.count("inbox")
            idle = 0 if taken or waits else idle + 1
            if idle == 3:
                return
        raise AssertionError("the tasks never come to rest")

    def move(self) -> None:
        self.system.scheduler._leadership._clock_offset += timedelta(seconds=MOVE)
        self.settle()

    def became(self) -> Became:
        columns = "name, payload, status, attempt, failures"
        rows = self.system.sql(
            f"SELECT {columns}, NULL::bytea AS result, NULL::text AS kind FROM orchestrator.tasks UNION ALL "
            f"SELECT {columns}, result, error->>'kind' FROM orchestrator.ended_tasks"
        )
        return Counter(
            became(
                *(row["name"], bytes(row["payload"]), row["status"], row["attempt"], row["failures"]),
                row["result"] and decode_value(bytes(row["result"])) if row["status"] == "success" else None,
                row["kind"] if row["status"] == "failed" else None,
            )
            for row in rows
        )


def play(world: Memory | Real, first: int, number: int) -> Became:
    """Play programs; return the outcomes of their tasks and of the programs' own calls."""
    told: Became = Counter()
    handles: list[tuple[int, Handle[Any]]] = []
    for seed in range(first, first + number):
        for one in scripts(random.Random(seed), seed):
            handles += [(seed, handle) for handle in world.program.enqueue(one | {"inside": False})]
    again = random.Random(first)
    for seed in range(first, first + number):  # the second call with a key
        key = {"label": f"{seed}.key", "key": f"{seed}.key", "scope": "running", "delay": 1, "how": "enqueue"}
        plain = script(again, f"{seed}.key", None, {}, 0) | key
        world.program.enqueue(plain, priority=0)
        policy = again.choice(["return", "replace", "raise"])
        try:
            world.program.optioned(plain, {"on_duplicate": policy}).enqueue(plain | {"label": f"{seed}.second"})
        except Duplicate:
            told[seed, "duplicate"] += 1
    world.settle()
    for move in range(MOVES):
        world.move()
        for place, (seed, handle) in enumerate(handles):
            chance = again.random()
            try:
                if chance < 0.02:
                    handle.cancel()
                elif chance < 0.06:
                    handle.retry()
            except WrongState:
                told[seed, place, move, "refused"] += 1
        world.settle()
    return told + world.became()


def agree(engine: Any, database_url: str, redis_url: str, first: int, number: int) -> None:
    memory = Memory()
    with memory.test:
        here = play(memory, first, number)
    with fresh_system(engine, database_url, redis_url) as system:
        there = play(Real(system), first, number)
    assert len(here) > 5 * number
    only_here, only_there = here - there, there - here
    words = [f"test {one}" for one in sorted(only_here, key=str)] + [
        f"real {one}" for one in sorted(only_there, key=str)
    ]
    assert not words, f"{len(words)} differences\n" + "\n".join(sorted(words, key=lambda text: text[5:])[:20])


@in_batches("TASK_PROGRAMS", 4000)
def test_random_programs_have_the_same_outcomes_in_both(
    engine: Any, database_url: str, redis_url: str, first: int, number: int
) -> None:
    agree(engine, database_url, redis_url, first, number)
