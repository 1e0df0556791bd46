"""Headers and context variables reach everything that a call creates, over Postgres and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import Engine as Database

from orchestrator import (
    EnqueueCall,
    InvalidTask,
    InvalidWorkflow,
    Middleware,
    Orchestrator,
    Settings,
    Task,
    Workflow,
    WorkflowContext,
    chain,
    group,
)
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import CompleteRun
from orchestrator.domain.tasks.task import Dispatch, Enqueued, NewTask, parse_options
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.tasks.context import enter_task
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.task_runtime import JobRuntime
from tests.integration.code_stage import act, rest
from tests.integration.serving import Way, serving
from tests.integration.stage import ONE, System, Worker, fresh_system
from tests.outbox import KeptOutbox
from tests.waiting import eventually

tenant: ContextVar[str] = ContextVar("tenant")
ACME = {"context.tenant": '"acme"'}


class Stage:
    """A system, an application that propagates the tenant, and a worker that knows its tasks and workflows."""

    def __init__(self, system: System, app: Orchestrator) -> None:
        self.system = system
        self.app = app
        app.task(name="job")(nothing)
        self.mail: Task[..., Any] = app.task(name="mail")(nothing)
        self.worker: Worker = system.worker(knows=["job", "coded", "outer"])
        self.engine = Engine(app.code_workflows.find, 1_000_000)
        system.pass_seconds()

    def take(self) -> Dispatch:
        """Return the only dispatched task."""
        self.system.pass_seconds(2)
        (task,) = self.worker.take()
        return task

    def rest(self) -> None:
        rest(self.system, self.worker, self.engine)

    @contextmanager
    def inside(self, task: Dispatch) -> Iterator[None]:
        """Run the block inside this task, in a worker that has no tenant of its own."""
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
            with Orchestrator(system.app.settings, context=[tenant]) as app:
                stage = Stage(system, app)
                yield stage
                stage.engine.close()
            return
        with serving(system.app.settings) as url, Orchestrator(Settings(api_url=url), context=[tenant]) as app:
            stage = Stage(system, app)
            yield stage
            stage.engine.close()


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
    stage.app.workflows.apply(one_step(stage.mail))


def one_step(task: Task[..., Any]) -> Workflow:
    flow = Workflow("one")
    flow.task("only", task)
    return flow


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


def composition(stage: Stage) -> None:
    with_tenant(chain(stage.app.tasks["job"].s(), stage.mail.s()).start)
    stage.worker.succeed(stage.take())


def composition_that_a_task_starts(stage: Stage) -> None:
    with_tenant(stage.app.tasks["job"].enqueue)
    with stage.inside(stage.take()):
        group(stage.mail.s()).start()


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


def code_that_is_started_over(stage: Stage) -> None:
    @stage.app.workflow(name="coded")
    async def coded(ctx: WorkflowContext, number: int = 0) -> None:
        await stage.mail.schedule()

    handle = with_tenant(coded.start)
    stage.rest()
    stage.system.sql("DELETE FROM orchestrator.tasks WHERE name = 'mail'")
    handle.rerun()
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
    run_of_many_that_a_task_starts, run_that_is_started_over, composition,
    composition_that_a_task_starts, node, code, code_that_is_started_over, child_of_code_that_goes_on,
    code_that_a_task_starts,
]  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS, ids=[origin.__name__ for origin in ORIGINS])
def test_a_context_variable_reaches_everything_a_call_creates(stage: Stage, origin: Callable[[Stage], None]) -> None:
    origin(stage)
    stage.system.pass_seconds(2)
    rows = stage.system.sql("SELECT options FROM orchestrator.tasks WHERE name = 'mail'")
    assert [row["options"]["headers"] for row in rows] == [ACME]


def test_turns_of_code_have_the_headers_of_their_run(stage: Stage) -> None:
    @stage.app.workflow(name="coded")
    async def coded(ctx: WorkflowContext) -> None:
        await stage.mail.schedule()

    with_tenant(coded.start)
    turn = stage.take()
    assert parse_options(turn.options).headers == ACME
    act(stage.engine, turn)


def test_reset_runs_and_runs_started_by_signal_have_the_headers(stage: Stage) -> None:
    @stage.app.workflow(name="coded")
    async def coded(ctx: WorkflowContext) -> None:
        await ctx.signals("go").get()

    first = coded.starting(id="k").start()
    stage.system.pass_seconds()
    with_tenant(coded.starting(id="k", signal=("go", 1)).start)
    (turn,) = stage.worker.take()  # ends the run without reading the signal
    stage.worker.report(Activated(turn.id, turn.attempt, 0.1, through=1, commands=[CompleteRun(ONE)]))
    stage.system.tick()
    runs = stage.system.sql("SELECT id, headers FROM orchestrator.runs WHERE headers IS NOT NULL")
    assert [run["headers"] for run in runs] == [ACME]
    assert str(runs[0]["id"]) != first.id
    stage.rest()
    with ThreadPoolExecutor(1) as pool:
        reset = pool.submit(stage.app.workflow_run(str(runs[0]["id"])).reset, to=1)
        eventually(lambda: stage.system.pass_seconds(after=0.1) or reset.done(), "the leader answers")
    runs = stage.system.sql("SELECT id, headers FROM orchestrator.runs WHERE headers IS NOT NULL")
    assert [run["headers"] for run in runs] == [ACME] * 2
    assert reset.result().id in [str(run["id"]) for run in runs]


def test_a_child_keeps_its_own_headers_and_inherits_the_others(stage: Stage) -> None:
    with_tenant(stage.app.tasks["job"].options(headers={"a": "1", "b": "1"}).enqueue)
    with stage.inside(stage.take()):
        stage.mail.options(headers={"b": "2"}).enqueue()
    (row,) = stage.system.sql("SELECT options FROM orchestrator.tasks WHERE name = 'mail'")
    assert row["options"]["headers"] == {**ACME, "a": "1", "b": "2"}


def test_middleware_sees_and_can_reject_the_start_of_a_run(stage: Stage) -> None:
    seen: list[tuple[str, str, Any, Any]] = []

    class Gate(Middleware):
        def enqueue(self, call: EnqueueCall) -> None:
            seen.append((call.kind, call.name, call.args, dict(call.kwargs)))
            if call.name == "graph":
                call.options["priority"] = 5
            if call.name == "steps":
                raise PermissionError(call.name)

    @stage.app.workflow(name="coded")
    async def coded(ctx: WorkflowContext, number: int) -> None: ...

    apply(stage)
    stage.app.flows.publish("graph", {"start": "a", "nodes": {"a": {"kind": "approval"}}})
    stage.app.middleware.add(Gate())
    with_tenant(stage.app.workflows["one"].start)
    with_tenant(lambda: coded.start(7))
    with pytest.raises(InvalidWorkflow, match="set priority for flow 'graph': only tasks have options"):
        stage.app.flows["graph"].start()
    with pytest.raises(PermissionError, match="steps"):
        stage.app.workflows["steps"].start()
    calls: list[Any] = [("workflow", "one", (), {}), ("workflow", "coded", (7,), {}), ("flow", "graph", (), {})]
    assert seen == [*calls, ("workflow", "steps", (), {})]
    rows = stage.system.sql("SELECT name, headers FROM orchestrator.runs ORDER BY id")
    assert [(row["name"], row["headers"]) for row in rows] == [("one", ACME), ("coded", ACME)]


def test_headers_do_not_affect_idempotency(stage: Stage) -> None:
    first = with_tenant(stage.mail.options(idempotency_key="k").enqueue)
    assert stage.mail.options(idempotency_key="k").enqueue().id == first.id


def test_headers_are_stored_and_validated_over_http(system: System) -> None:
    large = {"a": "x" * 5_000}
    system.app.workflows.apply(one_step(system.app.task(name="mail")(nothing)))
    with serving(system.app.settings) as url, httpx.Client(base_url=f"{url}/api/v1") as api:
        call = {"name": "mail", "headers": {"tenant": "acme"}}
        assert api.post("/tasks", json=call).status_code == 201
        assert api.post("/tasks", json=call, headers={"Idempotency-Key": "k"}).status_code == 201
        again = api.post("/tasks", json={"name": "mail"}, headers={"Idempotency-Key": "k"})
        assert again.status_code == 201, "headers are no part of the call"
        refused = api.post("/tasks", json=call | {"headers": large})
        assert refused.status_code == 422
        assert "at most 4,096 are allowed" in refused.json()["detail"]
        start = {"Orchestrator-Headers": '{"tenant": "\\u00e9"}'}
        assert api.post("/workflows/one/runs", json={}, headers=start).is_success
        for wrong in (msgspec.json.encode(large).decode(), "nothing", "[]"):
            refused = api.post("/workflows/one/runs", json={}, headers={"Orchestrator-Headers": wrong})
            assert refused.status_code == 422, refused.text
    (run,) = system.sql("SELECT headers FROM orchestrator.runs")
    assert run["headers"] == {"tenant": "é"}
    rows = system.sql("SELECT options FROM orchestrator.tasks WHERE run_id IS NULL")
    assert [row["options"]["headers"] for row in rows] == [{"tenant": "acme"}] * 2


def test_the_server_checks_the_headers_of_clients(engine: Database, database_url: str, redis_url: str) -> None:
    with (
        fresh_system(engine, database_url, redis_url) as system,
        serving(system.app.settings) as url,
        Orchestrator(Settings(api_url=url)) as app,
    ):
        task = app.task(name="mail")(nothing)
        options = msgspec.json.encode({"headers": {"a": "x" * 5_000}}).decode()
        new: NewTask = msgspec.structs.replace(task._new((), {}), options=options)
        with pytest.raises(InvalidTask, match="at most 4,096 are allowed"):
            app._client.backend.tasks.enqueue(new)


def test_middleware_sees_the_calls_in_a_composition(stage: Stage) -> None:
    seen: list[EnqueueCall] = []

    class Gate(Middleware):
        def enqueue(self, call: EnqueueCall) -> None:
            seen.append(call)
            if any(part.name == "mail" for part in call.parts):
                raise PermissionError("mail")

    stage.app.middleware.add(Gate())
    job = stage.app.tasks["job"]
    (job.si(1) | job.si(number=2)).start()
    with pytest.raises(PermissionError, match="mail"):
        (job.si(1) | stage.mail.si()).start()
    assert [(part.name, part.args, dict(part.kwargs)) for part in seen[0].parts] == [
        ("job", (1,), {}),
        ("job", (), {"number": 2}),
    ]
    assert (seen[0].kind, seen[0].kwargs) == ("workflow", {})
    assert len(stage.system.sql("SELECT id FROM orchestrator.runs")) == 1
