"""RQ programs run with only their imports changed, on real schedulers and workers."""

from __future__ import annotations

import importlib
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import rq_shop
from rq_shop import queue

from orchestrator.compat.rq import Callback, Job, Queue, Repeat, Retry, app, cancel_job, requeue_job
from orchestrator.compat.rq.exceptions import (
    DuplicateJobError,
    InvalidJobOperation,
    NoSuchJobError,
    TimeoutFormatError,
)
from orchestrator.compat.rq.job import Dependency, JobStatus, Result
from orchestrator.compat.rq.registry import FailedJobRegistry, FinishedJobRegistry
from orchestrator.compat.rq.scheduler import Scheduler
from orchestrator.errors import InvalidTask, OrchestratorError, PayloadError
from tests.acceptance.stack import HERE, Stack
from tests.waiting import eventually

application = app
SETTINGS = {"heartbeat": 0.5}


@pytest.fixture(scope="module")
def shop(leading: Stack) -> Stack:
    worker = leading._start("worker", ["rq", "worker", "--allow", "rq_shop", "--processes", "2", "high", "mail"], HERE)
    eventually(lambda: worker.logged("process.ready", 2), f"worker ready, see {worker.log}")
    return leading


def ended(job: Job) -> Result:
    found = job.latest_result(timeout=30)
    assert found is not None, job.get_status()
    return found


def words(folder: Path) -> list[str]:
    path = folder / "words"
    return path.read_text().splitlines() if path.exists() else []


def test_a_job_is_enqueued_run_and_read(shop: Stack) -> None:
    job = queue.enqueue(
        rq_shop.send, "ann", datetime(2026, 1, 1, tzinfo=UTC), copies=2, job_timeout="1m", meta={"a": 1}
    )

    assert ended(job).type is Result.Type.SUCCESSFUL
    assert job.result == job.return_value() == {"to": "ann", "is_time": True, "copies": 2}
    assert job.get_status() == "finished"
    assert job.is_finished
    found = Job.fetch(job.id)
    assert (found, found.func_name, found.origin, found.args[0], found.kwargs) == (
        job,
        "rq_shop.send",
        "mail",
        "ann",
        {"copies": 2},
    )
    assert (found.timeout, found.meta, found.exc_info, found.func) == (60, {"a": 1}, None, rq_shop.send)
    assert found.created_at <= found.started_at <= found.ended_at
    assert job.id in FinishedJobRegistry(queue=queue)


def test_functions_may_be_named_async_and_decorated(shop: Stack) -> None:
    jobs = [
        queue.enqueue("rq_shop.later", 1),
        queue.enqueue_call("rq_shop.later", args=(2,), timeout=5),
        queue.enqueue(rq_shop.later, args=(3,)),
        rq_shop.decorated.delay("x"),
    ]
    assert [ended(job).return_value for job in jobs] == [2, 3, 4, "X"]
    assert rq_shop.decorated("y") == "Y"


def test_many_jobs_are_enqueued_at_once(shop: Stack) -> None:
    jobs = queue.enqueue_many(Queue.prepare_data(rq_shop.later, (number,)) for number in range(5))
    assert [ended(job).return_value for job in jobs] == [1, 2, 3, 4, 5]
    assert Job.fetch_many([jobs[0].id, "nobody"]) == [jobs[0], None]


def test_a_failed_job_is_kept_with_its_traceback_and_can_run_again(shop: Stack, tmp_path: Path) -> None:
    job = queue.enqueue(rq_shop.flaky, str(tmp_path), 1)

    assert ended(job).type is Result.Type.FAILED
    assert job.is_failed
    assert job.result is None
    assert "OSError: try 1" in (job.exc_info or "")
    assert job in FailedJobRegistry("mail")
    assert requeue_job(job.id) == job
    assert eventually(lambda: Job.fetch(job.id).is_finished, "it ran again")
    assert Job.fetch(job.id).result == 2


def test_retries_have_their_intervals(shop: Stack, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    retried = queue.enqueue(rq_shop.flaky, str(tmp_path), 2, retry=Retry(max=3, interval=[0, 1]))
    asking = queue.enqueue(rq_shop.again, str(tmp_path / "other"))

    assert ended(retried).return_value == 3
    assert retried._read().options["retry"]["intervals"] == [0, 1, 1]
    assert ended(asking).return_value == 2


def test_jobs_start_at_their_time(shop: Stack) -> None:
    soon = queue.enqueue_in(timedelta(seconds=1), rq_shop.later, 1)
    moment = datetime.now(UTC) + timedelta(hours=1)
    late = queue.enqueue_at(moment, rq_shop.later, 1, description="late")

    assert late.get_status() is JobStatus.SCHEDULED
    registry = queue.scheduled_job_registry
    assert late.id in registry
    assert abs(registry.get_scheduled_time(late) - moment) < timedelta(seconds=2)
    assert Job.fetch(late.id).description == "late"
    cancel_job(late.id)
    assert ended(soon).return_value == 2
    assert eventually(lambda: late.id in queue.canceled_job_registry, "it was cancelled")
    with pytest.raises(InvalidJobOperation):
        soon.requeue()


def test_a_job_waits_for_its_dependencies(shop: Stack, tmp_path: Path) -> None:
    held = queue.enqueue(rq_shop.hold, str(tmp_path))
    other = queue.enqueue(rq_shop.decorated, "b")
    job = Queue("high").enqueue(rq_shop.sum_up, depends_on=[held, other])

    eventually(lambda: (tmp_path / "began").exists(), "the first has begun")
    eventually(lambda: held.is_started, "and is known to have")
    assert job.get_status() is JobStatus.DEFERRED
    assert job.id in Queue("high").deferred_job_registry.get_job_ids()
    (tmp_path / "go").touch()
    assert ended(job).return_value == ["B", "held"]
    assert [one.id for one in job.fetch_dependencies()] == [held.id, other.id]


def test_a_failed_dependency_fails_the_job_unless_allowed(shop: Stack) -> None:
    failed = queue.enqueue(rq_shop.fail, "no")
    bound = queue.enqueue(rq_shop.later, 1, depends_on=failed)
    free = queue.enqueue(rq_shop.later, 1, depends_on=Dependency(failed, allow_failure=True))

    assert ended(free).return_value == 2
    assert failed.id in (ended(bound).exc_string or "")


def test_callbacks_are_called_in_the_job(shop: Stack, tmp_path: Path) -> None:
    both: dict[str, Any] = {"on_success": rq_shop.on_success, "on_failure": Callback("rq_shop.on_failure")}
    good = queue.enqueue(rq_shop.with_folder, "fine", folder=str(tmp_path), **both)
    assert ended(good).return_value == "fine"
    assert words(tmp_path) == [f"success {good.id} fine"]

    bad = queue.enqueue(rq_shop.with_folder, "bad", folder=str(tmp_path), **both)
    assert ended(bad).type is Result.Type.FAILED
    assert words(tmp_path)[1:] == ["failure KeyError 'bad'"]


def test_a_stopped_job_calls_its_callback(shop: Stack, tmp_path: Path) -> None:
    job = queue.enqueue(rq_shop.hold, str(tmp_path), on_stopped=rq_shop.on_stopped)
    eventually(lambda: (tmp_path / "began").exists(), "it has begun")
    job.cancel()

    assert job.is_canceled
    eventually(lambda: words(tmp_path) == ["stopped"], "the callback was called")
    assert Job.fetch(job.id).is_canceled


def test_a_blocking_job_is_stopped_or_times_out_with_its_callbacks(shop: Stack, tmp_path: Path) -> None:
    late = tmp_path / "late"
    late.mkdir()
    both: dict[str, Any] = {"on_stopped": rq_shop.on_stopped, "on_failure": rq_shop.on_timeout}
    job = queue.enqueue(rq_shop.block, str(tmp_path), **both)
    slow = queue.enqueue(rq_shop.block, str(late), job_timeout=1, **both)
    eventually(lambda: (tmp_path / "began").exists(), "it has begun")
    job.cancel()

    eventually(lambda: words(tmp_path) == ["stopped"], "the callback of the stop was called", 30)
    assert ended(slow).type is Result.Type.FAILED
    eventually(lambda: words(late) == ["failure JobTimeoutException"], "the callback of the failure was called", 30)


def test_arguments_and_results_keep_the_types_that_pickle_keeps(shop: Stack) -> None:
    day, key = datetime(2020, 1, 1), UUID(int=7)
    value = {"a": (day, timedelta(days=1)), "b": [{Decimal("1.10")}, b"x", day.date()], key: frozenset([key])}
    job = queue.enqueue(rq_shop.give, value, day, timedelta(1), (1,), {1}, key, Decimal("1.0"))

    names = ["datetime", "timedelta", "tuple", "set", "UUID", "Decimal"]
    assert ended(job).return_value == (value, names)
    found = Job.fetch(job.id)
    assert (found.args[0], found.args[3]) == (value, (1,))
    assert found.get_call_string().endswith("(1,), {1}, UUID('00000000-0000-0000-0000-000000000007'), Decimal('1.0'))")
    assert ended(queue.enqueue(rq_shop.named, Path("a"), timedelta(1))).return_value == [True, "timedelta"]


def test_a_value_whose_type_would_change_is_rejected(shop: Stack, tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match=r"PosixPath would not keep its type"):
        queue.enqueue(rq_shop.give, [Path("a")])
    with pytest.raises(PayloadError, match="JobStatus"):
        queue.enqueue("rq_shop.give", JobStatus.FAILED)
    job = queue.enqueue(rq_shop.make, "a", retry=Retry(max=3))
    assert "PosixPath would not keep its type" in (ended(job).exc_string or "")
    assert Job.fetch(job.id)._read().attempt == 1
    assert ended(queue.enqueue(rq_shop.make, "a", result_ttl=0)).type is Result.Type.SUCCESSFUL


def test_queries_about_jobs_and_queues_answer_as_in_rq(shop: Stack) -> None:
    idle = Queue("idle-2")
    job = idle.enqueue(rq_shop.send, "x" * 100, copies=2)
    assert job.get_call_string() == f"rq_shop.send('{'x' * 74}, copies=2)"
    assert (Job.exists(job.id), Job.exists("nobody"), job.results()) == (True, False, [])
    importlib.import_module("orchestrator.compat.rq.command").send_stop_job_command(None, job.id)
    eventually(lambda: [one.type for one in Job.fetch(job.id).results()] == [Result.Type.STOPPED], "it was cancelled")
    idle.enqueue(rq_shop.send, "y")
    idle.delete()
    eventually(idle.is_empty, "it is empty")
    with pytest.raises(OrchestratorError, match="Job.get_position is not covered: see"):
        job.get_position()


def test_a_callback_that_the_worker_does_not_allow_is_not_called(shop: Stack, tmp_path: Path) -> None:
    job = queue.enqueue(rq_shop.with_folder, "fine", folder=str(tmp_path), on_success="os.system")
    assert "not among the functions that this worker allows" in (ended(job).exc_string or "")


def test_the_meta_of_a_running_job_is_visible(shop: Stack, tmp_path: Path) -> None:
    job = queue.enqueue(rq_shop.step, str(tmp_path), 3, meta={"by": "ann"})
    eventually(lambda: Job.fetch(job.id).meta == {"by": "ann", "done": 3}, "its meta is seen")
    (tmp_path / "go").touch()
    assert ended(job).return_value == "held"
    assert job.get_meta() == {"by": "ann", "done": 3}
    with pytest.raises(InvalidJobOperation, match="only the running job"):
        job.save_meta()


def test_a_job_repeats(shop: Stack, tmp_path: Path) -> None:
    first = queue.enqueue(rq_shop.note, str(tmp_path), "x", repeat=Repeat(times=2, interval=[0, 1]))
    eventually(lambda: words(tmp_path) == ["x"] * 3, "three runs")
    assert ended(first).type is Result.Type.SUCCESSFUL


def test_a_job_enqueues_another(shop: Stack) -> None:
    inner = ended(queue.enqueue(rq_shop.spawn, 4)).return_value
    assert ended(Job.fetch(inner)).return_value == 5


def test_a_job_can_have_a_chosen_id(shop: Stack, tmp_path: Path) -> None:
    job = queue.enqueue(rq_shop.hold, str(tmp_path), job_id="report-7")
    assert job.id == "report-7"
    assert queue.enqueue(rq_shop.hold, str(tmp_path), job_id="report-7") == job
    with pytest.raises(DuplicateJobError, match="is open"):
        queue.enqueue(rq_shop.hold, str(tmp_path), job_id="report-7", unique=True)
    (tmp_path / "go").touch()
    assert ended(Job.fetch("report-7")).return_value == "held"
    assert "report-7" in queue.finished_job_registry
    with pytest.raises(DuplicateJobError, match="has ended"):
        queue.enqueue(rq_shop.hold, str(tmp_path), job_id="report-7")
    with pytest.raises(NoSuchJobError):
        Job.fetch("report-8")


def test_jobs_of_a_queue_without_workers_are_listed_and_removed(shop: Stack) -> None:
    idle = Queue("idle")
    jobs = [idle.enqueue(rq_shop.later, number, at_front=number == 1) for number in range(3)]
    assert idle.job_ids == [job.id for job in jobs]
    assert (idle.count, len(idle), idle.is_empty(), jobs[0].is_queued) == (3, 3, False, True)
    assert idle.fetch_job(jobs[0].id) == jobs[0]
    assert queue.fetch_job(jobs[0].id) is None
    assert idle in Queue.all()
    idle.remove(jobs[0])
    idle.empty()
    eventually(idle.is_empty, "it is empty")


def test_a_synchronous_queue_runs_jobs_in_the_caller(shop: Stack, tmp_path: Path) -> None:
    here = Queue(is_async=False)
    job = here.enqueue(rq_shop.with_folder, "x", folder=str(tmp_path), on_success=rq_shop.on_success)
    assert (job.is_finished, job.result, len(words(tmp_path))) == (True, "x", 1)
    failed = here.enqueue(rq_shop.fail, "no")
    assert failed.is_failed
    assert "ValueError: no" in (failed.exc_info or "")


def test_a_function_that_was_not_allowed_is_not_run(shop: Stack) -> None:
    job = queue.enqueue("os.getpid")
    eventually(lambda: Job.fetch(job.id)._read().hold or Job.fetch(job.id)._read().attempt, "a worker has looked at it")
    assert not Job.fetch(job.id).is_finished
    job.cancel()


def test_invalid_jobs_are_rejected(shop: Stack) -> None:
    with pytest.raises(InvalidTask, match="top of a module"):
        queue.enqueue(lambda: None)
    with pytest.raises(InvalidTask, match="does not unpickle objects"):
        queue.enqueue("text".upper)
    with pytest.raises(InvalidTask, match="webhooks"):
        queue.enqueue(rq_shop.send, "x", webhooks=["https://example.com"])
    with pytest.raises(TimeoutFormatError):
        queue.enqueue(rq_shop.send, "x", job_timeout="soon")
    with pytest.raises(ImportError, match="orchestrator rq worker"):
        from orchestrator.compat.rq import Worker  # noqa: F401
    with pytest.raises(ImportError, match="orchestrator rq worker"):
        importlib.import_module("orchestrator.compat.rq.worker").SimpleWorker  # noqa: B018


def test_rq_scheduler_repeats_jobs(shop: Stack, tmp_path: Path) -> None:
    scheduler = Scheduler("mail")
    job = scheduler.schedule(
        datetime.now(UTC), rq_shop.note, args=[str(tmp_path)], kwargs={"word": "${x}"}, interval=1, id="often"
    )
    nightly = scheduler.cron("0 3 * * *", "rq_shop.later", args=[1], id="nightly")
    late = scheduler.enqueue_in(timedelta(hours=1), rq_shop.later, 1)

    eventually(lambda: words(tmp_path)[:2] == ["${x}"] * 2, "it runs again and again")
    assert {one.id for one in scheduler.get_jobs()} >= {"often", "nightly", late.id}
    times = {one.id: moment for one, moment in scheduler.get_jobs(with_times=True)}
    assert (times["nightly"].hour, times["nightly"].minute) == (3, 0)
    for one in (job, nightly, late):
        assert one in scheduler
        scheduler.cancel(one)
    eventually(lambda: not {"often", "nightly", late.id} & {one.id for one in scheduler.get_jobs()}, "all are gone")


def test_a_job_with_dependencies_fails_on_a_worker_without_database(shop: Stack) -> None:
    given = shop.environment
    shop.environment = {name: value for name, value in given.items() if name != "ORCHESTRATOR_DATABASE_URL"}
    worker = shop._start("worker", ["rq", "worker", "--allow", "rq_shop", "poor"], HERE)
    shop.environment = given
    eventually(lambda: worker.logged("process.ready"), f"worker ready, see {worker.log}")
    poor = Queue("poor")
    first = poor.enqueue(rq_shop.later, 1)
    assert ended(first).return_value == 2
    told = ended(poor.enqueue(rq_shop.later, 1, depends_on=first)).exc_string or ""
    assert "its worker cannot check them" in told
