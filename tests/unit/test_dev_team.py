"""Which processes `orchestrator dev` restarts, and when it gives up."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from orchestrator.cli.dev.children import Restarts
from orchestrator.cli.dev.command import _Team


class Killed:
    """A child that was killed."""

    def __init__(self, *, ready: bool, exit_code: int = -9) -> None:
        self.is_ready = threading.Event()
        if ready:
            self.is_ready.set()
        self.started_at = time.monotonic()
        self.exit_code = exit_code


class Team(_Team):
    """A team whose processes are only counted."""

    def __init__(self) -> None:
        self._restarts = Restarts()
        self._unready: dict[str, int] = {}
        self._options = {"scheduler": ("--fast",)}
        self._children: dict[str, Any] = {}

    def kill(self, *, ready: bool, exit_code: int = -9) -> bool:
        child: Any = Killed(ready=ready, exit_code=exit_code)
        self._children["scheduler"] = child
        return self._start_again("scheduler", child, exit_code)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_process_killed_repeatedly_is_restarted_after_growing_pauses(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    team = Team()
    pauses = []
    for _ in range(12):
        assert team.kill(ready=True)
        assert team._children == {}
        begun = clock[0]
        while not (due := team._restarts.take_due()):
            clock[0] += 0.5
        assert due == ["scheduler"]
        pauses.append(clock[0] - begun)
    assert pauses[:7] == [0, 1, 2, 4, 8, 10, 10]
    assert max(pauses) == 10
    assert caplog.messages[0] == "the scheduler was killed by signal 9: restarting it"
    assert caplog.messages[3] == ("the scheduler was killed by signal 9, 4 times within 30 s: restarting it in 4 s")
    clock[0] += 31
    assert team.kill(ready=True)
    assert team._restarts.take_due() == ["scheduler"]


def test_a_process_that_never_becomes_ready_is_given_up(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    team = Team()
    assert [team.kill(ready=False) for _ in range(3)] == [True] * 3
    assert team.kill(ready=True)
    assert [team.kill(ready=False) for _ in range(4)] == [True, True, True, False]
    assert caplog.messages[-1] == (
        "the scheduler was killed by signal 9 before it was ready, 4 times in a row: giving up"
    )


def test_a_process_that_exits_by_itself_is_not_restarted() -> None:
    team = Team()
    assert not team.kill(ready=True, exit_code=1)
    assert not team.kill(ready=True, exit_code=0)
