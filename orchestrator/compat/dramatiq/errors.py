"""Dramatiq's exceptions, as far as this package raises or handles them."""

from __future__ import annotations

from orchestrator.errors import RetryLater


class DramatiqError(Exception):
    """Base of Dramatiq's errors."""


class TimeLimitExceeded(BaseException):
    """Raised in an actor at its time limit. As in Dramatiq, `except Exception` does not catch it."""


class ResultError(DramatiqError):
    """A message has no result."""


class ResultMissing(ResultError):
    """The message has not been processed yet."""


class ResultTimeout(ResultError):
    """The result was not available in time."""


class ResultFailure(ResultError):
    """The actor failed. Carries the type and message of its exception."""

    def __init__(self, message: str = "", orig_exc_type: str = "", orig_exc_msg: str = "") -> None:
        super().__init__(message)
        self.orig_exc_type = orig_exc_type
        self.orig_exc_msg = orig_exc_msg


class Retry(RetryLater):
    """Raised by an actor to run again after `delay` milliseconds, without counting as a retry."""

    def __init__(self, message: str = "", delay: float | None = None) -> None:
        super().__init__((delay or 0) / 1_000)
        self.delay = delay
