"""To follow one thing through the product, a reader opens few files, and seldom returns to one."""

from __future__ import annotations

import pytest

from orchestrator import WorkflowContext
from orchestrator.api.context import Api
from orchestrator.api.dashboard import rendering
from orchestrator.api.dashboard.pages import tasks
from orchestrator.api.dashboard.pages.tasks import TasksQuery
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.sdk.code.engine import Engine
from tests.integration.code_stage import act
from tests.integration.stage import System, raw
from tests.walks import Walk, following, marks_of


def assert_short(walk: Walk, *, files: int, stays: int) -> None:
    assert 0 < len(walk.stays) <= stays, str(walk)
    assert len(walk.files) <= files, str(walk)


def test_an_enqueue_reaches_its_row_through_few_files(system: System) -> None:
    system.job.enqueue(0)
    with following("needle") as walk:
        system.job.enqueue("needle")
    assert_short(walk, files=9, stays=10)


def test_a_report_reaches_row_and_client_through_few_files(system: System) -> None:
    worker = system.worker()
    system.dispatch()
    (task,) = worker.take()
    worker.succeed(task)
    with following(*marks_of(task.id)) as walk:
        system.tick()
    assert_short(walk, files=15, stays=24)


def test_a_lost_worker_reaches_the_row_through_few_files(system: System) -> None:
    worker = system.worker()
    system.settle()
    (handle,) = system.dispatch()
    worker.take()
    system.make_old()
    worker.die()
    walks: list[Walk] = []
    while system.row(handle)["status"] == "dispatched":
        system.clock.now += 1
        with following(*marks_of(raw(handle))) as walk:
            system.scheduler.tick()
        walks.append(walk)
    assert_short(walks[-1], files=23, stays=43)


def test_a_run_of_many_tasks_starts_and_ends_in_few_files(system: System) -> None:
    worker = system.worker()
    run = system.app.start_many(system.job, [1, 2, 3])
    with following(*marks_of(raw(run))) as walk:
        system.pass_seconds()
    assert_short(walk, files=17, stays=28)
    worker.succeed(*worker.take())
    with following(*marks_of(raw(run))) as walk:
        system.tick()
    assert_short(walk, files=16, stays=26)


def test_the_commands_of_a_turn_are_applied_in_few_files(system: System, engine_: Engine) -> None:
    job = system.job

    @system.app.workflow(name="double")
    async def double(ctx: WorkflowContext, number: int) -> int:
        return 2 * int(await job.schedule(number))

    worker = system.worker(knows=("job", "double"))
    handle = double.start(1)
    system.pass_seconds()
    worker.report(act(engine_, *worker.take()))
    with following(*marks_of(raw(handle))) as walk:
        system.tick()
    assert_short(walk, files=25, stays=43)


def test_a_dashboard_page_reads_its_rows_through_few_files(system: System, request: pytest.FixtureRequest) -> None:
    api = Api(system.settings)
    request.addfinalizer(api.close)
    visit = rendering.Visit(
        who="ada", scope=Scope.ADMIN, key_scope=KeyScope(), path="/ui", query="", token="", check_tasks=print
    )
    reset = rendering.current.set(visit)
    request.addfinalizer(lambda: rendering.current.reset(reset))
    handle = system.job.enqueue(1)
    with following(*marks_of(raw(handle))) as walk:
        tasks.list_tasks(api, TasksQuery(), KeyScope())
    walk.calls = [file for file in walk.calls if not file.endswith(".html")]  # Jinja enters templates line by line
    assert_short(walk, files=11, stays=15)
