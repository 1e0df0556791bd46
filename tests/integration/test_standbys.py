"""Standby schedulers announce themselves in Redis as long as they stand by."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.domain.fleet.announced import Standby
from orchestrator.scheduler.process import StandbyNotice
from orchestrator.transport import announcements
from orchestrator.transport.connection import connect
from tests.integration.stage import KEYS, System
from tests.waiting import eventually

HERE = f"{socket.gethostname()}:{os.getpid()}"
SINCE = datetime(2026, 1, 1, tzinfo=UTC)


def addresses(system: System) -> list[str]:
    return [one.address for one in announcements.list_standbys(system.redis, KEYS)]


def announce(system: System, name: str, ttl: float = 600.0) -> None:
    announcements.announce(system.redis, KEYS, name, Standby(address=f"{name}:1", since=SINCE), ttl)


def test_a_scheduler_announces_itself_until_it_leads_or_ends(system: System) -> None:
    leading = threading.Event()
    redis = connect(system.settings.redis_url)
    notice = StandbyNotice(redis, KEYS, leading, every=0.02, ttl=600.0)
    notice.start()
    eventually(lambda: addresses(system) == [HERE], "it stands by")
    leading.set()
    eventually(lambda: addresses(system) == [], "it leads")
    leading.clear()
    eventually(lambda: addresses(system) == [HERE], "another one leads")
    notice.close()
    assert addresses(system) == []
    assert system.redis.keys(f"{KEYS.prefix}:standby*") == []
    redis.close()


def test_a_lease_that_no_standby_takes_is_offered_ever_less_often(system: System) -> None:
    """Each offer ends the lease for a moment, and a standby that has just failed does not take over."""
    leading, redis = threading.Event(), connect(system.settings.redis_url)
    looks: list[bool] = []
    offers: list[int] = []

    class Watched(StandbyNotice):
        def _should_lead(self) -> bool:
            looks.append(len(looks) > 130)
            self._is_over.set() if len(looks) > 140 else None
            return looks[-1]

    notice = Watched(redis, KEYS, leading, every=0.0, ttl=600.0, offer=lambda: offers.append(len(looks)))
    leading.set()
    notice._run()
    assert offers == [1, 3, 7, 15, 31, 63, 95, 127]
    redis.close()


def test_a_standby_that_stops_announcing_expires(system: System) -> None:
    announce(system, "dies", ttl=30.0)
    announce(system, "lives")
    assert addresses(system) == ["dies:1", "lives:1"]
    left: Any = system.redis.pttl(KEYS.standby("dies"))
    assert 0 < left <= 30_000
    system.redis.delete(KEYS.standby("dies"))  # as Redis does at its expiry
    assert addresses(system) == ["lives:1"]
    announce(system, "lives")
    assert system.redis.smembers(KEYS.standbys) == {b"lives"}
    names: Any = system.redis.pttl(KEYS.standbys)
    assert 0 < names <= 600_000, "nobody is left who could tidy up"


def test_invalid_entries_of_standbys_are_ignored(system: System) -> None:
    announce(system, "lives")
    system.redis.sadd(KEYS.standbys, "strange", "wrong", b"\xff")
    system.redis.set(KEYS.standby("strange"), b"\xc1")
    system.redis.rpush(KEYS.standby("wrong"), "1")
    assert addresses(system) == ["lives:1"]


@pytest.fixture
def status(system: System, in_empty_folder: Path) -> Callable[..., str]:
    return lambda *words: CliRunner().invoke(main, ["status", *words]).output


def test_status_lists_the_standbys(system: System, status: Callable[..., str]) -> None:
    assert json.loads(status("--json"))["standbys"] == []
    assert "standbys" in status()
    announce(system, "second")
    announce(system, "first")
    found = json.loads(status("--json"))
    assert [one["address"] for one in found["standbys"]] == ["first:1", "second:1"]
    assert "standbys" not in found["redis"]
    assert "first:1, second:1" in status()
    system.redis.delete(KEYS.standbys)
    system.redis.set(KEYS.standbys, "somebody else's")
    assert json.loads(status("--json"))["standbys"] is None, "the trouble is told beside it"
