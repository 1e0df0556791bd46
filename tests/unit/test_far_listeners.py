"""Listeners on another server than the leader's: lost entries are noticed, and a silent server delays nothing."""

from __future__ import annotations

import pytest
from fakeredis import FakeRedis

from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.transport.leader import fleet
from orchestrator.transport.leader.fleet import RemoteListeners

KEYS = Keys("shop/1")
NOBODY = "redis://127.0.0.1:1"


def test_a_lost_entry_reports_no_listeners_once(
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


def test_an_unreachable_server_is_not_asked_again_for_a_while() -> None:
    far = RemoteListeners(connect(NOBODY), KEYS)
    assert not far.have_listeners()
    far._redis = FakeRedis()
    far._redis.set(KEYS.watched, b"1")
    assert not far.have_listeners(), "it is not asked"
