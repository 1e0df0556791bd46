"""A client's nudges: the client waits for no replies, and no error of Redis reaches the caller."""

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


def wait_for_nudges(redis: Redis, count: int) -> None:
    eventually(lambda: redis.xlen(KEYS.nudges) == count)


def test_every_nudge_arrives(redis: Redis, nudges: Nudges) -> None:
    for _ in range(50):
        nudges.send()
    wait_for_nudges(redis, 50)


def test_a_nudge_arrives_after_redis_closed_the_connection(redis: Redis, nudges: Nudges) -> None:
    nudges.send()
    wait_for_nudges(redis, 1)
    others = [client["id"] for client in redis.client_list() if client["id"] != str(redis.client_id())]
    for client in others:
        redis.client_kill_filter(_id=client)
    nudges.send()
    wait_for_nudges(redis, 2)


def test_a_nudge_does_not_wait_for_its_reply(redis: Redis, nudges: Nudges) -> None:
    redis.client_pause(60_000, all=False)
    try:
        for _ in range(3):
            nudges.send()
        assert not nudges._paused_until, "the answer was waited for until the time was over"
    finally:
        redis.client_unpause()
    wait_for_nudges(redis, 3)


def test_a_fork_has_a_connection_of_its_own(redis: Redis, nudges: Nudges) -> None:
    nudges.send()
    wait_for_nudges(redis, 1)
    child = os.fork()
    if child == 0:
        nudges.send()
        os._exit(0)
    os.waitpid(child, 0)
    nudges.send()
    wait_for_nudges(redis, 3)
    nudges.send()
    wait_for_nudges(redis, 4)


def test_an_error_reply_pauses_nudges_and_does_not_reach_the_caller(
    redis: Redis, nudges: Nudges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.transport.client._FAILURE_PAUSE", 3_600.0)  # longer than the test
    redis.set(KEYS.nudges, "somebody's")
    nudges.send()

    def is_error_noticed() -> bool:  # a reply is read when the next nudge is sent
        nudges.send()
        return nudges._paused_until > 0.0

    eventually(is_error_noticed)
    redis.delete(KEYS.nudges)
    nudges.send()
    assert redis.exists(KEYS.nudges) == 0
    nudges._paused_until = 0.0
    nudges.send()
    wait_for_nudges(redis, 1)
