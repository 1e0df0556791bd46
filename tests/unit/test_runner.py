"""A worker's report of an attempt: its result, or whether the task is retried, delayed or given up."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator import ConfigurationError, GiveUp, Orchestrator, Retry, RetryLater, TaskContext
from orchestrator.domain.executors.builtin import reported
from orchestrator.domain.executors.registry import call_of
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, Dispatch, Failed, Returned, Succeeded, TaskError
from orchestrator.executors import Process
from orchestrator.payloads.stores import MARK
from orchestrator.references import whole_reference
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running import large_results
from orchestrator.workers.running.delivery import discard_interruption
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from tests.outbox import ClosedOutbox
from tests.waiting import eventually


def run(function: Callable[..., Any], failures: int = 0, **options: Any) -> AttemptReport:
    """Run a task like a worker, and return the report."""
    app = Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere")
    task = app.task(name="it", **options)(function)
    new = task._new((), {})
    dispatch = Dispatch(new.id, 1, "it", new.payload, "default", new.options, failures=failures)
    job = Job(dispatch, Bundle("g", "default", "0-1", 1), 0, 0.0)
    job.begin(0.0)
    return Runner(app, ClosedOutbox(), Allowed(app, ())).run(job)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_task_of_an_executor_is_returned_however_it_was_enqueued(is_async: bool) -> None:
    """The row names no executor: the client that enqueued the task knew only its name."""
    ran: list[str] = []

    async def afunction(database: str) -> None:
        ran.append(database)

    def function(database: str) -> None:
        ran.append(database)

    app = Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere")
    call = Process(command=["/usr/bin/tee"])
    app.task(name="it", executor=call)(afunction if is_async else function)
    stub = Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere").task(name="it")(function)
    new = stub._new(("orders",), {})
    job = Job(Dispatch(new.id, 1, "it", new.payload, "default", new.options), Bundle("g", "default", "0-1", 1), 0, 0.0)
    job.begin(0.0)
    runner = Runner(app, ClosedOutbox(), Allowed(app, ()))
    report = runner.run(job)
    assert isinstance(report, Returned)
    assert (report.executor, ran) == (call_of(call), [])
    assert runner.call(job) == ((), {"database": "orders"})


def test_the_kind_of_an_error_reveals_no_secret() -> None:
    """A service names the kind, and may have received the secret."""
    app = Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere")
    new = app.task(name="it", redact=("token",), executor=Process(command=["/usr/bin/tee"]))(_keep)._new(
        ("s3cret",), {}
    )
    job = Job(Dispatch(new.id, 1, "it", new.payload, "default", new.options), Bundle("g", "default", "0-1", 1), 0, 0.0)
    runner = Runner(app, ClosedOutbox(), Allowed(app, ()))
    runner.call(job)
    said = reported({"kind": "Denied s3cret", "message": "no"})
    report = runner.failures.broken(job, TaskError(said.kind, said.message, ""), retryable=True)
    assert "s3cret" not in report.error.kind
    assert report.error.kind.startswith("Denied")
    assert len(reported({"kind": "x" * 1_000}).kind) == 100
    assert reported({"kind": "a\nb"}).kind == "ServiceError"


def test_a_redacted_default_appears_in_no_error() -> None:
    def login(user: str = "eve", token: str = "s3cret") -> None:
        raise ValueError(f"{user} has {token}")

    report = run(login, redact=("token",))
    assert isinstance(report, Failed)
    assert report.error.message == "eve has •••"


def test_an_argument_may_be_called_self() -> None:
    app = Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere")
    given: dict[str, Any] = {"self": 1}
    assert app.task(name="it")(_given)(**given) == given


def _keep(token: str) -> None: ...


def _given(**given: Any) -> dict[str, Any]:
    return given


def fail(error: BaseException, retries: int | Retry = 3, failures: int = 0) -> Failed:
    """Run a task that raises, and return the report."""

    def boom() -> None:
        raise error

    report = run(boom, failures, retries=retries)
    assert isinstance(report, Failed)
    return report


def test_any_error_is_retryable_by_default() -> None:
    report = fail(ValueError("no"))
    assert (report.retryable, report.delay, report.charged) == (True, None, True)
    assert DEFAULT_OPTIONS.retry.on == ()


def test_retry_later_sets_the_delay_without_charging_a_retry() -> None:
    report = fail(RetryLater(30, "the other side is busy"), retries=0)
    assert (report.delay, report.charged) == (30, False)
    assert report.error.message == "the other side is busy"
    assert fail(RetryLater(0.5)).error.message == "asked to be retried in 0.5 s"
    with pytest.raises(ValueError, match="expected the seconds to wait, from 0 to 1e9, found -1"):
        RetryLater(-1)
    with pytest.raises(ValueError, match=r"RetryLater: expected the seconds to wait, from 0 to 1e9, found 'x'"):
        RetryLater("x")  # type: ignore[arg-type]


def test_give_up_prevents_further_retries() -> None:
    report = fail(GiveUp("the account is closed"))
    assert not report.retryable
    assert report.error.message == "the account is closed"


@pytest.mark.parametrize(
    ("retries", "error", "expected"),
    [
        (Retry(on=(OSError,)), ConnectionRefusedError(), True),
        (Retry(on=(OSError,)), ValueError(), False),
        (Retry(on=OSError), OSError(), True),
        (Retry(on="OSError"), ConnectionRefusedError(), True),
        (Retry(on=["ValueError"]), ConnectionRefusedError(), False),
        (Retry(on="json.JSONDecodeError"), json.JSONDecodeError("no", "", 0), True),
        (Retry(on="json.decoder.JSONDecodeError"), json.JSONDecodeError("no", "", 0), True),
        (Retry(on="nowhere.Error"), json.JSONDecodeError("no", "", 0), False),
        (Retry(give_up_on=["LookupError", ValueError]), KeyError(), False),
        (Retry(give_up_on=(LookupError,)), KeyError(), False),
        (Retry(give_up_on=(LookupError,)), ValueError(), True),
        (Retry(on=(Exception,), give_up_on=(KeyError,)), KeyError(), False),
        (Retry(on=(RetryLater,)), GiveUp("no"), False),
    ],
)
def test_retries_depend_on_the_type_of_the_error(retries: Retry, error: BaseException, expected: bool) -> None:
    assert fail(error, retries).retryable is expected


def test_a_custom_backoff_is_computed_by_the_worker() -> None:
    retries = Retry(max=9, backoff=lambda failures: 10.0 * failures, cap=25)
    assert [fail(ValueError(), retries, failures).delay for failures in (0, 1, 2)] == [10, 20, 25]


def test_a_failing_custom_backoff_leaves_the_delay_to_the_scheduler() -> None:
    report = fail(ValueError(), Retry(backoff=lambda failures: failures / 0))
    assert (report.retryable, report.delay) == (True, None)


def test_a_result_that_is_not_stored_need_not_be_serializable() -> None:
    kept, dropped = run(lambda: [1, 2]), run(lambda: object(), store_result=False)
    assert isinstance(kept, Succeeded)
    assert isinstance(dropped, Succeeded)
    assert (kept.result, dropped.result) == (b"\x92\x01\x02", b"\xc0")


def test_calls_can_be_profiled_after_a_discarded_interruption() -> None:
    """In Python 3.11, a thread that profiles its calls hangs forever while an exception seems to be pending."""

    def take_back_and_watch() -> None:
        discard_interruption()
        sys.setprofile(lambda *_: None)
        try:
            str.upper("a")
            (lambda: None)()
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=take_back_and_watch, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_worker_without_a_database_returns_tasks_that_need_the_database(caplog: pytest.LogCaptureFixture) -> None:
    def pays(ctx: TaskContext) -> None:
        with ctx.transaction():
            raise AssertionError("there is none")

    async def pays_later(ctx: TaskContext) -> None:
        pays(ctx)

    for function in (pays, pays_later):
        caplog.clear()
        report = run(function, retries=0)
        assert isinstance(report, Returned)
        assert (report.unknown, report.reason) == ("it", "no database")
        assert ["`orchestrator worker --database`.: the task waits" in line for line in caplog.messages] == [True]


def test_a_task_may_handle_the_missing_database_itself() -> None:
    def goes_on(ctx: TaskContext) -> str:
        with pytest.raises(ConfigurationError), ctx.transaction():
            pass
        return "without"

    def gives_up(ctx: TaskContext) -> None:
        try:
            with ctx.transaction():
                pass
        except ConfigurationError as error:
            raise GiveUp("not here") from error

    assert isinstance(run(goes_on), Succeeded)
    report = run(gives_up)
    assert isinstance(report, Failed)
    assert not report.retryable


def test_an_output_that_is_too_large_fails_the_task_without_retries() -> None:
    def writes(ctx: TaskContext) -> None:
        with ctx.open_output() as output:
            output.write(bytes(10_000_000))

    report = run(writes, retries=2)
    assert isinstance(report, Failed)
    assert (report.error.kind, report.retryable) == ("orchestrator.errors.PayloadError", False)


def test_an_output_waits_for_a_full_store_before_the_task_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Orchestrator(
        database_url="postgresql://nowhere",
        redis_url="redis://nowhere",
        payload_store=str(tmp_path),
        inline_payload=1_000,
    )
    data = os.urandom(3_000_000)
    (tmp_path / "orchestrator").mkdir()
    (tmp_path / "orchestrator" / MARK).touch()

    @app.task(name="it")
    def write(ctx: TaskContext) -> None:
        with ctx.open_output() as output:
            output.write(data)

    runner = Runner(app, ClosedOutbox(), Allowed(app, ()))

    def run() -> AttemptReport:
        new = write._new((), {})
        job = Job(Dispatch(new.id, 1, "it", new.payload, "default", new.options), Bundle("", "default", "1", 1), 0, 0.0)
        job.begin(0.0)
        return runner.run(job)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, limits[1]))  # in the middle of a chunk
    try:
        with ThreadPoolExecutor(1) as threads:
            report = threads.submit(run)
            eventually(lambda: runner._results._outage.is_ongoing, "that it waits")
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            done = report.result(60)
        assert isinstance(done, Succeeded)
        reference = whole_reference(done.result)
        assert reference is not None
        assert runner._results._store.encoded(reference) == msgspec.msgpack.encode(data)  # type: ignore[union-attr]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, limits[1]))
        monkeypatch.setattr(large_results, "_STORE_TIMEOUT", 0.0)
        assert isinstance(run(), Returned)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
