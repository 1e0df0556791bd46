"""When a failed attempt is tried again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often a task is tried again, and how long it waits before each try."""

    max: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Retries after the first try: 3 means up to four tries."""
    backoff: Literal["exponential", "linear", "constant", "computed", "listed"] = "exponential"
    """How the wait grows; `computed` is the task's own function, which only its worker has."""
    base: _Seconds = 1.0
    """Seconds before the first retry."""
    cap: _Seconds = 600.0
    """Longest wait in seconds."""
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the wait by which it varies, so that a thousand failures do not come back at once."""
    on: tuple[str, ...] = ()
    """Names of exceptions after which alone it is tried again; none given means all."""
    give_up_on: tuple[str, ...] = ()
    """Names of exceptions after which it is never tried again."""
    intervals: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e9)], ...], Meta(max_length=1_000)] = ()
    """The waits themselves, where they are listed; the last counts for all that follow."""


def has_tries_left(policy: RetryPolicy, failures: int) -> bool:
    """Say whether a task that has now failed `failures` times may be tried again."""
    return failures <= policy.max


def is_worth_retrying(policy: RetryPolicy, kinds: Collection[str]) -> bool:
    """Say whether an error, given by the names of its type and of all it derives from, may be tried again."""
    if any(name in kinds for name in policy.give_up_on):
        return False
    return not policy.on or any(name in kinds for name in policy.on)


def backoff_delay(policy: RetryPolicy, failures: int, roll: float) -> float:
    """Return the seconds to wait after the `failures`-th failure; `roll` in [0, 1) places it within the jitter."""
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
