"""Random workflow programs, and a random environment to run them in.

A program is a tree of steps that one workflow interprets. The workflow's result is a diary of everything that happened,
so that two runs are equal only if everything happened in the same order.
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
    """The state that the steps of a program share."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.lock = asyncio.Lock()
        self.queue: asyncio.Queue[str] = asyncio.Queue()
        self.children: list[ChildRun[Any]] = []
        """Children that no step awaits."""
        self.notes = 0


async def play(ctx: WorkflowContext, steps: list[Step]) -> list[str]:
    """Interpret a program; return its diary."""
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
    kind, *arguments = step
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
                diary.append(await work.schedule(f"{arguments[0]} {ctx.random.random()} {ctx.uuid()}"))
            case "sleep":
                await asyncio.sleep(arguments[0])
            case "timer":
                await ctx.sleep(arguments[0])
            case "operation":
                diary.append(str(await ctx.run("operation", lambda: arguments[0])))
            case "signal":
                diary.append(str(await ctx.signals("signal").get()))
            case "condition":
                await ctx.wait_condition(lambda: played.notes, timeout=arguments[0] or None)
                played.notes -= 1  # waiters are woken one at a time
                diary.append(f"{played.notes} left")
            case "finished":
                await ctx.wait_condition(lambda: ctx.all_handlers_finished, timeout=arguments[0] or None)
            case "promise":
                diary.append(str(await ctx.promise("promise", timeout=arguments[0])))
            case "state":
                ctx.set("key", arguments[0])
            case "child":
                diary.append(
                    str(await child.options(on_cancel=arguments[1], detached=arguments[2]).schedule(arguments[0]))
                )
            case "start":
                options: dict[str, Any] = {
                    "on_cancel": arguments[1],
                    "close_policy": arguments[2],
                    "timeout": arguments[3],
                }
                played.children.append(child.options(**options).schedule(arguments[0]))
            case "drop":
                while played.children:
                    played.children.pop().cancel()
            case "open":
                work.schedule("left open")
            case "fail":
                raise ArithmeticError("the program fails")
            case "again":
                ctx.continue_as_new(arguments[0])
            case "lock":
                async with lock:
                    for inner in arguments[0]:
                        await _step(ctx, inner, played)
            case "put":
                queue.put_nowait(ctx.now().isoformat())
            case "get":
                diary.append(await queue.get())
            case "gather":
                branches = [branch(steps, f"gathered {index}") for index, steps in enumerate(arguments[0])]
                diary.append(str(await asyncio.gather(*branches, return_exceptions=arguments[1])))
            case "group":
                async with asyncio.TaskGroup() as group:
                    for index, steps in enumerate(arguments[0]):
                        group.create_task(branch(steps, f"grouped {index}"))
            case "first":
                tasks = [asyncio.create_task(branch(steps, f"first {n}")) for n, steps in enumerate(arguments[0])]
                done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in pending:
                    task.cancel()
                diary.extend(str(task.exception() or task.result()) for task in done)
                diary.extend(str(one) for one in await asyncio.gather(*pending, return_exceptions=True))
            case "first gathered":
                gathered: list[asyncio.Future[Any]] = []
                for n, steps in enumerate(arguments[0]):
                    gathered.append(asyncio.gather(branch(steps, f"one of {n}")))
                some, others = await asyncio.wait(gathered, return_when=asyncio.FIRST_COMPLETED)
                for one in (*some, *others):  # in set order, which must be the same in all processes
                    one.cancel()
                    diary.append(await work.schedule(f"place {gathered.index(one)}"))
                await asyncio.gather(*some, *others, return_exceptions=True)
            case "tell":
                app.workflow_run(ctx.info.run_id).signal("signal", arguments[0])
            case "ask":
                to = ctx.info.parent_id or ctx.info.run_id
                other = played.children[-1].handle if played.children else app.workflow_run(to)
                if arguments[0] == "signal":
                    diary.append(f"told: {await other.asignal('signal', 1)}")
                elif arguments[0] == "cancel":
                    diary.append(f"asked: {await other.acancel()}")
                else:
                    diary.append(f"ended: {await other.aresult(timeout=arguments[1] or None)}")
            case "as completed":
                for next_one in asyncio.as_completed(
                    [branch(steps, f"raced {n}") for n, steps in enumerate(arguments[0])]
                ):
                    diary.append(str(await next_one))
            case "wait for":
                diary.append(str(await asyncio.wait_for(branch(arguments[1], "waited for"), arguments[0])))
            case "timeout":
                async with asyncio.timeout(arguments[0]):
                    await branch(arguments[1], "timed")
            case "cancel":
                task = asyncio.create_task(branch(arguments[1], "victim"))
                await asyncio.sleep(arguments[0])
                task.cancel()
                diary.append(str(await asyncio.gather(task, return_exceptions=True)))
            case "shield":
                diary.append(str(await asyncio.wait_for(asyncio.shield(work.schedule("shielded")), arguments[0])))
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
    """One activation of the run: the history before it, and the commands of the cached code."""

    def __init__(self, shown: list[Event], batch: list[history.HistoryItem]) -> None:
        self.shown = shown
        self.batch = batch


class World:
    """Runs a program with random events from a seed, and records every turn."""

    def __init__(self, steps: list[Any], seed: int) -> None:
        self._random = random.Random(seed)
        self._engine = Engine(app.code_workflows.find, LIMIT, capacity=self._random.choice([1, 100]))
        self.leader = MemoryLeader(self._engine, app.code_workflows.find, 1_700_000_000.0)
        payload = encode_value(([steps], {}), "a program", LIMIT)
        self.run = self.leader.start(history.RunStarted("program", 1, payload), bytes(range(16)))
        self.turns: list[Turn] = []

    def play(self, max_events: int = 150) -> None:
        """Run random events until the run has ended, or `max_events` events have happened."""
        self.go_on(max_events)
        self._engine.close()

    def go_on(self, max_events: int) -> None:
        """Run at most `max_events` further random events."""
        for _ in range(max_events):
            if self.run.end is not None:
                break
            self._next_event()

    def reset(self, to: int) -> None:
        """Reset the run to an event, and record the turns of the repeated run."""
        self.run = self.leader.reset(self.run, to)
        self.turns.clear()

    def _next_event(self) -> None:
        runs = list(self.leader.runs.values())
        runnable = [run for run in runs if run.has_unseen_facts]
        if runnable and self._random.random() < 0.6:
            self._activate(self._random.choice(runnable))
            return
        tasks = [(run, task) for run in runs for task in run.tasks]
        choices = ["task"] * 3 * bool(tasks) + ["timer"] * (self.leader.next_due() is not None)
        choices += ["promise", "promise"]
        choices += ["query"] * (self.run.shown > 0 and not self.run.has_unseen_facts)
        choices += ["signal"] if self._random.random() < 0.3 else []
        choices += ["update", "cancel"] if self._random.random() < 0.1 else []
        match self._random.choice(choices):
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
        if run is self.run and not refused_at(mark):  # a rejected end appends only the marker
            self.turns.append(Turn(shown, [event.what for event in batch if not _is_by_leader(event)]))

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
    """Return the number of the fact at which the code ended, if newer facts made the marker reject it; else 0."""
    return mark.what.ended if isinstance(mark.what, history.ActivationApplied) else 0


def _is_by_leader(event: Event) -> bool:
    """Return whether the leader itself appended an event while it applied a batch."""
    answered = history.PromiseSettled  # a result of an abandoned promise goes to the next promise of that name
    sent = history.SignalReceived | history.RunCancelRequested  # sent to the run itself
    return isinstance(event.what, history.TaskCancelled | history.ChildFailed | sent | answered)
