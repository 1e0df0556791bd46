"""Retry policies and backoff."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often a task is retried, and how long it waits before each retry."""

    max: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Retries after the first attempt: 3 means up to four attempts."""
    backoff: Literal["exponential", "linear", "constant", "computed", "listed"] = "exponential"
    """How the wait grows. `computed` uses the task's own function, which only its worker has."""
    base: _Seconds = 1.0
    """Seconds before the first retry."""
    cap: _Seconds = 600.0
    """The longest wait, in seconds."""
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """The share of the wait by which it varies at random, so that a thousand failures are not retried at once."""
    on: tuple[str, ...] = ()
    """Names of exceptions that are retried. Empty for all."""
    give_up_on: tuple[str, ...] = ()
    """Names of exceptions that are never retried."""
    intervals: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e9)], ...], Meta(max_length=1_000)] = ()
    """The waits of the backoff `listed`, in seconds. The last one applies to all further retries."""


def has_tries_left(policy: RetryPolicy, failures: int) -> bool:
    """Return whether a task that has now failed `failures` times may be retried."""
    return failures <= policy.max


def is_worth_retrying(policy: RetryPolicy, kinds: Collection[str]) -> bool:
    """Return whether an error may be retried. `kinds` are the names of its type and all base classes."""
    if any(name in kinds for name in policy.give_up_on):
        return False
    return not policy.on or any(name in kinds for name in policy.on)


def backoff_delay(policy: RetryPolicy, failures: int, roll: float) -> float:
    """Return the seconds to wait after the `failures`-th failure. `roll` in [0, 1) is the random part of the jitter."""
    if policy.backoff == "listed" and policy.intervals:
        wait = policy.intervals[min(failures, len(policy.intervals)) - 1]
        return wait * (1.0 + policy.jitter * (2.0 * roll - 1.0))
    if policy.backoff == "constant":
        wait = policy.base
    elif policy.backoff == "linear":
        wait = policy.base * failures
    else:
        wait = policy.base * 2.0 ** min(failures - 1, 60)
    return min(wait, policy.cap) * (1.0 + policy.jitter * (2.0 * roll - 1.0))
