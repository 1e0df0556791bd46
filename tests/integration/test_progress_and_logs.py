"""What tasks say of themselves, in a real Redis: capped, expiring, and never in the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from redis import Redis

from orchestrator.transport import journal
from orchestrator.transport.codec import LogLine, ProgressMark
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import JOURNAL_TTL, LOG_CAP, Keys
from orchestrator.workers.reporting.journal import Journal
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


def test_of_progress_the_newest_is_kept_for_a_while(redis: Redis, task: bytes) -> None:
    assert journal.read_progress(redis, KEYS, task) is None
    for fraction in (0.1, 0.2):
        journal.write(redis, KEYS, {task: ProgressMark(1, fraction, "text")}, [])
    found = journal.read_progress(redis, KEYS, task)
    assert found is not None
    assert found[0] == ProgressMark(1, 0.2, "text")
    assert 0 <= found[1] < 60
    redis.expire(KEYS.progress(task), JOURNAL_TTL - 100)
    found = journal.read_progress(redis, KEYS, task)
    assert found is not None
    assert 100 <= found[1] < 160


def test_of_a_log_the_last_lines_are_kept_for_a_while(redis: Redis, task: bytes) -> None:
    journal.write(redis, KEYS, {}, [(task, line(str(number))) for number in range(LOG_CAP + 50)])
    said = journal.read_log(redis, KEYS, task)
    assert [item.line.text for item in said] == [str(number) for number in range(50, LOG_CAP + 50)]
    assert 0 < redis.ttl(KEYS.log(task)) <= JOURNAL_TTL
    assert journal.read_log(redis, KEYS, task, said[-1].entry) == []


def test_whoever_follows_a_log_is_woken(redis: Redis, redis_url: str, task: bytes) -> None:
    found: list[str] = []
    reader = connect(redis_url)

    def follow() -> None:
        found.extend(item.line.text for item in journal.read_log(reader, KEYS, task, block=8.0))

    thread = threading.Thread(target=follow)
    thread.start()
    eventually(lambda: redis.info("clients")["blocked_clients"], "somebody waits for lines")
    journal.write(redis, KEYS, {}, [(task, line("hello"))])
    thread.join(10)
    assert found == ["hello"]
    reader.close()


def test_what_another_release_wrote_is_passed_over(redis: Redis, task: bytes) -> None:
    redis.set(KEYS.progress(task), b"\xc1")
    redis.xadd(KEYS.log(task), {"other": b"field"})
    journal.write(redis, KEYS, {}, [(task, line("ours"))])
    assert journal.read_progress(redis, KEYS, task) is None
    assert [item.line.text for item in journal.read_log(redis, KEYS, task)] == ["ours"]


def test_a_chatty_task_is_written_down_a_few_times_a_second(redis: Redis, task: bytes) -> None:
    before = redis.info("stats")["total_commands_processed"]
    words = Journal(redis, KEYS)
    for number in range(10_000):
        words.mark(task, ProgressMark(1, number / 10_000))
    words.mark(task, ProgressMark(1, 1.0))

    def arrived() -> bool:
        found = journal.read_progress(redis, KEYS, task)
        return found is not None and found[0].fraction == 1.0

    eventually(arrived, "the last mark", every=0.1)
    assert redis.info("stats")["total_commands_processed"] - before < 1_000


def test_of_too_many_lines_the_oldest_are_dropped(redis: Redis, task: bytes) -> None:
    words = Journal(redis, KEYS)
    words._started = True  # nobody writes meanwhile
    for number in range(5_000):
        words.log(task, line(str(number)))
    words.flush()
    assert [item.line.text for item in journal.read_log(redis, KEYS, task)][-1] == "4999"
    assert len(words._lines) == 0


def test_it_stays_silent_before_it_could_fill_redis(
    redis: Redis, task: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    words = Journal(redis, KEYS)
    words._started = True
    redis.config_set("maxmemory", redis.info("memory")["used_memory"] + 100_000)
    for _ in range(2):
        words.mark(task, ProgressMark(1, 0.5))
        words.flush()
    assert journal.read_progress(redis, KEYS, task) is None
    assert caplog.text.count("Redis is nearly full") == 1
    redis.config_set("maxmemory", 0)
    words._check_at = 0.0
    words.mark(task, ProgressMark(1, 0.6))
    words.flush()
    assert journal.read_progress(redis, KEYS, task) is not None


def test_a_key_that_a_stranger_has_taken_stops_nothing(redis: Redis, task: bytes) -> None:
    other = os.urandom(16)
    redis.set(KEYS.log(task), b"not a stream")
    words = Journal(redis, KEYS)
    for number in range(2):
        words.log(task, line("lost"))
        words.mark(other, ProgressMark(1, number / 2))
        words.flush()
    found = journal.read_progress(redis, KEYS, other)
    assert found is not None


def test_what_cannot_be_written_is_forgotten(task: bytes) -> None:
    words = Journal(Redis(host="127.0.0.1", port=1), KEYS)
    words._started = True
    words.mark(task, ProgressMark(1, 0.5))
    words.log(task, line("lost"))
    words.flush()
    assert (words._marks, len(words._lines)) == ({}, 0)
