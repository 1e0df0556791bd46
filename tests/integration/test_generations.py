"""What the log says of a Redis that was restarted or has lost something."""

from __future__ import annotations

import logging

import pytest

from tests.integration.stage import System


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def restart(system: System, *, empty: bool) -> None:
    """Have Redis begin another life, with its data or without, and another leader look at it."""
    before = system.generation
    if empty:
        system.redis.flushdb()
    system.sql("UPDATE orchestrator.cursors SET server = 'an earlier life'")
    system.lead()
    system.look(2)
    assert system.generation != before


@pytest.mark.parametrize("empty", [False, True])
def test_a_restart_with_nothing_under_way_is_no_alarm(
    system: System, caplog: pytest.LogCaptureFixture, empty: bool
) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.succeed(*worker.take())
    system.tick()
    assert handle.status() == "success"
    restart(system, empty=empty)
    assert warnings(caplog) == []


def test_a_loss_with_tasks_under_way_is_one(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.worker()
    system.dispatch(2)
    restart(system, empty=True)
    (said,) = (text for text in warnings(caplog) if "Redis" in text)
    assert said.startswith("Redis has restarted, or lost or damaged data, with 2 tasks under way; generation ")
