"""Parents and children of tasks: stored, found by id, and shown only to permitted keys."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from uuid import UUID

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator import Orchestrator
from orchestrator.api import access
from orchestrator.cli import main
from orchestrator.domain.access import Scope
from orchestrator.domain.code.history import RunStarted
from orchestrator.domain.ids import derived_id
from orchestrator.domain.tasks.starts import Start, StartCode, StartMany, StartSteps, as_task
from orchestrator.domain.tasks.task import Dispatch, Enqueued, Lost, NewTask, Succeeded
from orchestrator.sdk.dag import definitions
from orchestrator.store.insights import Lineage
from orchestrator.store.insights import lineage as lineage_of
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.task_runtime import JobRuntime
from tests.integration.api_client import ApiClient, make_key
from tests.integration.stage import ONE, System, raw
from tests.integration.test_tasks_that_enqueue import child_of
from tests.outbox import KeptOutbox


def kin(system: System, task: bytes | str) -> Lineage:
    identifier = UUID(bytes=task) if isinstance(task, bytes) else UUID(task)
    return system.app._client.backend.insights.lineage(identifier)


def children(system: System, task: bytes | str) -> list[tuple[bytes, str, str]]:
    return [(child.id.bytes, child.kind, child.status) for child in kin(system, task).children]


def own(task: Dispatch, number: int, **changes: Any) -> NewTask:
    return child_of(task, number, parent=task.id, **changes)


def test_a_worker_records_the_parent_of_enqueued_tasks() -> None:
    app = Orchestrator()
    child = app.task(name="child")(lambda: None)
    job = Job(Dispatch(bytes(16), 3, "job", b"\x92\x90\x80", "default"), Bundle("g", "default", "1-0", 1), 0, 0.0)
    outbox = KeptOutbox()
    runtime = JobRuntime(job, outbox)
    runtime.enqueue([child._new((), {})])
    runtime.enqueue_on_success([child._new((), {})])
    assert [task.parent for task in (*outbox.tasks, *job.children)] == [bytes(16)] * 2


def test_parents_and_children_find_each_other_in_every_state(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    assert kin(system, handle.id) == Lineage(parent=None, children=[], is_part=False)
    (task,) = worker.take()
    first, second, last = own(task, 1), own(task, 7, delay=60.0), own(task, 9)
    worker.report(Enqueued([first, second]), Succeeded(task.id, 1, 0.1, ONE, [last]))
    system.pass_seconds()
    assert children(system, handle.id) == [
        (first.id, "task", "dispatched"),
        (second.id, "task", "pending"),
        (last.id, "task", "dispatched"),
    ]
    for child in (first, second, last):
        parent = kin(system, child.id).parent
        assert parent is not None
        assert (str(parent.id), parent.name, parent.status) == (handle.id, "job", "success")
    worker.report(*(Succeeded(one.id, one.attempt, 0.1, ONE) for one in worker.take() if one.id == first.id))
    system.pass_seconds()
    assert system.row(first.id)["parent_id"] == UUID(handle.id), "also when it has ended"
    assert children(system, handle.id)[0] == (first.id, "task", "success")


def test_a_failed_and_retried_task_keeps_its_parent(system: System) -> None:
    worker = system.worker()
    system.dispatch()
    (task,) = worker.take()
    child = own(task, 1)
    worker.report(Enqueued([child]))
    system.pass_seconds()
    worker.fail(*worker.take(), retryable=False)
    system.pass_seconds()
    assert system.row(child.id)["status"] == "failed"
    assert system.row(child.id)["parent_id"] == UUID(bytes=task.id)
    system.app.handle(UUID(bytes=child.id)).retry()
    system.pass_seconds()
    assert system.row(child.id)["status"] == "dispatched"
    assert system.row(child.id)["parent_id"] == UUID(bytes=task.id)


def test_children_with_unique_keys_or_of_later_attempts_are_found(system: System) -> None:
    worker = system.worker()
    keyed = system.job.options(unique_key="k")._new((), {})
    (handle,) = system.dispatch()
    (task,) = worker.take()
    first = own(task, 1, unique=keyed.unique)
    worker.report(Enqueued([first]))
    system.pass_seconds(2)
    worker.report(Lost(task.id, 1, alone=False))
    system.pass_seconds(2)
    (again,) = (one for one in worker.take() if one.id == task.id)
    assert again.attempt == 2
    second = own(again, 1)
    worker.report(Enqueued([second]))
    system.pass_seconds()
    assert [child for child, _, _ in children(system, handle.id)] == [first.id, second.id]
    assert system.row(first.id)["parent_id"] == UUID(handle.id)


def test_callback_tasks_are_children_of_their_task(system: System) -> None:
    worker = system.worker(knows=("job", "follower", "mourner"))
    follower = system.app.task(name="follower")(lambda what: what)
    mourner = system.app.task(name="mourner")(lambda what: what)
    task = system.job.options(on_success=follower, on_failure=mourner, retries=0)
    won, lost = task.enqueue(), task.enqueue()
    system.pass_seconds()
    for one in worker.take():
        (worker.succeed if one.id == raw(won) else worker.fail)(one)
    system.pass_seconds()
    for handle, name in ((won, "follower"), (lost, "mourner")):
        (child,) = kin(system, handle.id).children
        assert child.name == name
        assert system.row(child.id.bytes)["parent_id"] == UUID(handle.id)


def test_a_run_is_listed_instead_of_its_tasks(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    run, inside = derived_id(task.id, 1, 1), derived_id(task.id, 1, 2)
    many = StartMany("many", [NewTask(inside, "job", "default", b"\x92\x90\x80", run_id=run, position=0)])
    worker.report(Enqueued([msgspec.structs.replace(as_task(run, many), parent=task.id)]))
    system.pass_seconds(2)
    (child,) = kin(system, handle.id).children
    assert (child.id.bytes, child.kind, child.name) == (run, "run", "many")
    assert system.row(inside)["parent_id"] == UUID(handle.id)


@pytest.mark.parametrize("kind", ["many", "steps", "flow", "code"])
def test_a_run_knows_the_task_that_started_it(system: System, in_empty_folder: object, kind: str) -> None:
    system.app.workflows.apply(definitions.loads("name: steps\ntasks: {a: {task: job}}"))
    system.app.flows.publish("graph", {"start": "a", "nodes": {"a": {"kind": "approval"}}})
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    run = derived_id(task.id, 1, 1)
    inside = NewTask(derived_id(task.id, 1, 2), "job", "default", b"\x92\x90\x80", run_id=run, position=0)
    starts: dict[str, Start] = {
        "many": StartMany("many", [inside]),
        "steps": StartSteps("steps", "{}"),
        "flow": StartSteps("graph", "{}", flow=True),
        "code": StartCode(RunStarted("code", 1, b"\x92\x90\x80")),
    }
    worker.report(Enqueued([msgspec.structs.replace(as_task(run, starts[kind]), parent=task.id)]))
    system.pass_seconds(2)
    found = system.app._client.backend.insights.show_run(UUID(bytes=run))
    assert found is not None
    assert found.parent_task == UUID(handle.id)
    shown = CliRunner().invoke(main, ["runs", "show", str(UUID(bytes=run))])
    assert f"started by  task {handle.id}" in shown.stdout, shown.output
    (child,) = kin(system, handle.id).children
    assert (child.id.bytes, child.kind) == (run, "run")


def test_the_number_of_children_looked_up_is_bounded(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("orchestrator.store.insights.lookup"), "MAX_CALLS", 2)
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    found = [own(task, number) for number in (1, 2, 3)]
    worker.report(Enqueued(found[:1]))
    system.pass_seconds()
    assert not kin(system, handle.id).is_part
    worker.report(Enqueued(found[1:]))
    system.pass_seconds()
    assert [child.id.bytes for child in kin(system, handle.id).children] == [one.id for one in found[:2]]
    assert kin(system, handle.id).is_part
    with system.engine.connect() as connection:
        assert lineage_of(connection, UUID(handle.id), None, [1, 2, 3, 4]).is_part, "and of so many attempts"


def test_lineage_is_shown_by_api_page_and_command(
    system: System, in_empty_folder: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    mine, others = own(task, 1), own(task, 2, queue="bank")
    worker.report(Enqueued([mine, others]))
    system.pass_seconds()
    mine_id, others_id = str(UUID(bytes=mine.id)), str(UUID(bytes=others.id))
    shown = CliRunner().invoke(main, ["tasks", "show", handle.id]).stdout
    assert mine_id in shown.partition("Tasks that it enqueued:")[2]
    assert f"enqueued by  {handle.id}, job" in CliRunner().invoke(main, ["tasks", "show", mine_id]).stdout
    server = ApiClient(system.settings)
    asked = [("GET", f"/api/v1/tasks/{mine_id}"), ("GET", f"/api/v1/tasks/{mine_id}/lineage")]
    asked += [("GET", f"/api/v1/tasks/{handle.id}/lineage"), ("GET", f"/ui/tasks/{handle.id}")]
    child, up, down, page = server.send_all(*asked)
    assert child.json()["parent"] == handle.id
    assert up.json()["parent"]["id"] == handle.id
    assert [one["id"] for one in down.json()["children"]] == [mine_id, others_id]
    assert f"/ui/tasks/{others_id}" in page.text
    assert f"/ui/tasks/{handle.id}" in server.get(f"/ui/tasks/{mine_id}").text
    secret = make_key(system.engine, Scope.READ, queues="default")
    try:
        bound, page, hidden = server.send_all(*asked[2:], ("GET", f"/api/v1/tasks/{others_id}/lineage"), key=secret)
        assert [one["id"] for one in bound.json()["children"]] == [mine_id]
        assert others_id not in page.text
        assert hidden.status_code == 404
    finally:
        system.sql("DELETE FROM orchestrator.api_keys")


def test_a_deleted_parent_is_reported_as_no_longer_kept(system: System, in_empty_folder: object) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    child = own(task, 1)
    worker.report(Enqueued([child]), Succeeded(task.id, 1, 0.1, ONE))
    system.pass_seconds()
    system.sql("DELETE FROM orchestrator.ended_tasks")
    shown = CliRunner().invoke(main, ["tasks", "show", str(UUID(bytes=child.id))]).stdout
    assert f"enqueued by  {handle.id}, which is no longer kept" in shown
