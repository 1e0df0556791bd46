"""What a task's context accepts, and what becomes of what it is told."""

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


# -- what it accepts


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "x", None])
def test_progress_goes_from_zero_to_one(fraction: Any) -> None:
    with pytest.raises(InvalidTask, match="from 0 to 1, found"):
        by_hand().progress(fraction)


def test_log_levels_are_known() -> None:
    with pytest.raises(InvalidTask, match="debug, info, warning, error, found 'loud'"):
        by_hand().log("text", "loud")  # type: ignore[arg-type]


def test_words_are_text() -> None:
    with pytest.raises(InvalidTask, match="Progress of task 'big': expected a string, found 7"):
        by_hand().progress(0.5, 7)  # type: ignore[arg-type]
    with pytest.raises(InvalidTask, match=r"Log of task 'big': expected a string, found \['a'\]"):
        by_hand().log(["a"])  # type: ignore[arg-type]


def test_what_is_left_is_small_and_plain() -> None:
    by_hand().heartbeat("x" * 9_000)
    with pytest.raises(PayloadError, match=r"'big' saves .* at most 10,000"):
        by_hand().heartbeat("x" * 11_000)
    with pytest.raises(PayloadError, match="cannot be serialised"):
        by_hand().heartbeat(object())


def by_hand() -> TaskContext:
    return TaskContext(task_id=uuid4(), task_name="big", attempt=1, queue="default")


def test_one_made_by_hand_says_nothing() -> None:
    ctx = by_hand()
    ctx.progress(0.5, "half")
    ctx.log("text")
    ctx.check_cancelled()
    assert (ctx.cancelled, ctx.details, ctx.deadline, ctx.remaining) == (False, None, None, None)


def test_a_plain_call_is_given_one_where_it_needs_one() -> None:
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

    of_last: Any = last  # no type says that its keyword is given by itself
    assert (named("a"), named(word="a"), of_last("b"), optional()) == ("a named 1", "a named 1", "b named 1", True)
    function: Any = named.function
    assert function(TaskContext(attempt=3, task_name="x"), "c") == "c x 3"


# -- what becomes of it


def test_words_reach_the_outbox_within_limits(outbox: ClosedOutbox) -> None:
    ctx = JobRuntime(new_job(), outbox).context()
    ctx.progress(1, "x" * 5_000)
    ctx.log("y" * 5_000, "error")
    assert outbox.marks == [(TASK, ProgressMark(3, 1.0, "x" * 1_000))]
    assert [(line.attempt, line.level, line.text) for _, line in outbox.lines] == [(3, "error", "y" * 1_000)]


def test_a_task_that_has_ended_says_nothing(outbox: ClosedOutbox) -> None:
    job = new_job()
    ctx = JobRuntime(job, outbox).context()
    job.finish()
    ctx.progress(0.5)
    ctx.log("late")
    ctx.heartbeat("late")
    assert (outbox.marks, outbox.lines, job.noted) == ([], [], None)


def test_details_and_deadline_come_with_the_attempt(outbox: ClosedOutbox) -> None:
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
def test_a_task_sees_that_it_was_told_to_stop(outbox: ClosedOutbox, reason: type[Exception]) -> None:
    job = new_job(options='{"timeout":60}')
    ctx = JobRuntime(job, outbox).context()
    assert not ctx.cancelled
    job.stop_with(reason, 1.0)
    assert ctx.cancelled
    with pytest.raises(reason):
        ctx.check_cancelled()


# -- notes and reports


class Stream:
    """An events stream that takes everything."""

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


def sent(reporter: Reporter, stream: Stream) -> list[Report]:
    reporter._flush(reporter._gather())
    return stream.reports


class SilentStream:
    """An events stream that takes everything, and of which nothing is ever applied."""

    is_over = False

    def flush(self, generation: str, body: bytes | None, _: object) -> Receipt:
        if self.is_over:
            raise EOFError
        return Receipt("1-0" if body else None, generation, None)


def test_a_drain_waits_for_a_report_that_is_not_applied() -> None:
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
def test_what_was_left_last_goes_before_the_end(reporter: tuple[Reporter, Stream], end: Report) -> None:
    job = new_job()
    job.noted = b"old"
    job.noted = b"new"
    reporter[0].report(end, job)
    reporter[0].note(job)
    assert sent(*reporter) == [Noted(TASK, 3, b"new"), end]


def test_what_was_left_is_sent_once_and_not_with_a_success(reporter: tuple[Reporter, Stream]) -> None:
    job = new_job()
    job.noted = b"one"
    reporter[0].note(job)
    reporter[0].note(job)
    job.noted = b"two"
    success = Succeeded(TASK, 3, 0.1, b"\x01")
    reporter[0].report(success, job)
    assert sent(*reporter) == [Noted(TASK, 3, b"one"), success]


def test_what_runs_when_the_process_ends_has_left_its_last_too(reporter: tuple[Reporter, Stream]) -> None:
    pool = Pool(None, None, reporter[0], HeldAttempts(), concurrency=1, ttl=5.0, stop_grace=5.0, on_stuck=print)  # type: ignore[arg-type]
    job = new_job()
    pool.received.jobs[id(job)] = job
    job.noted = b"last"
    pool.send_notes()
    assert sent(*reporter) == [Noted(TASK, 3, b"last")]


def test_of_several_notes_the_newest_attempts_last_counts() -> None:
    other = b"o" * 16
    notes = [
        Noted(TASK, 1, b"a"),
        Noted(TASK, 2, b"b"),
        Noted(TASK, 2, b"c"),
        Noted(TASK, 1, b"d"),
        Noted(other, 1, b"e"),
    ]
    assert fold(notes) == {TASK: Noted(TASK, 2, b"c"), other: Noted(other, 1, b"e")}


def test_a_note_travels() -> None:
    flush = Flush("w", [Noted(TASK, 2, b"details")])
    assert decode(Flush, encode(flush)) == flush


# -- after a completion


@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_completed_task_does_it_has_succeeded(outbox: ClosedOutbox, is_async: bool) -> None:
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


def test_another_result_than_the_completion_is_only_warned_of(
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
        assert caplog.text.count("returned a different result") == 1  # of the first
