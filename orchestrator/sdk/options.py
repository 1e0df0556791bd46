"""The options of a task, given on the decorator or per call, checked at once."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, get_args

import msgspec

from orchestrator.domain.retry import RetryPolicy
from orchestrator.domain.task import DEFAULT_OPTIONS, Isolation, TaskOptions
from orchestrator.errors import InvalidTask, UnknownOption, did_you_mean

_NAME = re.compile(r"[\w.:/-]{1,128}")
_PRIORITIES = range(-100, 101)
_CENTURY = 100 * 365 * 86_400


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How a task is run."""

    queue: str = "default"
    """The queue it waits in."""
    priority: int = 0
    """From -100 to 100; higher goes first."""
    delay: float | timedelta = 0.0
    """Seconds before it may start."""
    retries: int | RetryPolicy = 0
    """How often a failed attempt is tried again, or a whole Retry policy."""
    timeout: float | timedelta | None = None
    """Seconds that one attempt may run."""
    isolation: Isolation = "thread"
    """Where a synchronous function runs: `thread`, or `process` for a child process that can be killed."""
    on_success: bool = False
    """Inside a task: let the new task exist only if the current one succeeds."""

    def __post_init__(self) -> None:
        check_name("queue", self.queue)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or self.priority not in _PRIORITIES:
            raise InvalidTask(f"Option priority: expected a whole number from -100 to 100, found {self.priority!r}.")
        if _seconds("delay", self.delay) < 0:
            raise InvalidTask(f"Option delay: expected zero or more seconds, found {self.delay!r}.")
        if self.timeout is not None and _seconds("timeout", self.timeout) <= 0:
            raise InvalidTask(f"Option timeout: expected more than zero seconds, found {self.timeout!r}.")
        try:
            msgspec.convert(msgspec.structs.asdict(self.policy), RetryPolicy)  # a struct does not check its arguments
        except msgspec.ValidationError as error:
            raise InvalidTask(
                f"Option retries: expected zero or more, or a Retry, found {self.retries!r}: {error}."
            ) from None
        if self.isolation not in get_args(Isolation):
            raise InvalidTask(f"Option isolation: expected 'thread' or 'process', found {self.isolation!r}.")
        if not isinstance(self.on_success, bool):
            raise InvalidTask(f"Option on_success: expected True or False, found {self.on_success!r}.")

    @property
    def policy(self) -> RetryPolicy:
        return self.retries if isinstance(self.retries, RetryPolicy) else RetryPolicy(max=self.retries)

    @property
    def delay_seconds(self) -> float:
        return _seconds("delay", self.delay)

    def stored(self) -> str | None:
        """Return what travels with the task, as JSON; None where all of it is default."""
        timeout = None if self.timeout is None else _seconds("timeout", self.timeout)
        options = TaskOptions(retry=self.policy, timeout=timeout, isolation=self.isolation)
        return None if options == DEFAULT_OPTIONS else msgspec.json.encode(options).decode()


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(CallOptions))


def with_options(base: CallOptions, given: dict[str, Any]) -> CallOptions:
    """Return the options changed by `given`; an unknown name is refused, with the nearest one suggested."""
    for name in given:
        if name not in OPTION_NAMES:
            raise UnknownOption(
                f"Unknown task option {name!r}.{did_you_mean(name, OPTION_NAMES)} Known: {', '.join(OPTION_NAMES)}."
            )
    return dataclasses.replace(base, **given)


def check_name(what: str, name: object) -> str:
    """Refuse a name that could not be typed, logged or used as a key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidTask(f"A {what} name has 1 to 128 letters, digits, or any of _ . : / -; found {name!r:.200}.")
    return name


def _seconds(name: str, value: object) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) <= _CENTURY:
        raise InvalidTask(f"Option {name}: expected seconds or a timedelta, up to a hundred years, found {value!r}.")
    return float(seconds)
