"""Calls that the context of a task accepts, and their effects."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from orchestrator import InvalidTask, Orchestrator, PayloadError, TaskAborted, TaskContext, TaskTimeout
from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.domain.tasks.outcomes import fold_notes as fold
from orchestrator.domain.tasks.task import Dispatch, Failed, Noted, Returned, Succeeded, TaskError
from orchestrator.sdk.values.payload import decode_value
from orchestrator.transport.codec import ProgressMark, decode, encode
from orchestrator.transport.worker import Receipt
from orchestrator.workers.functions import Allowed
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.pool import Pool
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.task_runtime import JobRuntime
from tests.outbox import ClosedOutbox

TASK = b"t" * 16


def new_job(details: bytes | None = None, options: str | None = None) -> Job:
    dispatch = Dispatch(TASK, 3, "job", b"\x92\x90\x80", "default", options, details=details)
    job = Job(dispatch, Bundle("g", "default", "1-0", 1), 0, 0.0)
    assert job.begin(100.0)
    return job


@pytest.fixture
def outbox() -> ClosedOutbox:
    return ClosedOutbox()


# -- accepted arguments


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "x", None])
def test_progress_must_be_between_zero_and_one(fraction: Any) -> None:
    with pytest.raises(InvalidTask, match="from 0 to 1, found"):
        manual_context().progress(fraction)


def test_unknown_log_levels_are_rejected() -> None:
    with pytest.raises(InvalidTask, match="debug, info, warning, error, found 'loud'"):
        manual_context().log("text", "loud")  # type: ignore[arg-type]


def test_progress_and_log_texts_must_be_strings() -> None:
    with pytest.raises(InvalidTask, match="Progress of task 'big': expected a string, found 7"):
        manual_context().progress(0.5, 7)  # type: ignore[arg-type]
    with pytest.raises(InvalidTask, match=r"Log of task 'big': expected a string, found \['a'\]"):
        manual_context().log(["a"])  # type: ignore[arg-type]


def test_heartbeat_details_must_be_small_and_serializable() -> None:
    manual_context().heartbeat("x" * 9_000)
    with pytest.raises(PayloadError, match=r"'big' saves .* at most 10,000"):
        manual_context().heartbeat("x" * 11_000)
    with pytest.raises(PayloadError, match="cannot be serialised"):
        manual_context().heartbeat(object())


def manual_context() -> TaskContext:
    return TaskContext(task_id=uuid4(), task_name="big", attempt=1, queue="default")


def test_a_manually_created_context_has_no_effect() -> None:
    ctx = manual_context()
    ctx.progress(0.5, "half")
    ctx.log("text")
    ctx.check_cancelled()
    assert (ctx.cancelled, ctx.details, ctx.deadline, ctx.remaining) == (False, None, None, None)


def test_a_plain_call_receives_a_context_if_needed() -> None:
    app = Orchestrator()

    @app.task(name="named")
    def named(ctx: TaskContext, word: str) -> str:
        return f"{word} {ctx.task_name} {ctx.attempt}"

    @app.task
    def last(word: str, *, ctx: TaskContext) -> str:
        return named(word)

    @app.task
    def optional(ctx: TaskContext | None = None) -> bool:
        return ctx is None

    of_last: Any = last  # no type can say that the keyword is filled in
    assert (named("a"), named(word="a"), of_last("b"), optional()) == ("a named 1", "a named 1", "b named 1", True)
    function: Any = named.function
    assert function(TaskContext(attempt=3, task_name="x"), "c") == "c x 3"


# -- effects


def test_progress_and_log_texts_are_truncated(outbox: ClosedOutbox) -> None:
    ctx = JobRuntime(new_job(), outbox).context()
    ctx.progress(1, "x" * 5_000)
    ctx.log("y" * 5_000, "error")
    assert outbox.marks == [(TASK, ProgressMark(3, 1.0, "x" * 1_000))]
    assert [(line.attempt, line.level, line.text) for _, line in outbox.lines] == [(3, "error", "y" * 1_000)]


def test_calls_after_the_end_of_the_task_have_no_effect(outbox: ClosedOutbox) -> None:
    job = new_job()
    ctx = JobRuntime(job, outbox).context()
    job.finish()
    ctx.progress(0.5)
    ctx.log("late")
    ctx.heartbeat("late")
    assert (outbox.marks, outbox.lines, job.noted) == ([], [], None)


def test_an_attempt_has_its_details_and_its_deadline(outbox: ClosedOutbox) -> None:
    assert JobRuntime(new_job(), outbox).context().deadline is None
    job = new_job(msgspec.msgpack.encode({"line": 7}), '{"timeout":60}')
    assert job.deadline == 160.0
    job.deadline = time.monotonic() + 60
    ctx = JobRuntime(job, outbox).context()
    assert ctx.details == {"line": 7}
    assert ctx.deadline is not None
    assert ctx.remaining is not None
    assert abs(ctx.deadline - datetime.now(UTC) - timedelta(seconds=60)) < timedelta(seconds=30)
    assert 30 < ctx.remaining <= 60


@pytest.mark.parametrize("reason", [TaskAborted, TaskTimeout])
def test_a_task_sees_that_it_must_stop(outbox: ClosedOutbox, reason: type[Exception]) -> None:
    job = new_job(options='{"timeout":60}')
    ctx = JobRuntime(job, outbox).context()
    assert not ctx.cancelled
    job.stop_with(reason, 1.0)
    assert ctx.cancelled
    with pytest.raises(reason):
        ctx.check_cancelled()


# -- heartbeat details and reports


class Stream:
    """An events stream that accepts everything."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def flush(self, generation: str, body: bytes | None, _: object) -> Receipt:
        self.reports += decode(Flush, body or b"").reports
        return Receipt(f"{len(self.reports)}-0", generation, None)


@pytest.fixture
def reporter() -> tuple[Reporter, Stream]:
    stream = Stream()
    reporter = Reporter(stream, "w", HeldAttempts())  # type: ignore[arg-type]
    reporter.generation = "g"
    return reporter, stream


def flush_reports(reporter: Reporter, stream: Stream) -> list[Report]:
    reporter._flush(reporter._gather())
    return stream.reports


class SilentStream:
    """An events stream that accepts everything and never applies anything."""

    is_over = False

    def flush(self, generation: str, body: bytes | None, _: object) -> Receipt:
        if self.is_over:
            raise EOFError
        return Receipt("1-0" if body else None, generation, None)


def test_a_drain_waits_for_an_unapplied_report() -> None:
    stream = SilentStream()
    reporter = Reporter(stream, "w", HeldAttempts())  # type: ignore[arg-type]
    reporter.generation = "g"

    def send() -> None:
        with suppress(EOFError):
            reporter._run()

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    reporter.report(Returned(TASK, 3, "drained"))
    assert not reporter.wait_until_applied(0.2)
    stream.is_over = True
    reporter.check_generation()
    sending.join(30)
    assert not sending.is_alive()


@pytest.mark.parametrize("end", [Failed(TASK, 3, 0.1, TaskError("E", "")), Returned(TASK, 3, "drained")])
def test_the_last_details_are_sent_before_the_end(reporter: tuple[Reporter, Stream], end: Report) -> None:
    job = new_job()
    job.noted = b"old"
    job.noted = b"new"
    reporter[0].report(end, job)
    reporter[0].note(job)
    assert flush_reports(*reporter) == [Noted(TASK, 3, b"new"), end]


def test_details_are_sent_once_and_not_with_a_success(reporter: tuple[Reporter, Stream]) -> None:
    job = new_job()
    job.noted = b"one"
    reporter[0].note(job)
    reporter[0].note(job)
    job.noted = b"two"
    success = Succeeded(TASK, 3, 0.1, b"\x01")
    reporter[0].report(success, job)
    assert flush_reports(*reporter) == [Noted(TASK, 3, b"one"), success]


def test_details_of_running_tasks_are_sent_when_the_process_ends(reporter: tuple[Reporter, Stream]) -> None:
    pool = Pool(None, None, reporter[0], HeldAttempts(), concurrency=1, ttl=5.0, stop_grace=5.0, on_stuck=print)  # type: ignore[arg-type]
    job = new_job()
    pool.received.jobs[id(job)] = job
    job.noted = b"last"
    pool.send_notes()
    assert flush_reports(*reporter) == [Noted(TASK, 3, b"last")]


def test_the_last_details_of_the_newest_attempt_count() -> None:
    other = b"o" * 16
    notes = [
        Noted(TASK, 1, b"a"),
        Noted(TASK, 2, b"b"),
        Noted(TASK, 2, b"c"),
        Noted(TASK, 1, b"d"),
        Noted(other, 1, b"e"),
    ]
    assert fold(notes) == {TASK: Noted(TASK, 2, b"c"), other: Noted(other, 1, b"e")}


def test_details_survive_encoding() -> None:
    flush = Flush("w", [Noted(TASK, 2, b"details")])
    assert decode(Flush, encode(flush)) == flush


# -- after a completion


@pytest.mark.parametrize("is_async", [False, True])
def test_a_completed_task_succeeds_whatever_it_does_afterwards(outbox: ClosedOutbox, is_async: bool) -> None:
    app = Orchestrator(redis_url="redis://localhost", database_url="postgresql://localhost")
    job = new_job()

    def finish() -> str:
        job.completion = b"\x07"
        raise ValueError("too late")

    async def finish_async() -> str:
        return finish()

    app.task(name="job")(finish_async if is_async else finish)
    runner = Runner(app, outbox, Allowed(app, []))
    report = asyncio.run(runner.run_async(job)) if is_async else runner.run(job)
    assert isinstance(report, Succeeded)
    assert (decode_value(report.result), report.children) == (7, [])


def test_a_result_that_differs_from_the_completion_logs_a_warning(
    outbox: ClosedOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    app = Orchestrator(redis_url="redis://localhost", database_url="postgresql://localhost")
    results = iter([8, 7, None])

    def finish() -> int | None:
        job.completion = b"\x07"
        return next(results)

    app.task(name="job")(finish)
    for _ in range(3):
        job = new_job()
        report = Runner(app, outbox, Allowed(app, [])).run(job)
        assert isinstance(report, Succeeded)
        assert decode_value(report.result) == 7
        assert caplog.text.count("returned a different result") == 1  # for the first result
