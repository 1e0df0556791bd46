"""When a failed attempt is tried again, as a user says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from orchestrator.domain.retry import RetryPolicy
from orchestrator.errors import InvalidTask
from orchestrator.sdk.names import type_name

Backoff = Literal["exponential", "linear", "constant"] | Callable[[int], float]
Errors = tuple[type[BaseException], ...]


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often a task is tried again, how long it waits before each try, and after which errors."""

    max: int = 3
    """Retries after the first try: 3 means up to four tries."""
    backoff: Backoff = "exponential"
    """How the wait grows, or a function that is given the number of failures so far and returns seconds."""
    base: float = 1.0
    """Seconds before the first retry."""
    cap: float = 600.0
    """Longest wait in seconds."""
    jitter: float = 0.1
    """Share of the wait by which it varies, so that a thousand failures do not come back at once."""
    on: Errors = ()
    """Exceptions after which alone it is tried again; none given means all."""
    give_up_on: Errors = ()
    """Exceptions after which it is never tried again."""

    def __post_init__(self) -> None:
        for name in ("on", "give_up_on"):
            given = getattr(self, name)
            kinds = given if isinstance(given, (tuple, list, set, frozenset)) else (given,)
            if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
                raise InvalidTask(f"Retry: expected exception types in {name}=, found {given!r}.")
            object.__setattr__(self, name, tuple(kinds))
        try:
            msgspec.convert(msgspec.structs.asdict(self.policy), RetryPolicy)  # a struct does not check its arguments
        except msgspec.ValidationError as error:
            raise InvalidTask(f"{self!r} is no way to retry: {error}.") from None

    @property
    def policy(self) -> RetryPolicy:
        """Return what travels with the task: names instead of types, and not the function."""
        return RetryPolicy(
            max=self.max,
            backoff="computed" if callable(self.backoff) else self.backoff,
            base=self.base,
            cap=self.cap,
            jitter=self.jitter,
            on=tuple(type_name(kind) for kind in self.on),
            give_up_on=tuple(type_name(kind) for kind in self.give_up_on),
        )
