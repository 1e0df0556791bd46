"""The table of held attempts is read by the parent while the child writes it."""

from __future__ import annotations

import os

import pytest

from orchestrator.workers.parent.held import HeldAttempts


def test_the_parent_reads_a_growing_table_consistently(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldAttempts(1_000)
    held.add(os.urandom(16), 1)
    numbers = held._numbers

    def growing() -> tuple[int, int]:
        found = numbers()
        held.add(os.urandom(16), 1)  # meanwhile the child receives another attempt
        return found

    monkeypatch.setattr(held, "_numbers", growing)
    assert len(held.unended()) == 1
    assert held.overdue(1.0) == []
    assert len(held.snapshot()[0]) // 20 == 3


def test_the_parent_sees_whether_a_timed_out_attempt_is_retryable() -> None:
    held = HeldAttempts(10)
    ids = [os.urandom(16) for _ in range(3)]
    slots = [held.add(task, 1) for task in ids]
    held.limit(slots[0], 1.0, 0.5, retryable=True)
    held.limit(slots[1], 2.0, 0.5, retryable=False)
    assert held.overdue(1.5) == [(ids[0], 1, 1.0, 0.5, True)]
    assert held.overdue(2.5) == [(ids[0], 1, 1.0, 0.5, True), (ids[1], 1, 2.0, 0.5, False)]
    held.unlimit(slots[0])
    assert held.overdue(2.5) == [(ids[1], 1, 2.0, 0.5, False)]


def test_the_parent_reads_only_slots_in_use() -> None:
    held = HeldAttempts(1_000)
    slots = [held.add(os.urandom(16), 1) for _ in range(500)]
    for slot in slots[:-1]:
        held.drop(slot)
    held.shrink()
    assert held._numbers()[0] == 500, "one is held, and it may be the last"
    assert len(held.unended()) == 1
    held.drop(slots[-1])
    held.shrink()
    assert held._numbers()[0] == 0
    assert held.room == 1_000
    task = os.urandom(16)
    held.limit(held.add(task, 7), 5.0, 2.0, retryable=True)
    assert held.unended() == [(task, 7)]
    assert [(limit.id, limit.attempt) for limit in held.overdue(6.0)] == [(task, 7)]


def test_an_attempt_added_while_counts_are_written_is_kept() -> None:
    held = HeldAttempts(1_000)
    task = os.urandom(16)

    class Count:
        def __index__(self) -> int:
            if not held.unended():
                held.add(task, 1)  # the process receives a task while its clock writes
            return 3

    held.write_running(Count())  # type: ignore[arg-type]
    assert held.unended() == [(task, 1)]
    assert held.snapshot()[1] == 3


def test_the_child_knows_how_long_its_parent_has_been_silent() -> None:
    held = HeldAttempts(10)
    assert held.parent_silence(100.0) == 0.0, "it has not begun to beat"
    held.write_parent_beat(100.0)
    held.beat(103.0, 0.5)
    held.add(b"a" * 16, 1)
    assert held.parent_silence(103.5) == 3.5
    assert held.pulse() == (103.0, 0.5)


def test_the_parent_knows_which_attempts_have_begun() -> None:
    held = HeldAttempts(10)
    ids = [os.urandom(16) for _ in range(3)]
    slots = [held.add(task, 7) for task in ids]
    held.mark_begun(slots[1])
    assert held.begun() == {(ids[1], 7)}
    held.drop(slots[1])
    held.add(ids[0], 8)
    assert held.begun() == set(), "a slot that is used again has not begun"
