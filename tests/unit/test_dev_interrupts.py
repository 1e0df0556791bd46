"""Signals that end `orchestrator dev`: whenever they come, the first asks for the end, the second for a quick one."""

from __future__ import annotations

from orchestrator.cli.dev.command import Interrupts


def test_a_signal_that_interrupts_who_waits_for_it_is_noted() -> None:
    interrupts = Interrupts()
    with vars(interrupts.requested)["_cond"]:  # as the main thread holds it for a moment, before and after it waits
        interrupts.note()
    assert interrupts.requested.wait(60)
    assert not interrupts.urgent.is_set()
    interrupts.note()
    assert interrupts.urgent.wait(60)
