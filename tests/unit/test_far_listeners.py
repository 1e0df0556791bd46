"""Listeners to live changes on another server than the leader's: what is lost is noticed, and keeps nobody."""

from __future__ import annotations

import pytest
from fakeredis import FakeRedis

from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.transport.leader import fleet
from orchestrator.transport.leader.fleet import RemoteListeners

KEYS = Keys("shop/1")
NOBODY = "redis://127.0.0.1:1"


def test_after_a_lost_entry_nobody_listens_once_so_that_the_next_is_a_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "_PAUSE", 0.0)
    redis = FakeRedis()
    redis.set(KEYS.watched, b"1")
    far = RemoteListeners(redis, KEYS)
    assert far.have_listeners()
    far.add(b"one", 10)
    far._redis = connect(NOBODY)
    far.add(b"lost", 10)
    far._redis = redis
    far.add(b"would hide that", 10)
    assert redis.xlen("{shop:0}:changes") == 1
    assert [far.have_listeners(), far.have_listeners()] == [False, True]
    far.add(b"first", 10)
    assert redis.xlen("{shop:0}:changes") == 2


def test_a_server_that_does_not_answer_is_left_alone_for_a_while() -> None:
    far = RemoteListeners(connect(NOBODY), KEYS)
    assert not far.have_listeners()
    far._redis = FakeRedis()
    far._redis.set(KEYS.watched, b"1")
    assert not far.have_listeners(), "it is not asked"
