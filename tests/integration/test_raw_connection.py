"""A raw connection to Redis: one socket, one thread, no command repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from orchestrator.transport.connection import FULL, RawConnection, Script, connect, field

ECHO = Script("return {KEYS[1], ARGV[1]}")
ADD = Script("local answer = redis.pcall('XADD', KEYS[1], '*', 'd', ARGV[1]) return answer")


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with connect(redis_url) as redis:
        redis.delete("line:a", "line:b", "line:server")
        yield redis
        redis.config_set("maxmemory", 0)
        redis.delete("line:a", "line:b", "line:server")


@pytest.fixture
def line(redis: Redis) -> Iterator[RawConnection]:
    line = RawConnection(redis)
    yield line
    line.close()


def test_replies_arrive_unchanged(line: RawConnection) -> None:
    assert line.call("SET", "line:a", b"\x00\xff") == b"OK"
    assert line.call("GET", "line:a") == b"\x00\xff"
    assert line.call("GET", "line:b") is None
    assert line.call("INCRBY", "line:b", 7) == 7


def test_an_error_reply_keeps_the_connection_usable(redis: Redis, line: RawConnection) -> None:
    line.call("SET", "line:a", "text")
    before = line.call("CLIENT", "ID")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        line.call("XLEN", "line:a")
    assert line.call("GET", "line:a") == b"text"
    assert line.call("CLIENT", "ID") == before


def test_a_late_reply_is_not_taken_for_the_next_one(redis_url: str) -> None:
    with connect(redis_url, timeout=1.0) as hasty:
        line = RawConnection(hasty)
        with pytest.raises(TimeoutError):
            line.call("BLPOP", "line:a", 60)
        assert line.call("ECHO", "mine") == b"mine"
        line.close()


def test_a_closed_connection_raises_once_and_reconnects(redis: Redis, line: RawConnection) -> None:
    number = line.call("CLIENT", "ID")
    redis.client_kill_filter(_id=str(number))
    with pytest.raises(ConnectionError):
        line.call("PING")
    assert line.call("PING") in (b"PONG", True)


def test_a_script_flushed_by_redis_is_sent_again(redis: Redis, line: RawConnection) -> None:
    assert line.run(ECHO, ["line:a"], ["x"]) == [b"line:a", b"x"]
    redis.script_flush()
    assert line.run(ECHO, ["line:a"], ["y"]) == [b"line:a", b"y"]


@pytest.fixture
def bound(redis: Redis) -> Iterator[RawConnection]:
    """A connection that stays open only to a server on which a leader has begun."""
    line = RawConnection(redis, "line:server")
    yield line
    line.close()


def test_no_connection_is_opened_to_a_server_without_a_leader(redis: Redis, bound: RawConnection) -> None:
    assert bound.call("GET", "line:a") is None, "with no leader ever, there is nothing to mistake"
    redis.set("line:server", "the life of another")
    redis.client_kill_filter(_id=str(bound.call("CLIENT", "ID")))
    with pytest.raises(ConnectionError):
        bound.call("PING")
    for _ in range(2):
        with pytest.raises(ConnectionError, match="no leader uses it yet"):
            bound.call("SET", "line:a", "x")
    redis.set("line:server", str(redis.info("server")["run_id"]))
    assert bound.call("GET", "line:a") is None


def test_a_server_key_of_another_type_fails_the_connection(redis: Redis, bound: RawConnection) -> None:
    redis.rpush("line:server", "x")
    for _ in range(2):
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            bound.call("SET", "line:a", "x")
    redis.delete("line:server")
    assert bound.call("GET", "line:a") is None


def test_a_server_that_lacks_a_script_is_identified_again(redis: Redis, bound: RawConnection) -> None:
    """A proxy kept the connection while another server took over behind it."""
    assert bound.run(ECHO, ["line:a"], ["x"]) == [b"line:a", b"x"]
    redis.set("line:server", "the life of another")
    redis.script_flush()
    with pytest.raises(ConnectionError, match="no leader uses it yet"):
        bound.run(ECHO, ["line:a"], ["y"])
    assert redis.script_exists(ECHO.hash) == [False], "or the next would not ask"
    redis.delete("line:server")
    assert bound.run(ECHO, ["line:a"], ["y"]) == [b"line:a", b"y"]


def test_a_script_without_memory_raises_that_redis_is_full(redis: Redis, line: RawConnection) -> None:
    entry = (line.run(ADD, ["line:a"], ["x"]), [b"d", b"x"])
    assert field(entry, b"d") == b"x"
    redis.config_set("maxmemory", 1)
    with pytest.raises(FULL, match="maxmemory"):
        line.run(ADD, ["line:a"], ["y"])
    redis.config_set("maxmemory", 0)
    assert line.call("XLEN", "line:a") == 1


def test_fields_are_found_by_their_names() -> None:
    assert field((b"1-0", [b"x", b"d", b"d", b"body"]), b"d") == b"body"
    assert field((b"1-0", [b"x", b"d"]), b"d") == b""
    assert field((b"1-0", None), b"d") == b""
