"""Random workflow programs, and a random world for them to run in.

A program is a tree of steps, played by one workflow that writes down everything that happens to it. Its result is that
diary, so that two plays are the same only if everything happened in the same order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from hypothesis import strategies as st

from orchestrator import Orchestrator, OrchestratorError, WorkflowContext
from orchestrator.domain.code import history
from orchestrator.domain.code.activation import Query
from orchestrator.domain.code.history import Event
from orchestrator.domain.tasks.task import TaskError
from orchestrator.sdk.code.child_run import ChildRun
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.values.payload import encode_value
from orchestrator.testing.leader import MemoryLeader
from orchestrator.testing.memory_run import Run

app = Orchestrator()
Step = list[Any]
LIMIT = 1_000_000


@app.task(name="work")
def work(label: str) -> str:
    return label


@app.workflow(name="child")
async def child(ctx: WorkflowContext, steps: list[Step]) -> list[str]:
    return await play(ctx, steps)


@app.workflow(name="program")
async def program(ctx: WorkflowContext, steps: list[Step]) -> list[str]:
    @ctx.update
    async def poke(label: str) -> str:
        return await work.schedule(f"poked {label}")

    event = asyncio.Event()

    @ctx.query
    def meddle() -> None:
        for act in (
            ctx.uuid,
            ctx.random.random,
            event.set,
            lambda: work.schedule("meddled"),
            lambda: ctx.set("key", 0),
        ):
            with contextlib.suppress(OrchestratorError):
                act()

    ctx.compensate(work, "undone")
    return await play(ctx, steps)


class Played:
    """What the steps of a program share."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.lock = asyncio.Lock()
        self.queue: asyncio.Queue[str] = asyncio.Queue()
        self.children: list[ChildRun[Any]] = []
        """Those that nobody waits for."""
        self.notes = 0


async def play(ctx: WorkflowContext, steps: list[Step]) -> list[str]:
    """Play a program and return its diary."""
    played = Played()

    @ctx.signal
    async def note(label: str) -> None:
        played.notes += 1
        try:
            played.diary.append(await work.schedule(f"noted {label}"))
        except OrchestratorError:
            if label == "hard":  # fails the run
                raise

    for step in steps:
        await _step(ctx, step, played)
    return played.diary


async def _step(ctx: WorkflowContext, step: Step, played: Played) -> None:
    kind, *given = step
    diary, lock, queue = played.diary, played.lock, played.queue

    async def branch(steps: list[Step], label: str) -> str:
        try:
            for inner in steps:
                await _step(ctx, inner, played)
            diary.append(f"{label} done")
        except asyncio.CancelledError:
            diary.append(f"{label} cancelled")
            raise
        finally:
            diary.append(f"{label} left")
        return label

    try:
        match kind:
            case "task":
                diary.append(await work.schedule(f"{given[0]} {ctx.random.random()} {ctx.uuid()}"))
            case "sleep":
                await asyncio.sleep(given[0])
            case "timer":
                await ctx.sleep(given[0])
            case "operation":
                diary.append(str(await ctx.run("operation", lambda: given[0])))
            case "signal":
                diary.append(str(await ctx.signals("signal").get()))
            case "condition":
                await ctx.wait_condition(lambda: played.notes, timeout=given[0] or None)
                played.notes -= 1  # those that wait are woken one by one
                diary.append(f"{played.notes} left")
            case "finished":
                await ctx.wait_condition(lambda: ctx.all_handlers_finished, timeout=given[0] or None)
            case "promise":
                diary.append(str(await ctx.promise("promise", timeout=given[0])))
            case "state":
                ctx.set("key", given[0])
            case "child":
                diary.append(str(await child.options(on_cancel=given[1], detached=given[2]).schedule(given[0])))
            case "start":
                options: dict[str, Any] = {"on_cancel": given[1], "close_policy": given[2], "timeout": given[3]}
                played.children.append(child.options(**options).schedule(given[0]))
            case "drop":
                while played.children:
                    played.children.pop().cancel()
            case "open":
                work.schedule("left open")
            case "fail":
                raise ArithmeticError("the program fails")
            case "again":
                ctx.continue_as_new(given[0])
            case "lock":
                async with lock:
                    for inner in given[0]:
                        await _step(ctx, inner, played)
            case "put":
                queue.put_nowait(ctx.now().isoformat())
            case "get":
                diary.append(await queue.get())
            case "gather":
                branches = [branch(steps, f"gathered {place}") for place, steps in enumerate(given[0])]
                diary.append(str(await asyncio.gather(*branches, return_exceptions=given[1])))
            case "group":
                async with asyncio.TaskGroup() as group:
                    for place, steps in enumerate(given[0]):
                        group.create_task(branch(steps, f"grouped {place}"))
            case "first":
                tasks = [asyncio.create_task(branch(steps, f"first {n}")) for n, steps in enumerate(given[0])]
                done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in pending:
                    task.cancel()
                diary.extend(str(task.exception() or task.result()) for task in done)
                diary.extend(str(one) for one in await asyncio.gather(*pending, return_exceptions=True))
            case "first gathered":
                gathered: list[asyncio.Future[Any]] = []
                for n, steps in enumerate(given[0]):
                    gathered.append(asyncio.gather(branch(steps, f"one of {n}")))
                some, others = await asyncio.wait(gathered, return_when=asyncio.FIRST_COMPLETED)
                for one in (*some, *others):  # in the order of the sets, which must be that of all processes
                    one.cancel()
                    diary.append(await work.schedule(f"place {gathered.index(one)}"))
                await asyncio.gather(*some, *others, return_exceptions=True)
            case "tell":
                app.workflow_run(ctx.info.run_id).signal("signal", given[0])
            case "ask":
                to = ctx.info.parent_id or ctx.info.run_id
                other = played.children[-1].handle if played.children else app.workflow_run(to)
                if given[0] == "signal":
                    diary.append(f"told: {await other.asignal('signal', 1)}")
                elif given[0] == "cancel":
                    diary.append(f"asked: {await other.acancel()}")
                else:
                    diary.append(f"ended: {await other.aresult(timeout=given[1] or None)}")
            case "as completed":
                for next_one in asyncio.as_completed([branch(steps, f"raced {n}") for n, steps in enumerate(given[0])]):
                    diary.append(str(await next_one))
            case "wait for":
                diary.append(str(await asyncio.wait_for(branch(given[1], "waited for"), given[0])))
            case "timeout":
                async with asyncio.timeout(given[0]):
                    await branch(given[1], "timed")
            case "cancel":
                task = asyncio.create_task(branch(given[1], "victim"))
                await asyncio.sleep(given[0])
                task.cancel()
                diary.append(str(await asyncio.gather(task, return_exceptions=True)))
            case "shield":
                diary.append(str(await asyncio.wait_for(asyncio.shield(work.schedule("shielded")), given[0])))
    except (OrchestratorError, TimeoutError, ExceptionGroup) as error:
        diary.append(f"{kind}: {type(error).__name__}")


SECONDS = st.sampled_from([0, 0.5, 1, 5, 60])
LEAVES = st.one_of(
    st.tuples(st.just("task"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["sleep", "timer", "promise", "shield", "condition", "finished"]), SECONDS),
    st.tuples(st.sampled_from(["operation", "state", "tell"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["signal", "put", "get"])),
    st.tuples(st.just("ask"), st.sampled_from(["signal", "cancel", "await"]), SECONDS),
)


def _branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    steps = st.lists(inner, min_size=1, max_size=3)
    several = st.lists(steps, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("gather"), several, st.booleans()),
        st.tuples(st.sampled_from(["group", "first", "first gathered", "as completed"]), several),
        st.tuples(st.sampled_from(["wait for", "timeout", "cancel"]), SECONDS, steps),
        st.tuples(st.just("lock"), steps),
        st.tuples(st.just("child"), steps, st.sampled_from(["cancel", "wait", "abandon"]), st.booleans()),
    )


PROGRAMS = st.lists(st.recursive(LEAVES, _branches, max_leaves=8), min_size=1, max_size=5)


class Turn:
    """One activation of the run: what had happened, and what the cached code commanded."""

    def __init__(self, shown: list[Event], batch: list[history.HistoryItem]) -> None:
        self.shown = shown
        self.batch = batch


class World:
    """Lets a program run, in an order that its seed decides, and remembers every turn of it."""

    def __init__(self, steps: list[Any], seed: int) -> None:
        self._random = random.Random(seed)
        self._engine = Engine(app.code_workflows.find, LIMIT, capacity=self._random.choice([1, 100]))
        self.leader = MemoryLeader(self._engine, app.code_workflows.find, 1_700_000_000.0)
        payload = encode_value(([steps], {}), "a program", LIMIT)
        self.run = self.leader.start(history.RunStarted("program", 1, payload), bytes(range(16)))
        self.turns: list[Turn] = []

    def play(self, most: int = 150) -> None:
        """Let things happen until the run has ended, or enough is enough."""
        self.go_on(most)
        self._engine.close()

    def go_on(self, most: int) -> None:
        """Let some more things happen."""
        for _ in range(most):
            if self.run.end is not None:
                break
            self._happen()

    def reset(self, to: int) -> None:
        """Let the run be repeated up to an event, and that one be watched."""
        self.run = self.leader.reset(self.run, to)
        self.turns.clear()

    def _happen(self) -> None:
        runs = list(self.leader.runs.values())
        news = [run for run in runs if run.has_unseen_facts]
        if news and self._random.random() < 0.6:
            self._activate(self._random.choice(news))
            return
        tasks = [(run, task) for run in runs for task in run.tasks]
        chances = ["task"] * 3 * bool(tasks) + ["timer"] * (self.leader.next_due() is not None)
        chances += ["promise", "promise"]
        chances += ["query"] * (self.run.shown > 0 and not self.run.has_unseen_facts)
        chances += ["signal"] if self._random.random() < 0.3 else []
        chances += ["update", "cancel"] if self._random.random() < 0.1 else []
        match self._random.choice(chances):
            case "task":
                self._end_task(*self._random.choice(tasks))
            case "timer":
                self.leader.fire_next()
            case "query":
                before = list(self.run.history)
                query = Query(bytes(16), "meddle", encode_value(([], {}), "query", LIMIT))
                (answer,) = self.leader.activate(self.run, [query])
                assert answer.error is not None
                assert self.run.history == before
            case "signal":
                name = self._random.choice(["signal", "note"])
                self._tell(history.SignalReceived(name, encode_value("hello", "signal", LIMIT)))
            case "promise":
                run = self._random.choice(runs)
                if run.promises and run.end is None:
                    promise, _ = run.promises.popitem()
                    self.leader.append(run, history.PromiseResolved(promise, encode_value(1, "promise", LIMIT)))
            case "update":
                payload = encode_value((["me"], {}), "update", LIMIT)
                self._tell(history.UpdateRequested(self._random.randbytes(16), "poke", payload))
            case "cancel":
                self._tell(history.RunCancelRequested())

    def _activate(self, run: Run) -> None:
        shown = list(run.history)
        self.leader.activate(run)
        assert run.stuck is None, run.stuck
        mark, *batch = run.history[len(shown) :]
        if run is self.run and not refused_at(mark):  # a refused end leaves nothing but the mark
            self.turns.append(Turn(shown, [event.what for event in batch if not _is_leaders(event)]))

    def _end_task(self, run: Run, task: bytes) -> None:
        self.leader.now += self._random.random()
        if self._random.random() < 0.8:
            label = encode_value(f"worked {self._random.randrange(10)}", "result", LIMIT)
            self.leader.settle(run, task, history.TaskCompleted(task, label))
        else:
            self.leader.settle(run, task, history.TaskFailed(task, TaskError("ValueError", "no")))

    def _tell(self, fact: history.Fact) -> None:
        if self.run.end is None:
            self.leader.append(self.run, fact)


def refused_at(mark: Event) -> int:
    """Return the number of the fact at which the code ended, if a mark refuses that: more facts were there already."""
    return mark.what.ended if isinstance(mark.what, history.ActivationApplied) else 0


def _is_leaders(event: Event) -> bool:
    """Say whether the leader itself appended an event while it applied a batch."""
    answered = history.PromiseSettled  # one that came as the code gave up a promise goes to the next of the name
    said = history.SignalReceived | history.RunCancelRequested  # to itself
    return isinstance(event.what, history.TaskCancelled | history.ChildFailed | said | answered)
