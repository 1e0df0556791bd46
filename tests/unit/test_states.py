"""The transition tables match the design, and everything derived from them follows them."""

from __future__ import annotations

import pytest

from orchestrator.domain.states import (
    ENDED_RUN_STATES,
    ENDED_TASK_STATES,
    IN_FLIGHT_STATES,
    OPEN_RUN_STATES,
    OPEN_TASK_STATES,
    RUN_TRANSITIONS,
    TASK_TRANSITIONS,
    RunState,
    TaskState,
    run_sources_of,
    sources_of,
)

TASK_TABLE = [
    ("pending", "dispatched"),
    ("pending", "failed"),
    ("pending", "skipped"),
    ("pending, dispatched, running", "cancelled"),
    ("dispatched", "running"),
    ("dispatched, running", "pending"),
    ("dispatched, running", "success"),
    ("dispatched, running", "failed"),
    ("failed, skipped", "pending"),
    ("cancelled", "pending"),
]
"""The design's table, row by row, and the states that a retry of a whole run reopens."""

RUN_TABLE = [
    ("pending", "running"),
    ("pending", "failed, cancelled"),
    ("running", "success, failed, cancelled"),
    ("failed", "running"),
    ("failed, cancelled", "pending"),
]
"""The design's table, row by row, and the return of a retried run and its children to pending."""


def expand(table: list[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(source, target) for left, right in table for source in left.split(", ") for target in right.split(", ")}


def test_task_transitions_match_the_design() -> None:
    pairs = [(transition.source, transition.target) for transition in TASK_TRANSITIONS]
    assert set(pairs) == expand(TASK_TABLE)
    assert len(pairs) == len(set(pairs))


def test_run_transitions_match_the_design() -> None:
    pairs = [(transition.source, transition.target) for transition in RUN_TRANSITIONS]
    assert set(pairs) == expand(RUN_TABLE)
    assert len(pairs) == len(set(pairs))


def test_every_transition_describes_its_occasion() -> None:
    assert all(transition.when for transition in TASK_TRANSITIONS)
    assert all(transition.when for transition in RUN_TRANSITIONS)


def test_every_state_is_either_open_or_ended() -> None:
    assert set(OPEN_TASK_STATES) == {"pending", "dispatched", "running"}
    assert set(ENDED_TASK_STATES) == {"success", "failed", "cancelled", "skipped"}
    assert set(OPEN_RUN_STATES) == {"pending", "running"}
    assert set(ENDED_RUN_STATES) == {"success", "failed", "cancelled"}
    assert set(IN_FLIGHT_STATES) == {"dispatched", "running"}


def test_success_is_final() -> None:
    assert not [transition for transition in TASK_TRANSITIONS if transition.source == "success"]
    assert not [transition for transition in RUN_TRANSITIONS if transition.source == "success"]


@pytest.mark.parametrize("target", TaskState)
def test_the_sources_of_a_task_state_match_the_design(target: TaskState) -> None:
    assert set(sources_of(target)) == {source for source, entered in expand(TASK_TABLE) if entered == target}


@pytest.mark.parametrize("target", RunState)
def test_the_sources_of_a_run_state_match_the_design(target: RunState) -> None:
    assert set(run_sources_of(target)) == {source for source, entered in expand(RUN_TABLE) if entered == target}


def test_every_state_can_be_reached() -> None:
    assert {target for target in TaskState if not sources_of(target)} == set()
    assert {target for target in RunState if not run_sources_of(target)} == set()
