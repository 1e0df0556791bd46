"""Signals that end `orchestrator dev`: at any moment, the first requests the end, the second a quick end."""

from __future__ import annotations

from orchestrator.cli.dev.command import Interrupts


def test_a_signal_during_the_wait_for_signals_is_noted() -> None:
    interrupts = Interrupts()
    with vars(interrupts.requested)["_cond"]:  # as the main thread holds it for a moment before and after its wait
        interrupts.note()
    assert interrupts.requested.wait(60)
    assert not interrupts.urgent.is_set()
    interrupts.note()
    assert interrupts.urgent.wait(60)
