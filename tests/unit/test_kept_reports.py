"""Applied reports that a worker keeps, and sends again when Postgres has lost commits."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import RecordOperation
from orchestrator.domain.fleet.generation import age, name, rewind_of
from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.domain.tasks.task import (
    Dispatch,
    Enqueued,
    Failed,
    KnownTask,
    NewTask,
    Recalled,
    Started,
    Succeeded,
    TaskError,
)
from orchestrator.errors import PayloadError
from orchestrator.transport import codec
from orchestrator.transport.codec import Applied, decode
from orchestrator.transport.worker import Receipt
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.reporting.kept import MAX_KEPT_SECONDS, SECONDS, KeptReports, PendingReport
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.running.job import Bundle, Job

ONE, TWO = b"1" * 16, b"2" * 16


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def job(task: bytes = ONE, slot: int = 0) -> Job:
    return Job(Dispatch(task, 1, "job", b"", "default"), Bundle("", "default", "1-0", 1), slot, 0.0)


def enqueued(number: int, parent: bytes = ONE, size: int = 10) -> Enqueued:
    return Enqueued([NewTask(number.to_bytes(16, "big"), "child", "default", b"x" * size, parent=parent)])


def succeeded(task: bytes = ONE) -> Succeeded:
    return Succeeded(task, 1, 0.1, b"\x01")


def recall_and_keep(keeper: KeptReports, running: Iterable[Job] = ()) -> list[Report]:
    """Return the reports that would be sent again, and keep them as if they had been applied."""
    reports = keeper.recall(running)
    keeper.add(PendingReport(report) for report in reports)
    return reports


# -- which reports are kept, and for how long


def test_end_reports_are_kept_for_a_minute(clock: Clock) -> None:
    keeper = KeptReports(clock=clock)
    keeper.add([PendingReport(Started(ONE, 1, 0.0)), PendingReport(succeeded(), job())])
    clock.now += SECONDS - 1
    assert recall_and_keep(keeper) == [succeeded()], "that it has started is of no use"
    clock.now += SECONDS + 1
    assert keeper.recall([]) == []


def test_enqueues_are_kept_until_a_minute_after_the_end_of_their_task(clock: Clock) -> None:
    keeper = KeptReports(clock=clock)
    keeper.add([PendingReport(enqueued(1))])
    clock.now += 10 * SECONDS
    keeper.add([PendingReport(enqueued(2)), PendingReport(enqueued(3, TWO))])
    clock.now += 10 * SECONDS
    keeper.add([PendingReport(succeeded(), job())])
    clock.now += SECONDS - 1
    assert keeper.recall([]) == [enqueued(3, TWO), enqueued(1), enqueued(2), succeeded()], "before the end"


def test_enqueues_are_dropped_a_minute_after_the_end_of_their_task(clock: Clock) -> None:
    keeper = KeptReports(clock=clock)
    keeper.add([PendingReport(enqueued(1)), PendingReport(succeeded(), job())])
    clock.now += SECONDS + 1
    assert keeper.recall([]) == []


def test_enqueues_of_an_endless_task_are_kept_for_an_hour(clock: Clock) -> None:
    keeper = KeptReports(clock=clock)
    keeper.add([PendingReport(enqueued(1))])
    clock.now += MAX_KEPT_SECONDS - 1
    keeper.add([PendingReport(enqueued(2))])
    clock.now += 2
    keeper.add([])
    assert recall_and_keep(keeper) == [enqueued(1), enqueued(2)], "for a minute more"
    clock.now += MAX_KEPT_SECONDS + 1
    keeper.add([])
    clock.now += SECONDS + 1
    assert keeper.recall([]) == []


def test_kept_enqueues_are_bounded_and_drops_are_counted(clock: Clock) -> None:
    keeper = KeptReports(10_000, clock)
    for number in range(1_000):
        keeper.add([PendingReport(enqueued(number, number.to_bytes(16, "little"), size=1_000))])
        assert keeper._open_bytes <= 10_000
    found = keeper.recall([])
    assert found == [enqueued(number, number.to_bytes(16, "little"), 1_000) for number in range(1_000)][-len(found) :]
    assert 5 < len(found) < 10
    assert (keeper.dropped, keeper.is_incomplete) == (1_000 - len(found), True)
    clock.now += SECONDS + 1
    assert not keeper.is_incomplete, "that was long ago"


def test_kept_end_reports_are_bounded_and_displace_no_enqueues(clock: Clock) -> None:
    keeper = KeptReports(10_000, clock)
    keeper.add([PendingReport(enqueued(1, TWO))])
    for _ in range(1_000):
        keeper.add([PendingReport(succeeded(), job())])
        assert keeper._recent_bytes <= 10_000
    found = keeper.recall([])
    assert found[0] == enqueued(1, TWO)
    assert 50 < len(found) < 500
    assert keeper.dropped == 1_001 - len(found)


def test_a_report_larger_than_the_bound_is_not_kept(clock: Clock) -> None:
    keeper = KeptReports(10_000, clock)
    keeper.add([PendingReport(enqueued(1, size=20_000))])
    assert (keeper.recall([]), keeper.dropped) == ([], 1)


def test_turns_and_completions_are_not_sent_again(clock: Clock) -> None:
    """Postgres has what a transaction completed, or the task must run again; turns are repeated from the history."""
    keeper = KeptReports(clock=clock)
    completed = job()
    completed.completion = b"\x01"
    keeper.add([PendingReport(succeeded(), completed), PendingReport(Activated(TWO, 1, 0.1), job(TWO))])
    assert keeper.recall([]) == []


def test_the_worker_asks_later_which_tasks_are_lost(clock: Clock) -> None:
    keeper = KeptReports(clock=clock)
    keeper.add([PendingReport(succeeded(), job()), PendingReport(Failed(TWO, 1, 0.1, TaskError("E", "")), job(TWO))])
    third = b"3" * 16
    assert len(recall_and_keep(keeper, [job(third)])) == 2
    assert (list(keeper.questions()), keeper.has_questions) == ([], True), "others may still send what they have"
    clock.now += 30
    known = [KnownTask(ONE, "job", "succeeded"), KnownTask(TWO, "job", "failed"), KnownTask(third, "job", "running")]
    assert list(keeper.questions()) == [Recalled(known)]
    assert (list(keeper.questions()), keeper.has_questions) == ([], False)


# -- names of generations


def test_a_generation_name_shows_when_commits_were_last_lost() -> None:
    before, lost, after = name(1, 1, "aa"), name(2, 1, "bb", "bb"), name(2, 2, "cc", "bb")
    assert [rewind_of(generation) for generation in ("12-1", before, lost, after)] == ["", "", "bb", "bb"]
    assert [age(generation) for generation in (before, lost, after)] == [(1, 1), (2, 1), (2, 2)]


# -- the reporter

BEFORE, LOST, AFTER = name(1, 1, "aa"), name(2, 1, "bb", "bb"), name(2, 2, "cc", "bb")


class Stream:
    """An events stream of the current generation, which applies everything while `applies` is set."""

    def __init__(self) -> None:
        self.generation = BEFORE
        self.applies = True
        self.reports: list[Report] = []

    def flush(self, generation: str, body: bytes | None, _: object) -> Receipt:
        if generation != self.generation or body is None:
            return Receipt(None, self.generation, None)
        self.reports += decode(Flush, body).reports
        return Receipt("1-0", generation, Applied(generation, "1-0") if self.applies else None)

    def begin(self, generation: str) -> None:
        self.generation = generation
        self.reports.clear()


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def reporter(stream: Stream) -> Reporter:
    reporter = Reporter(stream, "w", HeldAttempts())  # type: ignore[arg-type]
    reporter.generation = BEFORE
    return reporter


def send(reporter: Reporter) -> None:
    batch = [*reporter._backlog, *reporter._gather()]
    reporter._backlog = []
    for _ in range(2):  # the first flush learns the generation, the second sends in it
        batch = reporter._flush(batch)


def held_job(reporter: Reporter, task: bytes = ONE) -> Job:
    return job(task, reporter._held.add(task, 1))


def test_applied_reports_are_sent_again_first_after_lost_commits(reporter: Reporter, stream: Stream) -> None:
    reporter.report(enqueued(1))
    send(reporter)
    stream.applies = False
    reporter.report(succeeded(), held_job(reporter))
    send(reporter)
    stream.begin(AFTER)  # the reporter was cut off while LOST began
    reporter.check_generation()
    send(reporter)
    assert stream.reports == [enqueued(1), succeeded()]


def test_applied_reports_are_not_sent_again_if_only_redis_lost_data(reporter: Reporter, stream: Stream) -> None:
    reporter.report(enqueued(1))
    reporter.report(succeeded(), held_job(reporter))
    send(reporter)
    stream.begin(name(1, 2, "dd"))
    send(reporter)
    stream.begin(LOST)
    send(reporter)
    assert stream.reports == [enqueued(1), succeeded()]
    stream.begin(AFTER)
    send(reporter)
    assert stream.reports == []


def test_a_possibly_lost_completion_is_not_reported_as_success(reporter: Reporter, stream: Stream) -> None:
    first, second = held_job(reporter), held_job(reporter, TWO)
    first.completion = second.completion = b"\x01"
    stream.applies = False
    reporter.report(succeeded(), first)
    send(reporter)
    stream.begin(LOST)
    send(reporter)
    reporter.report(succeeded(TWO), second)
    send(reporter)
    assert [type(report) for report in stream.reports] == [Started, Started]
    reporter.note_applied(Applied(LOST, "1-0"))
    assert reporter._held.unended() == [], "nobody has them any more: without a completion they run again"


# -- reports sent by the thread that made them


def test_a_thread_sends_its_reports_together(reporter: Reporter, stream: Stream) -> None:
    for task in (ONE, TWO):
        reporter.report(succeeded(task), held_job(reporter, task), later=True)
    assert not reporter.has_sent_all
    assert stream.reports == []
    reporter.send()
    assert stream.reports == [succeeded(), succeeded(TWO)]
    assert reporter.has_sent_all
    assert reporter._gather() == []


def test_no_report_overtakes_a_waiting_report(reporter: Reporter, stream: Stream) -> None:
    reporter._backlog = [PendingReport(enqueued(1))]  # this report could not be sent, and the thread pauses
    reporter.report(succeeded(), held_job(reporter), later=True)
    reporter.send()
    assert stream.reports == []
    send(reporter)
    assert stream.reports == [enqueued(1), succeeded()]


@pytest.mark.parametrize("error", [ConnectionError("gone"), RuntimeError("a defect, which ends the process")])
def test_an_unsent_report_is_left_to_the_reporter_thread(
    reporter: Reporter, stream: Stream, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> Receipt:
        raise error

    reporter._is_asleep = True
    with monkeypatch.context() as patch:
        patch.setattr(stream, "flush", refuse)
        reporter.report(succeeded(), held_job(reporter), later=True)
        reporter.send()
    assert reporter._wakeup.get_nowait() is None, "the thread is woken"
    reporter.report(succeeded(TWO), held_job(reporter, TWO), later=True)
    reporter.send()
    assert not reporter.has_sent_all
    send(reporter)
    assert stream.reports == [succeeded(), succeeded(TWO)]


def test_reports_that_wait_for_a_busy_thread_are_sent(reporter: Reporter) -> None:
    reporter._is_asleep = True
    reporter.wake()
    assert reporter._wakeup.empty()
    reporter.report(succeeded(), held_job(reporter), later=True)
    assert reporter._wakeup.empty()
    reporter.wake()
    assert reporter._wakeup.get_nowait() is None


@pytest.mark.parametrize("problem", ["half a surrogate pair", "too large"])
def test_a_report_that_cannot_be_sent_costs_only_its_own_task(
    reporter: Reporter, stream: Stream, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE", 2_000)
    name, value = ("a", bytes(3_000)) if problem == "too large" else ("a \ud800", b"")
    command = RecordOperation(1, name, value)
    child = NewTask(TWO, name, "default", value)
    reporter.report(succeeded(), held_job(reporter))
    reporter.report(Activated(bytes(16), 3, 0.1, 7, [command]))
    reporter.report(Succeeded(bytes(16), 1, 0.1, b"", [child]))
    reporter.report(succeeded(), turn=Activated(bytes(16), 4, 0.1, 7, [command]))
    send(reporter)
    first, stuck, failed, last = stream.reports
    assert first == last == succeeded()
    assert isinstance(stuck, Activated)
    assert "cannot be sent" in str(stuck.stuck)
    assert isinstance(failed, Failed)
    assert not failed.retryable
    assert "cannot be sent" in failed.error.message


def test_tasks_that_cannot_be_sent_are_refused_where_they_are_enqueued(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE", 10)
    with pytest.raises(PayloadError, match="These 1 tasks cannot be sent"):
        reporter.send_tasks([NewTask(TWO, "a", "default", b"")])
