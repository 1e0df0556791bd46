"""Progress and log lines of tasks, in a real Redis: capped, expiring, and never a failure of the task."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from redis import Redis

from orchestrator.domain.tasks.task import Dispatch
from orchestrator.transport import journal
from orchestrator.transport.codec import LogChunk, LogLine, ProgressMark, decode, encode
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import JOURNAL_TTL, Keys
from orchestrator.workers.reporting.journal import Journal
from orchestrator.workers.running.job import Bundle, Job
from tests.waiting import eventually

KEYS = Keys()


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    redis = connect(redis_url)
    yield redis
    redis.config_set("maxmemory", 0)
    redis.close()


@pytest.fixture
def task() -> bytes:
    return os.urandom(16)


def line(text: str) -> LogLine:
    return LogLine(1_700_000_000.0, 1, "info", text)


def new_job(task: bytes) -> Job:
    return Job(Dispatch(task, 1, "job", b"\x92\x90\x80", "default", None), Bundle("g", "default", "1-0", 1), 0, 0.0)


def texts(chunks: list[LogChunk]) -> list[str]:
    return [said.text for chunk in chunks for said in decode(list[LogLine], chunk.lines)]


def test_only_the_newest_progress_is_kept_until_it_expires(redis: Redis, task: bytes) -> None:
    assert journal.read_progress(redis, KEYS, task) is None
    for fraction in (0.1, 0.2):
        journal.write(redis, KEYS, {task: ProgressMark(1, fraction, "text")})
    found = journal.read_progress(redis, KEYS, task)
    assert found is not None
    assert found[0] == ProgressMark(1, 0.2, "text")
    assert 0 <= found[1] < 60
    redis.expire(KEYS.progress(task), JOURNAL_TTL - 100)
    found = journal.read_progress(redis, KEYS, task)
    assert found is not None
    assert 100 <= found[1] < 160


def test_entries_of_another_release_are_skipped(redis: Redis, task: bytes) -> None:
    redis.set(KEYS.progress(task), b"\xc1")
    assert journal.read_progress(redis, KEYS, task) is None
    chunk = LogChunk(task, 1, 0, None, "step", encode([line("ours")]))
    redis.xadd(KEYS.logs, {"other": b"field"})
    journal.send_lines(redis, KEYS, [chunk])
    waiting = journal.waiting_lines(redis, KEYS, 10, 0.0)
    assert (len(waiting.entries), waiting.chunks) == (2, [chunk])
    journal.drop_lines(redis, KEYS, waiting)
    assert redis.xlen(KEYS.logs) == 0


def test_frequent_progress_is_written_a_few_times_a_second(redis: Redis, task: bytes) -> None:
    before = redis.info("stats")["total_commands_processed"]
    words = Journal(redis, KEYS)
    for number in range(10_000):
        words.publish_progress(task, ProgressMark(1, number / 10_000))
    words.publish_progress(task, ProgressMark(1, 1.0))

    def arrived() -> bool:
        found = journal.read_progress(redis, KEYS, task)
        return found is not None and found[0].fraction == 1.0

    eventually(arrived, "the last mark", every=0.1)
    assert redis.info("stats")["total_commands_processed"] - before < 1_000


def test_log_lines_beyond_the_cap_are_dropped_and_counted(
    redis: Redis, task: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LOGS_CAP", 3)
    words, job = Journal(redis, KEYS), new_job(task)
    words._started = True  # no background writer
    for number in range(10):
        words.log(job, line(str(number)))
        words.flush()
    assert redis.xlen(KEYS.logs) == 3
    journal.drop_lines(redis, KEYS, journal.waiting_lines(redis, KEYS, 10, 0.0))
    words.log(job, line("last"))
    words.flush()
    said = texts(journal.waiting_lines(redis, KEYS, 10, 0.0).chunks)
    assert said == ["7 lines (14 bytes) were dropped here: it came faster than it could be stored", "last"]
    journal.drop_lines(redis, KEYS, journal.waiting_lines(redis, KEYS, 10, 0.0))


def test_progress_is_not_written_when_redis_is_nearly_full(
    redis: Redis, task: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    words = Journal(redis, KEYS)
    words._started = True
    redis.config_set("maxmemory", redis.info("memory")["used_memory"] + 100_000)
    for _ in range(2):
        words.publish_progress(task, ProgressMark(1, 0.5))
        words.flush()
    assert journal.read_progress(redis, KEYS, task) is None
    assert caplog.text.count("redis.nearly_full") == 1
    redis.config_set("maxmemory", 0)
    words._check_at = 0.0
    words.publish_progress(task, ProgressMark(1, 0.6))
    words.flush()
    assert journal.read_progress(redis, KEYS, task) is not None


def test_a_log_key_of_another_type_does_not_stop_progress(redis: Redis, task: bytes) -> None:
    other = os.urandom(16)
    redis.delete(KEYS.logs)
    redis.set(KEYS.logs, b"not a stream")
    words, job = Journal(redis, KEYS), new_job(task)
    words._started = True
    for number in range(2):
        words.log(job, line("lost"))
        words.publish_progress(other, ProgressMark(1, number / 2))
        words.flush()
    found = journal.read_progress(redis, KEYS, other)
    assert found is not None
    redis.delete(KEYS.logs)


def test_lines_that_cannot_be_written_are_dropped_and_counted(redis: Redis, task: bytes) -> None:
    words, job = Journal(Redis(host="127.0.0.1", port=1), KEYS), new_job(task)
    words._started = True
    words.publish_progress(task, ProgressMark(1, 0.5))
    words.log(job, line("lost"))
    words.flush()
    assert words._marks == {}
    words._redis = redis
    words.end(job)
    words.flush()
    waiting = journal.waiting_lines(redis, KEYS, 10, 0.0)
    assert texts(waiting.chunks) == ["1 line (5 bytes) was dropped here: Redis could not be used"]
    journal.drop_lines(redis, KEYS, waiting)
    words.flush()
    assert redis.xlen(KEYS.logs) == 0
