"""When a failed attempt is tried again."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often a task is tried again, and how long it waits before each try."""

    max: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Retries after the first try: 3 means up to four tries."""
    backoff: Literal["exponential", "linear", "constant"] = "exponential"
    base: _Seconds = 1.0
    """Seconds before the first retry."""
    cap: _Seconds = 600.0
    """Longest wait in seconds."""
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the wait by which it varies, so that a thousand failures do not come back at once."""


def has_tries_left(policy: RetryPolicy, failures: int) -> bool:
    """Say whether a task that has now failed `failures` times may be tried again."""
    return failures <= policy.max


def backoff_delay(policy: RetryPolicy, failures: int, roll: float) -> float:
    """Return the seconds to wait after the `failures`-th failure; `roll` in [0, 1) places it within the jitter."""
    if policy.backoff == "exponential":
        wait = policy.base * 2.0 ** min(failures - 1, 60)
    elif policy.backoff == "linear":
        wait = policy.base * failures
    else:
        wait = policy.base
    return min(wait, policy.cap) * (1.0 + policy.jitter * (2.0 * roll - 1.0))
