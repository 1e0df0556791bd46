"""Checks that each end of a task has exactly one callback, of the right kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos.real.arena import Arena
from tests.chaos.real.project.callbacks import follow_failure, follow_success, work_and_be_followed


def check_callbacks(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    """Check that a success and a failure each have one callback of their kind, and a cancelled task has none."""
    followers: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for task, end, by in arena.journal.of_tasks("follows"):
        followers[task].add((end, by))
    expected = 0
    for task, row in ended.items():
        if row["name"] == work_and_be_followed.name:
            expected_ends = [row["status"]] if row["status"] in ("success", "failed") else []
            expected += len(expected_ends)
            if sorted(end for end, _ in followers[task]) != expected_ends:
                yield f"task {task} ended as {row['status']}, and was followed by {sorted(followers[task])}"
    created = sum(row["name"] in (follow_success.name, follow_failure.name) for row in ended.values())
    if created != expected:
        yield f"{expected} ends are to be followed, and {created} tasks followed one"
