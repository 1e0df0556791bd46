"""Lines about tasks, one each as long as they are few."""

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


def told(lines: pytest.LogCaptureFixture) -> list[tuple[int, str, bool]]:
    found = [(record.levelno, record.getMessage(), bool(record.exc_text)) for record in lines.records]
    lines.clear()
    return found


def test_how_each_attempt_ends(lines: pytest.LogCaptureFixture) -> None:
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
    assert told(lines) == [
        (logging.INFO, "received", False),
        (logging.INFO, "succeeded in 250 ms", False),
        (logging.ERROR, "failed: ValueError: burnt (after 500 ms)", True),
        (
            logging.WARNING,
            "failed, next try in about 1 s: ValueError: burnt (tasks.py:7, after 500 ms, try 1 of 4)",
            False,
        ),
        (
            logging.WARNING,
            "failed, next try in 7 s: ValueError: burnt (tasks.py:7, after 500 ms, try 3 of 4)",
            False,
        ),
        (logging.ERROR, "failed: ValueError: burnt (after 500 ms, try 1 of 4)", True),
        (logging.INFO, "asks to be tried again in 2 s: burnt\nblack", False),
        (logging.ERROR, "failed: ValueError: burnt (after 500 ms)", False),
        (logging.WARNING, "its process died: killed, out of memory, or crashed", False),
        (logging.INFO, "stopped after 500 ms: cancelled, or another attempt counts now", False),
        (
            logging.INFO,
            "ended after 250 ms, and its result is dropped: cancelled, or another attempt counts now",
            False,
        ),
        (logging.INFO, "succeeded in 250 ms", False),
    ]


def test_what_succeeded_and_did_not_count_is_told_once(lines: pytest.LogCaptureFixture) -> None:
    log, late = TaskLog(), job()
    for _ in range(3):  # the leader repeats itself
        log.dropped(late)
    assert told(lines) == [(logging.INFO, "its result is dropped: cancelled, or another attempt counts now", False)]


def test_many_of_a_kind_are_counted_and_a_rare_one_is_not_lost_among_them(lines: pytest.LogCaptureFixture) -> None:
    log = TaskLog()
    for number in range(200):
        log.ended(job(number), Succeeded(b"", 1, 0.0, b""))
        log.ended(job(number), failed())
    log.ended(job(name="rare"), failed())
    assert len(told(lines)) == 50 + 50 + 1
    log.summarize(log._since + 5.0)
    latest = "the latest failure, 00000000-0000-0000-0000-0000000000c7: ValueError: burnt"
    counts = "bake: 150 succeeded, 150 failed in the last 5 s, without a line each"
    assert told(lines) == [(logging.ERROR, f"{counts}; {latest}", False)]

    for number in range(100):  # as long as it lasts, nothing but the count
        log.ended(job(number), Succeeded(b"", 1, 0.0, b""))
    log.ended(job(), failed())
    log.summarize(log._since + 5.0)
    log.summarize(log._since + 5.0)
    counts = "bake: 100 succeeded, 1 failed in the last 5 s, without a line each"
    assert [line.partition(";")[0] for _, line, _ in told(lines)] == [counts]

    log.ended(job(), Succeeded(b"", 1, 0.0, b""))
    assert told(lines) == [(logging.INFO, "succeeded in 0 ms", False)]


def test_what_is_off_is_not_even_counted(lines: pytest.LogCaptureFixture) -> None:
    lines.set_level(logging.WARNING, "orchestrator")
    log = TaskLog()
    log.received([job()])
    log.ended(job(), Succeeded(b"", 1, 0.25, b""))
    assert (told(lines), log._tallies) == ([], {})
