"""Reports of the same attempt fold into one, and counters determine how a run ended."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.runs import RunCounters, verdict
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.outcomes import AttemptReport, fold
from orchestrator.domain.tasks.task import (
    Failed,
    Lost,
    Returned,
    Started,
    Succeeded,
    TaskError,
)

ERROR = TaskError("ValueError", "no")

# -- fold

ONE = b"1" * 16


def report_of(kind: type[AttemptReport], attempt: int, task: bytes = ONE) -> AttemptReport:
    extra: dict[type, tuple[object, ...]] = {
        Started: (0.1,),
        Returned: ("drained",),
        Lost: (False,),
        Failed: (0.1, ERROR),
        Succeeded: (0.1, b"\xc0"),
    }
    return kind(task, attempt, *extra[kind])  # type: ignore[arg-type]


ALL_KINDS: list[type[AttemptReport]] = [Started, Returned, Lost, Failed, Succeeded]
reports = st.builds(report_of, st.sampled_from(ALL_KINDS), st.integers(1, 4), st.sampled_from([ONE, b"2" * 16]))


def test_reports_of_one_attempt_fold_alike_in_any_order() -> None:
    for order in itertools.permutations(ALL_KINDS):
        folded = fold([("worker", report_of(kind, 1)) for kind in order])
        assert folded == {ONE: ("worker", report_of(Succeeded, 1))}


@given(st.lists(reports), st.randoms(use_true_random=False))
def test_the_order_of_reports_makes_no_difference(some: list[AttemptReport], random: object) -> None:
    shuffled = list(some)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fold(("w", report) for report in some) == fold(("w", report) for report in shuffled)


@given(st.lists(reports, min_size=1))
def test_the_newest_attempt_wins(some: list[AttemptReport]) -> None:
    folded = fold(("w", report) for report in some)
    assert folded.keys() == {report.id for report in some}
    for task, (_, report) in folded.items():
        assert report.attempt == max(other.attempt for other in some if other.id == task)


@pytest.mark.parametrize("other", [Started, Returned, Lost, Failed])
def test_a_success_is_kept_over_other_reports_of_the_attempt(other: type[AttemptReport]) -> None:
    """A worker's parent process may report an attempt as lost while its success is on its way."""
    for pair in itertools.permutations([("a", report_of(Succeeded, 2)), ("b", report_of(other, 2))]):
        assert fold(pair)[ONE] == ("a", report_of(Succeeded, 2))


def test_a_newer_start_outranks_an_older_success() -> None:
    assert fold([("a", report_of(Succeeded, 1)), ("b", report_of(Started, 2))])[ONE][1] == report_of(Started, 2)


def test_the_first_of_two_equal_reports_is_kept() -> None:
    assert fold([("a", report_of(Failed, 1)), ("b", report_of(Failed, 1))])[ONE][0] == "a"


# -- runs


@given(*[st.integers(0, 3)] * 5, st.booleans())
def test_a_run_ends_exactly_when_no_task_is_open(
    opened: int, success: int, failed: int, cancelled: int, skipped: int, cancelling: bool
) -> None:
    total = opened + success + failed + cancelled + skipped
    counters = RunCounters(
        total=total, open=opened, success=success, failed=failed, cancelled=cancelled, skipped=skipped
    )
    state = verdict(counters, cancelling)
    assert counters.ended == success + failed + cancelled + skipped
    assert (state is None) == (opened > 0)
    if state is not None:
        assert (state is RunState.CANCELLED) == cancelling
        assert (state is RunState.SUCCESS) == (not cancelling and failed == cancelled == 0)
