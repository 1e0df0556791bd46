"""Headers and context variables reach everything that comes of a call, over Postgres and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from sqlalchemy import Engine as Database

from orchestrator import Orchestrator, Settings, Task, Workflow, WorkflowContext
from orchestrator.domain.tasks.task import Dispatch, Enqueued
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.tasks.context import enter_task
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.task_runtime import JobRuntime
from tests.integration.code_stage import rest
from tests.integration.serving import Way, serving
from tests.integration.stage import System, Worker, fresh_system
from tests.outbox import KeptOutbox

tenant: ContextVar[str] = ContextVar("tenant")
ACME = {"context.tenant": '"acme"'}


class Stage:
    """A system, an application that carries the tenant, and a worker that knows its tasks and workflows."""

    def __init__(self, system: System, app: Orchestrator) -> None:
        self.system = system
        self.app = app
        app.task(name="job")(nothing)
        self.mail: Task[..., Any] = app.task(name="mail")(nothing)
        self.worker: Worker = system.worker(knows=["job", "coded", "outer"])
        self.engine = Engine(app.code_workflows.find, 1_000_000)
        system.pass_seconds()

    def take(self) -> Dispatch:
        """Return the one task that is there."""
        self.system.pass_seconds(2)
        (task,) = self.worker.take()
        return task

    def rest(self) -> None:
        rest(self.system, self.worker, self.engine)

    @contextmanager
    def inside(self, task: Dispatch) -> Iterator[None]:
        """Run what follows as that task would, in a worker that has no tenant of its own."""
        outbox, job = KeptOutbox(), Job(task, Bundle("g", "default", "1-0", 1), 0, 0.0)
        job.begin(100.0)
        enter_task(JobRuntime(job, outbox))
        try:
            yield
        finally:
            enter_task(None)
        self.worker.report(Enqueued(outbox.tasks))
        self.system.pass_seconds(2)


def nothing(*_: Any, **__: Any) -> None: ...


@pytest.fixture(params=["database", "http"])
def stage(request: pytest.FixtureRequest, engine: Database, database_url: str, redis_url: str) -> Iterator[Stage]:
    way: Way = request.param
    with fresh_system(engine, database_url, redis_url) as system:
        if way == "database":
            yield Stage(system, Orchestrator(system.app.settings, context=[tenant]))
            return
        with serving(system.app.settings) as url, Orchestrator(Settings(api_url=url), context=[tenant]) as app:
            yield Stage(system, app)


def enqueued(stage: Stage) -> None:
    with_tenant(stage.mail.enqueue)


def many(stage: Stage) -> None:
    with_tenant(lambda: stage.app.enqueue_many(stage.mail, [()]))


def run_of_many(stage: Stage) -> None:
    with_tenant(lambda: stage.app.start_many(stage.mail, [()]))


def follower(stage: Stage) -> None:
    with_tenant(stage.app.tasks["job"].options(on_success=stage.mail).enqueue)
    stage.worker.succeed(stage.take())


def follower_of_failure(stage: Stage) -> None:
    with_tenant(stage.app.tasks["job"].options(on_failure=stage.mail).enqueue)
    stage.worker.fail(stage.take())


def child(stage: Stage) -> None:
    with_tenant(stage.app.tasks["job"].enqueue)
    with stage.inside(stage.take()):
        stage.mail.enqueue()


def apply(stage: Stage) -> None:
    flow = Workflow("steps", on_success=[{"task": "mail"}])
    flow.task("first", stage.app.tasks["job"])
    stage.app.workflows.apply(flow)
    flow = Workflow("one")
    flow.task("only", stage.mail)
    stage.app.workflows.apply(flow)


def step(stage: Stage) -> None:
    apply(stage)
    with_tenant(stage.app.workflows["one"].start)


def hook(stage: Stage) -> None:
    apply(stage)
    with_tenant(stage.app.workflows["steps"].start)
    stage.worker.succeed(stage.take())


def step_of_a_run_that_a_task_starts(stage: Stage) -> None:
    apply(stage)
    with_tenant(stage.app.tasks["job"].enqueue)
    with stage.inside(stage.take()):
        stage.app.workflows["one"].start()


def run_of_many_that_a_task_starts(stage: Stage) -> None:
    with_tenant(stage.app.tasks["job"].enqueue)
    with stage.inside(stage.take()):
        stage.app.start_many(stage.mail, [()])


def run_that_is_started_over(stage: Stage) -> None:
    apply(stage)
    handle = with_tenant(stage.app.workflows["one"].start)
    stage.system.pass_seconds(2)
    stage.system.sql("DELETE FROM orchestrator.tasks WHERE name = 'mail'")
    stage.app.run(handle.id).rerun()


def node(stage: Stage) -> None:
    graph = {"start": "a", "nodes": {"a": {"kind": "executor", "exec_type": "local_func", "func": "mail"}}}
    stage.app.flows.publish("graph", graph)
    with_tenant(stage.app.flows["graph"].start)


def code(stage: Stage) -> None:
    @stage.app.workflow(name="coded")
    async def coded(ctx: WorkflowContext) -> None:
        await stage.mail.schedule()

    with_tenant(coded.start)
    stage.rest()


def child_of_code_that_goes_on(stage: Stage) -> None:
    @stage.app.workflow(name="coded")
    async def coded(ctx: WorkflowContext) -> None:
        await stage.mail.schedule()

    @stage.app.workflow(name="outer")
    async def outer(ctx: WorkflowContext, number: int = 0) -> None:
        if number == 0:
            ctx.continue_as_new(1)
        await coded.schedule()

    with_tenant(outer.start)
    stage.rest()


def code_that_a_task_starts(stage: Stage) -> None:
    @stage.app.workflow(name="coded")
    async def coded(ctx: WorkflowContext) -> None:
        await stage.mail.schedule()

    with_tenant(stage.app.tasks["job"].enqueue)
    with stage.inside(stage.take()):
        coded.start()
    stage.rest()


def with_tenant(call: Callable[[], Any]) -> Any:
    token = tenant.set("acme")
    try:
        return call()
    finally:
        tenant.reset(token)


ORIGINS = [
    enqueued, many, run_of_many, follower, follower_of_failure, child, step, hook, step_of_a_run_that_a_task_starts,
    run_of_many_that_a_task_starts, run_that_is_started_over, node, code, child_of_code_that_goes_on,
    code_that_a_task_starts,
]  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS, ids=[origin.__name__ for origin in ORIGINS])
def test_a_context_variable_reaches_all_that_comes_of_a_call(stage: Stage, origin: Callable[[Stage], None]) -> None:
    origin(stage)
    stage.system.pass_seconds(2)
    rows = stage.system.sql("SELECT options FROM orchestrator.tasks WHERE name = 'mail'")
    assert [row["options"]["headers"] for row in rows] == [ACME]
