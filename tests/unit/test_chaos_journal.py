"""What the chaos driver knows of when a task's code ended."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.real.journal import Execution, Journal


def test_code_ends_with_its_own_process(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    execution = Execution("task", 1, worker=10, pid=11, began=5.0)
    journal.note_deaths([10, 11])
    assert journal.end_of(execution) > 5.0


def test_when_a_worker_dies_nothing_is_said_of_a_process_that_had_ended_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    execution = Execution("task", 1, worker=10, pid=11, began=5.0)
    journal.note_deaths([10])
    assert journal.end_of(execution) == 5.0
