"""The same tasks and workflows on other deployments."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import (
    Cell,
    CodeWorkflow,
    EnqueueCall,
    Handle,
    Middleware,
    Orchestrator,
    OrchestratorError,
    Settings,
    Task,
    WorkflowContext,
    gather,
)
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.context import _runtime
from orchestrator.settings import load_settings
from orchestrator.testing import WorkflowTest

app = Orchestrator(load_settings(environ={}, namespace="home", max_payload=2_000))
europe: Cell = app.at(namespace="europe")


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


def test_a_cell_differs_from_the_application_in_what_is_given() -> None:
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
def test_a_workflow_reaches_no_other_cell(workflow: CodeWorkflow[[], object]) -> None:
    async def play() -> None:
        async with WorkflowTest() as test:
            await test.run(workflow)

    with pytest.raises(OrchestratorError, match="reached via a cell inside a workflow"):
        asyncio.run(play())


def test_handles_of_two_cells_are_not_waited_for_together() -> None:
    here: list[Handle[str]] = [Handle(one._client, new_id()) for one in (app, europe)]
    with pytest.raises(ValueError, match="is of another cell than"):
        gather(here)


def test_a_running_task_hands_over_what_is_for_its_own_cell_only() -> None:
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
