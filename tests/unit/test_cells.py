"""One application's tasks and workflows on other deployments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import (
    Cell,
    CodeWorkflow,
    EnqueueCall,
    FlowGraph,
    Handle,
    InvalidTask,
    InvalidWorkflow,
    Middleware,
    Orchestrator,
    OrchestratorError,
    Settings,
    Task,
    WorkflowContext,
    chain,
    gather,
)
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.context import _runtime
from orchestrator.settings import load_settings
from orchestrator.testing import WorkflowTest

app = Orchestrator(load_settings(environ={}, namespace="home", max_payload=2_000))
europe: Cell = app.at(namespace="europe")
asia: Cell = app.at(namespace="asia")


@app.task(queue="images")
def resize(path: str, width: int = 1) -> str:
    return f"{path} {width}"


there: Task[[str, int], str] = resize.via(europe)


@app.workflow
async def reaches_out(ctx: WorkflowContext) -> str:
    return await there.schedule("a.png", 1)


@app.workflow
async def signals_out(ctx: WorkflowContext) -> None:
    await europe.workflow_run("01a1ef17-d649-78a4-8ae4-9af0c05439bc").asignal("word", 1)


def test_a_cell_overrides_only_the_given_settings() -> None:
    assert (app.settings.namespace, europe.settings.namespace) == ("home", "europe")
    assert europe.settings.max_payload == 2_000
    assert app.at(Settings(namespace="asia"), max_payload=3_000).settings.max_payload == 3_000
    with pytest.raises(TypeError, match=r"at\(…\): expected Settings"):
        app.at("postgresql://somewhere")  # type: ignore[arg-type]


def test_a_task_via_a_cell_is_the_same_task() -> None:
    assert there("a.png", 2) == "a.png 2"
    assert (there.name, there.queue) == (resize.name, "images")
    assert there.options(delay=1)._client is europe._client
    assert europe.find_task(resize.name)._client is europe._client
    assert app.find_task(resize.name) is resize
    assert there.via(app)._client is app._client
    assert europe.handle(new_id().hex())._client is europe._client


@pytest.mark.parametrize("workflow", [reaches_out, signals_out])
def test_a_workflow_cannot_call_another_cell(workflow: CodeWorkflow[[], object]) -> None:
    async def play() -> None:
        async with WorkflowTest() as test:
            await test.run(workflow)

    with pytest.raises(OrchestratorError, match="called via a cell inside a workflow"):
        asyncio.run(play())


def test_handles_of_two_cells_cannot_be_awaited_together() -> None:
    here: list[Handle[str]] = [Handle(one._client, new_id()) for one in (app, europe)]
    with pytest.raises(ValueError, match="belongs to a different cell from"):
        gather(here)


MIXED: list[Callable[[], object]] = [
    lambda: app.enqueue_many(there, [("a", 1)]),
    lambda: europe.enqueue_many(resize.via(app), [("a", 1)]),
    lambda: asia.enqueue_many(there, [("a", 1)]),
    lambda: asyncio.run(asia.aenqueue_many(there.options(delay=1), [("a", 1)])),
    lambda: app.start_many(there, ["a"]),
    lambda: asyncio.run(europe.astart_many(resize.via(app), ["a"])),
    lambda: resize.options(on_success=there),
    lambda: there.options(on_failure=[resize, resize.via(app)]),
    lambda: there.options(on_success=there).via(asia),
    lambda: app.task(name="other", on_success=there)(lambda path: path),
    lambda: app.task(there),
    lambda: app.schedule(every=60, params={"path": "a"})(there),
    lambda: app.schedule(every=60)(reaches_out.via(europe)),
]


@pytest.mark.parametrize("call", MIXED)
def test_a_task_of_one_cell_is_rejected_by_another_cell(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidTask, match=r"is for .*(cell|own deployment).*, but '\S+' was made for the .*Omit"):
        call()


def test_compositions_and_flows_reject_tasks_of_another_cell() -> None:
    with pytest.raises(
        InvalidWorkflow, match=r"resize via the cell namespace europe> belongs to a different one from <Task \S*ze>"
    ):
        chain(resize.s("a", 1), there.s(1)).start()
    with pytest.raises(InvalidWorkflow, match=r"Leave out the task's via"):
        FlowGraph("one").executor("one", run=there)


def test_callbacks_of_a_task_go_to_its_cell() -> None:
    assert there.options(on_success=resize)._client is europe._client
    assert there.options(on_success=there).options(delay=1)._after_success == (there,)
    assert resize.options(on_failure=resize).via(europe)._client is europe._client


@pytest.mark.parametrize("given", [None, "EU", {"namespace": "x"}])
def test_via_accepts_only_a_cell(given: Any) -> None:
    calls: list[Callable[[Any], object]] = [resize.via, reaches_out.via]
    for call in calls:
        with pytest.raises(TypeError, match=r"via\(…\): expected a cell, as `app.at\(…\)` returns it"):
            call(given)


def test_reprs_and_equality_include_the_cell_but_no_password() -> None:
    secret = app.at(database_url="postgresql://ann:hunter2@eu/shop", redis_url="redis://:hunter2@eu")
    name = " via the cell postgresql://ann:***@eu/shop"
    identifier = "01a1ef17-d649-78a4-8ae4-9af0c05439bc"
    assert (repr(app), repr(secret)) == ("<Orchestrator>", "<Cell postgresql://ann:***@eu/shop>")
    assert (repr(resize), repr(resize.via(secret))) == (f"<Task {resize.name}>", f"<Task {resize.name}{name}>")
    assert (repr(app.handle(identifier)), repr(secret.handle(identifier))) == (
        f"<Handle {identifier}>",
        f"<Handle {identifier}{name}>",
    )
    for find in ("handle", "run", "workflow_run"):
        assert repr(getattr(secret, find)(identifier)).endswith(f"{identifier}{name}>")
    assert repr(app.at(lambda: Settings())) == "<Cell>"
    for find in ("handle", "workflow_run"):
        here, same, away = (getattr(one, find)(identifier) for one in (app, app, secret))
        assert here == same != away


def test_a_running_task_hands_over_only_calls_to_its_own_cell() -> None:
    runtime = object()
    token = _runtime.set(runtime)  # type: ignore[arg-type]
    try:
        assert app._client.runtime() is runtime
        assert europe._client.runtime() is None
    finally:
        _runtime.reset(token)


def test_cells_share_middleware_that_is_added_later() -> None:
    class Noting(Middleware):
        def enqueue(self, call: EnqueueCall) -> None: ...

    own = Orchestrator()
    before = own.at(namespace="before")
    own.middleware.add(Noting())
    after = own.at(namespace="after")
    assert own._client.middleware is before._client.middleware is after._client.middleware is not None
