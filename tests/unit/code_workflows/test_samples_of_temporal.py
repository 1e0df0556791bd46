"""Temporal's samples of messages and updates, as workflows of this project.

`message_passing/introduction`, `safe_message_handlers`, and `waiting_for_handlers` with its compensating variant;
`resource_pool` and `batch_sliding_window` are in `test_batch_samples_of_temporal.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from orchestrator import (
    Orchestrator,
    RunFailed,
    TaskFailed,
    UpdateRefused,
    WorkflowContext,
    WorkflowFailed,
    WrongState,
    workflow,
)
from orchestrator.testing import After, TestedRun, WorkflowTest
from orchestrator.testing.workflows import Mocks
from tests.unit.code_workflows.playing import started

app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")


# -- message_passing/introduction


@app.task(name="greeting-in")
def greeting_in(language: str) -> str | None: ...


@app.workflow(name="greeting")
@dataclass
class Greeting:
    ctx: WorkflowContext
    greetings: dict[str, str] = field(default_factory=lambda: {"en": "Hello", "de": "Hallo"})
    language: str = "en"
    approved_by: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @workflow.run
    async def run(self) -> str:
        await self.ctx.wait_condition(lambda: self.approved_by is not None and self.ctx.all_handlers_finished)
        return f"{self.greetings[self.language]}, {self.approved_by}"

    @workflow.query
    def languages(self, include_unsupported: bool = False) -> list[str]:
        return [*sorted(self.greetings), *(["tlh"] if include_unsupported else [])]

    @workflow.signal
    def approve(self, name: str) -> None:
        self.approved_by = name

    @workflow.update
    def set_language(self, language: str) -> str:
        self.language, before = language, self.language
        return before

    @set_language.validator
    def check_language(self, language: str) -> None:
        if language not in self.greetings:
            raise ValueError(f"{language} is not supported")

    @workflow.update
    async def fetch_language(self, language: str) -> str:
        async with self.lock:  # one at a time, in order of arrival
            if language not in self.greetings:
                found = await greeting_in.schedule(language)
                if found is None:
                    raise WorkflowFailed(f"nobody greets in {language}")
                self.greetings[language] = found
            self.language, before = language, self.language
            return before


def test_the_introduction_sample_handles_queries_updates_and_signals() -> None:
    async def play(run: TestedRun[str], test: WorkflowTest) -> str:
        assert await run.query(Greeting.languages) == ["de", "en"]
        assert await run.query(Greeting.languages, include_unsupported=True) == ["de", "en", "tlh"]
        assert await run.update(Greeting.set_language, "de") == "en"
        with pytest.raises(UpdateRefused, match="fr is not supported"):
            await run.update(Greeting.set_language, "fr")
        fetched = [await run.start_update(Greeting.fetch_language, language) for language in ("fr", "es")]
        await run.signal(Greeting.approve, "Ann")
        result = await run.result()
        assert [update.result() for update in fetched] == ["de", "fr"]
        assert await run.query(Greeting.languages) == ["de", "en", "es", "fr"]  # after the end
        return result

    mocks: Mocks = {greeting_in: After(5, lambda language: {"fr": "Bonjour", "es": "Hola"}[language])}
    assert started(Greeting.run, play, mocks=mocks) == "Hola, Ann"


# -- message_passing/safe_message_handlers


@app.task(name="assign-nodes")
def assign_nodes(job: str, nodes: list[int]) -> None: ...


@app.task(name="find-bad-nodes")
def find_bad_nodes(nodes: list[int]) -> list[int]: ...


@dataclass
class ClusterState:
    nodes: dict[int, str | None] = field(default_factory=lambda: dict.fromkeys(range(6)))
    jobs: dict[str, list[int]] = field(default_factory=dict)
    rounds: int = 0
    started: bool = False


@app.workflow(name="cluster")
class Cluster:
    def __init__(self, ctx: WorkflowContext) -> None:
        self.ctx = ctx
        self.state = ClusterState()
        self.lock = asyncio.Lock()
        self.shut_down = False

    @workflow.run
    async def run(self, state: ClusterState | None = None, rounds: int = 3) -> int:
        self.state = state or self.state
        await self.ctx.wait_condition(lambda: self.state.started)
        for _ in range(rounds):
            try:
                await self.ctx.wait_condition(lambda: self.shut_down, timeout=10)
                break
            except TimeoutError:
                await self.check_nodes()
        await self.ctx.wait_condition(lambda: self.ctx.all_handlers_finished)
        if not self.shut_down:
            self.ctx.continue_as_new(self.state, rounds)
        return self.state.rounds

    async def check_nodes(self) -> None:
        async with self.lock:
            self.state.rounds += 1
            assigned = [node for node, job in self.state.nodes.items() if job not in (None, "bad")]
            for node in await find_bad_nodes.schedule(assigned):
                self.state.nodes[node] = "bad"

    @workflow.signal
    def start(self) -> None:
        self.state.started = True

    @workflow.signal
    def shutdown(self) -> None:
        self.shut_down = True

    @workflow.update
    async def assign(self, job: str, count: int) -> list[int]:
        await self.ctx.wait_condition(lambda: self.state.started)
        if self.shut_down:
            raise WorkflowFailed("the cluster shuts down")
        async with self.lock:
            if job not in self.state.jobs:  # a client may send the update twice
                free = [node for node, owner in self.state.nodes.items() if owner is None][:count]
                if len(free) < count:
                    raise WorkflowFailed(f"{count} nodes are wanted, and {len(free)} are free")
                await assign_nodes.schedule(job, free)
                self.state.nodes |= dict.fromkeys(free, job)
                self.state.jobs[job] = free
            return self.state.jobs[job]


def test_the_safe_message_handlers_sample_assigns_each_node_once() -> None:
    async def play(run: TestedRun[int], test: WorkflowTest) -> int:
        early = await run.start_update(Cluster.assign, "a", 2)  # waits until the cluster has started
        await run.signal(Cluster.start)
        both = [await run.start_update(Cluster.assign, job, 2) for job in ("b", "b")]
        await test.skip(100)  # checks its nodes, and continues as new
        assert early.result() == [0, 1]
        assert [update.result() for update in both] == [[2, 3], [2, 3]]
        with pytest.raises(Exception, match="3 nodes are wanted, and 2 are free"):
            await run.update(Cluster.assign, "c", 3)
        await run.signal(Cluster.shutdown)
        return await run.result()

    mocks: Mocks = {assign_nodes: After(1, None), find_bad_nodes: lambda nodes: nodes[:1]}
    assert started(Cluster.run, play, mocks=mocks) > 3


# -- message_passing/waiting_for_handlers, with and without compensation


@app.task(name="charge")
def charge(amount: int) -> str: ...


@app.task(name="undo-charge")
def undo_charge(amount: int) -> None: ...


@app.workflow(name="waiting")
class Waiting:
    def __init__(self, ctx: WorkflowContext) -> None:
        self.ctx = ctx

    @workflow.run
    async def run(self, how: str) -> str:
        try:
            await self.ctx.sleep(10)
            if how == "failure":
                raise WorkflowFailed("as was asked for")
            return "done"
        finally:  # whether it returns, fails or is cancelled
            await self.ctx.wait_condition(lambda: self.ctx.all_handlers_finished)

    @workflow.update
    async def pay(self, amount: int) -> str:
        try:
            return await charge.schedule(amount)
        except TaskFailed:
            await undo_charge.schedule(amount)
            return "undone"


@pytest.mark.parametrize("how", ["success", "failure", "cancel"])
@pytest.mark.parametrize("outcome", ["paid", "undone"])
def test_a_run_waits_for_its_handlers_however_it_ends(how: str, outcome: str) -> None:
    undone: list[int] = []

    async def play(run: TestedRun[str], test: WorkflowTest) -> str:
        update = await run.start_update(Waiting.pay, 7)
        if how == "cancel":
            await run.cancel()
        try:
            await run.result()
        except RunFailed as error:
            assert ("as was asked for" if how == "failure" else "cancelled") in str(error)
        return update.result()

    answer = "paid" if outcome == "paid" else ValueError("no money")
    mocks: Mocks = {charge: After(60, answer), undo_charge: undone.append}
    assert started(Waiting.run, play, how, mocks=mocks) == outcome
    assert undone == ([] if outcome == "paid" else [7])


def test_a_run_that_does_not_wait_drops_open_updates() -> None:
    @app.workflow(name="impatient")
    class Impatient:
        def __init__(self, ctx: WorkflowContext) -> None:
            self.ctx = ctx

        @workflow.run
        async def run(self) -> None:
            await self.ctx.sleep(10)

        @workflow.update
        async def pay(self, amount: int) -> str:
            return await charge.schedule(amount)

    async def play(run: TestedRun[None], test: WorkflowTest) -> None:
        update = await run.start_update(Impatient.pay, 7)
        await run.result()
        with pytest.raises(WrongState, match="ended before update 'pay' was completed"):
            update.result()

    started(Impatient.run, play, mocks={charge: After(60, "paid")})
