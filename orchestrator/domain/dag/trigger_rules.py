"""When the trigger of a step fires, from how the steps above it have ended."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.domain.dag.definition import Trigger
from orchestrator.domain.dag.state import StepState


def decide(trigger: Trigger, parents: int, tally: Mapping[int, int] | list[int]) -> bool | None:
    """Say whether a trigger fires (True), can no longer fire (False), or is not certain yet (None)."""
    success = tally[StepState.SUCCESS]
    failed = tally[StepState.FAILED] + tally[StepState.CANCELLED]
    skipped = tally[StepState.SKIPPED]
    complete = success + failed + skipped == parents
    if not parents:
        return True
    if trigger == "all_success":
        return False if failed or skipped else complete or None
    if trigger == "none_failed":
        return False if failed else complete or None
    if trigger == "any_success":
        return True if success else (False if complete else None)
    if trigger == "any_failed":
        return True if failed else (False if complete else None)
    return complete or None
