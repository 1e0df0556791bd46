"""Delays between attempts, and the decision after a failure or a loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.tasks.outcomes import FailTask, RetryTask, after_failure, after_loss, within_starts
from orchestrator.domain.tasks.retry import RetryPolicy, backoff_delay, has_tries_left
from orchestrator.domain.tasks.task import Failed, TaskError, TaskOptions

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

# -- delays


def test_listed_delays_are_used_in_order_and_the_last_repeats() -> None:
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
def test_jitter_varies_a_delay_only_by_its_share(policy: RetryPolicy, failures: int, roll: float) -> None:
    middle = backoff_delay(policy, failures, 0.5)
    assert abs(backoff_delay(policy, failures, roll) - middle) <= middle * policy.jitter * (1 + 1e-9)


@pytest.mark.parametrize(
    ("kind", "expected"), [("exponential", [2, 4, 8, 16, 20]), ("linear", [2, 4, 6, 8, 10]), ("constant", [2] * 5)]
)
def test_backoff_delays_follow_their_kind(kind: str, expected: list[float]) -> None:
    policy = RetryPolicy(backoff=kind, base=2, cap=20, jitter=0)  # type: ignore[arg-type]
    assert [backoff_delay(policy, failures, 0.7) for failures in range(1, 6)] == expected


@given(st.integers(0, 50))
def test_max_retries_allows_as_many_attempts_and_one_more(retries: int) -> None:
    tries, failures = 1, 1
    while has_tries_left(RetryPolicy(max=retries), failures):
        tries, failures = tries + 1, failures + 1
    assert tries == retries + 1


def test_three_retries_mean_four_attempts() -> None:
    policy = RetryPolicy(max=3)
    decisions = [after_failure(Failed(b"x" * 16, 1, 0.1, ERROR), policy, failures, 0.5) for failures in range(4)]
    assert [type(decision) for decision in decisions] == [RetryTask, RetryTask, RetryTask, FailTask]


# -- decisions after a failure or a loss


def test_a_failure_is_charged_and_waits_for_its_backoff() -> None:
    policy = RetryPolicy(max=5, base=10, jitter=0)
    assert after_failure(Failed(b"x" * 16, 3, 0.1, ERROR), policy, 1, 0.5) == RetryTask(delay=20, failures=1)


def test_a_failure_that_is_not_retryable_ends_the_task() -> None:
    report = Failed(b"x" * 16, 1, 0.1, ERROR, retryable=False)
    assert after_failure(report, RetryPolicy(max=5), 0, 0.5) == FailTask(reason="ValueError", failures=1)


def test_the_last_failure_ends_the_task_with_its_error_kind() -> None:
    assert after_failure(Failed(b"x" * 16, 1, 0.1, ERROR), RetryPolicy(), 0, 0.5) == FailTask("ValueError", failures=1)


def test_a_loss_shared_with_other_tasks_is_not_charged() -> None:
    assert after_loss(alone=False, losses=0, deaths=0, limit=3) == RetryTask(delay=0, losses=0)
    assert after_loss(alone=False, losses=2, deaths=9, limit=3) == RetryTask(delay=0, losses=0)


def test_a_task_fails_after_thirty_shared_worker_deaths() -> None:
    decisions = [after_loss(alone=False, losses=0, deaths=deaths, limit=3) for deaths in range(30)]
    assert decisions[:-1] == [RetryTask(delay=0, losses=0)] * 29
    assert decisions[-1] == FailTask(reason="worker lost", losses=0)


@given(st.integers(1, 20))
def test_losses_of_a_task_alone_count_up_to_the_limit(limit: int) -> None:
    decisions = [after_loss(alone=True, losses=losses, deaths=losses, limit=limit) for losses in range(limit)]
    assert decisions[:-1] == [RetryTask(delay=0, losses=1)] * (limit - 1)
    assert decisions[-1] == FailTask(reason="worker lost", losses=1)


def test_a_task_starts_at_most_as_often_as_allowed() -> None:
    again, once = RetryTask(delay=1, failures=1), TaskOptions(on_loss="fail")
    assert within_starts(again, once, 0, lost=False) == again
    assert within_starts(again, once, 0, lost=True) == FailTask("worker lost", failures=1)
    thrice = TaskOptions(max_starts=3)
    assert [within_starts(again, thrice, starts, lost=starts == 1) for starts in range(3)] == [
        again,
        again,
        FailTask("started too often", failures=1),
    ]
    assert within_starts(again, TaskOptions(), 10_000, lost=True) == again
