"""A client's nudges: nobody waits for their answers, and nothing that Redis does reaches the caller."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from redis import Redis

from orchestrator.transport.client import Nudges
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from tests.waiting import eventually

KEYS = Keys("nudged")


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    redis = connect(redis_url)
    yield redis
    redis.delete(KEYS.nudges)
    redis.close()


@pytest.fixture
def nudges(redis_url: str) -> Iterator[Nudges]:
    nudges = Nudges(redis_url, KEYS)
    yield nudges
    nudges.close()


def arrive(redis: Redis, count: int) -> None:
    eventually(lambda: redis.xlen(KEYS.nudges) == count)


def test_each_arrives(redis: Redis, nudges: Nudges) -> None:
    for _ in range(50):
        nudges.send()
    arrive(redis, 50)


def test_one_arrives_although_redis_has_closed_the_connection(redis: Redis, nudges: Nudges) -> None:
    nudges.send()
    arrive(redis, 1)
    others = [client["id"] for client in redis.client_list() if client["id"] != str(redis.client_id())]
    for client in others:
        redis.client_kill_filter(_id=client)
    nudges.send()
    arrive(redis, 2)


def test_nobody_waits_for_an_answer_that_has_not_come(redis: Redis, nudges: Nudges) -> None:
    redis.client_pause(60_000, all=False)
    try:
        for _ in range(3):
            nudges.send()
        assert not nudges._paused_until, "the answer was waited for until the time was over"
    finally:
        redis.client_unpause()
    arrive(redis, 3)


def test_a_fork_has_a_connection_of_its_own(redis: Redis, nudges: Nudges) -> None:
    nudges.send()
    arrive(redis, 1)
    child = os.fork()
    if child == 0:
        nudges.send()
        os._exit(0)
    os.waitpid(child, 0)
    nudges.send()
    arrive(redis, 3)
    nudges.send()
    arrive(redis, 4)


def test_a_refusal_is_kept_from_the_caller_and_followed_by_silence(
    redis: Redis, nudges: Nudges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.transport.client._FAILURE_PAUSE", 3_600.0)  # it outlasts the test
    redis.set(KEYS.nudges, "somebody's")
    nudges.send()

    def is_known() -> bool:  # the answer is read when the next is sent
        nudges.send()
        return nudges._paused_until > 0.0

    eventually(is_known)
    redis.delete(KEYS.nudges)
    nudges.send()
    assert redis.exists(KEYS.nudges) == 0
    nudges._paused_until = 0.0
    nudges.send()
    arrive(redis, 1)
