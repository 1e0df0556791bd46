"""Reports of workers, all kinds together, and which of them count."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from orchestrator.domain.code.activation import Activated
from orchestrator.domain.tasks.task import Enqueued, Failed, Lost, Noted, Recalled, Returned, Started, Succeeded

Report = Started | Succeeded | Failed | Returned | Lost | Enqueued | Noted | Activated | Recalled
AttemptReport = Started | Succeeded | Failed | Returned | Lost | Activated


class Flush(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one worker reports at once."""

    worker: str
    reports: list[Report]
    turns: list[Activated] = []
    """Next turns, which follow successes among the reports."""


_RANK = {Started: 0, Returned: 1, Lost: 2, Failed: 3, Succeeded: 4, Activated: 4}


def fold(reports: Iterable[tuple[str, AttemptReport]]) -> dict[bytes, tuple[str, AttemptReport]]:
    """Reduce reports to one per task: the newest attempt's, and of that the one that says most.

    A worker that was cut off may repeat itself or be contradicted by its parent; what it finished stands.
    """
    folded: dict[bytes, tuple[str, AttemptReport]] = {}
    for pair in reports:
        report = pair[1]
        other = folded.get(report.id)
        if other is None or _weight(report) > _weight(other[1]):
            folded[report.id] = pair
    return folded


def fold_notes(notes: Iterable[Noted]) -> dict[bytes, Noted]:
    """Reduce notes to one per task: the newest attempt's last."""
    folded: dict[bytes, Noted] = {}
    for note in notes:
        other = folded.get(note.id)
        if other is None or note.attempt >= other.attempt:
            folded[note.id] = note
    return folded


def _weight(report: AttemptReport) -> tuple[int, int]:
    return report.attempt, _RANK[type(report)]
