"""Two operators act on the same task, group or run; the second one learns that it has changed."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from orchestrator import Handle
from orchestrator.api.app import create_app
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.sdk.dag.definitions import loads
from orchestrator.store.tasks import revival
from orchestrator.transport import journal
from orchestrator.transport.codec import ProgressMark
from tests.integration.stage import System, Worker, raw
from tests.integration.visitor import Visitor


def operator(system: System) -> Visitor:
    visitor = Visitor(create_app(system.settings))
    visitor.get("/ui/tasks")
    return visitor


def form(page: str, action: str) -> dict[str, Any]:
    """Return the hidden fields of a form."""
    body, *_ = re.findall(rf'<form method="post" action="{action}"[^>]*>(.*?)</form>', page, re.DOTALL)
    found = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', body))
    return {name: value for name, value in found.items() if name not in ("token", "back")}


def fail(system: System, worker: Worker) -> list[Dispatch]:
    """Dispatch the ready tasks and report them as failed."""
    system.pass_seconds()
    taken = worker.take()
    worker.fail(*taken, retryable=False)
    system.pass_seconds()
    return taken


def attempt(system: System, task: Handle[Any]) -> int:
    return int(system.row(task)["attempt"])


def test_a_second_retry_from_a_stale_page_is_rejected(system: System) -> None:
    worker = system.worker(knows=("job",), slots=9)
    task = system.job.enqueue(1)
    fail(system, worker)
    path = f"/ui/tasks/{task.id}"
    ada, bob = operator(system), operator(system)
    seen = form(ada.get(path).text, f"{path}/retry")
    assert seen == form(bob.get(path).text, f"{path}/retry") == {"attempt": "1"}
    ada.post(f"{path}/retry", **seen)
    assert ada.said() == "A retry is requested."
    bob.post(f"{path}/retry", **seen)
    assert "its retry is requested; it was retried by " in bob.said(), "at the same moment"
    assert len(fail(system, worker)) == 1
    bob.post(f"{path}/retry", **seen)
    assert "it is now failed in attempt 2; it was retried by " in bob.said()
    assert fail(system, worker) == []
    bob.post(f"{path}/retry", **form(bob.get(path).text, f"{path}/retry"))
    assert len(fail(system, worker)) == 1, "who has looked again may"


def test_a_retry_request_applies_only_to_its_attempt(system: System) -> None:
    worker = system.worker(knows=("job",), slots=9)
    task = system.job.enqueue(1)
    fail(system, worker)
    for _ in range(2):  # a request that the leader reads late, such as while another transaction holds the key
        with system.engine.begin() as connection:
            assert revival.request_retry(connection, raw(task), 1) is None
        fail(system, worker)
    assert attempt(system, task) == 2


def test_a_stale_cancel_of_a_retried_task_is_rejected(system: System) -> None:
    worker = system.worker(knows=("job",), slots=9)
    task = system.job.enqueue(1)
    path = f"/ui/tasks/{task.id}"
    ada, bob = operator(system), operator(system)
    waiting = form(ada.get(path).text, f"{path}/cancel")
    fail(system, worker)
    ada.post(f"{path}/retry", attempt="1")
    system.pass_seconds()
    (running,) = worker.take()
    worker.start(running)
    bob.post(f"{path}/cancel", **waiting)
    assert "in attempt 2; it was retried by " in bob.said()
    bob.post("/ui/tasks/cancel-chosen", id=f"{task.id}@{waiting['attempt']}")
    assert bob.said().startswith("0 of 1 tasks are cancelled; 1 skipped")
    bob.post(f"{path}/cancel", **form(bob.get(path).text, f"{path}/cancel"))
    assert bob.said() == "The task is being cancelled."


def test_marked_tasks_that_failed_again_are_skipped(system: System) -> None:
    worker = system.worker(knows=("job",), slots=9)
    tasks = [system.job.enqueue(number) for number in range(2)]
    keyed = system.job.options(unique_key="one").enqueue(9)
    fail(system, worker)
    ada, bob = operator(system), operator(system)
    marks = re.findall(r'name="id" value="([^"]*)" data-may="([^"]*)"', bob.get("/ui/tasks?status=failed").text)
    assert sorted(marks) == sorted((f"{one.id}@1", "retry") for one in (*tasks, keyed))
    marked = [value for value, _ in marks]
    ada.post("/ui/tasks/retry-chosen", id=marked)
    assert ada.said() == "3 of 3 tasks are retried."
    assert len(fail(system, worker)) == 3
    bob.post("/ui/tasks/retry-chosen", id=marked)
    assert bob.said().startswith("0 of 3 tasks are retried; 3 skipped")
    assert fail(system, worker) == []
    system.job.enqueue(5)
    assert 'data-may="cancel"' in bob.get("/ui/tasks?status=pending").text
    assert "Retry all failed" not in bob.get("/ui/tasks?status=pending").text


def test_a_stale_retry_of_a_group_retries_nothing(system: System) -> None:
    worker = system.worker(knows=("job",), slots=9)
    for number in range(3):
        system.job.enqueue(number)
    fail(system, worker)
    ada, bob = operator(system), operator(system)
    counted = [form(one.get("/ui/tasks/retry?name=job").text, "/ui/tasks/retry") for one in (ada, bob)]
    ada.post("/ui/tasks/retry", **counted[0])
    assert ada.said() == "Tasks being retried: 3."
    assert len(fail(system, worker)) == 3
    bob.post("/ui/tasks/retry", **counted[1])
    assert "These tasks are no longer failed" in bob.said()
    assert fail(system, worker) == []


def test_a_second_bulk_cancel_says_that_no_task_is_open(system: System) -> None:
    system.job.enqueue(1)
    system.pass_seconds()
    ada, bob = operator(system), operator(system)
    counted = [form(one.get("/ui/tasks/cancel?name=job").text, "/ui/tasks/cancel") for one in (ada, bob)]
    ada.post("/ui/tasks/cancel", **counted[0])
    assert ada.said() == "Tasks being cancelled: 1."
    system.pass_seconds()
    bob.post("/ui/tasks/cancel", **counted[1])
    assert "These tasks are no longer open: they have ended, or another user cancelled them." in bob.said()


def test_failed_tasks_of_one_run_are_retried_from_its_list(system: System) -> None:
    worker = system.worker(knows=("job",), slots=9)
    system.app.workflows.apply(loads("name: nightly\ntasks:\n  only: {task: job, input: {number: 1}}\n"))
    runs = [system.app.workflows["nightly"].start() for _ in range(2)]
    assert len(fail(system, worker)) == 2
    ada = operator(system)
    page = ada.get(f"/ui/tasks?status=failed&run={runs[0].id}").text
    (path,) = re.findall(r'href="(/ui/tasks/retry\?run=[^"]*)">Retry all failed…', page)
    ada.post("/ui/tasks/retry", **form(ada.get(path.replace("&amp;", "&")).text, "/ui/tasks/retry"))
    assert ada.said() == "Tasks being retried: 1."
    assert len(fail(system, worker)) == 1
    assert [run.progress().status for run in runs] == ["failed", "failed"]
    assert "/ui/tasks/retry?release=r2" in ada.get("/ui/tasks?status=failed&release=r2").text


def test_a_second_enqueue_with_changes_is_rejected_with_the_first(system: System) -> None:
    worker = system.worker(knows=("job",), slots=9)
    task = system.job.enqueue(1)
    fail(system, worker)
    ada, bob = operator(system), operator(system)
    path = f"/ui/tasks/{task.id}/again"
    seen = form(bob.get(path).text, path)
    assert ada.post(path, **seen | {"args": "[2]", "kwargs": "{}"}).status_code == 303
    refused = bob.post(path, **seen | {"args": "[3]", "kwargs": "{}"})
    assert (refused.status_code, "The same task was enqueued by " in refused.text) == (409, True)
    assert "[3]" in refused.text, "what was typed stays"
    assert bob.post(path, **form(refused.text, path) | {"args": "[3]", "kwargs": "{}"}).status_code == 303


def test_a_second_retry_of_a_run_is_rejected(system: System) -> None:
    worker = system.worker(knows=("job",), slots=9)
    system.app.workflows.apply(loads("name: nightly\ntasks:\n  only: {task: job, input: {number: 1}}\n"))
    run = system.app.workflows["nightly"].start()
    fail(system, worker)
    path = f"/ui/runs/{run.id}"
    ada, bob = operator(system), operator(system)
    seen = form(bob.get(path).text, f"{path}/retry")
    (marked,) = re.findall(r'name="id" value="([^"]*)" data-may="retry delete"', bob.get("/ui/runs").text)
    ada.post(f"{path}/retry", **seen)
    assert ada.said() == "Retrying the failed tasks of the run."
    system.pass_seconds()
    bob.post(f"{path}/retry", **seen)
    assert "it is now running; it was retried by " in bob.said()
    assert len(fail(system, worker)) == 1
    bob.post(f"{path}/retry", **seen)
    assert "it is now failed; it was retried by " in bob.said()
    bob.post("/ui/runs/retry-chosen", id=marked)
    assert bob.said().startswith("0 of 1 runs are being retried")
    assert fail(system, worker) == []
    bob.post(f"{path}/retry", **form(bob.get(path).text, f"{path}/retry"))
    assert len(fail(system, worker)) == 1


def test_progress_is_shown_for_running_and_failed_tasks(system: System) -> None:
    worker = system.worker(knows=("job",), slots=9)
    good, bad = system.job.enqueue(1), system.job.enqueue(2)
    system.pass_seconds()
    marks = {UUID(one.id).bytes: ProgressMark(1, 0.95, "step 19") for one in (good, bad)}
    journal.write(system.redis, system.keys, marks)
    visitor = operator(system)
    assert '<span>95 % <span class="soft">step 19' in visitor.get(f"/ui/tasks/{good.id}").text
    taken = {one.id: one for one in worker.take()}
    worker.succeed(taken[UUID(good.id).bytes])
    worker.fail(taken[UUID(bad.id).bytes], retryable=False)
    system.pass_seconds()
    journal.write(system.redis, system.keys, marks)
    assert "step 19" not in visitor.get(f"/ui/tasks/{good.id}").text, "it is done"
    assert '<span>stopped at 95 % <span class="soft">step 19' in visitor.get(f"/ui/tasks/{bad.id}").text
