"""Log lines about tasks: a line for each task, as long as they are few."""

from __future__ import annotations

import logging

import pytest

from orchestrator.domain.tasks.task import Dispatch, Failed, Lost, Succeeded, TaskError
from orchestrator.errors import TaskAborted
from orchestrator.workers.reporting.task_log import TaskLog
from orchestrator.workers.running.job import Bundle, Job

TRACEBACK = 'Traceback (most recent call last):\n  File "/shop/tasks.py", line 7, in bake\nValueError: burnt\n'


def job(number: int = 1, name: str = "bake", options: str | None = None, failures: int = 0) -> Job:
    dispatch = Dispatch(number.to_bytes(16, "big"), 1, name, b"", "default", options, failures=failures)
    return Job(dispatch, Bundle("", "", "", 1), 0, 0.0)


def failed(traceback: str = TRACEBACK, **fields: object) -> Failed:
    return Failed(b"", 1, 0.5, TaskError("ValueError", "burnt\nblack", traceback), **fields)  # type: ignore[arg-type]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("orchestrator").propagate = True
    caplog.set_level(logging.INFO, "orchestrator")
    return caplog


def logged_lines(lines: pytest.LogCaptureFixture) -> list[tuple[int, str, bool]]:
    found = [(record.levelno, record.getMessage(), bool(record.exc_text)) for record in lines.records]
    lines.clear()
    return found


def test_each_outcome_of_an_attempt_has_its_log_line(lines: pytest.LogCaptureFixture) -> None:
    log = TaskLog()
    log.received([job()])
    log.ended(job(), Succeeded(b"", 1, 0.25, b""))
    log.ended(job(), failed())
    log.ended(job(options='{"retry": {"max": 3}}'), failed())
    log.ended(job(options='{"retry": {"max": 3}}', failures=2), failed(delay=7.0))
    log.ended(job(options='{"retry": {"max": 3}}'), failed(retryable=False))
    log.ended(job(), failed(charged=False, delay=2.0))
    log.ended(job(), failed(traceback=""))
    log.ended(job(), Lost(b"", 1, alone=True))
    stopped = job()
    stopped.interrupted_by = TaskAborted
    log.ended(stopped, failed())
    log.ended(stopped, Succeeded(b"", 1, 0.25, b""))
    stopped.completion = b"done"
    log.ended(stopped, Succeeded(b"", 1, 0.25, b""))
    assert logged_lines(lines) == [
        (logging.INFO, "task.received attempt=1", False),
        (logging.INFO, "task.succeeded attempt=1 duration=250ms", False),
        (logging.ERROR, "task.failed attempt=1 try=1/1 duration=500ms error=ValueError: burnt", True),
        (
            logging.WARNING,
            "task.retried attempt=1 try=1/4 duration=500ms delay=~1s at=tasks.py:7 error=ValueError: burnt",
            False,
        ),
        (
            logging.WARNING,
            "task.retried attempt=1 try=3/4 duration=500ms delay=7s at=tasks.py:7 error=ValueError: burnt",
            False,
        ),
        (logging.ERROR, "task.failed attempt=1 try=1/4 duration=500ms error=ValueError: burnt", True),
        (logging.INFO, "task.retry_requested attempt=1 delay=2s reason=burnt\nblack", False),
        (logging.ERROR, "task.failed attempt=1 try=1/1 duration=500ms error=ValueError: burnt", False),
        (logging.WARNING, "task.lost attempt=1 reason=killed, out of memory, or crashed", False),
        (
            logging.INFO,
            "task.stopped attempt=1 duration=500ms: the task was cancelled, or another attempt counts now",
            False,
        ),
        (
            logging.INFO,
            "task.result_dropped attempt=1 duration=250ms: the task was cancelled, or another attempt counts now",
            False,
        ),
        (logging.INFO, "task.succeeded attempt=1 duration=250ms", False),
    ]


def test_a_dropped_success_is_logged_once(lines: pytest.LogCaptureFixture) -> None:
    log, late = TaskLog(), job()
    for _ in range(3):  # the leader repeats its answer
        log.dropped(late)
    assert logged_lines(lines) == [
        (logging.INFO, "task.result_dropped attempt=1: the task was cancelled, or another attempt counts now", False)
    ]


def test_frequent_lines_are_counted_and_rare_lines_are_still_logged(lines: pytest.LogCaptureFixture) -> None:
    log = TaskLog()
    for number in range(200):
        log.ended(job(number), Succeeded(b"", 1, 0.0, b""))
        log.ended(job(number), failed())
    log.ended(job(name="rare"), failed())
    assert len(logged_lines(lines)) == 50 + 50 + 1
    log.summarize(log._since + 5.0)
    latest = "the latest failure, 00000000-0000-0000-0000-0000000000c7: ValueError: burnt"
    counts = "task.summary task=bake seconds=5: 150 succeeded, 150 failed without a line each"
    assert logged_lines(lines) == [(logging.ERROR, f"{counts}; {latest}", False)]

    for number in range(100):  # while this lasts, only the count is logged
        log.ended(job(number), Succeeded(b"", 1, 0.0, b""))
    log.ended(job(), failed())
    log.summarize(log._since + 5.0)
    log.summarize(log._since + 5.0)
    counts = "task.summary task=bake seconds=5: 100 succeeded, 1 failed without a line each"
    assert [line.partition(";")[0] for _, line, _ in logged_lines(lines)] == [counts]

    log.ended(job(), Succeeded(b"", 1, 0.0, b""))
    assert logged_lines(lines) == [(logging.INFO, "task.succeeded attempt=1 duration=0ms", False)]


def test_disabled_log_levels_are_not_counted(lines: pytest.LogCaptureFixture) -> None:
    lines.set_level(logging.WARNING, "orchestrator")
    log = TaskLog()
    log.received([job()])
    log.ended(job(), Succeeded(b"", 1, 0.25, b""))
    assert (logged_lines(lines), log._tallies) == ([], {})
