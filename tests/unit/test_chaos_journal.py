"""What the chaos journal knows about the end of a task's code."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.real.journal import Execution, Journal


def test_code_ends_when_its_own_process_dies(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    execution = Execution("task", 1, worker=10, pid=11, began=5.0)
    journal.note_deaths([10, 11])
    assert journal.end_of(execution) > 5.0


def test_the_death_of_a_worker_does_not_move_the_end_of_ended_code(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    execution = Execution("task", 1, worker=10, pid=11, began=5.0)
    journal.note_deaths([10])
    assert journal.end_of(execution) == 5.0
