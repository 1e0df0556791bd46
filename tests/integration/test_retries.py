"""Retries decided by the leader, and bulk retries of failed tasks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from orchestrator import InvalidTask, Retry
from orchestrator.cli import main
from orchestrator.domain.tasks.task import Dispatch, Failed, TaskError
from orchestrator.store.tasks.redrive import FailedFilter
from tests.integration.stage import System, Worker


def fail(worker: Worker, *tasks: Dispatch, error: TaskError, **more: Any) -> None:
    worker.report(*(Failed(task.id, task.attempt, 0.1, error, **more) for task in tasks))


def fail_all(system: System, worker: Worker, error: TaskError) -> None:
    """Dispatch and fail all pending tasks, until none is open."""

    def none_left() -> bool:
        fail(worker, *worker.take(), error=error, retryable=False)
        system.tick()
        return system.count("tasks") == 0

    system.pass_seconds()
    system.tick_until(none_left)


# -- retries requested by workers


def test_retry_later_does_not_count_as_a_failure(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch(retries=1)
    (task,) = worker.take()
    fail(worker, task, error=TaskError("RetryLater", "too early"), delay=3600.0, charged=False)
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["failures"]) == ("pending", 0)
    assert row["wake_at"] > datetime.now(UTC) + timedelta(minutes=59)
    (attempt,) = system.sql("SELECT attempt, outcome, error FROM orchestrator.attempts")
    assert (attempt["attempt"], attempt["outcome"], attempt["error"]["message"]) == (1, "postponed", "too early")


def test_a_delay_computed_by_the_worker_overrides_the_backoff(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch(retries=Retry(max=1, base=60))
    fail(worker, *worker.take(), error=TaskError("E", "x"), delay=7200.0)
    system.tick()
    assert system.row(handle)["wake_at"] > datetime.now(UTC) + timedelta(minutes=119)


def test_a_dispatch_carries_the_number_of_failures(system: System) -> None:
    worker = system.worker()
    system.dispatch(retries=Retry(max=5, base=0.001, jitter=0))
    (task,) = worker.take()
    assert task.failures == 0
    fail(worker, task, error=TaskError("E", "x"))
    again: list[Dispatch] = []
    system.tick_until(lambda: again.extend(worker.take()) or again)
    assert (again[0].attempt, again[0].failures) == (2, 1)


def test_retry_on_accepts_only_exception_types_or_names() -> None:
    for given in ("not a name", "", "a..b", int, [ValueError, 3]):
        with pytest.raises(InvalidTask, match=r"Retry: expected types of exceptions, or their names such as .* in on="):
            Retry(on=given)  # type: ignore[arg-type]


def test_backoff_may_be_a_list_of_delays(system: System) -> None:
    worker = system.worker()
    handle = system.job.options(retries=Retry(backoff=[0, timedelta(hours=1)], jitter=0)).enqueue(1)
    system.pass_seconds()
    fail(worker, *worker.take(), error=TaskError("E", "x"))
    again: list[Dispatch] = []
    system.tick_until(lambda: again.extend(worker.take()) or again)
    fail(worker, *again, error=TaskError("E", "x"))
    system.pass_seconds(2)
    wait = system.sql("SELECT extract(epoch FROM wake_at - now()) AS wait FROM orchestrator.tasks")[0]["wait"]
    assert 3500 < wait <= 3600
    assert handle.status() == "pending"


def test_a_backoff_function_belongs_on_the_decorator(system: System) -> None:
    task = system.app.task(name="own", retries=Retry(backoff=lambda failures: failures))(lambda: None)
    assert task.options(priority=3)._call_options.policy.backoff == "computed"
    with pytest.raises(InvalidTask, match="a backoff function belongs on the decorator of task 'job'"):
        system.job.options(retries=Retry(backoff=lambda failures: failures))


# -- bulk retries


@pytest.fixture
def failed(system: System) -> System:
    """Six failed tasks, of two names, two queues and two errors, and a successful one."""
    other = system.app.task(name="other")(lambda number=0: number)
    default = system.worker(knows=["job", "other"])
    mail = system.worker("w2", knows=["job", "other"], queue="mail")
    for number in range(3):
        system.job.enqueue(number)
    fail_all(system, default, TaskError("ValueError", "no such Customer"))
    other.enqueue()
    fail_all(system, default, TaskError("ConnectionError", "refused"))
    system.job.options(queue="mail").enqueue()
    other.options(queue="mail").enqueue()
    fail_all(system, mail, TaskError("ConnectionError", "refused"))
    (handle,) = system.dispatch()
    default.succeed(*default.take())
    system.tick()
    assert handle.status() == "success"
    return system


def opened(system: System) -> list[tuple[str, str]]:
    return [
        (row["name"], row["queue"])
        for row in system.sql("SELECT name, queue FROM orchestrator.tasks WHERE failures = 0 ORDER BY name, queue")
    ]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"queue": "mail"}, [("job", "mail"), ("other", "mail")]),
        ({"name": "other"}, [("other", "default"), ("other", "mail")]),
        ({"error": "customer"}, [("job", "default")] * 3),
        ({"error": "ConnectionError: ref", "queue": "default"}, [("other", "default")]),
        ({"error": "nothing of the kind"}, []),
        ({"until": datetime(2020, 1, 1, tzinfo=UTC)}, []),
        ({"since": datetime(2020, 1, 1, tzinfo=UTC), "name": "job"}, [("job", "default")] * 3 + [("job", "mail")]),
    ],
)
def test_a_filter_selects_the_tasks_to_retry(
    failed: System, wanted: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    for worker in failed.workers:
        worker.die()
    failed.pass_seconds()
    assert failed.app.retry_failed(**wanted) == len(expected)
    failed.tick(3)
    assert opened(failed) == expected
    assert failed.count("inbox") == 0


def test_a_filter_by_error_type_ignores_error_messages(failed: System) -> None:
    failed.sql('UPDATE orchestrator.ended_tasks SET error = error || \'{"message": "after a ValueError"}\'')
    for worker in failed.workers:
        worker.die()
    failed.pass_seconds()
    assert failed.app._client.backend.tasks.retry_failed(FailedFilter(kind="ValueError")) == 3
    failed.tick(3)
    assert opened(failed) == [("job", "default")] * 3


def test_a_filter_by_release_matches_nothing_on_older_leaders(failed: System) -> None:
    failed.sql(
        "INSERT INTO orchestrator.worker_releases (worker, release, started_at, until)"
        " VALUES ('w1', 'r1', now(), now() + interval '1 day'), ('w2', 'r2', now(), now() + interval '1 day')"
    )
    for worker in failed.workers:
        worker.die()
    failed.pass_seconds()
    tasks = failed.app._client.backend.tasks
    assert tasks.retry_failed(FailedFilter(release="r3")) == 0
    assert tasks.retry_failed(FailedFilter(release="r2")) == 2
    assert tasks.retry_failed(FailedFilter(release="r1", kind="ConnectionError")) == 1
    stored = [row["kind"] for row in failed.sql("SELECT body->>'kind' AS kind FROM orchestrator.inbox ORDER BY id")]
    assert stored == ["# ", "# ConnectionError"], "which the previous release takes for types without tasks"
    found = failed.sql("SELECT id, name, queue FROM orchestrator.ended_tasks WHERE status = 'failed'")
    meant = {(row["name"], row["queue"]) for row in found if tasks.status(row["id"].bytes) == "pending"}
    assert meant == {("job", "mail"), ("other", "default"), ("other", "mail")}, "callers hear of it at once"
    failed.tick(3)
    assert opened(failed) == [("job", "mail"), ("other", "default"), ("other", "mail")]


def test_a_bulk_retry_in_slices_retries_each_task_once(failed: System) -> None:
    """A task that fails again during the bulk retry is not retried a second time."""
    object.__setattr__(failed.scheduler._settings, "batch", 1)
    assert failed.app.retry_failed(name="job") == 4
    worker = failed.workers[0]
    for _ in range(12):
        fail(worker, *worker.take(), error=TaskError("ValueError", "no such Customer"), retryable=False)
        failed.tick()
    attempts = failed.sql("SELECT attempt FROM orchestrator.ended_tasks WHERE name = 'job' AND status = 'failed'")
    assert [row["attempt"] for row in attempts] == [2] * 3
    assert [row["queue"] for row in failed.sql("SELECT queue FROM orchestrator.tasks WHERE name = 'job'")] == ["mail"]
    assert failed.count("inbox") == 0


@pytest.fixture
def run(failed: System, in_empty_folder: Path) -> Callable[..., Result]:
    return lambda *words, **more: CliRunner().invoke(main, ["tasks", "retry", *words], **more)


def test_the_retry_command_previews_and_asks_for_confirmation(failed: System, run: Callable[..., Result]) -> None:
    shown = run("--name", "job", "--dry-run")
    assert shown.exit_code == 0
    assert "ValueError: no such Customer" in shown.output
    assert failed.count("inbox") == 0
    declined = run("--name", "job", input="n\n")
    assert "Retry 4 tasks?" in declined.output
    assert (declined.exit_code, failed.count("inbox")) == (1, 0)
    accepted = run("--queue", "mail", "--error", "refused", "--since", "1h", "--yes")
    assert "Asked to retry 2 tasks." in accepted.output
    assert failed.count("inbox") == 1


def test_the_retry_command_requires_ids_or_a_filter(run: Callable[..., Result], failed: System) -> None:
    assert "Give the ids of tasks, or select failed tasks with" in run().output
    assert "No failed task matches." in run("--name", "unheard-of", "--yes").output
    assert failed.count("inbox") == 0
