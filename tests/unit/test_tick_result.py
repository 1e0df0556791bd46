"""The results of a part of a tick are added to the whole."""

from __future__ import annotations

from orchestrator.domain.code import history
from orchestrator.scheduler.tick_result import TickResult


def test_merging_adds_counts_and_flags() -> None:
    whole, part = TickResult(), TickResult()
    whole.counts.reports = 3
    part.counts.reports = 2
    part.wake.delayed = True
    whole.merge(part)
    assert whole.counts.reports == 5
    assert whole.wake.delayed
    whole.merge(TickResult())
    assert (whole.counts.reports, whole.wake.delayed) == (5, True)


def test_an_empty_value_replaces_and_a_missing_value_does_not() -> None:
    whole, part = TickResult(), TickResult()
    whole.outgoing.drains = frozenset({b"worker"})
    whole.merge(TickResult())
    assert whole.outgoing.drains == {b"worker"}
    part.outgoing.drains = frozenset()
    whole.merge(part)
    assert whole.outgoing.drains == frozenset()


def test_changes_of_a_run_in_two_parts_are_summed() -> None:
    run, child = bytes(16), history.ChildCompleted(b"c" * 16, b"")
    whole, part = TickResult(), TickResult()
    whole.runs.child_ended(run, "success", "step")
    part.runs.child_ended(run, "success", "step")
    part.runs.child_ended(run, "failed", "other")
    part.runs.child_ended(run, "success", child)
    whole.merge(part)
    changes = whole.runs.changes[run]
    assert changes.delta == {"success": 3, "failed": 1, "opened": -4}
    assert changes.ended == {("step", "success"): 2, ("other", "failed"): 1}
    assert changes.facts == [child]
