"""The leader waits for events with its own timer, and misses no event that arrives at the timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import ConnectionError, TimeoutError

from orchestrator.transport.client import Nudges, nudge
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import NUDGE_CAP, Keys
from orchestrator.transport.leader.streams import Inbound, LeaderStreams
from tests.waiting import eventually

KEYS = Keys()
G = "1-1-a"


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    redis = connect(redis_url)
    redis.flushall()
    yield redis
    redis.close()


@pytest.fixture
def streams(redis: Redis) -> Iterator[LeaderStreams]:
    streams = LeaderStreams(redis, KEYS)
    streams.terms.begin(1, G, life(redis))
    yield streams
    streams.close()


def life(redis: Redis) -> str:
    return str(redis.info("server")["run_id"])


def add(redis: Redis, body: bytes, generation: str = G) -> str:
    entry: bytes = redis.xadd(KEYS.events(generation), {"d": body})  # type: ignore[assignment]
    return entry.decode()


def test_a_wait_lasts_as_long_as_requested(streams: LeaderStreams) -> None:
    def is_short() -> bool:
        began = time.monotonic()
        assert streams.read(G, "0-0", 10, 0.005).entries == []
        waited = time.monotonic() - began
        assert waited >= 0.005
        return waited < 0.05

    for _ in range(10):  # other processes interfere on a busy machine
        eventually(is_short, "a short wait; by the timer of Redis alone, one after another would take 0.1 s", every=0.0)


def test_events_between_two_waits_are_found_by_the_next_wait(redis: Redis, streams: LeaderStreams) -> None:
    assert streams.read(G, "0-0", 10, 0.001).entries == []
    first = add(redis, b"a")
    assert streams.read(G, "0-0", 10, 30.0).entries == [(first, b"a")]
    assert streams.read(G, first, 10, 0.001).entries == []
    second, third = add(redis, b"b"), add(redis, b"c")
    found = [*streams.read(G, first, 10, 30.0).entries]
    while len(found) < 2:
        found += streams.read(G, found[-1][0], 10, 30.0).entries
    assert found == [(second, b"b"), (third, b"c")]


def test_events_read_without_waiting_are_not_returned_again(redis: Redis, streams: LeaderStreams) -> None:
    assert streams.read(G, "0-0", 10, 0.001).entries == []
    entry = add(redis, b"a")
    nudge(redis, KEYS)
    inbound = streams.read(G, "0-0", 10, 0.0)
    assert (inbound.entries, inbound.nudged) == ([(entry, b"a")], True)
    later = streams.read(G, entry, 10, 0.05)
    assert (later.entries, later.nudged) == ([], False)
    last = add(redis, b"b")
    assert streams.read(G, entry, 10, 30.0).entries == [(last, b"b")]


def test_nudges_for_tasks_alone_need_no_full_check(redis: Redis, streams: LeaderStreams, redis_url: str) -> None:
    nudges = Nudges(redis_url, KEYS)

    def read_after_nudges(*kinds: bool) -> Inbound:
        before = redis.xlen(KEYS.nudges)
        for is_task in kinds:
            nudges.send(is_task=is_task)
        eventually(lambda: redis.xlen(KEYS.nudges) == before + len(kinds))
        return streams.read(G, "0-0", 1_000, 0.0)

    try:
        assert [
            inbound.needs_full_check
            for inbound in (
                read_after_nudges(True, True),
                read_after_nudges(True, False),
                read_after_nudges(),
                read_after_nudges(True),
            )
        ] == [*(False, True, False, False)]
        assert read_after_nudges(*[True] * NUDGE_CAP).needs_full_check, (
            "others may have been trimmed before they were read"
        )
    finally:
        nudges.close()


def test_an_event_ends_the_wait(redis: Redis, streams: LeaderStreams) -> None:
    timer = threading.Timer(0.05, add, (redis, b"a"))
    timer.start()
    began = time.monotonic()
    assert [body for _, body in streams.read(G, "0-0", 10, 90.0).entries] == [b"a"]
    assert time.monotonic() - began < 60
    timer.join()


def test_a_new_generation_waits_on_its_own_stream(redis: Redis, streams: LeaderStreams) -> None:
    assert streams.read(G, "0-0", 10, 0.001).entries == []
    streams.terms.begin(1, "1-2-b", life(redis))
    add(redis, b"old")
    entry = add(redis, b"new", "1-2-b")
    assert streams.read("1-2-b", "0-0", 10, 30.0).entries == [(entry, b"new")]


def test_a_broken_connection_raises_once(redis: Redis, streams: LeaderStreams) -> None:
    assert streams.read(G, "0-0", 10, 0.001).entries == []
    redis.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(ConnectionError):
        eventually(lambda: streams.read(G, "0-0", 10, 0.01).entries, "it is told")
    entry = add(redis, b"a")
    assert streams.read(G, "0-0", 10, 30.0).entries == [(entry, b"a")]


def test_another_server_is_read_only_after_a_leader_began_there(redis: Redis, streams: LeaderStreams) -> None:
    add(redis, b"of before")
    redis.set(KEYS.server, "another life")
    with pytest.raises(ConnectionError, match="no leader uses it yet"):
        streams.read(G, "0-0", 10, 30.0)
    with pytest.raises(ConnectionError, match="no leader uses it yet"):
        streams.read(G, "0-0", 10, 0.0)
    assert [body for _, body in streams.leftover(G, "0-0", 10).entries] == [b"of before"]
    streams.terms.begin(1, "1-2-b", life(redis))
    entry = add(redis, b"new", "1-2-b")
    assert streams.read("1-2-b", "0-0", 10, 30.0).entries == [(entry, b"new")]


def test_a_read_that_is_never_answered_times_out(streams: LeaderStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection between the leader and Redis was dropped silently."""
    assert streams.read(G, "0-0", 10, 0.0005).entries == []
    monkeypatch.setattr("orchestrator.transport.connection._BLOCK_SECONDS", 0.001)
    monkeypatch.setattr("orchestrator.transport.connection._ANSWER_TIMEOUT", 0.02)
    streams._listening.close()  # the next read opens a connection with these timeouts
    monkeypatch.setattr(streams._listening, "_has_reply", lambda seconds: bool(time.sleep(seconds)))
    with pytest.raises(TimeoutError):
        eventually(lambda: streams.read(G, "0-0", 10, 0.01).entries, "it is given up")
