"""The table of held attempts is read by the parent while the child writes it."""

from __future__ import annotations

import os

import pytest

from orchestrator.workers.held import HeldAttempts


def test_the_parent_reads_one_size_of_a_table_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldAttempts(1_000)
    held.add(os.urandom(16), 1)
    numbers = held._numbers

    def growing() -> tuple[int, int]:
        found = numbers()
        held.add(os.urandom(16), 1)  # the child receives another one at this moment
        return found

    monkeypatch.setattr(held, "_numbers", growing)
    assert len(held.unended()) == 1
    assert held.overdue(1.0) == []
    assert len(held.snapshot()[0]) // 20 == 3
