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


class Retry(DramatiqError, RetryLater):
    """Raised by an actor to be retried after `delay` milliseconds, or after those of its options. It counts."""

    _is_failure = True

    def __init__(self, message: str = "", delay: float | None = None) -> None:
        super().__init__(max(0.0, (delay or 0) / 1_000), message)
        self.delay = delay
        if delay is None:
            self.seconds = None  # type: ignore[assignment]  # the retry policy decides, as after any failure
