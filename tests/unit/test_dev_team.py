"""Whom `orchestrator dev` starts again, and when it gives up."""

from __future__ import annotations

import time

import pytest

from orchestrator.cli.dev.command import _Team


class Team(_Team):
    """One whose children are only counted."""

    def __init__(self) -> None:
        self._killed: dict[str, list[float]] = {}
        self._options = {"scheduler": ("--fast",)}
        self.started: list[tuple[str, ...]] = []

    def _start(self, role: str, *options: str) -> None:
        self.started.append((role, *options))


def test_who_was_killed_is_started_again_as_before_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    team, now = Team(), 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert [team._start_again("scheduler", -9) for _ in range(4)] == [True, True, True, False]
    assert team.started == [("scheduler", "--fast")] * 3
    now += 31.0
    assert team._start_again("scheduler", -9)


def test_who_ends_by_itself_is_not_started_again() -> None:
    team = Team()
    assert not team._start_again("scheduler", 1)
    assert not team._start_again("scheduler", 0)
    assert team.started == []
