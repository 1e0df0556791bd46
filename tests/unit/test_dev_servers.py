"""What `orchestrator dev` does when its Postgres or Redis ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orchestrator.cli.dev.children import Servers
from orchestrator.errors import ConfigurationError


class Server:
    """A server that only counts its starts."""

    def __init__(self, folder: Path, title: str, *, running: bool = True, broken: bool = False) -> None:
        self.folder, self.log = folder, folder / "log"
        self.title, self.running, self.broken = title, running, broken
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        if self.broken:
            raise ConfigurationError("no space left on the device")
        self.running = True


def test_an_ended_server_is_restarted_after_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    postgres, redis = Server(tmp_path, "Postgres"), Server(tmp_path, "Redis")
    servers, now = Servers([postgres, redis]), 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert servers.restart_ended()
    for pause in (0, 1, 2, 4, 8):
        redis.running = False
        assert servers.restart_ended()
        assert redis.running == (pause == 0)
        now += pause
        assert servers.restart_ended()
        assert redis.running
    assert (postgres.starts, redis.starts) == (0, 5)
    assert "Redis has ended: restarting it" in caplog.text
    assert "Redis has ended, 5 times within 30 s: restarting it in 8 s" in caplog.text


def test_a_server_that_dev_did_not_start_is_not_restarted(tmp_path: Path) -> None:
    elsewhere = Server(tmp_path, "Redis", running=False)
    assert Servers([elsewhere]).restart_ended()
    assert elsewhere.starts == 0


def test_a_server_that_cannot_be_restarted_ends_dev(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken, gone = Server(tmp_path, "Postgres", broken=True), Server(tmp_path / "none", "Redis")
    servers = Servers([broken]), Servers([gone])
    broken.running = gone.running = False
    assert [one.restart_ended() for one in servers] == [False, False]
    assert gone.starts == 0, "it would begin with new data"
    assert "Postgres cannot be started again: no space left on the device" in caplog.text
    assert "is gone: giving up" in caplog.text
