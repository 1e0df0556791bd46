"""Dramatiq's exceptions, as far as something here raises or understands them."""

from __future__ import annotations

from orchestrator.errors import RetryLater


class DramatiqError(Exception):
    """Base of Dramatiq's errors."""


class ResultError(DramatiqError):
    """A message has no result to give."""


class ResultMissing(ResultError):
    """The message has not been processed yet."""


class ResultTimeout(ResultError):
    """The result did not come in time."""


class ResultFailure(ResultError):
    """The actor failed; carries what it raised, in words."""

    def __init__(self, message: str = "", orig_exc_type: str = "", orig_exc_msg: str = "") -> None:
        super().__init__(message)
        self.orig_exc_type = orig_exc_type
        self.orig_exc_msg = orig_exc_msg


class Retry(RetryLater):
    """An actor raises it to be tried again after `delay` milliseconds, which does not count towards its retries."""

    def __init__(self, message: str = "", delay: float | None = None) -> None:
        super().__init__((delay or 0) / 1_000)
        self.delay = delay
