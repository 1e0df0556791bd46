"""Pure decisions: retries, folding of reports, verdicts, windows, ids."""

from __future__ import annotations

import itertools
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.fleet.window import HORIZON, room, smoothed_rate
from orchestrator.domain.ids import derived_id, time_ordered_id, to_text
from orchestrator.domain.runs.verdict import RunCounters, verdict
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.reports import AttemptReport, fold
from orchestrator.domain.tasks.retry import RetryPolicy, backoff_delay, has_tries_left
from orchestrator.domain.tasks.task import (
    End,
    Failed,
    Lost,
    Returned,
    Started,
    Succeeded,
    TaskError,
    TryAgain,
    after_failure,
    after_loss,
)

ERROR = TaskError("ValueError", "no")
KINDS = ["exponential", "linear", "constant"]
policies = st.builds(
    RetryPolicy,
    max=st.integers(0, 1000),
    backoff=st.sampled_from(KINDS),
    base=st.floats(0.001, 10_000),
    cap=st.floats(0.001, 100_000),
    jitter=st.floats(0, 0.9),
)
rolls = st.floats(0, 1, exclude_max=True)

# -- retry


def test_listed_waits_are_taken_one_by_one_and_the_last_for_ever() -> None:
    policy = RetryPolicy(backoff="listed", intervals=(5, 0, 3600), cap=1, jitter=0)
    assert [backoff_delay(policy, failures, 0.7) for failures in range(1, 6)] == [5, 0, 3600, 3600, 3600]


@given(policies, st.integers(1, 10_000), rolls)
def test_a_delay_is_positive_and_bounded(policy: RetryPolicy, failures: int, roll: float) -> None:
    delay = backoff_delay(policy, failures, roll)
    assert 0 < delay <= policy.cap * (1 + policy.jitter) * (1 + 1e-12)


@given(policies, st.integers(1, 5_000))
def test_without_jitter_delays_never_shrink(policy: RetryPolicy, failures: int) -> None:
    steady = RetryPolicy(backoff=policy.backoff, base=policy.base, cap=policy.cap, jitter=0)
    assert backoff_delay(steady, failures, 0.3) <= backoff_delay(steady, failures + 1, 0.9)


@given(policies, st.integers(1, 100), rolls)
def test_jitter_varies_by_its_share_only(policy: RetryPolicy, failures: int, roll: float) -> None:
    middle = backoff_delay(policy, failures, 0.5)
    assert abs(backoff_delay(policy, failures, roll) - middle) <= middle * policy.jitter * (1 + 1e-9)


@pytest.mark.parametrize(
    ("kind", "expected"), [("exponential", [2, 4, 8, 16, 20]), ("linear", [2, 4, 6, 8, 10]), ("constant", [2] * 5)]
)
def test_the_shapes_of_backoff(kind: str, expected: list[float]) -> None:
    policy = RetryPolicy(backoff=kind, base=2, cap=20, jitter=0)  # type: ignore[arg-type]
    assert [backoff_delay(policy, failures, 0.7) for failures in range(1, 6)] == expected


@given(st.integers(0, 50))
def test_max_retries_means_one_more_try(retries: int) -> None:
    tries, failures = 1, 1
    while has_tries_left(RetryPolicy(max=retries), failures):
        tries, failures = tries + 1, failures + 1
    assert tries == retries + 1


def test_three_retries_mean_four_tries() -> None:
    policy = RetryPolicy(max=3)
    decisions = [after_failure(Failed(b"x" * 16, 1, 0.1, ERROR), policy, failures, 0.5) for failures in range(4)]
    assert [type(decision) for decision in decisions] == [TryAgain, TryAgain, TryAgain, End]


# -- what follows a failure or a loss


def test_a_failure_is_charged_and_waits_its_backoff() -> None:
    policy = RetryPolicy(max=5, base=10, jitter=0)
    assert after_failure(Failed(b"x" * 16, 3, 0.1, ERROR), policy, 1, 0.5) == TryAgain(delay=20, failures=1)


def test_a_failure_that_no_retry_can_mend_ends_the_task() -> None:
    report = Failed(b"x" * 16, 1, 0.1, ERROR, retryable=False)
    assert after_failure(report, RetryPolicy(max=5), 0, 0.5) == End(reason="ValueError", failures=1)


def test_the_last_failure_ends_the_task_with_its_kind() -> None:
    assert after_failure(Failed(b"x" * 16, 1, 0.1, ERROR), RetryPolicy(), 0, 0.5) == End("ValueError", failures=1)


def test_a_loss_among_others_costs_nothing() -> None:
    assert after_loss(alone=False, losses=0, deaths=0, limit=3) == TryAgain(delay=0, losses=0)
    assert after_loss(alone=False, losses=2, deaths=9, limit=3) == TryAgain(delay=0, losses=0)


def test_a_task_that_is_there_whenever_a_worker_dies_is_not_tried_for_ever() -> None:
    decisions = [after_loss(alone=False, losses=0, deaths=deaths, limit=3) for deaths in range(30)]
    assert decisions[:-1] == [TryAgain(delay=0, losses=0)] * 29
    assert decisions[-1] == End(reason="worker lost", losses=0)


@given(st.integers(1, 20))
def test_solitary_losses_count_up_to_the_limit(limit: int) -> None:
    decisions = [after_loss(alone=True, losses=losses, deaths=losses, limit=limit) for losses in range(limit)]
    assert decisions[:-1] == [TryAgain(delay=0, losses=1)] * (limit - 1)
    assert decisions[-1] == End(reason="worker lost", losses=1)


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


def test_one_attempt_folds_alike_in_any_order() -> None:
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
def test_what_was_finished_stands(other: type[AttemptReport]) -> None:
    """A worker's parent may call an attempt lost whose success is on its way."""
    for pair in itertools.permutations([("a", report_of(Succeeded, 2)), ("b", report_of(other, 2))]):
        assert fold(pair)[ONE] == ("a", report_of(Succeeded, 2))


def test_a_newer_start_outranks_an_older_success() -> None:
    assert fold([("a", report_of(Succeeded, 1)), ("b", report_of(Started, 2))])[ONE][1] == report_of(Started, 2)


def test_the_first_of_two_equal_reports_is_kept() -> None:
    assert fold([("a", report_of(Failed, 1)), ("b", report_of(Failed, 1))])[ONE][0] == "a"


# -- runs


@given(*[st.integers(0, 3)] * 5, st.booleans())
def test_a_run_ends_when_and_only_when_nothing_is_open(
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


# -- the window


def test_no_worker_no_room() -> None:
    assert room(slots=0, outstanding=0, rate=1_000_000.0) == 0


@given(st.integers(1, 10_000), st.integers(0, 100_000), st.floats(0, 100_000))
def test_room_is_free_slots_and_a_little_ahead(slots: int, outstanding: int, rate: float) -> None:
    free = room(slots, outstanding, rate)
    assert free >= 0
    assert free + outstanding <= max(outstanding, slots + rate * HORIZON)
    assert free == 0 or free + outstanding > slots + rate * HORIZON - 1


@given(st.floats(0, 1e5), st.integers(0, 10_000), st.floats(0.001, 100))
def test_a_rate_lies_between_the_old_and_the_new(previous: float, finished: int, seconds: float) -> None:
    measured = finished / seconds
    low, high = sorted((previous, measured))
    assert low * (1 - 1e-9) - 1e-9 <= smoothed_rate(previous, finished, seconds) <= high * (1 + 1e-9) + 1e-9


# -- ids

noises = st.binary(min_size=10, max_size=10)
times = st.integers(0, 2**48 - 1)


@given(times, noises)
def test_an_id_is_a_uuid_of_version_seven(milliseconds: int, noise: bytes) -> None:
    identifier = UUID(bytes=time_ordered_id(milliseconds, noise))
    assert identifier.version == 7
    assert identifier.variant == RFC_4122
    assert identifier.int >> 80 == milliseconds
    assert to_text(identifier.bytes) == str(identifier)


@given(times, times, noises, noises)
def test_ids_sort_by_time(one: int, other: int, noise: bytes, more: bytes) -> None:
    if one != other:
        assert (one < other) == (time_ordered_id(one, noise) < time_ordered_id(other, more))


@given(noises, noises)
def test_all_the_noise_that_fits_is_used(noise: bytes, more: bytes) -> None:
    def kept(raw: bytes) -> bytes:
        return bytes((raw[0] & 0x0F, raw[1], raw[2] & 0x3F)) + raw[3:]

    same = time_ordered_id(7, noise) == time_ordered_id(7, more)
    assert same == (kept(noise) == kept(more))


parents = st.builds(time_ordered_id, times, noises)
parts = st.tuples(st.one_of(st.integers(), st.text()), st.integers())


@given(parents, parts)
def test_a_derived_id_is_always_the_same(parent: bytes, chosen: tuple[str | int, int]) -> None:
    identifier = derived_id(parent, *chosen)
    assert identifier == derived_id(bytes(parent), *chosen)
    assert UUID(bytes=identifier).version == 8
    assert UUID(bytes=identifier).variant == RFC_4122
    assert identifier[:6] == parent[:6]


@given(st.lists(st.tuples(parents, parts), unique=True, max_size=50))
def test_derived_ids_are_distinct(origins: list[tuple[bytes, tuple[str | int, int]]]) -> None:
    assert len({derived_id(parent, *chosen) for parent, chosen in origins}) == len(origins)


def test_the_parts_of_a_derived_id_do_not_run_together() -> None:
    parent = time_ordered_id(1, bytes(10))
    assert len({derived_id(parent, *parts) for parts in [(1, 23), (12, 3), (123,), ("1", 23), ("1, 23",)]}) == 5


def test_an_attempt_derives_a_hundred_thousand_ids() -> None:
    parent = time_ordered_id(1, bytes(10))
    assert len({derived_id(parent, attempt, count) for attempt in range(10) for count in range(10_000)}) == 100_000
